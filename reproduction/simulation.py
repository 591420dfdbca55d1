"""Parts that SDPipe and Prague share: clusters of nodes, and the loss at a step of a curve."""

from collections.abc import Sequence

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.simulate.convergence import ConvergenceCurve
from polyrhythm.types import BytesPerSecond, Seconds


def node_cluster(
    name: str,
    gpus: Sequence[Device],
    *,
    server: Device,
    port: BytesPerSecond,
    inside: BytesPerSecond,
    between: BytesPerSecond,
    latency: Seconds,
) -> tuple[Cluster, tuple[int, ...]]:
    """Connect nodes (the regions of `gpus`): all GPUs of a node share its port to reach others.

    Return the cluster of the GPUs, one port per node and the server; and of each device its
    gateway: the port of its node, else the device itself.
    """
    nodes = tuple(dict.fromkeys(gpu.region for gpu in gpus))
    ports = [Device(name=f"{node}/port", region=node, uplink=port) for node in nodes]
    devices = (*gpus, *ports, server)
    regions = tuple(dict.fromkeys([*nodes, server.region]))
    cluster = Cluster(
        name=name,
        devices=devices,
        regions=regions,
        latency=((latency,) * len(regions),) * len(regions),
        bandwidth=tuple(
            tuple(inside if here == there else between for there in regions) for here in regions
        ),
    )
    gateways = [
        len(gpus) + nodes.index(device.region) if device.region in nodes else index
        for index, device in enumerate(devices)
    ]
    return cluster, tuple(gateways)


def loss_at(curve: ConvergenceCurve, step: float) -> float:
    """The loss of the first point at or after `step`."""
    return next(loss for at, loss in zip(curve.steps, curve.losses, strict=True) if at >= step)
