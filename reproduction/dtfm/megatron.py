"""A step of Megatron: tensor, pipeline and data parallel, with nothing hidden behind compute.

A layer is cut over `tensor` GPUs, which all-reduce its output in the forward, again when that is
repeated, and its input's gradient in the backward (appendix A: "one AllReduce ... of each layer").
Pipelines run 1F1B over single sequences, and stages wait for their messages (`blocking.py`); GPUs
that cut a layer send a part each. In the end replicas all-reduce their gradients. All-reduce is
NCCL's ring in order of ranks, and the slowest link decides. Ranks: first those that cut a layer,
then replicas, then stages.

Source: arXiv:2104.04473, sections 2 and 4; degrees as arXiv:2206.01288, appendix B.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes
from polyrhythm.cost.sync import ReplicaGroup
from polyrhythm.types import Seconds
from reproduction.dtfm.blocking import blocking_1f1b
from reproduction.dtfm.networks import Flow, Network
from reproduction.dtfm.workload import (
    ACTIVATION_BYTES,
    BACKWARD,
    NUM_GPUS,
    Workload,
    forward_time,
    gradient_bytes,
)


class Degrees(NamedTuple):
    tensor: int
    pipeline: int
    data: int

    def __str__(self) -> str:
        return "({}, {}, {})".format(*self)


GRID = tuple(
    Degrees(*degrees)
    for degrees in product((1, 2, 4, 8), repeat=3)
    if degrees[0] * degrees[1] * degrees[2] == NUM_GPUS
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """Megatron with these degrees on these devices, which are in order of their ranks."""

    devices: tuple[int, ...]
    degrees: Degrees
    network: Network

    def device(self, tensor: int, stage: int, replica: int) -> int:
        rank = (stage * self.degrees.data + replica) * self.degrees.tensor + tensor
        return self.devices[rank]

    def tensor_group(self, stage: int, replica: int) -> list[int]:
        return [self.device(tensor, stage, replica) for tensor in range(self.degrees.tensor)]

    def tensor_groups(self) -> list[ReplicaGroup]:
        """Who all-reduces activations; replicas of the first stage come first."""
        return [
            ReplicaGroup(members=tuple(self.tensor_group(stage, replica)), size=ACTIVATION_BYTES)
            for stage, replica in product(range(self.degrees.pipeline), range(self.degrees.data))
        ]

    def data_groups(self, num_layers: int) -> list[ReplicaGroup]:
        """Who all-reduces gradients."""
        replicas = range(self.degrees.data)
        sizes = gradient_bytes(num_layers, self.degrees.pipeline)
        return [
            ReplicaGroup(
                members=tuple(self.device(tensor, stage, replica) for replica in replicas),
                size=sizes[stage] / self.degrees.tensor,
            )
            for stage, tensor in product(range(self.degrees.pipeline), range(self.degrees.tensor))
        ]


def megatron_iterations(
    job: Job, num_layers: int, batches: Sequence[int]
) -> dict[Workload, Seconds]:
    """One for each batch; a batch only is longer than another."""
    degrees = job.degrees
    own = num_layers / degrees.pipeline
    compute = forward_time(own) / degrees.tensor
    agree = [own * time for time in ring_times(job.tensor_groups(), job.network)]
    sync = max(ring_times(job.data_groups(num_layers), job.network))
    hops = _hops(job)
    pipelines = []
    for replica in range(degrees.data):
        agreeing = [agree[stage * degrees.data + replica] for stage in range(degrees.pipeline)]
        forward = tuple(compute + each for each in agreeing)
        # Of three all-reduces the backward has two, one of them in what is repeated.
        backward = tuple(BACKWARD * compute + 2 * each for each in agreeing)
        links = tuple(hop[replica] for hop in hops)
        pipelines.append(
            PipelineTimes(forward=forward, backward=backward, activations=links, gradients=links)
        )
    iterations = {}
    for batch in batches:
        slowest = max(blocking_1f1b(one, batch // degrees.data) for one in pipelines)
        iterations[Workload(num_layers, batch)] = slowest + sync
    return iterations


def ring_times(groups: Sequence[ReplicaGroup], network: Network) -> list[Seconds]:
    """All-reduce of each group, all at once: 2 (n - 1) steps, each as long as its slowest link."""
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


def _hops(job: Job) -> list[list[LinkTimes]]:
    """[hop][replica]; replicas are in step, so what they send they send at once."""
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
