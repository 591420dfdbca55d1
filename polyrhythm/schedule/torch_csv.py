"""Read and write schedules as the CSV of torch.distributed.pipelining.

One row per rank, one cell per slot: `2F0` is the forward of micro-batch 0 on stage 2, and an empty
cell is a slot in which the rank waits. This is torch's "compute_only" format, which its runtime
(`_PipelineScheduleRuntime._load_csv`) and torchtitan complete with sends and receives themselves.
Its "compute_comms" format is read, too: a pipeline here derives what the further cells say. A rank
runs one stage and a backward is whole, so tables with several stages per rank or with split
backwards (I, W) are refused.
"""

import csv
import io
import re

from polyrhythm.errors import ScheduleError
from polyrhythm.schedule.builders import Schedule
from polyrhythm.schedule.check import check
from polyrhythm.types import Action, Op

_CELL = re.compile(r"(\d+)([A-Z_]+)(\d*)", re.ASCII)
_COMMUNICATION = {"SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"}


def to_csv(schedule: Schedule) -> str:
    """Return the text of the file; there are no empty cells, since ranks wait by themselves."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([f"{s}{action}" for action in row] for s, row in enumerate(schedule))
    return text.getvalue()


def from_csv(text: str) -> Schedule:
    """Return the schedule in `text` after checking it: complete, in order, free of deadlock."""
    if text.strip().endswith(".csv"):
        raise ScheduleError(
            f"the path {text.strip()} as a schedule",
            expected="the text of the file",
            fix=f"from_csv(Path({text.strip()!r}).read_text())",
        )
    rows = list(csv.reader(io.StringIO(text.rstrip())))
    if not rows:
        raise ScheduleError(
            "a schedule without rows", expected="one row per rank", fix="give the text of the file"
        )
    schedule = []
    for rank, row in enumerate(rows):
        cells = [(cell.strip(), f"row {rank + 1}, cell {i + 1}") for i, cell in enumerate(row)]
        actions = (_action(cell, rank, where) for cell, where in cells if cell)
        schedule.append([action for action in actions if action is not None])
    schedule = _renumbered(schedule)
    check(schedule, num_microbatches=max(1, sum(op is Op.F for op, _ in schedule[0])))
    return schedule


def _renumbered(schedule: Schedule) -> Schedule:
    """Number the micro-batches of two tables of torch 2.13 as a pipeline here runs them.

    ScheduleLoopedBFS runs all forwards, then all backwards from the last micro-batch to the first:
    with one stage per rank that is GPipe, whose backwards count up here, as links deliver in order.
    Schedule1F1B.pipeline_order counts the forwards of the last stage from 1, its backwards from 0.
    """
    size = sum(op is Op.F for op, _ in schedule[0])
    forwards = [Action(Op.F, m) for m in range(size)]
    backwards = [Action(Op.B, m) for m in range(size)]
    if all(row == forwards + backwards[::-1] for row in schedule):
        return [forwards + backwards for _ in schedule]
    alternating = [Action(op, m) for m in range(size) for op in (Op.F, Op.B)]
    if schedule[-1] == [Action(op, m + (op is Op.F)) for op, m in alternating]:
        return [*schedule[:-1], alternating]
    return schedule


def _action(cell: str, rank: int, where: str) -> Action | None:
    """Return the action of a cell; None for communication, which a pipeline derives itself."""
    parts = _CELL.fullmatch(cell)
    if parts is None:
        raise ScheduleError(
            f"{where}: {cell!r}",
            expected="a stage, F or B, and a micro-batch",
            fix=f"write it like {rank}F0",
        )
    stage, op, microbatch = parts.groups()
    if op not in _COMMUNICATION and (op not in set(Op) or not microbatch):
        raise ScheduleError(
            f"{where}: {cell!r}",
            expected="F and B of micro-batches, with no split backward (I, W)",
            fix="export a schedule with whole backwards, such as 1F1B or GPipe",
        )
    if int(stage) != rank:
        raise ScheduleError(
            f"{where}: stage {stage} on rank {rank}",
            expected=f"stage {rank} alone: one stage per rank, in order",
            fix="use a schedule that is not interleaved (no V, no virtual stages)",
        )
    return None if op in _COMMUNICATION else Action(Op(op), int(microbatch))
