"""`stormy`: samples per second in a storm, the Trainer with everything `auto` against torch.

The rival has random places, the mean over a few layouts, and its best size of micro-batches, which
is found on the first of them; its processes hardly need the cores, so that runs are made side by
side. Ours is timed from its first step to the end, the search for the best way to keep together
included. torch is synchronous: what it would have learned from as many samples, one process finds
out, and the first losses of both are compared.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from benchmarks.endtoend import ours, rival
from benchmarks.endtoend.alone import Alone
from benchmarks.endtoend.at_once import at_once
from benchmarks.endtoend.crew import Crew, Heard, Work
from benchmarks.endtoend.side import Assignment
from benchmarks.endtoend.stormy_setting import (
    BUCKET,
    DWELL,
    FULL,
    QUICK,
    Size,
    bursts,
    byte_scale,
    laid_out,
    links_of,
    problem_of,
    quick,
    random_layouts,
    slow_machines,
)
from benchmarks.sleeping.job import lab_cluster
from polyrhythm.describe.cluster import Cluster
from polyrhythm.lab.lab import Lab
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.search import make_plan
from polyrhythm.types import Seconds

_PORT = 29500
_ENOUGH = 5  # steps of each pipeline, to speak of a rate
_NUM_CORES = 2  # that all processes share
_LONGEST: Seconds = 1200.0  # of a run: as long is the storm


@dataclass(frozen=True, slots=True, kw_only=True)
class StormyRow:
    """One run."""

    side: str  # torch, or ours
    layout: str
    microbatch_size: int
    num_steps: int
    seconds: Seconds
    rate: float  # samples per second
    steady_rate: float  # of the second half of all samples
    load: float  # the share of two cores that its processes took
    losses: tuple[float, ...]  # of the samples of each step, at first
    disturbed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stormy:
    ratios: dict[str, float]
    figures: dict[str, float]
    rows: list[StormyRow]


def stormy(*, quick: bool, say: Callable[[str], None]) -> Stormy:
    size = QUICK if quick else FULL
    problem = problem_of(size)
    storm = _Storm(size, lab_cluster(problem.cluster), problem.profile.layers[0].forward, say)
    say("stormy: planning")
    plan = make_plan(problem).best.plan
    layouts = random_layouts(problem, size)
    with Alone(storm.told(plan, size.num_steps)) as alone:
        rows = storm.torch([(0, layouts[0], each) for each in size.rival_sizes])
        best = max(rows, key=lambda row: row.rate)
        others = enumerate(layouts[1:], start=1)
        chosen = [best, *storm.torch([(*other, best.microbatch_size) for other in others])]
        losses, expected = alone.losses()
        mine, held_out = storm.ours(plan)
    rows += [*chosen[1:], mine]
    return Stormy(
        ratios={
            "stormy": mine.rate / fmean(row.rate for row in chosen),
            "stormy_loss": held_out / expected - 1,
        },
        figures={
            "stormy_steady": mine.steady_rate / fmean(row.rate for row in chosen),
            "stormy_samples_per_s": mine.rate,
            "stormy_torch_samples_per_s": fmean(row.rate for row in chosen),
            "stormy_held_out": held_out,
            "stormy_torch_held_out": expected,
            "stormy_load": mine.load,
            "stormy_torch_loss_error": max(
                abs(a - b) for row in chosen for a, b in zip(row.losses, losses, strict=False)
            ),
        },
        rows=rows,
    )


class _Storm:
    """Runs a job in it, each in a lab of its own and with the same luck."""

    def __init__(
        self, size: Size, cluster: Cluster, forward: Seconds, say: Callable[[str], None]
    ) -> None:
        self._size, self._cluster, self._forward, self._say = size, cluster, forward, say
        self._links = bursts(cluster, dwell=DWELL * size.time_scale, until=_LONGEST, seed=0)

    def told(self, plan: Plan, num_steps: int) -> Assignment:
        return Assignment(
            plan=plan,
            num_steps=num_steps,
            forward=self._forward,
            backward=3 * self._forward,
            num_held_out=self._size.num_held_out,
            timeout=self._size.patience,
            scenario=slow_machines(),
            bucket=round(BUCKET * byte_scale()),
        )

    def torch(self, runs: Sequence[tuple[int, tuple[str, ...], int]]) -> list[StormyRow]:
        """Several at once, each a layout, its number, and the size of micro-batches."""
        patience = (self._size.rival_steps + 1) * self._size.patience
        return at_once([partial(self._torch, *run) for run in runs], patience=patience)

    def _torch(
        self,
        number: int,
        layout: tuple[str, ...],
        microbatch_size: int,
        prepared: Callable[[], object],
    ) -> StormyRow:
        plan = laid_out(layout, self._size, microbatch_size)
        told = self.told(plan, self._size.rival_steps)
        name = f"random {number}"
        run = f"torch, {name}, micro-batches of {microbatch_size}"
        heard, disturbed = self._run(run, rival.work, told, prepared)
        return _row("torch", name, told, heard, disturbed=disturbed)

    def ours(self, plan: Plan) -> tuple[StormyRow, float]:
        told = self.told(plan, self._size.num_steps)
        heard, disturbed = self._run("ours", ours.work, told)
        (held_out,) = {done.held_out for done in heard.done}
        assert held_out is not None, "everybody has evaluated"
        return _row("ours", "planned", told, heard, disturbed=disturbed), held_out

    def _run(
        self,
        name: str,
        work: Work,
        told: Assignment,
        prepared: Callable[[], object] = lambda: None,
    ) -> tuple[Heard, bool]:
        self._say(f"stormy: {name}")

        def on_step(heard: Heard) -> None:
            batches = heard.num_samples // told.batch
            before = heard.num_samples - heard.steps[-1].num_samples
            if batches > before // told.batch:
                seconds = heard.steps[-1].moment - heard.began
                self._say(f"stormy: {name}: {batches} of {told.num_steps} steps, {seconds:.1f} s")

        with (
            tempfile.TemporaryDirectory() as folder,
            Lab(quick(self._cluster)) as lab,
            Crew(lab, work, told, output=Path(folder), port=_PORT) as crew,
        ):
            for change in links_of(self._cluster):
                lab.change(change)
            prepared()
            lab.report(reset=True)
            crew.begin()
            heard = crew.follow(self._size.patience, links=self._links, on_step=on_step)
            return heard, lab.report().switch_timing.trouble is not None


def _row(side: str, layout: str, told: Assignment, heard: Heard, *, disturbed: bool) -> StormyRow:
    return StormyRow(
        side=side,
        layout=layout,
        microbatch_size=told.microbatch_size,
        num_steps=told.num_steps,
        seconds=heard.seconds,
        rate=heard.rate,
        steady_rate=_steady_rate(heard),
        load=sum(done.cpu for done in heard.done) / heard.seconds / _NUM_CORES,
        losses=_losses(told, heard),
        disturbed=disturbed,
    )


def _steady_rate(heard: Heard) -> float:
    """Of the second half of all steps; that of all where these are few."""
    ends = sorted(heard.steps, key=lambda end: end.moment)
    half = len(ends) // 2
    if half < _ENOUGH * len({end.worker for end in ends}):
        return heard.rate
    lasted = ends[-1].moment - ends[half - 1].moment
    return sum(end.num_samples for end in ends[half:]) / lasted


def _losses(told: Assignment, heard: Heard) -> tuple[float, ...]:
    """Means over the batches of steps that all pipelines made together."""
    found = []
    for step in range(told.num_steps):
        of_step = [end for end in heard.steps if end.step == step]
        if sum(end.num_samples for end in of_step) == told.batch:
            found.append(sum(end.loss * end.num_samples for end in of_step) / told.batch)
    return tuple(found)
