"""What plans are worth in a step as it really runs: ours, DT-FM's and random ones, simulated.

DT-FM's plan is the best layout by its own cost and its planner's constants, which are the same for
every workload; it has eight stages and eight pipelines, as its authors use it. Ours has the same
degrees and equal pipelines: what differs is who is where, and by a layer or two the cuts. Schedules
are chosen for each of them alike. Gradients are exchanged over all links at once, as we do; or in a
ring; or one peer after the other, as DT-FM supposes (`vs_dtfm`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from polyrhythm.cost.dtfm import PUBLISHED, device_links, pair_times
from polyrhythm.cost.sync import Sync
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import Layer, ModelProfile
from polyrhythm.plan.dtfm.placement import place
from polyrhythm.plan.job import TrainingJob
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.plan.predict import predict
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.search import make_plan
from polyrhythm.schedule.plan_schedules import PlannedSchedules
from polyrhythm.types import Seconds

CASES = (
    "case1_datacenter_ondemand",
    "case2_datacenter_spot",
    "case3_multi_datacenter",
    "case4_regional",
    "case5_worldwide",
)
WORLDWIDE = CASES[-1]
DEGREE = 8  # stages, and pipelines

# GPT3-XL in DT-FM's evaluation: hidden size 2048, sequences of 2048 tokens, activations in fp16.
_FLOPS = 60e12  # of a V100 in such layers, supposed
_FORWARD: Seconds = 240518168576 / _FLOPS  # of a layer and a sequence
_BACKWARD_PER_FORWARD = 3  # with activations computed again
_PARAMETERS = 50358272  # of a layer
_ACTIVATIONS = 2048 * 2048 * 2
_NUM_RANDOM = 5


@dataclass(frozen=True, slots=True)
class Workload:
    num_layers: int
    batch: int  # sequences
    gradient_bytes: int = 2  # per parameter: 2 in fp16, 4 in fp32

    def __str__(self) -> str:
        kind = "fp16" if self.gradient_bytes == 2 else "fp32"
        return f"{self.num_layers} layers, batch {self.batch}, {kind} gradients"


PUBLISHED_WORKLOADS = tuple(
    Workload(layers, batch) for layers in (24, 32, 40) for batch in (1024, 2048, 4096)
)
PLANNERS_WORKLOAD = Workload(24, 61 * DEGREE, gradient_bytes=4)  # 61 micro-batches per pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    case: str
    workload: Workload
    sync: Sync
    ours: Seconds
    dtfm: Seconds
    random: Seconds | None = None  # the mean of some

    @property
    def vs_dtfm(self) -> float:
        return self.dtfm / self.ours

    @property
    def vs_random(self) -> float | None:
        return None if self.random is None else self.random / self.ours


def real_rows(*, quick: bool, on_row: Callable[[Row], None] = lambda _: None) -> list[Row]:
    rows = []
    for case in CASES[-1:] if quick else CASES:
        layout = dtfm_layout(case)
        for workload, sync in _workloads(quick=quick):
            row = _row(case, workload, sync, layout, num_random=1 if quick else _NUM_RANDOM)
            on_row(row)
            rows.append(row)
    return rows


def ratios(rows: list[Row]) -> dict[str, float]:
    world = [row for row in rows if row.case == WORLDWIDE]
    against_random = [row.vs_random for row in world if row.vs_random is not None]
    first = next(row for row in world if row.workload == PUBLISHED_WORKLOADS[0])
    planners = {row.sync: row for row in world if row.workload == PLANNERS_WORKLOAD}
    assert first.vs_random is not None, "random placements are for the world-wide cluster"
    return {
        "vs_random": first.vs_random,
        "vs_random_worst": min(against_random),
        "vs_dtfm": planners[Sync.SEQUENTIAL].vs_dtfm,
        "vs_dtfm_ring": planners[Sync.RING].vs_dtfm,
        "vs_dtfm_all_reduce": planners[Sync.ALL_REDUCE].vs_dtfm,
        "vs_dtfm_worst": min(row.vs_dtfm for row in rows),
        # DT-FM's plan with gradients as it supposes them, against ours as we exchange them.
        "vs_dtfm_exchange": planners[Sync.SEQUENTIAL].dtfm / planners[Sync.ALL_REDUCE].ours,
    }


def problem_of(cluster: Cluster, workload: Workload, sync: Sync) -> Problem:
    layers = tuple(
        Layer(
            name=f"layer {number}",
            forward=_FORWARD,
            backward=_BACKWARD_PER_FORWARD * _FORWARD,
            parameter_bytes=_PARAMETERS * 2,
            activation_bytes=_ACTIVATIONS,
            stored_bytes=_ACTIVATIONS,  # the rest is computed again
        )
        for number in range(workload.num_layers)
    )
    return Problem(
        cluster=cluster,
        profile=ModelProfile(name="gpt3-xl", microbatch_size=1, layers=layers),
        job=TrainingJob(
            batch=workload.batch,
            sync=sync,
            gradient_bytes=workload.gradient_bytes / 2,
            num_stages=DEGREE,
            num_pipelines=DEGREE,
            unequal=False,
        ),
        schedules=PlannedSchedules(),
    )


def dtfm_layout(case: str) -> list[list[int]]:
    """The best one by DT-FM's cost: [stage][pipeline]."""
    latency, bandwidth = device_links(Cluster.load(case))
    times = pair_times(latency, bandwidth, PUBLISHED, num_stages=DEGREE)
    return [list(row) for row in place(times, seed=0).cost.layout]


def _workloads(*, quick: bool) -> Iterator[tuple[Workload, Sync]]:
    for workload in PUBLISHED_WORKLOADS[:1] if quick else PUBLISHED_WORKLOADS:
        yield workload, Sync.ALL_REDUCE
    for sync in (Sync.ALL_REDUCE, Sync.RING, Sync.SEQUENTIAL):
        yield PLANNERS_WORKLOAD, sync


def _row(
    case: str, workload: Workload, sync: Sync, layout: list[list[int]], *, num_random: int
) -> Row:
    problem = problem_of(Cluster.load(case), workload, sync)
    rng = np.random.default_rng(0)
    size = (DEGREE, DEGREE)
    random = [rng.permutation(DEGREE**2).reshape(size).tolist() for _ in range(num_random)]
    return Row(
        case=case,
        workload=workload,
        sync=sync,
        ours=make_plan(problem).best.time.total,
        dtfm=_step(layout, problem),
        random=fmean(_step(each, problem) for each in random) if case == WORLDWIDE else None,
    )


def _step(layout: list[list[int]], problem: Problem) -> Seconds:
    names = [device.name for device in problem.cluster.devices]
    count = problem.num_layers // DEGREE
    plan = Plan(
        layers_per_stage=(count,) * DEGREE,
        pipelines=tuple(
            PipelinePlan(
                devices=tuple(names[device] for device in column),
                num_microbatches=problem.job.batch // DEGREE,
            )
            for column in zip(*layout, strict=True)
        ),
        microbatch_size=1,
        sync=problem.job.sync,
    )
    return predict(plan, problem).time.total
