"""Print the doctor's report: what this machine has, group by group, and how to fix the rest.

Only the training group is essential; the lab and the extras are optional. A terminal shows a table,
other outputs get plain lines that are never wrapped or styled.
"""

import importlib.metadata
import importlib.util
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from polyrhythm.describe.check_result import CheckResult

_STYLES = {"ok": "green", "no": "bold red", "note": "yellow", "": ""}


def extras() -> list[CheckResult]:
    """Check the optional dependencies, except those of the lab, which the lab checks itself."""
    names = ("starlette", "uvicorn")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        advice = "pip install 'polyrhythm[watch]'; reports and everything else work without it"
        return [
            CheckResult("live web page (to come)", f"no {' and no '.join(missing)}", False, advice)
        ]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in names]
    return [CheckResult("live web page (to come)", ", ".join(versions), True)]


def show(
    console: Console,
    *,
    training: Sequence[CheckResult],
    lab: Sequence[CheckResult],
    extras: Sequence[CheckResult],
) -> bool:
    """Print all results; return True if something essential for training is missing."""
    groups = {"Training": training, "Lab": lab, "Extras": extras}
    if console.is_terminal:
        console.print(_table(groups))
    else:
        console.print(_plain(groups), soft_wrap=True)
    console.print(_verdict(groups), highlight=False)
    return _is_incomplete(training)


def _is_incomplete(check_results: Sequence[CheckResult]) -> bool:
    return any(result.ok is False for result in check_results)


def _mark(result: CheckResult) -> str:
    if result.ok is None:
        return "note" if result.advice else ""
    return "ok" if result.ok else "no"


# Text, not str: rich would remove brackets as in 'polyrhythm[lab]' as markup.
def _table(groups: dict[str, Sequence[CheckResult]]) -> Table:
    table = Table("", "what", "found", title="polyrhythm doctor", title_justify="left")
    for group, check_results in groups.items():
        table.add_section()
        table.add_row("", Text(group, style="bold"), "")
        for result in check_results:
            mark = _mark(result)
            found = Text(result.found)
            if result.advice:
                found.append(f"\n{result.advice}", style="yellow")
            table.add_row(Text(mark, style=_STYLES[mark]), Text(result.subject), found)
    return table


def _plain(groups: dict[str, Sequence[CheckResult]]) -> Text:
    lines = []
    width = max((len(item.subject) for group in groups.values() for item in group), default=0)
    for group, check_results in groups.items():
        lines.append(group)
        for result in check_results:
            lines.append(f"  {_mark(result):<4}  {result.subject:<{width}}  {result.found}")
            if result.advice:
                lines.append(f"  {'':<4}  {'':<{width}}  -> {result.advice}")
    return Text("\n".join(lines))


def _verdict(groups: dict[str, Sequence[CheckResult]]) -> str:
    training, lab = groups["Training"], groups["Lab"]
    return (
        f"Training {'does not work' if _is_incomplete(training) else 'works'} on this machine; "
        f"the lab {'lacks something' if _is_incomplete(lab) else 'works'}."
    )
