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
    number = {device.name: i for i, device in enumerate(cluster.devices)}
    return ChangeLinks(
        pairs=tuple(sorted({(number[a], number[b]) for a, b in change.pairs(cluster)})),
        latency=change.latency,
        bandwidth=change.bandwidth,
        lost=None if change.up is None else not change.up,
        at=at,
    )
