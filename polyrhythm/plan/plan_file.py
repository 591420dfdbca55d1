"""Read and write a plan as JSON or TOML, with a schema, for people to read and edit.

Its keys are the fields of `Plan`, with units in the keys, as in a description. The schema is
checked first, so that a plan of another version is refused as such, not for an unknown key. The
prediction in the file is for people: code that uses a plan predicts it again.
"""

import json
from dataclasses import asdict
from pathlib import Path

from polyrhythm.cost.sync import Sync
from polyrhythm.describe.read import build, parse_file, unknown
from polyrhythm.describe.units import check_amount
from polyrhythm.describe.write import check_target, replace_file
from polyrhythm.errors import PlanError, UserError
from polyrhythm.plan.plan import Plan, PredictedStep
from polyrhythm.types import Seconds

SCHEMA = 2
_WIDTH = 100  # a table up to this length is written on one line


def read_plan(path: Path) -> Plan:
    """Return the plan in a .json or .toml file; raise UserError if it is wrong."""
    try:
        table = parse_file(path)
        if isinstance(table, dict):
            _check_schema(table)
            table = {key: value for key, value in table.items() if key != "schema"}
        plan = build(table, Plan)
        if plan.sync not in set(Sync):
            raise unknown("sync", plan.sync, map(str, Sync))
        if plan.predicted is not None:
            _check_predicted(plan.predicted)
        return plan
    except UserError as error:
        raise error.at(str(path)) from None


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan as JSON; raise UserError for a file with another suffix."""
    check_target(path, (".json",), flag="save")
    replace_file(path, _text(plan_table(plan), indent="") + "\n")


def plan_table(plan: Plan) -> dict[str, object]:
    """Return the plan as the table that is written to a file."""
    return {"schema": SCHEMA, **_table(plan)}


def _check_schema(table: dict[str, object]) -> None:
    schema = table.get("schema")
    if type(schema) is int and schema == SCHEMA:
        return
    raise PlanError(
        "no schema: this is not a plan" if schema is None else f"a plan of schema {schema!r}",
        expected=f'"schema": {SCHEMA}, the only one that is known here',
        fix="make a new plan: polyrhythm plan CLUSTER PROFILE --batch-size N -o plan.json",
    )


def _check_predicted(predicted: PredictedStep) -> None:
    check_amount("predicted.step", predicted.step, Seconds)
    check_amount("predicted.bound", predicted.bound, Seconds)
    check_amount("predicted.price_per_step", predicted.price_per_step)
    for number, part in enumerate(predicted.parts):
        check_amount(f"predicted.parts[{number}].takes", part.takes, Seconds)


def _table(plan: Plan) -> dict[str, object]:
    """Return the plan's table without unknown or empty fields."""
    given = asdict(plan)
    table = {
        key: given[key]
        for key in ("cluster", "model", "layers_per_stage", "recompute", "microbatch_size", "sync")
    }
    table["pipelines"] = [_known(asdict(pipeline)) for pipeline in plan.pipelines]
    table["left_out"] = plan.left_out
    table["regions"] = tuple(asdict(region) for region in plan.regions)
    if plan.predicted is not None:
        table["predicted"] = _known(
            {
                "step_s": _digits(plan.predicted.step),
                "bound_s": _digits(plan.predicted.bound),
                "price_per_step": _digits(plan.predicted.price_per_step),
                "parts": [
                    {"name": part.name, "takes_s": _digits(part.takes)}
                    for part in plan.predicted.parts
                ],
            }
        )
    if plan.sources is not None:
        table["sources"] = _known(asdict(plan.sources))
    return _known(table)


def _known(table: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in table.items() if value not in (None, "", ())}


def _digits(value: float | None) -> float | None:
    """Round to six digits, which exceed the precision of any prediction."""
    return None if value is None else float(f"{value:.6g}")


def _text(value: object, indent: str) -> str:
    """Return JSON with lists of plain values, and tables that fit, on one line each."""
    line = json.dumps(value, ensure_ascii=False)
    inner = indent + " "
    if isinstance(value, dict) and (not indent or len(inner) + len(line) > _WIDTH):
        items = [f"{json.dumps(key)}: {_text(each, inner)}" for key, each in value.items()]
        return _lines("{", items, "}", indent)
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        return _lines("[", [_text(each, inner) for each in value], "]", indent)
    return line


def _lines(begin: str, items: list[str], end: str, indent: str) -> str:
    inner = f"\n{indent} "
    return begin + inner + f",{inner}".join(items) + f"\n{indent}{end}"
