"""The hosts of a plan's processes, and plans that do not fit a cluster."""

import pytest

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.errors import PlanError
from polyrhythm.plan.host_assignment import assign_hosts
from polyrhythm.plan.plan import PipelinePlan, Plan

CLUSTER = Cluster(
    name="four",
    devices=tuple(Device(name=name, region="here") for name in "abcd"),
    regions=("here",),
    latency=((0.001,),),
    bandwidth=((1e6,),),
)


def plan(*pipelines: str) -> Plan:
    return Plan(
        layers_per_stage=(1, 1), pipelines=tuple(PipelinePlan(devices=tuple(p)) for p in pipelines)
    )


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        (None, "abcd"),
        (plan("", ""), "abcd"),  # no device names: all devices in order
        (plan("db", "ca"), "dbca"),
        (plan("dd", "bc"), "ddbc"),  # two stages on one device, and one device left out
    ],
)
def test_plan_assigns_a_host_to_each_rank(given: Plan | None, hosts: str) -> None:
    assert "".join(assign_hosts(given, CLUSTER)) == hosts


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (plan("", "", ""), "4 devices for 2 stages x 3 pipelines"),
        (plan(""), "4 devices for 2 stages x 1 pipelines"),
        (plan("ab", "cx"), "the plan has s1p1 on 'x': no device of cluster 'four'"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(given: Plan, message: str) -> None:
    with pytest.raises(PlanError) as error:
        assign_hosts(given, CLUSTER)
    assert error.value.wrong == message
