"""Hosts as arrays: their connections, and the slowdowns and pauses of a scenario."""

import hashlib
from collections.abc import Iterable

import numpy as np

from polyrhythm.cost.sync import uplinks_of
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.scenario import Scenario, Slow
from polyrhythm.describe.slowness import find_playback, load_traces
from polyrhythm.errors import DescriptionError
from polyrhythm.jit import Floats
from polyrhythm.simulate.engine.state import HOST, NO_LIMIT, NONE, SLOW, Records
from polyrhythm.types import Seconds

DRAWS = 512  # random numbers drawn at a time, per slowness entry


def make_hosts(cluster: Cluster) -> Records:
    """Create the hosts; an unknown uplink is that of the fastest link, for averages only."""
    # One more, for the end of the last one's lists.
    hosts = np.zeros(len(cluster.devices) + 1, HOST)
    regions = {region: i for i, region in enumerate(cluster.regions)}
    for host, device, uplink in zip(hosts, cluster.devices, uplinks_of(cluster), strict=False):
        host["region"] = regions[device.region]
        host["up"] = host["down"] = min(uplink, NO_LIMIT)
        host["is_known"] = device.uplink is not None and device.uplink < NO_LIMIT
    hosts["first_up"] = hosts["first_down"] = NONE
    return hosts


def make_slow(
    scenario: Scenario, cluster: Cluster, hosts: Records
) -> tuple[Records, list["np.random.RandomState"], list[tuple[str | None, Seconds]], Floats]:
    """Create slowness entries by device, their random generators, their traces, and all bins.

    Of a trace it returns its name and when it ends.
    """
    traces = load_traces(scenario)
    entries: list[tuple[object, ...]] = []
    rngs, names, bins = [], list[tuple[str | None, Seconds]](), [np.zeros((0, 2))]
    first_bins: dict[tuple[str, int], int] = {}  # of each series of a trace, in `bins`
    for index, device in enumerate(cluster.devices):
        hosts[index]["slow"] = len(entries)
        for number, slow in enumerate(scenario.slow):
            if not slow.applies_to(device.name):
                continue
            first_bin, num_bins, start, duration = NONE, 0, 0.0, 1.0
            if slow.trace is not None:
                try:
                    trace, worker, start, duration = find_playback(slow, index, traces)
                except DescriptionError as error:
                    raise error.at(f"slow[{number}]") from None
                series = np.array(trace.workers[worker])
                num_bins = len(series)
                key = slow.trace, worker
                if key not in first_bins:
                    first_bins[key] = sum(map(len, bins))
                    bins.append(series)
                first_bin = first_bins[key]
            entries.append(_entry(slow, first_bin, num_bins, duration))
            rngs.append(_make_rng(f"{scenario.seed}/{number}/{device.name}"))
            names.append((slow.trace, start + duration))
    hosts[-1]["slow"] = len(entries)
    return np.array(entries, SLOW), rngs, names, np.concatenate(bins)


def _entry(slow: Slow, first_bin: int, num_bins: int, duration: Seconds) -> tuple[object, ...]:
    nan = float("nan")
    return (
        slow.start,
        np.inf if slow.until is None else slow.until,
        nan if slow.factor is None else slow.factor,
        nan if slow.probability is None else slow.probability,
        nan if slow.sleep_factor is None else slow.sleep_factor,
        first_bin,
        num_bins,
        duration,
        DRAWS,  # all used: the first are drawn on demand
        0,
    )


class _Unseeded(np.random.SeedSequence):
    """For generators that are seeded later: mixing entropy for each would dominate their cost."""

    def generate_state(self, n_words: int, dtype: object = None) -> list[int]:  # type: ignore[override]
        return [0] * n_words


_UNSEEDED = _Unseeded(0)


def _make_rng(seed: str) -> "np.random.RandomState":
    """A generator of the numbers of `random.Random(seed).random()`, many at a time.

    Both are the same generator; the seed is computed from a text as Python does.
    """
    text = seed.encode()
    number = int.from_bytes(text + hashlib.sha512(text).digest(), "big")
    words = number.to_bytes(-(-number.bit_length() // 32) * 4, "little")
    rng = np.random.RandomState(np.random.MT19937(_UNSEEDED))
    rng.seed(np.frombuffer(words, "<u4"))
    return rng


def make_pauses(scenario: Scenario, cluster: Cluster, hosts: Records) -> Floats:
    pauses: list[tuple[Seconds, Seconds]] = []
    for index, device in enumerate(cluster.devices):
        hosts[index]["pauses"] = len(pauses)
        pauses += _merged((p.at, p.until) for p in scenario.pause if p.device == device.name)
    hosts[-1]["pauses"] = len(pauses)
    return np.array(pauses, np.float64).reshape(-1, 2)


def _merged(pauses: Iterable[tuple[Seconds, Seconds]]) -> list[tuple[Seconds, Seconds]]:
    """Sort pauses and merge those that overlap."""
    merged: list[tuple[Seconds, Seconds]] = []
    for at, until in sorted(pauses):
        if merged and at <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(until, merged[-1][1])
        else:
            merged.append((at, until))
    return merged
