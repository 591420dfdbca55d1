"""Device speeds are ratios of flops, of the same or of unknown dtype."""

from dataclasses import replace

import pytest

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.model import Layer, ModelProfile
from polyrhythm.describe.profiles import builtin_profile
from polyrhythm.describe.speed import fit_speeds
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
    return [device.speed for device in fit_speeds(cluster, profile).devices]


def test_speeds_are_fitted_to_the_device_of_the_profile() -> None:
    assert speeds(CLUSTER, PROFILE) == [0.5, 1.5]
    assert fit_speeds(CLUSTER, replace(PROFILE, flops=None)) == CLUSTER
    half = replace(CLUSTER, devices=(CLUSTER.devices[0], Device(name="b", region="b")))
    with pytest.raises(DescriptionError, match="but not of 'b'"):
        fit_speeds(half, PROFILE)


@pytest.mark.parametrize(
    ("probed", "profiled"),
    [("", ""), ("float32", ""), ("", "float32"), ("float32", "float32")],
)
def test_flops_of_equal_or_unknown_dtype_are_compared(probed: str, profiled: str) -> None:
    cluster, profile = replace(CLUSTER, flops_dtype=probed), replace(PROFILE, flops_dtype=profiled)
    assert speeds(cluster, profile) == [0.5, 1.5]


@pytest.mark.parametrize(
    ("probed", "profiled", "fix"),
    [
        ("float32", "bfloat16", "probe --dtype bfloat16 or polyrhythm profile --dtype float32"),
        ("float32", "float64", "again: polyrhythm profile --dtype float32"),
    ],
)
def test_flops_of_different_dtypes_are_rejected(probed: str, profiled: str, fix: str) -> None:
    cluster, profile = replace(CLUSTER, flops_dtype=probed), replace(PROFILE, flops_dtype=profiled)
    with pytest.raises(
        DescriptionError, match=f"of {probed}, those of model 'm' of {profiled}"
    ) as raised:
        fit_speeds(cluster, profile)
    assert fix in str(raised.value)
    no_flops = replace(profile, flops=None)
    assert fit_speeds(cluster, no_flops) == cluster


def test_builtin_profile_has_flops_dtype() -> None:
    assert builtin_profile("bert-base", flops=1e12).flops_dtype == "float32"
    assert builtin_profile("bert-base", flops=1e12, dtype="float16").flops_dtype == "float16"
