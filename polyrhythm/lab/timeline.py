"""Translate a scenario into timed commands to the switch. Pure."""

from collections.abc import Iterator

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.scenario import LinkChange, Scenario
from polyrhythm.lab.commands import AnySwitchCommand, ChangeLinks, KillHost, PauseHost, ReviveHost
from polyrhythm.types import Seconds


def scenario_commands(
    scenario: Scenario, cluster: Cluster, start: Seconds
) -> Iterator[AnySwitchCommand]:
    """Yield all commands with their times; the scenario's clock starts at `start`."""
    number = {device.name: i for i, device in enumerate(cluster.devices)}
    for change in scenario.link:
        yield link_command(change, cluster, at=start + change.at)
    for kill in scenario.kill:
        yield KillHost(host=number[kill.device], at=start + kill.at)
    for join in scenario.join:
        yield ReviveHost(host=number[join.device], at=start + join.at)
    for pause in scenario.pause:
        host = number[pause.device]
        yield PauseHost(host=host, paused=True, at=start + pause.at)
        yield PauseHost(host=host, paused=False, at=start + pause.until)


def link_command(change: LinkChange, cluster: Cluster, at: Seconds | None = None) -> ChangeLinks:
    """Return the command for all ordered pairs of hosts that the change names."""
    sources = _numbers(change.source, cluster)
    targets = _numbers(change.target, cluster)
    pairs = {(a, b) for a in sources for b in targets if a != b}
    if not change.one_way:
        pairs |= {(b, a) for a, b in pairs}
    return ChangeLinks(
        pairs=tuple(sorted(pairs)),
        latency=change.latency,
        bandwidth=change.bandwidth,
        lost=None if change.up is None else not change.up,
        at=at,
    )


def absent_at_start(scenario: Scenario) -> frozenset[str]:
    """Return the devices whose first event is a join: they are absent at the start."""
    first: dict[str, tuple[Seconds, bool]] = {}
    events = [(kill.device, kill.at, False) for kill in scenario.kill]
    events += [(join.device, join.at, True) for join in scenario.join]
    for device, at, joins in events:
        first[device] = min(first.get(device, (at, joins)), (at, joins))
    return frozenset(device for device, (_, joins) in first.items() if joins)


def _numbers(name: str, cluster: Cluster) -> list[int]:
    return [
        number
        for number, device in enumerate(cluster.devices)
        if name in (device.name, device.region)
    ]
