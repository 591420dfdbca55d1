"""The paper's testbed: 64 GPUs, two networks, five models (section VI.A, Table I)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from polyrhythm.cost.decoupled import Ring, StepTimes
from polyrhythm.sync.fusion.layers import LayerTimes
from polyrhythm.types import Seconds
from reproduction.dear import image_layers
from reproduction.dear.bert_layers import BASE, LARGE, bert
from reproduction.dear.gpu_time import (
    WIDTH,
    Gpu,
    LearnableLayer,
    by_tensors,
    layer_times,
)

WORKERS = 64
_IMAGE, _WORDS = 224, 64


def gpu_at(efficiency: float) -> Gpu:
    """An RTX 2080 Ti at that part of what its data sheet says."""
    return Gpu(operations=efficiency * 13.45e12, memory=efficiency * 616e9)


EFFICIENCY = 0.8  # usual for large products, and for streams
GPU = gpu_at(EFFICIENCY)

_ETHERNET = 10e9 / 8
_SAMPLES = ((1_000_000, 4.5e-3), (500_000, 3.9e-3))  # all-reduces of 64 GPUs (section II.D)


def _latency(bandwidth: float) -> Seconds:
    """Of a message: what both all-reduces take beyond their bytes, over 2 (P - 1) messages."""
    rounds = 2 * (WORKERS - 1)
    beyond = [took - rounds * size / WORKERS / bandwidth for size, took in _SAMPLES]
    return sum(beyond) / len(beyond) / rounds


def _all_reduce_of(start: Seconds, per_byte: float) -> Ring:
    """The ring whose all-reduces take that long to begin, and for each byte."""
    rounds = 2 * (WORKERS - 1)
    return Ring(latency=start / rounds, bandwidth=rounds / WORKERS / per_byte)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    name: str
    ring: Ring
    believed: Ring  # by MG-WFBP, which decides by constants in its code


# A broadcast from one of 64 workers, by constants in the code that the authors published with
# SPD-KFAC (ICDCS 2021, `estimate_bcast_time`): a start of 2 * 5 * 4 * 6.374e-6 s, which 63 messages
# in a row share here, and 1.840e-10 s per byte. The code does not name the network.
START, _PER_BYTE = 2 * 5 * 4 * 6.374037687522862e-06, 1.840345743984339e-10
ETHERNET = Network(
    name="10GbE",
    ring=Ring(latency=_latency(_ETHERNET), bandwidth=_ETHERNET),
    believed=_all_reduce_of(3 * 0.0023476410788581382, 9.643300782166769e-10),
)
INFINIBAND = Network(
    name="100GbIB",
    ring=Ring(latency=START / (WORKERS - 1), bandwidth=1 / _PER_BYTE),
    believed=_all_reduce_of(0.00080632079996292579, 1.8 * 3.2713239529771973e-10),
)
NETWORKS = (ETHERNET, INFINIBAND)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A row of Table I."""

    name: str
    batch: int  # samples of each GPU
    make: Callable[[], list[LearnableLayer]]
    is_image: bool


MODELS = (
    Model(name="ResNet-50", batch=64, make=lambda: image_layers.resnet50(_IMAGE), is_image=True),
    Model(
        name="DenseNet-201", batch=32, make=lambda: image_layers.densenet201(_IMAGE), is_image=True
    ),
    Model(
        name="Inception-v4", batch=64, make=lambda: image_layers.inceptionv4(_IMAGE), is_image=True
    ),
    Model(name="BERT-Base", batch=64, make=lambda: bert(BASE, _WORDS), is_image=False),
    Model(name="BERT-Large", batch=32, make=lambda: bert(LARGE, _WORDS), is_image=False),
)


@dataclass(frozen=True, slots=True)
class Work:
    """What one GPU computes in a step, and the gradients that come of it."""

    layers: tuple[LayerTimes, ...]
    tensors: tuple[LayerTimes, ...]

    @property
    def compute(self) -> Seconds:
        return sum(layer.forward + layer.backward for layer in self.layers)

    def bounds(self, ring: Ring) -> StepTimes:
        """Equations 6 to 8: all gradients at once, at the full bandwidth, without latency."""
        size = sum(layer.size for layer in self.layers)
        return StepTimes(
            forward=sum(layer.forward for layer in self.layers),
            backward=sum(layer.backward for layer in self.layers),
            reduce_scatter=size / ring.bandwidth,
            all_gather=size / ring.bandwidth,
        )


@cache
def work(model: Model, batch: int = 0, gpu: Gpu = GPU) -> Work:
    """Of Table I's batch, unless another is given."""
    layers = model.make()
    times = layer_times(layers, batch or model.batch, gpu)
    assert sum(t.size for t in times) == WIDTH * sum(each.parameters for each in layers)
    return Work(tuple(times), tuple(by_tensors(layers, times)))
