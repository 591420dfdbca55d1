"""What-if sentences: each changes the cluster or the scenario before they are simulated.

link Tokyo-Seoul x0.5              half the bandwidth, in both directions
link Tokyo-Seoul latency x2
link Tokyo-Seoul down
device 3 slow x4                   by index in the cluster, or by name
device 3 speed x2
device 3 gone
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.read import unknown
from polyrhythm.describe.scenario import Kill, LinkChange, Scenario, Slow
from polyrhythm.errors import DescriptionError, UserError

_LINK = re.compile(r"link\s+(.+?)\s+(?:(latency|bandwidth)\s+)?x\s*([0-9.eE+-]+)", re.IGNORECASE)
_DOWN = re.compile(r"link\s+(.+?)\s+down", re.IGNORECASE)
_DEVICE = re.compile(r"device\s+(.+?)\s+(slow|speed)\s+x\s*([0-9.eE+-]+)", re.IGNORECASE)
_GONE = re.compile(r"device\s+(.+?)\s+gone", re.IGNORECASE)
_EXAMPLES = '"link Tokyo-Seoul x0.5", "link Tokyo-Seoul down", "device 3 slow x4", "device 3 gone"'


def what_if(sentence: str, cluster: Cluster, scenario: Scenario) -> tuple[Cluster, Scenario]:
    """Return the changed cluster and scenario; raise DescriptionError for an unknown sentence."""
    for pattern, change in _PATTERNS:
        if match := pattern.fullmatch(sentence.strip()):
            try:
                return change(*match.groups(), cluster, scenario)
            except UserError as error:
                raise error.at(f'--what-if "{sentence}"') from None
    raise DescriptionError(
        f'--what-if "{sentence}"', expected=f"such as {_EXAMPLES}", fix="use one of these forms"
    )


def _changed_link(
    ends: str, quantity: str | None, times: str, cluster: Cluster, scenario: Scenario
) -> tuple[Cluster, Scenario]:
    a, b = _ends(ends, cluster)
    factor = _factor(times)
    quantity = (quantity or "bandwidth").lower()
    if a in cluster.regions and b in cluster.regions:
        link_ends = {cluster.regions.index(a), cluster.regions.index(b)}
        changed = tuple(
            tuple(
                value * factor if {row, column} == link_ends else value
                for column, value in enumerate(values)
            )
            for row, values in enumerate(getattr(cluster, quantity))
        )
        matrix: dict[str, Any] = {quantity: changed}
        return replace(cluster, **matrix), scenario
    link = cluster.link(_device_in(a, cluster), _device_in(b, cluster))
    value: dict[str, Any] = {quantity: getattr(link, quantity) * factor}
    change = LinkChange(at=0.0, source=a, target=b, **value)
    return cluster, replace(scenario, link=(*scenario.link, change))


def _lost_link(ends: str, cluster: Cluster, scenario: Scenario) -> tuple[Cluster, Scenario]:
    a, b = _ends(ends, cluster)
    change = LinkChange(at=0.0, source=a, target=b, up=False)
    return cluster, replace(scenario, link=(*scenario.link, change))


def _changed_device(
    name: str, how: str, times: str, cluster: Cluster, scenario: Scenario
) -> tuple[Cluster, Scenario]:
    device, factor = _device(name, cluster), _factor(times)
    if how.lower() == "slow" and factor < 1:
        raise DescriptionError(
            f"slow x{times}", expected="1 or more", fix=f"write device {name} speed x{1 / factor:g}"
        )
    if how.lower() == "slow":
        return cluster, replace(scenario, slow=(*scenario.slow, Slow(device=device, factor=factor)))
    devices = tuple(
        replace(other, speed=other.speed * factor) if other.name == device else other
        for other in cluster.devices
    )
    return replace(cluster, devices=devices), scenario


def _lost_device(name: str, cluster: Cluster, scenario: Scenario) -> tuple[Cluster, Scenario]:
    kill = Kill(device=_device(name, cluster), at=0.0)
    return cluster, replace(scenario, kill=(*scenario.kill, kill))


def _device(name: str, cluster: Cluster) -> str:
    """Name of a device that is given by name or by index."""
    names = [device.name for device in cluster.devices]
    if name in names:
        return name
    if name.isdecimal() and int(name) < len(names):
        return names[int(name)]
    raise unknown("device", name, names)


def _device_in(name: str, cluster: Cluster) -> str:
    if name in cluster.regions:
        return next(device.name for device in cluster.devices if device.region == name)
    return name


def _ends(text: str, cluster: Cluster) -> tuple[str, str]:
    """Split two regions or devices at the dash between them; names may contain dashes."""
    known = [*cluster.regions, *(device.name for device in cluster.devices)]
    by_lower = {name.lower(): name for name in reversed(known)}
    parts = text.split("-")
    for i in range(1, len(parts)):
        a, b = "-".join(parts[:i]).strip().lower(), "-".join(parts[i:]).strip().lower()
        if a in by_lower and b in by_lower:
            return by_lower[a], by_lower[b]
    if text.strip().lower() in by_lower:
        raise DescriptionError(
            f"a link with one end, {text!r}",
            expected="two regions or devices with a dash between them",
            fix=f"write link {text}-{known[0]} x0.5",
        )
    first = next((part.strip() for part in parts if part.strip().lower() not in by_lower), text)
    raise unknown("region or device", first, known)


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = float("nan")
    if not 0 < factor < float("inf"):
        raise DescriptionError(
            f"x{text}",
            expected="a number above 0, such as x0.5",
            fix='correct it; use "down" or "gone" for 0',
        )
    return factor


_PATTERNS: tuple[tuple[re.Pattern[str], Callable[..., tuple[Cluster, Scenario]]], ...] = (
    (_LINK, _changed_link),
    (_DOWN, _lost_link),
    (_DEVICE, _changed_device),
    (_GONE, _lost_device),
)
