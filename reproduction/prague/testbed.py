"""Prague's testbed: the models, nodes of four GTX 1080 Ti with FDR InfiniBand, and the methods.

The compute times of a GTX 1080 Ti follow from published measurements of the same networks on a
Pascal Titan X, which has the same chip: 16 images of 224 x 224 forward and backward, with cuDNN 5.1
(github.com/jcjohnson/cnn-benchmarks). VGG-16 for CIFAR-10 is not among them; its operations are
counted, at the rate of ResNet-18, which also consists of 3 x 3 convolutions.

All-reduces and partial reduces are NCCL rings: a group sends its bytes through a node's one
InfiniBand connection once, however many members it has there, and shares it with other groups; if
all members are in one node, the ring uses PCIe. The parameter server and AD-PSGD use TensorFlow's
remote variables, that is gRPC (section 7.1.3), limited by what one process sends and receives.
"""

from dataclasses import dataclass
from itertools import pairwise

from polyrhythm.cost.step import StageWork
from polyrhythm.describe.cluster import Device
from polyrhythm.describe.convolution import square
from polyrhythm.describe.scenario import Scenario
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.simulate.job import EMPTY_SCENARIO, SimulatedJob, replicas
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Bytes, BytesPerSecond, Seconds
from reproduction.simulation import node_cluster

_ELEMENT_BYTES: Bytes = 4  # single precision
_MEASURED_BATCH = 16
_MEASURED = {"ResNet-18": 31.54e-3, "ResNet-50": 103.58e-3, "ResNet-200": 296.51e-3}  # seconds
_RESNET_18_OPERATIONS = 2 * 1.82e9  # forward, of an image (He et al., table 1: 1.8e9 products)
# Simonyan & Zisserman, configuration D: convolutions between two poolings, and their channels.
_VGG_16 = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
_CIFAR_SIDE, _CIFAR_CLASSES = 32, 10

_EFFICIENCY = 0.8  # of the data sheet, usual for large transfers
INFINIBAND: BytesPerSecond = _EFFICIENCY * 4 * 14.0625e9 * 64 / 66 / 8  # FDR: four lanes, 64b/66b
PCIE: BytesPerSecond = _EFFICIENCY * 15.75e9  # version 3, 16 lanes
# What one process receives from another over gRPC, after a fix in TensorFlow: "800 MB/s"
# (github.com/tensorflow/tensorflow/issues/6116, August 2017).
GRPC: BytesPerSecond = 0.8e9
_LATENCY: Seconds = 20e-6  # of a message between processes, over InfiniBand or within a node

ALL_REDUCE, STATIC, RANDOM, SMART = "All-Reduce", "Prague Static", "Prague Random", "Prague Smart"
SERVER, AD_PSGD = "Parameter Server", "AD-PSGD"
_POLICIES = {
    ALL_REDUCE: "all_reduce",
    STATIC: "static",
    RANDOM: "random",
    SMART: "smart",
    SERVER: "ssp",
    AD_PSGD: "pairwise",
}
METHODS = tuple(_POLICIES)
_OPTIONS = {SERVER: {"staleness": 0}, RANDOM: {"group_size": 3}}  # section 7.1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class PragueModel:
    """A row of Fig. 15."""

    name: str
    batch: int  # images of each GPU
    parameters: int
    image: Seconds  # forward and backward

    @property
    def compute(self) -> Seconds:
        """Compute time of a step."""
        return self.batch * self.image

    @property
    def size(self) -> Bytes:
        """Bytes of an average: all weights as one tensor (section 6.1)."""
        return self.parameters * _ELEMENT_BYTES


def _vgg_16(batch: int) -> PragueModel:
    """VGG-16 for CIFAR-10: five poolings leave one point of 512 channels, then a classifier."""
    channels = [3] + [width for count, width in _VGG_16 for _ in range(count)]
    sides = [_CIFAR_SIDE >> place for place, (count, _) in enumerate(_VGG_16) for _ in range(count)]
    layers = [
        square(inputs, outputs, 3, side, side)
        for (inputs, outputs), side in zip(pairwise(channels), sides, strict=True)
    ]
    biases = sum(channels[1:]) + _CIFAR_CLASSES
    head = channels[-1] * _CIFAR_CLASSES
    operations = sum(layer.operations for layer in layers) + 2 * head
    seconds_per_operation = _MEASURED["ResNet-18"] / _MEASURED_BATCH / _RESNET_18_OPERATIONS
    return PragueModel(
        name="VGG-16",
        batch=batch,
        parameters=sum(layer.weights for layer in layers) + head + biases,
        image=operations * seconds_per_operation,
    )


def _measured(name: str, batch: int, parameters: int) -> PragueModel:
    image = _MEASURED[name] / _MEASURED_BATCH
    return PragueModel(name=name, batch=batch, parameters=parameters, image=image)


VGG_16 = _vgg_16(128)
RESNET_18 = _measured("ResNet-18", 256, 11_689_512)
RESNET_50 = _measured("ResNet-50", 96, 25_557_032)
RESNET_200 = _measured("ResNet-200", 32, 64_669_864)


@dataclass(frozen=True, slots=True, kw_only=True)
class PragueWorkers:
    number: int = 16
    per_node: int = 4


SIXTEEN = PragueWorkers()


def job(
    method: str,
    model: PragueModel,
    workers: PragueWorkers = SIXTEEN,
    *,
    every: int = 1,  # steps from one average to the next
    scenario: Scenario = EMPTY_SCENARIO,
) -> SimulatedJob:
    is_remote = method in (SERVER, AD_PSGD)
    # AD-PSGD reads a remote variable, then writes the average to it: one after the other.
    size = model.size * (2 if method == AD_PSGD else 1)
    inside = GRPC if is_remote else PCIE
    gpus = [
        Device(name=f"w{number}", region=f"n{number // workers.per_node}", uplink=inside)
        for number in range(workers.number)
    ]
    # One device stands for as many servers as workers, each with an equal part of the variables.
    servers = Device(name="servers", region="elsewhere", uplink=workers.number * GRPC)
    cluster, gateways = node_cluster(
        "maverick2",
        gpus,
        server=servers,
        port=INFINIBAND,
        inside=inside,
        between=inside,
        latency=_LATENCY,
    )
    return SimulatedJob(
        cluster=cluster,
        stages=(
            StageWork(
                forward=model.compute / 3,  # a backward takes two forwards
                backward=model.compute * 2 / 3,
                activation_bytes=0.0,
                gradient_bytes=size,
            ),
        ),
        pipelines=replicas(
            ScheduleSpec.parse("1f1b").build(num_stages=1, num_microbatches=1), workers.number
        ),
        sync=Setup(
            policy=_POLICIES[method],
            num_stages=1,
            num_pipelines=workers.number,
            options=_OPTIONS.get(method, {}),
            every=every,
        ),
        scenario=scenario,
        coordinator=len(cluster.devices) - 1 if method == SERVER else None,
        gateways=None if is_remote else gateways,
    )
