"""Plan files: a written plan is read back equal, and errors name their location."""

import json
import re
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.cost.sync import Sync
from polyrhythm.errors import PlanError, UserError
from polyrhythm.plan.plan import PipelinePlan, Plan, PredictedStep, TimePart, even_plan
from polyrhythm.plan.plan_file import SCHEMA, read_plan, write_plan

MANUAL = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```json plan\n(.*?)```", MANUAL, re.DOTALL)

names = st.text(max_size=8)
amounts = st.floats(1e-6, 1e6).map(lambda value: float(f"{value:.6g}"))  # with the digits of a file


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    layers = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    prefix = draw(names)
    devices = (f"{prefix}{number}" for number in count())
    pipelines = []
    for _ in range(draw(st.integers(1, 4))):
        ends = sorted({0, *draw(st.lists(st.integers(1, len(layers))))})
        own = [name for end in ends if end < len(layers) for name in [next(devices)] * end]
        placed = (own + [next(devices)] * len(layers))[: len(layers)]
        pipelines.append(
            PipelinePlan(
                devices=tuple(draw(st.sampled_from([placed, []]))),
                num_microbatches=draw(st.none() | st.integers(1, 99)),
                schedule=draw(st.sampled_from(["auto", "1f1b", "bounded:5,3,1"])),
            )
        )
    parts = st.builds(TimePart, name=names, takes=amounts)
    return Plan(
        layers_per_stage=tuple(layers),
        pipelines=tuple(pipelines),
        microbatch_size=draw(st.none() | st.integers(1, 64)),
        sync=draw(st.sampled_from([str(sync) for sync in Sync])),
        cluster=draw(names),
        model=draw(names),
        left_out=tuple(draw(st.lists(st.just(next(devices)), max_size=1))),
        predicted=draw(
            st.none()
            | st.builds(
                PredictedStep,
                step=amounts,
                bound=amounts,
                parts=st.lists(parts, max_size=3).map(tuple),
                price_per_step=st.none() | amounts,
            )
        ),
    )


@settings(deadline=None)  # a file per example: slow on a busy machine
@given(plans())
def test_a_plan_is_read_as_it_was_written(plan: Plan) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        assert Plan.load(path) == plan
        assert [file.name for file in path.parent.iterdir()] == ["plan.json"]


def test_saved_plan_names_its_schema_and_omits_unknown_fields(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    even_plan(num_layers=6, num_stages=4, num_pipelines=2).save(path)
    assert json.loads(path.read_text()) == {
        "schema": 2,
        "layers_per_stage": [2, 2, 1, 1],
        "sync": "all_reduce",
        "pipelines": [{"schedule": "auto"}, {"schedule": "auto"}],
    }


def test_devices_of_a_pipeline_stand_on_one_line_and_times_have_their_unit(tmp_path: Path) -> None:
    devices = tuple(f"a device with quite a long name, number {i}" for i in range(6))
    plan = Plan(
        layers_per_stage=(1,) * 6,
        pipelines=(PipelinePlan(devices=devices),),
        predicted=PredictedStep(step=1.23456789, bound=1.0, parts=(TimePart(name="x", takes=1.2),)),
    )
    write_plan(plan, tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    assert any(all(f'"{name}"' in line for name in devices) for line in text.splitlines())
    assert '"step_s": 1.23457, "bound_s": 1.0' in text
    assert '{"name": "x", "takes_s": 1.2}' in text


GOOD: dict[str, Any] = {
    "schema": SCHEMA,
    "layers_per_stage": [2, 1],
    "microbatch_size": 4,
    "pipelines": [{"devices": ["a", "b"], "num_microbatches": 8, "schedule": "1f1b"}],
    "predicted": {"step_s": 2, "bound": "1500ms", "parts": [{"name": "x", "takes_s": 2}]},
}


def written(tmp_path: Path, table: object) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(table))
    return path


def test_handwritten_plan_may_use_units(tmp_path: Path) -> None:
    plan = read_plan(written(tmp_path, GOOD))
    assert plan.predicted is not None
    assert (plan.predicted.step, plan.predicted.bound) == (2.0, 1.5)
    assert plan.batch == 32


def test_plan_without_a_prediction_is_complete(tmp_path: Path) -> None:
    bare = {key: value for key, value in GOOD.items() if key != "predicted"}
    assert read_plan(written(tmp_path, bare)).predicted is None
    assert read_plan(written(tmp_path, {**bare, "predicted": None})).predicted is None


def test_a_plan_may_be_written_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('schema = 2\nlayers_per_stage = [1]\n[[pipelines]]\ndevices = ["a"]\n')
    assert read_plan(path).pipelines == (PipelinePlan(devices=("a",)),)


PIPELINE = GOOD["pipelines"][0]


@pytest.mark.parametrize(
    ("changes", "wrong", "fix"),
    [
        ({"shcema": 1}, "unknown key 'shcema'", "correct or remove"),
        ({"mircobatch_size": 1}, "unknown key 'mircobatch_size'", "'microbatch_size'?"),
        (
            {"pipelines": [{**PIPELINE, "device": ["a"]}]},
            "pipelines[0]: unknown key 'device'",
            "'devices'?",
        ),
        ({"layers_per_stage": "2"}, "layers_per_stage: got a text", "write a list"),
        ({"layers_per_stage": [2, "1"]}, "layers_per_stage[1]: got a text", "a whole number"),
        ({"pipelines": {}}, "pipelines: got a table", "a list of tables"),
        ({"pipelines": []}, "a plan without pipelines", "use 1"),
        ({"pipelines": ["a"]}, "pipelines[0]: got a text", "a table"),
        (
            {"pipelines": [PIPELINE, {**PIPELINE, "num_microbatches": 0}]},
            "pipelines[1]: a pipeline with 0 micro-batches",
            "micro-batch",
        ),
        ({"pipelines": [PIPELINE, PIPELINE]}, "'a' is in pipelines 0 and 1", "another device"),
        ({"left_out": ["b"]}, "'b' is in pipeline 0 and left out", "take it out"),
        ({"layers_per_stage": [2, 1, 1]}, "pipeline 0 has 2 devices", "every stage"),
        ({"sync": "alreduce"}, "unknown sync 'alreduce'", "'all_reduce'?"),
        ({"predicted": 3}, "predicted: got a whole number", "a table"),
        ({"predicted": {"step_s": 1}}, "predicted: the key 'bound' is missing", "bound_ms"),
        (
            {"predicted": {**GOOD["predicted"], "step_s": -1}},
            "predicted.step is -1s",
            "correct predicted.step",
        ),
        ({"predicted": {**GOOD["predicted"], "bound": 3}}, "predicted.bound: 3 has no unit", "ms"),
    ],
)
def test_plan_error_names_its_location(
    tmp_path: Path, changes: dict[str, Any], wrong: str, fix: str
) -> None:
    path = written(tmp_path, {**GOOD, **changes})
    with pytest.raises(UserError) as caught:
        read_plan(path)
    assert caught.value.wrong.startswith(f"{path}: {wrong}")
    assert fix in caught.value.fix


@pytest.mark.parametrize("schema", [1, 3, "2", True, 2.0])
def test_another_schema_is_refused_before_its_keys_are(tmp_path: Path, schema: object) -> None:
    path = written(tmp_path, {"num_pipelines": 2, "layers_per_stage": [1], "schema": schema})
    with pytest.raises(PlanError, match=f"a plan of schema {schema!r}") as caught:
        read_plan(path)
    assert '"schema": 2' in caught.value.expected
    assert "polyrhythm plan CLUSTER PROFILE" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('{"name": "a cluster"}', "no schema"),
        ("[1]", "got a list"),
        ('{"schema": 2', "syntax error"),
        ('{"schema": 2, "schema": 2}', "appears twice"),
    ],
)
def test_file_that_is_not_a_plan_is_refused(tmp_path: Path, text: str, wrong: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(wrong)):
        read_plan(path)


def test_missing_plan_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read it"):
        Plan.load(tmp_path / "plan.json")


@settings(deadline=None)
@given(st.data())
def test_a_misspelt_key_is_always_refused_by_name(data: st.DataObject) -> None:
    table = json.loads(json.dumps(GOOD))
    inner = data.draw(st.sampled_from([table, table["pipelines"][0], table["predicted"]]))
    key = data.draw(st.sampled_from(sorted(set(inner) - {"schema"})))
    inner[f"{key}q"] = inner.pop(key)
    with tempfile.TemporaryDirectory() as folder, pytest.raises(UserError) as caught:
        read_plan(written(Path(folder), table))
    assert f"unknown key '{key}q'" in caught.value.wrong


@pytest.mark.parametrize("text", EXAMPLES)
def test_an_example_of_the_manual_loads(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    assert read_plan(path).batch


def test_the_manual_has_an_example() -> None:
    assert EXAMPLES
