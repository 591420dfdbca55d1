"""The doctor's report: what this machine has, group by group, and what to do about the rest.

Only the training group decides whether something essential is missing: the lab and the extras are
conveniences. A terminal gets a table, anything else plain lines that are never wrapped or styled.
"""

import importlib.metadata
import importlib.util
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from polyrhythm.describe.finding import Finding

_STYLES = {"ok": "green", "no": "bold red", "note": "yellow", "": ""}


def extras() -> list[Finding]:
    """What the optional dependencies add, beside those of the lab, which the lab looks for."""
    names = ("starlette", "uvicorn")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        advice = "pip install 'polyrhythm[watch]'; reports and everything else work without it"
        return [Finding("live web page (to come)", f"no {' and no '.join(missing)}", False, advice)]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in names]
    return [Finding("live web page (to come)", ", ".join(versions), True)]


def show(
    console: Console,
    *,
    training: Sequence[Finding],
    lab: Sequence[Finding],
    extras: Sequence[Finding],
) -> bool:
    """Print all findings; True when something essential is missing: training fails."""
    groups = {"Training": training, "Lab": lab, "Extras": extras}
    if console.is_terminal:
        console.print(_table(groups))
    else:
        console.print(_plain(groups), soft_wrap=True)
    console.print(_verdict(groups), highlight=False)
    return _lacks(training)


def _lacks(findings: Sequence[Finding]) -> bool:
    return any(finding.ok is False for finding in findings)


def _mark(finding: Finding) -> str:
    if finding.ok is None:
        return "note" if finding.advice else ""
    return "ok" if finding.ok else "no"


# Text, not str: brackets as in 'polyrhythm[lab]' would be taken for markup and vanish.
def _table(groups: dict[str, Sequence[Finding]]) -> Table:
    table = Table("", "what", "found", title="polyrhythm doctor", title_justify="left")
    for group, findings in groups.items():
        table.add_section()
        table.add_row("", Text(group, style="bold"), "")
        for finding in findings:
            mark = _mark(finding)
            found = Text(finding.found)
            if finding.advice:
                found.append(f"\n{finding.advice}", style="yellow")
            table.add_row(Text(mark, style=_STYLES[mark]), Text(finding.subject), found)
    return table


def _plain(groups: dict[str, Sequence[Finding]]) -> Text:
    lines = []
    width = max((len(each.subject) for group in groups.values() for each in group), default=0)
    for group, findings in groups.items():
        lines.append(group)
        for finding in findings:
            lines.append(f"  {_mark(finding):<4}  {finding.subject:<{width}}  {finding.found}")
            if finding.advice:
                lines.append(f"  {'':<4}  {'':<{width}}  -> {finding.advice}")
    return Text("\n".join(lines))


def _verdict(groups: dict[str, Sequence[Finding]]) -> str:
    training, lab = groups["Training"], groups["Lab"]
    return (
        f"Training {'does not work' if _lacks(training) else 'works'} on this machine; "
        f"the lab {'lacks something' if _lacks(lab) else 'works'}."
    )
