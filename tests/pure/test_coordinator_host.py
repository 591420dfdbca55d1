"""The host of the lab that has the coordinator is one that the scenario leaves alone."""

import sys

import pytest

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.scenario import Kill, LinkChange, Pause, Scenario
from polyrhythm.lab.rehearsal import Rehearsal

CLUSTER = Cluster(
    name="c",
    devices=tuple(Device(name=d, region="far" if d == "a" else "near") for d in "abcd"),
    regions=("far", "near"),
    latency=((0.1,) * 2,) * 2,
    bandwidth=((1e6,) * 2,) * 2,
)


def cut(links: str) -> tuple[LinkChange, ...]:
    """Cut links such as "ab ac" one after the other; the last one returns."""
    changes = [
        LinkChange(at=1.0 + at, source=source, target=target, up=False)
        for at, (source, target) in enumerate(links.split())
    ]
    (*_, last) = changes
    return (*changes, LinkChange(at=99.0, source=last.source, target=last.target, up=True))


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ({}, "a"),
        ({"kill": (Kill(device="a", at=1.0),)}, "b"),
        ({"link": cut("ab ac ad")}, "b"),  # the first host is cut off
        ({"link": cut("da db dc")}, "a"),
        ({"link": cut("ab")}, "c"),
        ({"link": cut("ab cd")}, "a"),  # each host has one: all are as good
        ({"link": cut("ab cd"), "pause": (Pause(device="a", at=1.0, until=2.0),)}, "b"),
        ({"link": cut("ab ac ad"), "kill": tuple(Kill(device=d, at=1.0) for d in "bcd")}, "a"),
        ({"link": (LinkChange(at=1.0, source="far", target="near", up=False),)}, "b"),
        ({"link": (LinkChange(at=1.0, source="a", target="b", latency=1.0),)}, "a"),
    ],
)
def test_coordinator_is_on_the_host_with_the_fewest_faults(
    scenario: dict[str, object], expected: str
) -> None:
    rehearsal = Rehearsal(
        cluster=CLUSTER,
        scenario=Scenario(name="faults", **scenario),  # type: ignore[arg-type]
        program=[sys.executable],
        environment={},
        output=None,
        log=print,
    )
    assert rehearsal._coordinator_host() == expected
