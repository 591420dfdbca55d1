"""A job to simulate, with its checks: cluster, stages, pipelines with schedules, sync, scenario.

It consists of the runtime's own data: schedules are lists of actions, the setup creates the
scheduler that a coordinator serves, the scenario is the file that a lab plays.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

from polyrhythm.cost.step import Replica, Schedule, StageRun, StageWork
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.scenario import Scenario
from polyrhythm.describe.units import check_amount
from polyrhythm.errors import PlanError, PolicyError
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.problem import Problem
from polyrhythm.schedule.check import check
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds

EMPTY_SCENARIO = Scenario(name="calm")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedInputs:
    """What a job was planned from: with it survivors choose schedules, and may plan again."""

    plan: Plan  # with its schedules
    problem: Problem


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    cluster: Cluster
    stages: tuple[StageWork, ...]
    pipelines: tuple[Replica, ...]  # runs by index of device; a schedule for each run
    sync: Setup
    overlap: bool = False  # continue at once, and apply the average at the next step's end
    decoupled: bool = False  # reduce-scatter and all-gather are hidden by backward and forward
    num_buckets: int = 8  # of a stage's gradients, if decoupled
    in_flight: tuple[int, ...] | None = None  # per run: limits of a pipeline that is never flushed
    scenario: Scenario = EMPTY_SCENARIO
    coordinator: int | None = None  # its device; None for that of the first worker
    samples: tuple[int, ...] | None = None  # per step of each pipeline; None for micro-batches
    nodes: tuple[str, ...] | None = None  # the machine of each device; None for its region
    # For each device, the device whose uplink represents the shared uplink of its machine; averages
    # are then rings through these, as in NCCL. None: every device has its own uplink.
    gateways: tuple[int, ...] | None = None
    planned: PlannedInputs | None = None  # None: survivors keep the in-flight limits of schedules

    def __post_init__(self) -> None:
        _check_shape(self)
        _check_devices(self)
        _check_stages(self)
        _check_schedules(self)
        _check_sync_mode(self)
        self.scenario.check(self.cluster)

    @property
    def setup(self) -> Setup:
        """The setup of the scheduler: `sync`, with how far the stages run ahead of one another."""
        has_flush = self.in_flight is None
        return replace(self.sync, steps_ahead=float(self.overlap) if has_flush else math.inf)

    @property
    def has_epochs(self) -> bool:
        """Whether a loss ends an epoch, after which the survivors compute the whole batch."""
        faults = self.scenario.kill or self.scenario.join
        return bool(faults) and self.sync.mode.exact and self.in_flight is None


def replicas(schedule: Schedule, num_pipelines: int) -> tuple[Replica, ...]:
    """Pipelines with one device per worker: device s + num_stages * p runs worker (s, p)."""
    count = len(schedule)
    return tuple(
        Replica(
            runs=tuple(StageRun(p * count + s, s, s + 1) for s in range(count)), schedule=schedule
        )
        for p in range(num_pipelines)
    )


def split_regions(job: SimulatedJob) -> SimulatedJob:
    """Return the job with one region per device, if a link change names a device.

    So a scenario can change single links.
    """
    cluster, changes = job.cluster, job.scenario.link
    if all({change.source, change.target} <= set(cluster.regions) for change in changes):
        return job
    split = [
        replace(change, source=a, target=b, one_way=True)
        for change in changes
        for a, b in change.pairs(cluster)
    ]
    nodes = job.nodes or tuple(device.region for device in cluster.devices)
    scenario = replace(job.scenario, link=tuple(split))
    return replace(job, cluster=_region_per_device(cluster), scenario=scenario, nodes=nodes)


def _region_per_device(cluster: Cluster) -> Cluster:
    index = {region: i for i, region in enumerate(cluster.regions)}
    rows = [index[device.region] for device in cluster.devices]
    names = tuple(device.name for device in cluster.devices)
    prices = cluster.egress_price_per_gb
    return replace(
        cluster,
        devices=tuple(replace(device, region=device.name) for device in cluster.devices),
        regions=names,
        latency=tuple(tuple(cluster.latency[a][b] for b in rows) for a in rows),
        bandwidth=tuple(tuple(cluster.bandwidth[a][b] for b in rows) for a in rows),
        latency_spread=(),
        bandwidth_spread=(),
        egress_price_per_gb=tuple(prices[row] for row in rows) if prices else (),
    )


def _check_shape(job: SimulatedJob) -> None:
    for number, pipeline in enumerate(job.pipelines):
        ends = [run.end for run in pipeline.runs]
        firsts = [run.first for run in pipeline.runs]
        if not ends or firsts != [0, *ends[:-1]] or ends[-1] != len(job.stages):
            raise PlanError(
                f"pipeline {number} runs stages {list(zip(firsts, ends, strict=True))}",
                expected=f"each of the {len(job.stages)} stages once, in order",
                fix="assign every stage to one device",
            )
    shape = (job.sync.num_stages, job.sync.num_pipelines)
    if shape != (len(job.stages), len(job.pipelines)):
        raise PlanError(
            f"a scheduler for {shape[0]} stages x {shape[1]} pipelines",
            expected=f"one for {len(job.stages)} x {len(job.pipelines)}, as the job has",
            fix="create the setup from the plan",
        )
    lengths: list[tuple[str, tuple[object, ...] | None, int]] = [
        ("samples", job.samples, len(job.pipelines)),
        ("nodes", job.nodes, len(job.cluster.devices)),
        ("gateways", job.gateways, len(job.cluster.devices)),
    ]
    for name, values, expected in lengths:
        if values is not None and len(values) != expected:
            raise PlanError(f"{len(values)} {name}", expected=f"{expected}", fix=f"correct {name}")
    if job.num_buckets < 1:
        raise PlanError(f"num_buckets={job.num_buckets}", expected="1 or more", fix="use 8")


def _check_devices(job: SimulatedJob) -> None:
    count = len(job.cluster.devices)
    used = [run.device for pipeline in job.pipelines for run in pipeline.runs]
    named = [*used, *(job.gateways or ()), *([] if job.coordinator is None else [job.coordinator])]
    for device in named:
        if not 0 <= device < count:
            raise PlanError(
                f"device {device} of a cluster of {count}",
                expected=f"0 to {count - 1}",
                fix="use the cluster that the plan was made for",
            )
    for device, count in Counter(used).items():
        if count > 1:
            raise PlanError(
                f"{job.cluster.devices[device].name!r} has {count} parts of pipelines",
                expected="one part, of consecutive stages",
                fix="use another device for one of them",
            )


def _check_stages(job: SimulatedJob) -> None:
    for number, stage in enumerate(job.stages):
        for name in ("forward", "backward"):
            check_amount(f"{name} of stage {number}", getattr(stage, name), Seconds)
        for name in ("activation_bytes", "gradient_bytes"):
            check_amount(f"{name} of stage {number}", getattr(stage, name))
        if stage.forward + stage.backward <= 0:
            raise PlanError(
                f"stage {number} has no compute",
                expected="a forward and a backward that take time",
                fix="profile the model, or merge the stage with the previous one",
            )


def _check_schedules(job: SimulatedJob) -> None:
    checked: set[int] = set()
    for number, pipeline in enumerate(job.pipelines):
        if len(pipeline.schedule) != len(pipeline.runs):
            raise PlanError(
                f"pipeline {number}: a schedule of {len(pipeline.schedule)} stages for "
                f"{len(pipeline.runs)} devices",
                expected="a list of actions for each device",
                fix="build it for the devices of the pipeline",
            )
        if id(pipeline.schedule) not in checked:
            checked.add(id(pipeline.schedule))
            lists = [list(actions) for actions in pipeline.schedule]
            check(lists, num_microbatches=len(lists[0]) // 2)
        if job.in_flight is not None:
            _check_in_flight(job.in_flight, len(pipeline.runs))


def _check_in_flight(in_flight: tuple[int, ...], num_runs: int) -> None:
    is_descending = all(a >= b for a, b in pairwise(in_flight))
    if len(in_flight) != num_runs or not is_descending or min(in_flight) < 1:
        raise PlanError(
            f"in_flight={in_flight}",
            expected=f"{num_runs} limits of 1 or more, none above the previous one",
            fix=f"use {tuple(range(num_runs, 0, -1))}, as 1F1B does",
        )


def _check_sync_mode(job: SimulatedJob) -> None:
    """Check as the runtime does; decoupled all_reduce is its DistributedOptimizer."""
    mode, policy = job.sync.mode, job.sync.policy
    if job.overlap and (job.decoupled or not mode.can_overlap):
        raise PolicyError(
            "overlap with " + ("decoupled" if job.decoupled else policy),
            expected="a policy that averages models in groups of the scheduler",
            fix="use age or adaptive, or omit overlap",
        )
    if job.decoupled and not mode.can_decouple:
        raise PolicyError(
            f"decoupled with {policy}",
            expected=f"a policy whose averages can be decoupled; {mode.why_not_decoupled}",
            fix="use all_reduce, age or adaptive, or omit decoupled",
        )
    if job.in_flight is not None and (mode.balances_microbatches or job.decoupled):
        raise PolicyError(
            f"{'decoupled' if job.decoupled else policy} in a pipeline that is never flushed",
            expected="steps of several micro-batches, and one version of the weights",
            fix="omit in_flight",
        )
    if not mode.has_coordinator and (job.scenario.kill or job.scenario.join):
        raise PolicyError(
            f"{policy} with devices that are lost or join",
            expected="a policy whose losses are simulated: those of this one are not simulated yet",
            fix="use decoupled, adaptive or age, or remove kill and join from the scenario",
        )
