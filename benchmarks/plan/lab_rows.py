"""Plans carried out in the lab: the planner's against random ones, and dealt by speed or equally.

Real processes, pipelines, messages and averages; compute is a sleep. What is compared takes turns,
and a run during which the emulated network was late is repeated while there is time.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from benchmarks.plan.lab_jobs import Measured, carry_out
from benchmarks.plan.lab_setting import FULL, QUICK, placed, random_plans, uneven, world
from benchmarks.sleeping.job import lab_cluster
from polyrhythm.lab.lab import Lab
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.predict import Prediction, predict
from polyrhythm.plan.problem import Problem
from polyrhythm.types import Seconds

PLANNED, EQUAL = "planner", "equally"
_TRIES = 3
_TURN = 2  # others between two runs of the planner's plan

Side = tuple[str, Prediction]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabRow:
    """One run of one plan."""

    ratio: str  # that it is for
    side: str
    measured: Seconds  # a step
    predicted: Seconds
    layers: tuple[int, ...]  # of each stage
    microbatches: tuple[int, ...]  # of each pipeline
    disturbed: bool

    @property
    def error(self) -> float:
        return abs(self.predicted - self.measured) / self.measured


@dataclass(frozen=True, slots=True, kw_only=True)
class LabFigures:
    ratios: dict[str, float]
    figures: dict[str, float]
    rows: list[LabRow]
    warning: str | None  # why not to trust them, if the machine was disturbed


def lab_rows(
    *,
    quick: bool,
    make_plan: Callable[[Problem], Plan],
    on_progress: Callable[[str], None] = lambda _: None,
) -> LabFigures:
    size = QUICK if quick else FULL
    until = time.monotonic() + size.budget
    around, beside = world(size), uneven(size)
    ours = PLANNED, predict(make_plan(around), around)
    others = [
        (f"random {place}", one) for place, one in enumerate(random_plans(around, size.num_random))
    ]
    dealt = PLANNED, predict(make_plan(beside), beside)
    equal = EQUAL, placed(beside, [device.name for device in beside.cluster.devices])
    tell = _Teller(size.num_steps, until, on_progress)
    rows = tell.runs("lab_vs_random", around, _in_turns(ours, others))
    rows += tell.runs("uneven", beside, [dealt, equal] * size.uneven_rounds)
    return _figures(rows)


class _Teller:
    """Runs plans in a lab and says so."""

    def __init__(self, num_steps: int, until: Seconds, on_progress: Callable[[str], None]) -> None:
        self._num_steps, self._until, self._say = num_steps, until, on_progress

    def runs(self, ratio: str, problem: Problem, sides: Sequence[Side]) -> list[LabRow]:
        rows, numbers = [], count()
        with tempfile.TemporaryDirectory() as folder, Lab(lab_cluster(problem.cluster)) as lab:
            for name, prediction in sides:
                self._say(f"{ratio}: {name}")
                for _ in range(_TRIES):
                    measured = carry_out(
                        lab,
                        prediction.plan,
                        problem,
                        num_steps=self._num_steps,
                        folder=Path(folder),
                        number=next(numbers),
                    )
                    if measured.trouble is None or time.monotonic() >= self._until:
                        break
                rows.append(_row(ratio, name, prediction, measured))
        return rows


def _in_turns(ours: Side, others: Sequence[Side]) -> list[Side]:
    sides: list[Side] = []
    for first in range(0, len(others), _TURN):
        sides += [ours, *others[first : first + _TURN]]
    return sides


def _row(ratio: str, side: str, prediction: Prediction, measured: Measured) -> LabRow:
    plan = prediction.plan
    return LabRow(
        ratio=ratio,
        side=side,
        measured=statistics.median(measured.steps),
        predicted=prediction.time.total,
        layers=plan.layers_per_stage,
        microbatches=tuple(pipeline.num_microbatches or 0 for pipeline in plan.pipelines),
        disturbed=measured.trouble is not None,
    )


def _figures(rows: list[LabRow]) -> LabFigures:
    ours, others = _steps(rows, "lab_vs_random")
    dealt, equal = _steps(rows, "uneven")
    planned = next(row for row in rows if row.ratio == "lab_vs_random").predicted
    num_disturbed = sum(row.disturbed for row in rows)
    return LabFigures(
        ratios={
            "lab_vs_random": statistics.fmean(others) / statistics.median(ours),
            "lab_predicted": abs(planned / statistics.median(ours) - 1),
            "uneven": statistics.median(equal) / statistics.median(dealt),
        },
        figures={
            "lab_step_s": statistics.median(ours),
            "lab_random_step_s": statistics.fmean(others),
            "lab_predicted_worst": max(row.error for row in rows),
        },
        rows=rows,
        warning=f"the emulated network was late in {num_disturbed} of {len(rows)} runs: repeat it "
        "while the machine has nothing else to do"
        if num_disturbed
        else None,
    )


def _steps(rows: Sequence[LabRow], ratio: str) -> tuple[list[Seconds], list[Seconds]]:
    """Of the planner's plan, and of what it is compared with."""
    of_ratio = [row for row in rows if row.ratio == ratio]
    ours = [row.measured for row in of_ratio if row.side == PLANNED]
    return ours, [row.measured for row in of_ratio if row.side != PLANNED]
