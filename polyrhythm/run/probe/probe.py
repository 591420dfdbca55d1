"""Measure a cluster by a process on every device: first the devices, then every pair.

All processes measure their device's speed at the same time, as in training. Then come rounds in
which every process is in at most one pair, and so is every machine unless `all_at_once` is set:
processes of a machine share its network cards. A barrier follows each round, so that pairs of two
rounds never overlap.
"""

import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.measure import device_flops, device_of, device_text
from polyrhythm.describe.pairs import disjoint_rounds, round_robin_pairs
from polyrhythm.describe.sample import Sample
from polyrhythm.errors import LaunchError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.machine import machine_name, usable_memory
from polyrhythm.run.probe.link import PeerChannel, as_source, as_target, measure_nccl
from polyrhythm.types import Bytes, Seconds

_JOIN_TIMEOUT: Seconds = 30.0
_MAX_SECONDS: Seconds = 86_400.0  # a day; timers overflow at some point beyond
# A stream that is too short is doubled: it lasts 2 times as long as intended, 2.5 with its start.
_OVERSHOOT = 4
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeEffort:
    """How thoroughly a probe measures, and its timeouts."""

    seconds: Seconds = 0.2  # minimum duration of the transfer that measures a bandwidth
    repeat: int = 5  # measurements per value
    pair_timeout: Seconds = 20.0  # for one pair: after it, only required measurements start
    timeout: Seconds = 60.0  # for one message, or for all messages of one stream

    def __post_init__(self) -> None:
        for name in ("seconds", "pair_timeout", "timeout"):
            value = getattr(self, name)
            flag = "--" + name.replace("_", "-")
            if not 0 < value <= _MAX_SECONDS:
                raise LaunchError(
                    f"{flag} {value:g}",
                    expected=f"seconds, above 0 and up to {_MAX_SECONDS:g}",
                    fix=f"omit {flag} for {type(self).__dataclass_fields__[name].default:g}",
                )
        if not 1 <= self.repeat <= 1000:
            raise LaunchError(
                f"--repeat {self.repeat}", expected="1 to 1000", fix="omit --repeat for 5"
            )
        if self.timeout < _OVERSHOOT * self.seconds:
            raise LaunchError(
                f"--timeout {self.timeout:g} with --seconds {self.seconds:g}: a transfer would "
                "time out before it ends",
                expected=f"--timeout of at least {_OVERSHOOT} times --seconds",
                fix=f"--timeout {_OVERSHOOT * self.seconds:g}, "
                f"or --seconds {self.timeout / _OVERSHOOT:g}",
            )

    @property
    def longest_stream(self) -> Seconds:
        """Longest intended duration of a transfer, which may take longer but within `timeout`."""
        return self.timeout / _OVERSHOOT

    @property
    def round_timeout(self) -> Seconds:
        """For a process to finish its pair: longer than all waits of that process together.

        These are echoes within `pair_timeout` and two more; streams within `pair_timeout`, one
        started just before its end and three required ones; and the message that ends them. A
        process with a silent peer has therefore timed out and reported it before.
        """
        return 8 * self.timeout + 2 * self.pair_timeout

    @property
    def speed_timeout(self) -> Seconds:
        """For a process to measure its device, at most a second per measurement."""
        return self.round_timeout + 2 * self.repeat

    @property
    def stall_timeout(self) -> Seconds:
        """Without a new round: longer than any process waits before it reports a lost peer."""
        return 3 * self.speed_timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    cluster_name: str
    measured_at: str
    device: str = "auto"
    dtype: str = "float32"
    all_at_once: bool = False  # allow concurrent pairs on the same machine
    nccl: bool = True  # measure GPUs of one machine over NCCL, too; seconds per pair
    effort: ProbeEffort = field(default_factory=ProbeEffort)


class _ProcessInfo(msgspec.Struct, frozen=True):
    """A process's device and machine, as sent to the other processes."""

    name: str
    machine: str  # equal for processes of one machine
    host: str  # the name of the machine; of the device in a lab, whose devices are machines
    text: str
    memory: Bytes
    memory_of: str  # equal for processes that share this memory: of a machine, or of one GPU
    is_gpu: bool
    flops: Sample


class _LinkSamples(msgspec.Struct):
    """A process's measurements of links, by the other end's rank."""

    latency: dict[int, Sample] = {}  # of sends
    bandwidth: dict[int, Sample] = {}  # of receives
    nccl_latency: dict[int, Sample] = {}
    nccl_bandwidth: dict[int, Sample] = {}


def probe(
    ctx: DistContext,
    name: str,
    options: ProbeOptions,
    on_progress: Callable[[str], object] = lambda text: None,
) -> Cluster | None:
    """Take part with the device `name`; returns the cluster on rank 0, None elsewhere.

    Raises PeerError with the name of a lost process.
    """
    device = device_of(options.device, index=ctx.local_rank)
    effort = options.effort
    # Machines start at different times: one that joins some seconds late is not lost.
    with ctx.process_group(max(_JOIN_TIMEOUT, effort.timeout)):
        channel = PeerChannel(rank=ctx.rank, world_size=ctx.world_size, timeout=effort.timeout)
        on_progress("device speed")
        members = _all_gather_info(channel, _local_info(name, device, options), effort)
        channel.names = distinct_names([member.name for member in members])
        found, nccl = _LinkSamples(), nccl_pairs(members) if options.nccl else set()
        rounds = _rounds([member.machine for member in members], options.all_at_once)
        for number, pairs in enumerate(rounds, start=1):
            on_progress(f"links: round {number} of {len(rounds)}")
            _measure_round(channel, pairs, found, effort)
            on_nccl = [pair for pair in pairs if frozenset(pair) in nccl]
            _measure_nccl_round(channel, on_nccl, found, device, effort)
        every = _gather(channel, found, "collecting the figures", effort.round_timeout)
    return _cluster(channel.names, members, every, options) if ctx.rank == 0 else None


def _local_info(name: str, device: torch.device, options: ProbeOptions) -> _ProcessInfo:
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return _ProcessInfo(
        name=name,
        machine=machine,
        host=machine_name(),
        text=device_text(device),
        memory=usable_memory() if gpu is None else gpu.total_memory,
        # Not the GPU's index, which differs in a process that sees only some of the GPUs.
        memory_of=machine if gpu is None else f"{machine} {gpu.uuid}",
        is_gpu=gpu is not None,
        flops=device_flops(device, getattr(torch, options.dtype), repeat=options.effort.repeat),
    )


def _all_gather_info(
    channel: PeerChannel, own: _ProcessInfo, effort: ProbeEffort
) -> list[_ProcessInfo]:
    """Return the information of all processes by rank, on every process."""
    action, timeout = "exchanging device information", effort.speed_timeout
    members = _gather(channel, own, action, timeout)
    if channel.rank > 0:
        received = channel.receive_bytes(0, action=action, timeout=timeout)
        return msgspec.json.decode(received, type=list[_ProcessInfo])
    for rank in channel.others:
        channel.send_bytes(msgspec.json.encode(members), rank, action=action, timeout=timeout)
    return members


def _gather(channel: PeerChannel, own: _R, action: str, timeout: Seconds) -> list[_R]:
    """Gather the records of all processes by rank on rank 0; [] elsewhere."""
    if channel.rank > 0:
        channel.send_bytes(msgspec.json.encode(own), 0, action=action, timeout=timeout)
        return []
    replies = [
        channel.receive_bytes(rank, action=action, timeout=timeout) for rank in channel.others
    ]
    return [own, *(msgspec.json.decode(each, type=type(own)) for each in replies)]


def distinct_names(names: Sequence[str]) -> list[str]:
    """Make the names of devices unique, by the ranks of their processes."""
    count = Counter(names)
    return [f"{n} (rank {i})" if count[n] > 1 else n for i, n in enumerate(names)]


def _rounds(machines: Sequence[str], all_at_once: bool) -> list[list[tuple[int, int]]]:
    """Return the pairs of ranks of each round, given the machine of each rank."""
    machine = dict(enumerate(machines))
    return [
        concurrent
        for pairs in round_robin_pairs(range(len(machines)))
        for concurrent in ([pairs] if all_at_once else disjoint_rounds(pairs, machine))
    ]


def _measure_round(
    channel: PeerChannel, pairs: Sequence[tuple[int, int]], found: _LinkSamples, effort: ProbeEffort
) -> None:
    """Measure this process's pair, if any, and wait for all processes."""
    for source, target in pairs:
        if channel.rank == source:
            found.latency[target] = as_source(channel, target, effort)
        elif channel.rank == target:
            found.bandwidth[source] = as_target(channel, source, effort)
    channel.barrier("a round of pairs", timeout=effort.round_timeout)


def nccl_pairs(members: Sequence[_ProcessInfo]) -> set[frozenset[int]]:
    """Return the pairs of ranks of one machine that have a GPU each, and no other process on it."""
    sharing = Counter(member.memory_of for member in members)
    own = {
        rank for rank, each in enumerate(members) if each.is_gpu and sharing[each.memory_of] == 1
    }
    return {
        frozenset(pair)
        for pair in combinations(sorted(own), 2)
        if members[pair[0]].machine == members[pair[1]].machine
    }


def _measure_nccl_round(
    channel: PeerChannel,
    pairs: Sequence[tuple[int, int]],
    found: _LinkSamples,
    device: torch.device,
    effort: ProbeEffort,
) -> None:
    """Measure this process's pair over NCCL; wait for all processes if there is any pair."""
    for source, target in pairs:
        if channel.rank in (source, target):
            sample = measure_nccl(channel, source, target, device, effort)
            if sample is not None and channel.rank == source:
                found.nccl_latency[target] = sample
            elif sample is not None:
                found.nccl_bandwidth[source] = sample
    if pairs:
        channel.barrier("a round of pairs over NCCL", timeout=effort.round_timeout)


def _memory_shares(members: Sequence[_ProcessInfo]) -> list[Bytes]:
    """Divide each memory equally among the processes that share it."""
    sharing = Counter(member.memory_of for member in members)
    return [member.memory // sharing[member.memory_of] for member in members]


def _hosts(members: Sequence[_ProcessInfo]) -> list[str]:
    """Return the host of each process; machines of equal names differ by their first rank."""
    first_ranks: dict[str, int] = {}
    for rank, member in enumerate(members):
        first_ranks.setdefault(member.machine, rank)
    machines = Counter(members[rank].host for rank in first_ranks.values())
    return [
        f"{each.host} (rank {first_ranks[each.machine]})" if machines[each.host] > 1 else each.host
        for each in members
    ]


def _cluster(
    names: Sequence[str],
    members: Sequence[_ProcessInfo],
    every: Sequence[_LinkSamples],
    options: ProbeOptions,
) -> Cluster:
    devices = [
        Device(
            name=name,
            region=name,
            host=host,
            memory=memory,
            speed=member.flops.median / members[0].flops.median,
            flops=member.flops.median,
            flops_spread=member.flops.spread,
        )
        for name, member, host, memory in zip(
            names, members, _hosts(members), _memory_shares(members), strict=True
        )
    ]
    num_machines = len({member.machine for member in members})
    kinds = "; ".join(dict.fromkeys(member.text for member in members))
    ranks = range(len(members))
    nothing = Sample(0.0, 0.0)  # a device has no link to itself
    latency = [[every[a].latency.get(b, nothing) for b in ranks] for a in ranks]
    bandwidth = [[every[b].bandwidth.get(a, nothing) for b in ranks] for a in ranks]
    nccl_latency = [[every[a].nccl_latency.get(b, nothing) for b in ranks] for a in ranks]
    nccl_bandwidth = [[every[b].nccl_bandwidth.get(a, nothing) for b in ranks] for a in ranks]
    has_nccl = any(each.nccl_bandwidth for each in every)
    return Cluster(
        name=options.cluster_name,
        source=f"polyrhythm probe, {len(members)} processes on {num_machines} "
        f"machine{'s' * (num_machines > 1)}, {options.dtype}: {kinds}",
        measured_at=options.measured_at,
        flops_dtype=options.dtype,
        devices=tuple(devices),
        regions=tuple(names),
        latency=_matrix(latency, "median"),
        bandwidth=_matrix(bandwidth, "median"),
        latency_spread=_matrix(latency, "spread"),
        bandwidth_spread=_matrix(bandwidth, "spread"),
        nccl_latency=_matrix(nccl_latency, "median") if has_nccl else (),
        nccl_bandwidth=_matrix(nccl_bandwidth, "median") if has_nccl else (),
    )


def _matrix(samples: list[list[Sample]], figure: str) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(getattr(sample, figure) for sample in row) for row in samples)
