"""A scenario: slowdowns, link changes and faults of a cluster; time 0 is the start of training.

A scenario is plain data: a rehearsal with real processes and a simulation in virtual time play the
same file. All random draws come from `seed`.
"""

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path

from polyrhythm.describe.bundled_files import bundled, is_name, locate
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.read import read, unknown
from polyrhythm.describe.trace import bundled_traces
from polyrhythm.describe.units import check_amount, show
from polyrhythm.errors import DescriptionError
from polyrhythm.types import BytesPerSecond, Seconds

EVERY_DEVICE = "*"
SLOWEST = 1e6  # largest factor of slowness; use a pause beyond
LONGEST: Seconds = 100 * 365 * 86_400  # more is a typing error


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A device, or every device, computes slower in one of three ways; overlapping entries add up.

    A factor below 1 is refused: a simulation could play it, but a rehearsal cannot speed up a real
    machine.
    """

    device: str  # or EVERY_DEVICE, each with independent draws
    factor: float | None = None  # multiplies the duration of every action
    probability: float | None = None  # of a sleep before an action, drawn for each action
    sleep_factor: float | None = None  # the sleep, in units of one forward plus one backward
    trace: str | None = None  # a recording to play from `start` on: a bundled one, or its file
    trace_worker: int | None = None  # index of the series; None: the device's index in the cluster
    trace_duration: Seconds | None = None  # scales the whole recording; None: as recorded
    start: Seconds = 0.0
    until: Seconds | None = None  # None: to the end

    def __post_init__(self) -> None:
        sleeps = (self.probability is not None, self.sleep_factor is not None)
        num_kinds = (self.factor is not None) + any(sleeps) + (self.trace is not None)
        if num_kinds != 1 or any(sleeps) != all(sleeps):
            raise DescriptionError(
                f"{self.device!r} is slowed in {num_kinds} ways"
                if num_kinds != 1
                else "only one of probability and sleep_factor",
                expected="factor, or probability and sleep_factor, or trace",
                fix="use exactly one of the three",
            )
        if self.factor is not None:
            check_amount("factor", self.factor)
            if self.factor > SLOWEST:
                raise DescriptionError(
                    f"factor is {self.factor:g}",
                    expected=f"at most {SLOWEST:,.0f}: slower is a pause",
                    fix="use [[pause]], or [[kill]] without an end",
                )
            if self.factor < 1:
                raise DescriptionError(
                    f"factor is {self.factor:g}",
                    expected="1 or more: 2 takes twice as long",
                    fix="give the device a higher speed in the cluster, and slow down the others",
                )
        if self.probability is not None and not 0 <= self.probability <= 1:
            raise DescriptionError(
                f"probability is {self.probability:g}",
                expected="a fraction between 0 and 1",
                fix="write 10% as 0.1",
            )
        if self.sleep_factor is not None:
            check_amount("sleep_factor", self.sleep_factor)
            if self.sleep_factor > SLOWEST:
                raise DescriptionError(
                    f"sleep_factor is {self.sleep_factor:g}",
                    expected=f"at most {SLOWEST:,.0f}",
                    fix="use [[pause]] to stop the device",
                )
        self._check_trace()
        _check_time("start", self.start)
        if self.until is not None:
            _check_order(self.start, self.until)

    def applies_to(self, device: str) -> bool:
        return self.device in (EVERY_DEVICE, device)

    def _check_trace(self) -> None:
        check_amount("trace_worker", self.trace_worker)
        check_amount("trace_duration", self.trace_duration, Seconds, zero=False)
        if self.trace is None and (self.trace_worker, self.trace_duration) != (None, None):
            raise DescriptionError(
                "trace_worker or trace_duration without a trace",
                expected="trace next to them",
                fix='add trace = "sdpipe_16gpu", or remove them',
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChange:
    """Links between two devices or regions change at time `at`."""

    at: Seconds
    source: str = field(metadata={"key": "from"})
    target: str = field(metadata={"key": "to"})  # the same region: the links inside it
    latency: Seconds | None = None  # None: as before
    bandwidth: BytesPerSecond | None = None
    up: bool | None = None  # False: lost, until a later change to True
    one_way: bool = False  # only the direction from `source` to `target`

    def __post_init__(self) -> None:
        _check_time("at", self.at)
        check_amount("latency", self.latency, Seconds)
        check_amount("bandwidth", self.bandwidth, BytesPerSecond, zero=False)
        measured = self.latency is not None or self.bandwidth is not None
        if self.up is None and not measured:
            raise DescriptionError(
                f"the link from {self.source!r} to {self.target!r} does not change",
                expected="latency, bandwidth or up",
                fix='add what changes, such as bandwidth = "100Mbit/s"',
            )
        if self.up is False and measured:
            raise DescriptionError(
                f"the link from {self.source!r} to {self.target!r} is lost, but has values",
                expected="no latency or bandwidth next to up = false",
                fix="set them in the entry with up = true, when the link returns",
            )

    def pairs(self, cluster: Cluster) -> list[tuple[str, str]]:
        """Sources and targets of the changed links: pairs of devices, one for each direction."""
        sources, targets = (
            [device.name for device in cluster.devices if end in (device.name, device.region)]
            for end in (self.source, self.target)
        )
        pairs = [*itertools.product(sources, targets)]
        if not self.one_way and sources != targets:
            pairs += itertools.product(targets, sources)
        return [(a, b) for a, b in pairs if a != b]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A device stops for a while and then continues."""

    device: str
    at: Seconds
    until: Seconds

    def __post_init__(self) -> None:
        _check_time("at", self.at)
        _check_order(self.at, self.until)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A device fails silently."""

    device: str
    at: Seconds

    def __post_init__(self) -> None:
        _check_time("at", self.at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A device joins or returns; one that was not killed before is absent from the start."""

    device: str
    at: Seconds

    def __post_init__(self) -> None:
        _check_time("at", self.at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str = ""  # by default the file's name
    seed: int = 0
    slow: tuple[Slow, ...] = ()
    link: tuple[LinkChange, ...] = ()
    pause: tuple[Pause, ...] = ()
    kill: tuple[Kill, ...] = ()
    join: tuple[Join, ...] = ()

    def __post_init__(self) -> None:
        kills_and_joins: list[Kill | Join] = [*self.kill, *self.join]
        kills_and_joins.sort(key=lambda event: (event.device, event.at))
        for first, second in itertools.pairwise(kills_and_joins):
            alternate = type(first) is not type(second) and first.at < second.at
            if first.device == second.device and not alternate:
                raise DescriptionError(
                    f"device {first.device!r}: {_dated(first)}, then {_dated(second)}",
                    expected="kill and join to alternate, at different times",
                    fix="remove one of the two, or put the other kind between them",
                )

    @classmethod
    def load(cls, source: str | Path) -> "Scenario":
        """Read a .toml or .json file, or one of `bundled_scenarios()` by its name.

        A trace's path is relative to the scenario's file; loading makes it absolute.
        """
        with locate("scenario", source, "scenarios") as path:
            scenario = read(path, cls)
            slow = list(scenario.slow)
            for i, entry in enumerate(slow):
                if entry.trace is None:
                    continue
                if not is_name(entry.trace):
                    slow[i] = replace(entry, trace=str(path.absolute().parent / entry.trace))
                elif entry.trace not in bundled_traces():
                    place = f"{path}: slow[{i}].trace"
                    raise unknown("trace", entry.trace, bundled_traces()).at(place)
            return replace(scenario, name=scenario.name or path.stem, slow=tuple(slow))

    @property
    def absent_at_start(self) -> set[str]:
        """The devices that join without having been killed before."""
        killed = {kill.device: kill.at for kill in sorted(self.kill, key=lambda kill: -kill.at)}
        return {join.device for join in self.join if killed.get(join.device, LONGEST) >= join.at}

    def check(self, cluster: Cluster) -> None:
        """Refuse an event for a device or a region that `cluster` does not have."""
        devices = [device.name for device in cluster.devices]
        events: dict[str, tuple[Slow | Pause | Kill | Join, ...]]
        events = {"slow": self.slow, "pause": self.pause, "kill": self.kill, "join": self.join}
        for kind, entries in events.items():
            for i, event in enumerate(entries):
                everyone = isinstance(event, Slow) and event.device == EVERY_DEVICE
                if not everyone and event.device not in devices:
                    raise unknown("device", event.device, devices).at(f"{kind}[{i}].device")
        hosts = list(dict.fromkeys([*cluster.regions, *devices]))
        for i, change in enumerate(self.link):
            for key, host in (("from", change.source), ("to", change.target)):
                if host not in hosts:
                    raise unknown("device or region", host, hosts).at(f"link[{i}].{key}")
            if change.source == change.target and change.source in devices:
                raise DescriptionError(
                    f"link[{i}]: from device {change.source!r} to itself",
                    expected="two devices, two regions, or one region for the links inside it",
                    fix="name the device at the other end",
                )


def bundled_scenarios() -> tuple[str, ...]:
    """Return the names of the bundled scenarios."""
    return bundled("scenarios")


def _dated(event: Kill | Join) -> str:
    return f"{type(event).__name__.lower()} at {show(event.at, Seconds)}"


def _check_time(name: str, value: Seconds) -> None:
    check_amount(name, value, Seconds)
    if value > LONGEST:
        raise DescriptionError(
            f"{name} is {show(value, Seconds)}",
            expected="a time within a hundred years",
            fix=f"correct {name}, or omit it for no limit",
        )


def _check_order(start: Seconds, until: Seconds) -> None:
    _check_time("until", until)
    if until <= start:
        raise DescriptionError(
            f"from {show(start, Seconds)} until {show(until, Seconds)}",
            expected="an end after the start",
            fix="make until later: it is a time on the clock, not a duration",
        )
