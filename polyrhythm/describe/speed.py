"""Compute device speeds relative to a profile: 1 is the device that the model was profiled on.

`probe` measures the operations per second of every device, `profile` those of its own: the speed of
a device is the ratio. Descriptions without flops keep their written speeds.
"""

from dataclasses import replace

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.layer_work import BYTES_OF
from polyrhythm.describe.model import ModelProfile
from polyrhythm.errors import DescriptionError


def fit_speeds(cluster: Cluster, profile: ModelProfile) -> Cluster:
    """Return the cluster with speeds relative to the profile's device, if both have flops.

    Without flops, speeds stay unchanged. Raises DescriptionError if both name the dtype of their
    flops and the dtypes differ: one device would have two speeds.
    """
    unknown = [device.name for device in cluster.devices if device.flops is None]
    if profile.flops is None or len(unknown) == len(cluster.devices):
        return cluster
    if unknown:
        raise DescriptionError(
            f"cluster {cluster.name!r} says the flops of some devices, but not of {unknown[0]!r}",
            expected="flops for every device, or for none",
            fix=f"add flops to {unknown[0]!r}, or measure all: polyrhythm probe",
        )
    _check_types(cluster, profile)
    flops = profile.flops
    return replace(
        cluster,
        devices=tuple(
            replace(device, speed=device.flops / flops)
            for device in cluster.devices
            if device.flops is not None
        ),
    )


def _check_types(cluster: Cluster, profile: ModelProfile) -> None:
    cluster_dtype, profile_dtype = cluster.flops_dtype, profile.flops_dtype
    if not cluster_dtype or not profile_dtype or cluster_dtype == profile_dtype:
        return
    commands = (
        f"polyrhythm probe --dtype {profile_dtype}",
        f"polyrhythm profile --dtype {cluster_dtype}",
    )
    dtypes = (profile_dtype, cluster_dtype)
    usable = [c for c, dtype in zip(commands, dtypes, strict=True) if dtype in BYTES_OF]
    raise DescriptionError(
        f"flops of cluster {cluster.name!r} are of {cluster_dtype}, those of model "
        f"{profile.name!r} of {profile_dtype}",
        expected="flops of one dtype in both, as a speed is their ratio",
        fix=f"measure one of them again: {' or '.join(usable or commands)}",
    )
