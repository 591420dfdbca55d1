"""`polyrhythm report RUN` and `polyrhythm export RUN`: what a run did, and the model it trained."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from polyrhythm.errors import EventError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from polyrhythm.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCommand:
    """Report on a finished or running job: steps, loss, time by activity, plan switches, groups.

    For a folder that `polyrhythm coordinator --log` wrote: the scheduler's decisions.
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's folder, such as runs/demo-20261115-040004."""
    trace: Path | None = None
    """Write a Chrome trace to this file instead; open it at https://ui.perfetto.dev."""

    def run(self, console: "Console") -> int:
        if self.trace is not None:
            _write_trace(_read(self.folder), self.trace, console)
        else:
            _show(self.folder, console)
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCommand:
    """Write the whole model of a checkpoint as safetensors, in Hugging Face's layout.

    Writes one model.safetensors, or several and an index above 5 GB. A model from transformers also
    gets its config.json, so that from_pretrained loads the folder. Needs no GPU and no running job.
    """

    run_folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's folder, a folder of checkpoints, or one checkpoint."""
    step: int | Literal["best"] | None = None
    """Step of the checkpoint, or best (of CheckpointConfig(keep_best=...)); by default the latest
    complete one."""
    out: Path | None = None
    """Target folder, new or empty; by default RUN/export/step-NNNNNNNN."""
    from_legacy: tyro.conf.FlagCreatePairsOff[bool] = False
    """Instead, convert an old checkpoint (format 1), so that training resumes from the run folder
    OUT, by default RUN-converted. It is a pickle: this RUNS THE CODE in it, so convert only
    checkpoints that you trust."""

    def run(self, console: "Console") -> int:
        from polyrhythm.run.checkpoint.export import export
        from polyrhythm.run.checkpoint.folder import find_checkpoint

        if self.from_legacy:
            from polyrhythm.run.checkpoint.legacy import convert

            if isinstance(self.step, str):
                raise UserError(
                    f"--step {self.step} --from-legacy",
                    expected="a number: old checkpoints have no evaluation",
                    fix="name the step, or omit --step for the newest",
                )
            source = self.run_folder
            folder = self.out or source.absolute().with_name(f"{source.name}-converted")
            out = convert(source, folder, self.step)
        else:
            checkpoint = find_checkpoint(self.run_folder, self.step)
            out = self.out or self.run_folder / "export" / checkpoint.name
            export(checkpoint, out)
        for path in sorted(out.iterdir()):
            console.print(f"{path}  {path.stat().st_size:,} bytes", soft_wrap=True)
        return 0


def _show(folder: Path, console: "Console") -> None:
    from polyrhythm.events import WORKERS, merged_log
    from polyrhythm.observe.groups import Groups
    from polyrhythm.observe.report import RunReport
    from polyrhythm.sync.decision_log import decision_log_paths
    from polyrhythm.tables import print_line

    logs = decision_log_paths(folder)
    is_run = merged_log(folder).exists() or (folder / WORKERS).exists() or not logs
    if is_run:
        events = _read(folder)
        RunReport.of(events).show(console)
        Groups.of(events).show(console)
    for number, path in enumerate(logs):
        if is_run or number:
            print_line(console, "")
        _show_decisions(path, console)


def _show_decisions(path: Path, console: "Console") -> None:
    from polyrhythm.observe.decisions import Decisions
    from polyrhythm.sync.log_reader import DecisionReader
    from polyrhythm.tables import print_line

    reader = DecisionReader(path)
    decisions = Decisions.of((entry.event, entry.commands) for _, entry in reader.decisions())
    setup = reader.setup
    plan = f"{setup.num_stages} stages x {setup.num_pipelines} pipelines"
    decisions.show(console, f"{setup.text}, {plan}")
    if num_before := reader.num_before:
        print_line(console, f"{path.name}: without the first {num_before:,} decisions, not kept")


def _read(folder: Path) -> "list[Event]":
    from polyrhythm.events import read_run

    try:
        return list(read_run(folder))
    except EventError as error:
        runs = [*folder.glob("*/events.jsonl"), *folder.glob("*/workers")]
        if (folder / "events.jsonl").exists() or (folder / "workers").exists() or not runs:
            raise
        newest = max(path.parent for path in runs)  # names contain the time
        raise EventError(
            error.wrong, expected="the folder of one run", fix=f"pass a run in it: {newest}"
        ) from None


def _write_trace(events: "list[Event]", path: Path, console: "Console") -> None:
    from polyrhythm.observe.trace import chrome_trace, write_trace
    from polyrhythm.tables import print_line

    if path.suffix == ".jsonl":
        raise UserError(
            f"--trace {path}",
            expected="a file that is not an event log, which would be overwritten",
            fix=f"--trace {path.with_suffix('.json').name}",
        )
    trace = chrome_trace(events)
    write_trace(trace, path)
    slices = sum(event.ph == "X" for event in trace)
    arrows = sum(event.ph == "s" for event in trace)
    print_line(console, f"{path}: {slices:,} slices, {arrows:,} arrows")
    print_line(console, "open it at https://ui.perfetto.dev (nothing is uploaded)")
