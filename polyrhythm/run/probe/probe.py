"""Measure a cluster from inside: a process on every device, and every pair of them in turn.

All start with the speed of their device, at the same time, as in training. Then come rounds in
which every process is in one pair at the most, and every machine too unless all are wanted at once:
processes of a machine share its network cards. All go on together from one round to the next, so
that pairs of two rounds never meet.
"""

import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.measure import device_flops, device_of, device_text
from polyrhythm.describe.pairs import apart, matchings
from polyrhythm.describe.sample import Sample
from polyrhythm.run.launch import Place
from polyrhythm.run.machine import usable_memory
from polyrhythm.run.probe.effort import Effort
from polyrhythm.run.probe.link import as_source, as_target
from polyrhythm.run.probe.talk import Talk
from polyrhythm.types import Bytes, Seconds

_JOINING: Seconds = 30.0
_Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    cluster_name: str
    measured_at: str
    device: str = "auto"
    dtype: str = "float32"
    all_at_once: bool = False  # pairs side by side that touch the same machine
    effort: Effort = field(default_factory=Effort)


class _Member(msgspec.Struct, frozen=True):
    """What a process says of itself."""

    name: str
    machine: str  # equal for processes that share one
    text: str
    memory: Bytes
    memory_of: str  # equal for processes that share this memory: of a machine, or of one GPU
    flops: Sample


class _Found(msgspec.Struct):
    """What a process has measured, by the rank at the other end."""

    latency: dict[int, Sample] = {}  # of what it sends
    bandwidth: dict[int, Sample] = {}  # of what it receives


def probe(
    place: Place, name: str, options: ProbeOptions, say: Callable[[str], object] = lambda text: None
) -> Cluster | None:
    """Take part as the process of this place, on the device `name`; rank 0 gets the cluster.

    Raises PeerError with the name of a process that is lost.
    """
    device = device_of(options.device, index=place.local_rank)
    effort = options.effort
    # Machines start at different times: nobody is lost that is some seconds late for the beginning.
    with place.joined(max(_JOINING, effort.deadline)):
        talk = Talk(rank=place.rank, world_size=place.world_size, deadline=effort.deadline)
        say("the speed of devices")
        members = _introduce(talk, _own(name, device, options), effort)
        talk.names = _distinct([member.name for member in members])
        found = _Found(latency={}, bandwidth={})
        rounds = _rounds([member.machine for member in members], options.all_at_once)
        for number, pairs in enumerate(rounds, start=1):
            say(f"links: round {number} of {len(rounds)}")
            _play_round(talk, pairs, found, effort)
        every = _gather(talk, found, effort)
    return _cluster(talk.names, members, every, options) if place.rank == 0 else None


def _own(name: str, device: torch.device, options: ProbeOptions) -> _Member:
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return _Member(
        name=name,
        machine=machine,
        text=device_text(device),
        memory=usable_memory() if gpu is None else gpu.total_memory,
        # Not its number: that is another one where a process sees some of the GPUs only.
        memory_of=machine if gpu is None else f"{machine} {gpu.uuid}",
        flops=device_flops(device, getattr(torch, options.dtype), repeat=options.effort.repeat),
    )


def _introduce(talk: Talk, own: _Member, effort: Effort) -> list[_Member]:
    """All members, by rank, known to all."""
    action, within = "introducing themselves", effort.speed_deadline
    if talk.rank == 0:
        heard = [talk.hear(rank, action=action, within=within) for rank in talk.others]
        members = [own, *(msgspec.json.decode(each, type=_Member) for each in heard)]
        for rank in talk.others:
            talk.tell(msgspec.json.encode(members), rank, action=action, within=within)
        return members
    talk.tell(msgspec.json.encode(own), 0, action=action, within=within)
    return msgspec.json.decode(talk.hear(0, action=action, within=within), type=list[_Member])


def _distinct(names: Sequence[str]) -> list[str]:
    count = Counter(names)
    return [f"{n} (rank {i})" if count[n] > 1 else n for i, n in enumerate(names)]


def _rounds(machines: Sequence[str], all_at_once: bool) -> list[list[tuple[int, int]]]:
    """Pairs of ranks, from the machine of each rank."""
    machine = dict(enumerate(machines))
    return [
        together
        for pairs in matchings(range(len(machines)))
        for together in ([pairs] if all_at_once else apart(pairs, machine))
    ]


def _play_round(
    talk: Talk, pairs: Sequence[tuple[int, int]], found: _Found, effort: Effort
) -> None:
    """Measure this process's pair, if it has one, and wait for all others."""
    for source, target in pairs:
        if talk.rank == source:
            found.latency[target] = as_source(talk, target, effort)
        elif talk.rank == target:
            found.bandwidth[source] = as_target(talk, source, effort)
    talk.go_on_together("a round of pairs", within=effort.round_deadline)


def _gather(talk: Talk, found: _Found, effort: Effort) -> list[_Found]:
    """On rank 0, what everybody found, by rank; elsewhere nothing."""
    action, within = "collecting the figures", effort.round_deadline
    if talk.rank > 0:
        talk.tell(msgspec.json.encode(found), 0, action=action, within=within)
        return []
    heard = [talk.hear(rank, action=action, within=within) for rank in talk.others]
    return [found, *(msgspec.json.decode(each, type=_Found) for each in heard)]


def _memories(members: Sequence[_Member]) -> list[Bytes]:
    """What each can have of a memory that it shares."""
    sharing = Counter(member.memory_of for member in members)
    return [member.memory // sharing[member.memory_of] for member in members]


def _cluster(
    names: Sequence[str], members: Sequence[_Member], every: Sequence[_Found], options: ProbeOptions
) -> Cluster:
    devices = [
        Device(
            name=name,
            region=name,
            memory=memory,
            speed=member.flops.median / members[0].flops.median,
            flops=member.flops.median,
            flops_spread=member.flops.spread,
        )
        for name, member, memory in zip(names, members, _memories(members), strict=True)
    ]
    num_machines = len({member.machine for member in members})
    kinds = "; ".join(dict.fromkeys(member.text for member in members))
    ranks = range(len(members))
    nothing = Sample(0.0, 0.0)  # a device has no link to itself
    latency = [[every[a].latency.get(b, nothing) for b in ranks] for a in ranks]
    bandwidth = [[every[b].bandwidth.get(a, nothing) for b in ranks] for a in ranks]
    return Cluster(
        name=options.cluster_name,
        source=f"polyrhythm probe, {len(members)} processes on {num_machines} "
        f"machine{'s' * (num_machines > 1)}, {options.dtype}: {kinds}",
        measured_at=options.measured_at,
        flops_dtype=options.dtype,
        devices=tuple(devices),
        regions=tuple(names),
        latency=_medians(latency),
        bandwidth=_medians(bandwidth),
        latency_spread=_spreads(latency),
        bandwidth_spread=_spreads(bandwidth),
    )


def _medians(samples: list[list[Sample]]) -> _Matrix:
    return tuple(tuple(sample.median for sample in row) for row in samples)


def _spreads(samples: list[list[Sample]]) -> _Matrix:
    return tuple(tuple(sample.spread for sample in row) for row in samples)
