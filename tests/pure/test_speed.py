"""Speeds are ratios of flops: only of flops that can be compared."""

from dataclasses import replace

import pytest

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.model import Layer, ModelProfile
from polyrhythm.describe.profiles import builtin_profile
from polyrhythm.describe.speed import fitted
from polyrhythm.errors import DescriptionError

LINKS = ((0.0, 1.0), (1.0, 0.0))
CLUSTER = Cluster(
    name="c",
    devices=(Device(name="a", region="a", flops=1e12), Device(name="b", region="b", flops=3e12)),
    regions=("a", "b"),
    latency=LINKS,
    bandwidth=LINKS,
)
LAYER = Layer(
    name="x", forward=1.0, backward=2.0, parameter_bytes=1, activation_bytes=1, stored_bytes=1
)
PROFILE = ModelProfile(name="m", microbatch_size=1, flops=2e12, layers=(LAYER,))


def speeds(cluster: Cluster, profile: ModelProfile) -> list[float]:
    return [device.speed for device in fitted(cluster, profile).devices]


def test_speeds_are_fitted_to_the_device_of_the_profile() -> None:
    assert speeds(CLUSTER, PROFILE) == [0.5, 1.5]
    assert fitted(CLUSTER, replace(PROFILE, flops=None)) == CLUSTER
    half = replace(CLUSTER, devices=(CLUSTER.devices[0], Device(name="b", region="b")))
    with pytest.raises(DescriptionError, match="but not of 'b'"):
        fitted(half, PROFILE)


@pytest.mark.parametrize(
    ("ours", "theirs"), [("", ""), ("float32", ""), ("", "float32"), ("float32", "float32")]
)
def test_flops_of_one_type_or_of_none_said_are_compared(ours: str, theirs: str) -> None:
    cluster, profile = replace(CLUSTER, flops_dtype=ours), replace(PROFILE, flops_dtype=theirs)
    assert speeds(cluster, profile) == [0.5, 1.5]


@pytest.mark.parametrize(
    ("ours", "theirs", "fix"),
    [
        ("float32", "bfloat16", "probe --dtype bfloat16 or polyrhythm profile --dtype float32"),
        ("float32", "float64", "again: polyrhythm profile --dtype float32"),
    ],
)
def test_flops_of_two_types_are_refused(ours: str, theirs: str, fix: str) -> None:
    cluster, profile = replace(CLUSTER, flops_dtype=ours), replace(PROFILE, flops_dtype=theirs)
    with pytest.raises(
        DescriptionError, match=f"of {ours}, those of model 'm' of {theirs}"
    ) as told:
        fitted(cluster, profile)
    assert fix in str(told.value)
    no_flops = replace(profile, flops=None)
    assert fitted(cluster, no_flops) == cluster


def test_a_counted_profile_says_the_type_that_it_was_counted_for() -> None:
    assert builtin_profile("bert-base", flops=1e12).flops_dtype == "float32"
    assert builtin_profile("bert-base", flops=1e12, dtype="float16").flops_dtype == "float16"
