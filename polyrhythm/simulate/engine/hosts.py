"""What befalls hosts, as arrays: their connections, and how a scenario slows or stops them."""

import hashlib
from collections.abc import Iterable

import numpy as np

from polyrhythm.compiled import Floats
from polyrhythm.cost.sync import uplinks_of
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.scenario import Scenario, Slow
from polyrhythm.describe.slowness import find_playback, load_traces
from polyrhythm.errors import DescriptionError
from polyrhythm.simulate.engine.state import HOST, NO_LIMIT, NONE, SLOW, Records
from polyrhythm.types import Seconds

DRAWS = 512  # of each entry at a time


def make_hosts(cluster: Cluster) -> Records:
    """A connection that nobody has described is that of its fastest link, for averages alone."""
    hosts = np.zeros(len(cluster.devices) + 1, HOST)  # one more: where the last one's lists end
    places = {region: place for place, region in enumerate(cluster.regions)}
    for host, device, uplink in zip(hosts, cluster.devices, uplinks_of(cluster), strict=False):
        host["region"] = places[device.region]
        host["up"] = host["down"] = min(uplink, NO_LIMIT)
        host["is_known"] = device.uplink is not None and device.uplink < NO_LIMIT
    hosts["first_up"] = hosts["first_down"] = NONE
    return hosts


def make_slow(
    scenario: Scenario, cluster: Cluster, hosts: Records
) -> tuple[Records, list["np.random.RandomState"], Floats]:
    """The entries of each device, what they draw from, and the bins of all traces."""
    traces = load_traces(scenario)
    entries: list[tuple[object, ...]] = []
    rngs, bins = [], [np.zeros((0, 2))]
    where: dict[tuple[str, int], int] = {}  # series of a trace, in `bins`
    for index, device in enumerate(cluster.devices):
        hosts[index]["slow"] = len(entries)
        for number, slow in enumerate(scenario.slow):
            if not slow.applies_to(device.name):
                continue
            place, num_bins, duration = NONE, 0, 1.0
            if slow.trace is not None:
                try:
                    trace, worker, _, duration = find_playback(slow, index, traces)
                except DescriptionError as error:
                    raise error.at(f"slow[{number}]") from None
                series = np.array(trace.workers[worker])
                num_bins = len(series)
                key = slow.trace, worker
                if key not in where:
                    where[key] = sum(map(len, bins))
                    bins.append(series)
                place = where[key]
            entries.append(_entry(slow, place, num_bins, duration))
            rngs.append(_make_rng(f"{scenario.seed}/{number}/{device.name}"))
    hosts[-1]["slow"] = len(entries)
    return np.array(entries, SLOW), rngs, np.concatenate(bins)


def trace_names(scenario: Scenario, cluster: Cluster) -> list[tuple[str, Seconds]]:
    """Of the entries of all devices, in the same order: their traces, and when these end."""
    traces = load_traces(scenario)
    return [
        ("", 0.0)
        if slow.trace is None
        else (slow.trace, sum(find_playback(slow, index, traces)[2:]))
        for index, device in enumerate(cluster.devices)
        for slow in scenario.slow
        if slow.applies_to(device.name)
    ]


def _entry(slow: Slow, place: int, num_bins: int, duration: Seconds) -> tuple[object, ...]:
    nan = float("nan")
    return (
        slow.start,
        np.inf if slow.until is None else slow.until,
        nan if slow.factor is None else slow.factor,
        nan if slow.probability is None else slow.probability,
        nan if slow.sleep_factor is None else slow.sleep_factor,
        place,
        num_bins,
        duration,
        DRAWS,  # all used: the first are drawn when they are needed
        0,
    )


class _Unseeded(np.random.SeedSequence):
    """Of generators that get their seed later: to mix entropy for each takes most of their time."""

    def generate_state(self, n_words: int, dtype: object = None) -> list[int]:  # type: ignore[override]
        return [0] * n_words


_UNSEEDED = _Unseeded(0)


def _make_rng(seed: str) -> "np.random.RandomState":
    """Draws the numbers that `random.Random(seed).random()` would, many at a time.

    Both are the same generator. This is what Python makes of a text to begin with.
    """
    text = seed.encode()
    number = int.from_bytes(text + hashlib.sha512(text).digest(), "big")
    words = number.to_bytes(-(-number.bit_length() // 32) * 4, "little")
    rng = np.random.RandomState(np.random.MT19937(_UNSEEDED))
    rng.seed(np.frombuffer(words, "<u4"))
    return rng


def make_pauses(scenario: Scenario, cluster: Cluster, hosts: Records) -> Floats:
    found: list[tuple[Seconds, Seconds]] = []
    for index, device in enumerate(cluster.devices):
        hosts[index]["pauses"] = len(found)
        found += _joined((one.at, one.until) for one in scenario.pause if one.device == device.name)
    hosts[-1]["pauses"] = len(found)
    return np.array(found, np.float64).reshape(-1, 2)


def _joined(pauses: Iterable[tuple[Seconds, Seconds]]) -> list[tuple[Seconds, Seconds]]:
    """In order, and those that overlap as one."""
    found: list[tuple[Seconds, Seconds]] = []
    for at, until in sorted(pauses):
        if found and at <= found[-1][1]:
            found[-1] = found[-1][0], max(until, found[-1][1])
        else:
            found.append((at, until))
    return found
