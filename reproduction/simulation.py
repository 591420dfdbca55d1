"""Parts that SDPipe and Prague share: clusters of nodes, and the loss at a step of a curve."""

from collections.abc import Sequence
from typing import NamedTuple

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.simulate.convergence import ConvergenceCurve
from polyrhythm.types import BytesPerSecond, Seconds


class NodeCluster(NamedTuple):
    cluster: Cluster  # the GPUs, one port per node, and the server
    gateways: tuple[int, ...]  # of each device: the port of its node, else the device itself


def node_cluster(
    name: str,
    gpus: Sequence[Device],
    *,
    server: Device,
    port: BytesPerSecond,
    inside: BytesPerSecond,
    between: BytesPerSecond,
    latency: Seconds,
) -> NodeCluster:
    """Connect nodes (the regions of `gpus`): all GPUs of a node share its port to reach others."""
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
    return NodeCluster(cluster, tuple(gateways))


def loss_at(curve: ConvergenceCurve, step: float) -> float:
    """The loss of the first point at or after `step`."""
    return next(loss for at, loss in zip(curve.steps, curve.losses, strict=True) if at >= step)
