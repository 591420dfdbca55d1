"""How long a step takes in DT-FM's runtime and in Megatron, whose stages block on their messages.

A stage does one thing after another: it sends and continues when the message has left, it receives
and continues when the message has arrived. A send and a receive between two computations overlap.
Both systems of the paper work like that:

- Megatron waits for all messages between two computations (`p2p_communication.py`).
- DT-FM's runtime has streams for receiving, computing and sending, but one NCCL communicator per
  pipeline (`dist_gpipe_pipeline_async.py`), and NCCL serialises the calls of one communicator over
  all streams (github.com/NVIDIA/nccl/issues/574). A stage calls "receive i, send i, receive i + 1",
  so it does not receive before it has sent.

The order of computations is the list of `schedule`; only the blocking differs from
`cost/pipeline.py`, whose stages never wait for a send.

DT-FM runs GPipe over 64 sequences at a time: every pipeline fills and drains once per 64 sequences
(gradient accumulation). When a stage has all of its gradients, each device exchanges its share with
the others one by one (eq. 2). Source: arXiv:2206.01288, sections 3.2 and 3.5; the 64 is from the
published script. Section 3.5 says that messages hide behind compute, which the published code
cannot do; `overlap` models what the section says.

Megatron runs 1F1B over single sequences. `tensor` GPUs split a layer and all-reduce its output in
the forward, again when that is recomputed, and the gradient of its input in the backward (appendix
A: "one AllReduce ... of each layer"); each sends its part of a message between stages. At the end
replicas all-reduce their gradients. An all-reduce is NCCL's ring in rank order, limited by its
slowest link. Ranks count tensor-parallel GPUs first, then replicas, then stages. Source:
arXiv:2104.04473, sections 2 and 4; degrees as in arXiv:2206.01288, appendix B.2.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from typing import NamedTuple

from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes, simulate
from polyrhythm.cost.step import Replica, StageRun, StageWork, StepSpec, groups_of, pipeline_times
from polyrhythm.cost.sync import Links, ReplicaGroup, Sync, reduce_scatter_times
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import Action, Op, Seconds
from reproduction.dtfm import testbed
from reproduction.dtfm.testbed import ACTIVATION_BYTES, DtfmNetwork, Flow, GptWorkload, Layout

SEQUENCES_AT_A_TIME = 64
# Micro-batches. From the first number on, times repeat with a period of as many micro-batches as a
# critical stage has in flight. Of up to 8 stages all such periods but 7 divide the difference.
_FEW, _MORE = 40, 160


def blocking_ends(schedule: Sequence[Sequence[Action]], times: PipelineTimes) -> list[Seconds]:
    """When each stage has finished its list of actions."""
    last = times.num_stages - 1
    arrivals: dict[tuple[Op, int, int], Seconds] = {}  # by operation, receiver and micro-batch
    ends = [0.0] * (last + 1)

    def run_stage(stage: int) -> Iterator[None]:
        now = 0.0
        for op, m in schedule[stage]:
            source, target = (stage - 1, stage + 1) if op is Op.F else (stage + 1, stage - 1)
            if 0 <= source <= last:
                while (op, stage, m) not in arrivals:
                    yield
                now = max(now, arrivals[op, stage, m])
            now += times.forward[stage] if op is Op.F else times.backward[stage]
            ends[stage] = now
            if 0 <= target <= last:
                link = times.activations[stage] if op is Op.F else times.gradients[target]
                now += link.busy[0]
                arrivals[op, target, m] = now + link.latency

    waiting = [run_stage(stage) for stage in range(last + 1)]
    while waiting:
        waiting = [run for run in waiting if next(run, ends) is None]
    return ends


@cache
def blocking_1f1b(times: PipelineTimes, num_microbatches: int) -> Seconds:
    """One step of one pipeline; many equal micro-batches are extrapolated from few."""
    if num_microbatches > _MORE:
        few, more = blocking_1f1b(times, _FEW), blocking_1f1b(times, _MORE)
        return more + (num_microbatches - _MORE) * (more - few) / (_MORE - _FEW)
    schedule = ScheduleSpec("1f1b").build(
        num_stages=times.num_stages, num_microbatches=num_microbatches
    )
    return max(blocking_ends(schedule, times))


class Iteration(NamedTuple):
    total: Seconds
    pipeline: Seconds  # until the last backward; gradients are exchanged after it


def dtfm_iteration(
    layout: Layout, workload: GptWorkload, network: DtfmNetwork, *, overlap: bool = False
) -> Iteration:
    """One iteration of DT-FM; batches differ in how often pipelines fill and drain."""
    pipelines, sync_times = _dtfm_times(layout, workload.num_layers, network, overlap)
    num_before = workload.batch // len(pipelines) // SEQUENCES_AT_A_TIME - 1
    ends = [
        max(num_before * max(ends) + ends[stage] for ends in pipelines)
        for stage in range(len(layout))
    ]
    total = max(end + 2 * half for end, half in zip(ends, sync_times, strict=True))
    return Iteration(total, max(ends))


@cache  # it is the same for all batches
def _dtfm_times(
    layout: Layout, num_layers: int, network: DtfmNetwork, overlap: bool
) -> tuple[list[list[Seconds]], Sequence[Seconds]]:
    """When the stages of each pipeline end, which fills and drains once; exchanges of stages."""
    hops = [hop for devices in zip(*layout, strict=True) for hop in pairwise(devices)]
    step = _dtfm_step(layout, num_layers, network.links(hops))
    times = [pipeline_times(replica.runs, step) for replica in step.replicas]
    schedule = step.replicas[0].schedule
    ends_of = {  # equal pipelines are computed once
        one: [ends[-1] for ends in simulate(schedule, one).ends]
        if overlap
        else blocking_ends(schedule, one)
        for one in set(times)
    }
    sync_times = reduce_scatter_times(groups_of(step), network.busy_links, Sync.SEQUENTIAL)
    return [ends_of[one] for one in times], sync_times


def _dtfm_step(layout: Layout, num_layers: int, links: Links) -> StepSpec:
    num_stages = len(layout)
    forward = testbed.forward_time(num_layers / num_stages)
    schedule = ScheduleSpec("gpipe").build(
        num_stages=num_stages, num_microbatches=SEQUENCES_AT_A_TIME
    )
    return StepSpec(
        replicas=tuple(
            Replica(
                runs=tuple(StageRun(device, s, s + 1) for s, device in enumerate(devices)),
                schedule=schedule,
            )
            for devices in zip(*layout, strict=True)
        ),
        stages=tuple(
            StageWork(
                forward=forward,
                backward=testbed.BACKWARD * forward,
                activation_bytes=ACTIVATION_BYTES,
                gradient_bytes=size,
            )
            for size in testbed.gradient_bytes(num_layers, num_stages)
        ),
        speeds=(1.0,) * testbed.NUM_GPUS,
        links=links,
        sync=Sync.SEQUENTIAL,
    )


class Degrees(NamedTuple):
    tensor: int
    pipeline: int
    data: int

    def __str__(self) -> str:
        return "({}, {}, {})".format(*self)


ALL_DEGREES = tuple(
    Degrees(*degrees)
    for degrees in product((1, 2, 4, 8), repeat=3)
    if degrees[0] * degrees[1] * degrees[2] == testbed.NUM_GPUS
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MegatronJob:
    devices: tuple[int, ...]  # by rank
    degrees: Degrees
    network: DtfmNetwork

    def device(self, tensor: int, stage: int, replica: int) -> int:
        rank = (stage * self.degrees.data + replica) * self.degrees.tensor + tensor
        return self.devices[rank]

    def tensor_group(self, stage: int, replica: int) -> list[int]:
        return [self.device(tensor, stage, replica) for tensor in range(self.degrees.tensor)]

    def tensor_groups(self) -> list[ReplicaGroup]:
        """The groups that all-reduce activations: all replicas of stage 0, then of stage 1, ..."""
        return [
            ReplicaGroup(members=tuple(self.tensor_group(stage, replica)), size=ACTIVATION_BYTES)
            for stage, replica in product(range(self.degrees.pipeline), range(self.degrees.data))
        ]

    def data_groups(self, num_layers: int) -> list[ReplicaGroup]:
        """The groups that all-reduce gradients."""
        replicas = range(self.degrees.data)
        sizes = testbed.gradient_bytes(num_layers, self.degrees.pipeline)
        return [
            ReplicaGroup(
                members=tuple(self.device(tensor, stage, replica) for replica in replicas),
                size=sizes[stage] / self.degrees.tensor,
            )
            for stage, tensor in product(range(self.degrees.pipeline), range(self.degrees.tensor))
        ]


def megatron_iteration(job: MegatronJob, workload: GptWorkload) -> Seconds:
    pipelines, sync = _megatron_times(job, workload.num_layers)
    num_microbatches = workload.batch // job.degrees.data
    return max(blocking_1f1b(one, num_microbatches) for one in pipelines) + sync


@cache  # it is the same for all batches
def _megatron_times(job: MegatronJob, num_layers: int) -> tuple[list[PipelineTimes], Seconds]:
    """The times of each pipeline, and of exchanging the gradients."""
    degrees = job.degrees
    layers_per_stage = num_layers / degrees.pipeline
    compute = testbed.forward_time(layers_per_stage) / degrees.tensor
    reduces = [layers_per_stage * time for time in ring_times(job.tensor_groups(), job.network)]
    hops = _hops(job)
    pipelines = []
    for replica in range(degrees.data):
        of_stages = [reduces[stage * degrees.data + replica] for stage in range(degrees.pipeline)]
        forward = tuple(compute + reduce for reduce in of_stages)
        # Two of the three all-reduces are in the backward, one of them in its recomputed forward.
        backward = tuple(testbed.BACKWARD * compute + 2 * reduce for reduce in of_stages)
        links = tuple(hop[replica] for hop in hops)
        pipelines.append(
            PipelineTimes(forward=forward, backward=backward, activations=links, gradients=links)
        )
    return pipelines, max(ring_times(job.data_groups(num_layers), job.network))


def ring_times(groups: Sequence[ReplicaGroup], network: DtfmNetwork) -> list[Seconds]:
    """Concurrent ring all-reduces: 2 (n - 1) steps each, as long as the slowest link takes."""
    rings = [_ring(group.members) for group in groups]
    rates = network.rates(flow for ring in rings for flow in ring)
    times = []
    for group, ring in zip(groups, rings, strict=True):
        num_steps, part = 2 * (len(group.members) - 1), group.size / len(group.members)
        slowest = max((network.latency[flow] + part / rates[flow] for flow in ring), default=0.0)
        times.append(num_steps * float(slowest))
    return times


def _ring(members: Sequence[int]) -> list[Flow]:
    return list(zip(members, [*members[1:], members[0]], strict=True)) if len(members) > 1 else []


def _hops(job: MegatronJob) -> list[list[LinkTimes]]:
    """[hop][replica]. Replicas run in step, so they send at the same time."""
    part = ACTIVATION_BYTES / job.degrees.tensor
    hops = []
    for stage, after in pairwise(range(job.degrees.pipeline)):
        pairs = [
            list(
                zip(job.tensor_group(stage, replica), job.tensor_group(after, replica), strict=True)
            )
            for replica in range(job.degrees.data)
        ]
        rates = job.network.rates(flow for flows in pairs for flow in flows)
        hops.append(
            [
                LinkTimes(
                    busy=(max(part / rates[flow] for flow in flows),),
                    latency=max(float(job.network.latency[flow]) for flow in flows),
                )
                for flows in pairs
            ]
        )
    return hops
