"""The price of a step, computed by hand: rent of devices, and egress."""

from dataclasses import replace

import pytest

from polyrhythm.cost.step import StageRun, StageWork, StepSpec
from polyrhythm.cost.sync import GROUP_SIZE, Links, Sync
from polyrhythm.describe.cluster import Cluster
from polyrhythm.plan.predict import egress_price, price_of
from tests.pure.plan_examples import cluster
from tests.pure.step_cases import replica


def where(sizes: dict[str, int], egress: tuple[float, ...] = ()) -> Cluster:
    """A device costs 1 per hour in the first region, 2 in the second, and so on."""
    plain = cluster(sizes)
    devices = tuple(
        replace(device, price_per_hour=1.0 + list(sizes).index(device.region))
        for device in plain.devices
    )
    return replace(plain, devices=devices, egress_price_per_gb=egress)


def step_of(
    columns: list[list[int]],
    num_microbatches: list[int],
    on: Cluster,
    *,
    activations: float = 0.0,
    gradients: float = 0.0,
    sync: Sync = Sync.ALL_REDUCE,
) -> StepSpec:
    """Return a step; `columns` are the devices of each pipeline, one per stage."""
    work = StageWork(
        forward=1.0, backward=2.0, activation_bytes=activations, gradient_bytes=gradients
    )
    return StepSpec(
        replicas=tuple(
            replica(tuple(StageRun(device, s, s + 1) for s, device in enumerate(column)), count)
            for column, count in zip(columns, num_microbatches, strict=True)
        ),
        stages=(work,) * len(columns[0]),
        speeds=(1.0,) * len(on.devices),
        links=Links.of(on),
        sync=sync,
    )


def test_devices_are_paid_by_the_hour_and_only_those_that_are_used() -> None:
    on = where({"a": 2, "b": 2})
    step = step_of([[0, 2]], [4], on)
    assert price_of(step, 1800.0, on) == pytest.approx((1 + 2) / 2)


def test_a_device_that_runs_two_stages_is_paid_once() -> None:
    on = where({"a": 1, "b": 1})
    two = replace(step_of([[0, 1]], [4], on), replicas=(replica((StageRun(1, 0, 2),), 4),))
    assert price_of(two, 3600.0, on) == pytest.approx(2)


def test_price_is_none_if_a_used_device_has_no_price() -> None:
    on = where({"a": 2})
    bare = replace(on, devices=(on.devices[0], replace(on.devices[1], price_per_hour=None)))
    assert price_of(step_of([[0, 1]], [4], bare), 1.0, bare) is None
    assert price_of(step_of([[0]], [4], bare), 3600.0, bare) == pytest.approx(1)


def test_activations_and_their_gradients_leave_each_region_at_its_own_price() -> None:
    """4 micro-batches of 1 GB from a to b at 0.5, and as much back at 3."""
    on = where({"a": 1, "b": 2}, egress=(0.5, 3.0))
    step = step_of([[0, 1]], [4], on, activations=1e9)
    assert egress_price(step, on) == pytest.approx(4 * (0.5 + 3.0))
    inside = step_of([[1, 2]], [4], on, activations=1e9)
    assert egress_price(inside, on) == 0
    assert price_of(step, 3600.0, on) == pytest.approx(3 + 14)


def test_run_of_stages_sends_only_its_last_output() -> None:
    on = where({"a": 1, "b": 1}, egress=(1.0, 1.0))
    sizes = (7e9, 1e9, 7e9)
    works = tuple(
        StageWork(forward=1, backward=1, activation_bytes=size, gradient_bytes=0) for size in sizes
    )
    step = replace(
        step_of([[0, 1]], [3], on),
        stages=works,
        replicas=(replica((StageRun(0, 0, 2), StageRun(1, 2, 3)), 3),),
    )
    assert egress_price(step, on) == pytest.approx(3 * 2 * 1)


def test_gradients_leave_a_region_twice_in_shards() -> None:
    """Each of 3 replicas owns a third, and sends a third to both others in each collective."""
    on = where({"a": 2, "b": 1}, egress=(1.0, 10.0))
    step = step_of([[0], [1], [2]], [1, 1, 1], on, gradients=3e9)
    # From a two devices send 2 x 1 GB to b; from b one sends 2 x 1 GB to each of two.
    assert egress_price(step, on) == pytest.approx(2 * 2 * 1.0 + 2 * 2 * 10.0)


def test_each_pipeline_pays_for_its_own_microbatches() -> None:
    on = where({"a": 2, "b": 2}, egress=(1.0, 0.0))
    step = step_of([[0, 2], [1, 3]], [5, 2], on, activations=1e9)
    assert egress_price(step, on) == pytest.approx(5 + 2)


def test_group_member_sends_larger_shards_to_few_others() -> None:
    """In groups of 4 a device sends 3/4 of its gradients in each collective, to any others."""
    on = where({"a": 1, "b": 7}, egress=(1.0, 0.0))
    columns = [[device] for device in range(8)]
    step = step_of(columns, [1] * 8, on, gradients=4e9, sync=Sync.GROUPS)
    assert GROUP_SIZE == 4
    assert egress_price(step, on) == pytest.approx(2 * 3)
    small = step_of(columns[:4], [1] * 4, on, gradients=4e9, sync=Sync.GROUPS)
    everyone = replace(small, sync=Sync.ALL_REDUCE)
    assert egress_price(small, on) == pytest.approx(egress_price(everyone, on)) == pytest.approx(6)


def test_where_egress_is_free_only_rent_is_paid() -> None:
    on = where({"a": 1, "b": 1})
    step = step_of([[0, 1]], [4], on, activations=1e12)
    assert price_of(step, 3600.0, on) == pytest.approx(3)
