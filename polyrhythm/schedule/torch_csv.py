"""Read and write schedules as the CSV of torch.distributed.pipelining.

One row per rank, one cell per slot: `2F0` is the forward of micro-batch 0 on stage 2, and an empty
cell is a slot in which the rank waits. This is torch's "compute_only" format, which its runtime
(`_PipelineScheduleRuntime._load_csv`) and torchtitan complete with sends and receives themselves.
Here a rank runs one stage and a backward is whole, so tables with several stages per rank or with
split backwards (I, W) are refused.
"""

import csv
import io
import re

from polyrhythm.errors import ScheduleError
from polyrhythm.schedule.builders import Schedule
from polyrhythm.schedule.check import check
from polyrhythm.types import Action, Op

_CELL = re.compile(r"(\d+)([A-Z_]+)(\d*)", re.ASCII)


def to_csv(schedule: Schedule) -> str:
    """Return the text of the file; there are no empty cells, since ranks wait by themselves."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([f"{s}{action}" for action in row] for s, row in enumerate(schedule))
    return text.getvalue()


def from_csv(text: str) -> Schedule:
    """Return the schedule in `text` after checking it: complete, in order, free of deadlock."""
    rows = list(csv.reader(io.StringIO(text.rstrip())))
    if not rows:
        raise ScheduleError(
            "a schedule without rows", expected="one row per rank", fix="give the text of the file"
        )
    schedule = [
        [
            _action(cell.strip(), rank, f"row {rank + 1}, cell {place + 1}")
            for place, cell in enumerate(row)
            if cell.strip()
        ]
        for rank, row in enumerate(rows)
    ]
    check(schedule, num_microbatches=max(1, sum(op is Op.F for op, _ in schedule[0])))
    return schedule


def _action(cell: str, rank: int, where: str) -> Action:
    parts = _CELL.fullmatch(cell)
    if parts is None:
        raise ScheduleError(
            f"{where}: {cell!r}",
            expected="a stage, F or B, and a micro-batch",
            fix=f"write it like {rank}F0",
        )
    stage, op, microbatch = parts.groups()
    if op not in set(Op) or not microbatch:
        raise ScheduleError(
            f"{where}: {cell!r}",
            expected="F and B of micro-batches: no split backward (I, W), no communication",
            fix="export the schedule as compute_only, with whole backwards",
        )
    if int(stage) != rank:
        raise ScheduleError(
            f"{where}: stage {stage} on rank {rank}",
            expected=f"stage {rank} alone: one stage per rank, in order",
            fix="use a schedule that is not interleaved (no V, no virtual stages)",
        )
    return Action(Op(op), int(microbatch))
