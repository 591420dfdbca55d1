"""Speeds of devices that fit a profile: 1 is the device that the model was profiled on.

`probe` measures the operations per second of every device, `profile` those of its own: the speed of
a device is the ratio. Descriptions without them say speeds as somebody wrote them.
"""

from dataclasses import replace

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import ModelProfile
from polyrhythm.errors import DescriptionError


def fitted(cluster: Cluster, profile: ModelProfile) -> Cluster:
    """The cluster with speeds relative to the profile's device, where both say their flops.

    Both must have measured with the same type of number. Without flops speeds stay as they are.
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
    flops = profile.flops
    return replace(
        cluster,
        devices=tuple(
            replace(device, speed=device.flops / flops)
            for device in cluster.devices
            if device.flops is not None
        ),
    )
