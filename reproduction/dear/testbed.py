"""The paper's testbed: 64 GPUs, two networks and five models (section VI.A, Table I)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from polyrhythm.describe.transformer_work import TransformerShape
from polyrhythm.sync.fusion.layers import LayerTimes
from polyrhythm.types import BytesPerSecond, Seconds
from reproduction.dear.layers import (
    ELEMENT_BYTES,
    Gpu,
    LearnableLayer,
    bert,
    densenet201,
    inceptionv4,
    resnet50,
)
from reproduction.dear.ring import Ring, StepTimes

NUM_WORKERS = 64
_NUM_ROUNDS = 2 * (NUM_WORKERS - 1)  # messages in a row of one ring all-reduce
EFFICIENCY = 0.8  # usual for large matrix products and for streaming through memory


def gpu_at(efficiency: float) -> Gpu:
    """An RTX 2080 Ti at a fraction of the rates in its data sheet."""
    return Gpu(operations=efficiency * 13.45e12, memory=efficiency * 616e9)


GPU = gpu_at(EFFICIENCY)


@dataclass(frozen=True, slots=True, kw_only=True)
class DearNetwork:
    name: str
    ring: Ring
    assumed_by_mg_wfbp: Ring  # constants in the code of MG-WFBP, by which it merges layers


def _latency(bandwidth: BytesPerSecond) -> Seconds:
    """Latency of a message: what the two all-reduces of section II.D take beyond their bytes."""
    measured = ((1_000_000, 4.5e-3), (500_000, 3.9e-3))  # bytes and seconds, 64 GPUs
    beyond = [took - _NUM_ROUNDS * size / NUM_WORKERS / bandwidth for size, took in measured]
    return sum(beyond) / len(beyond) / _NUM_ROUNDS


def _ring(start: Seconds, per_byte: float) -> Ring:
    """A ring whose all-reduce takes `start` plus `per_byte` for each byte."""
    return Ring(latency=start / _NUM_ROUNDS, bandwidth=_NUM_ROUNDS / NUM_WORKERS / per_byte)


_10_GBIT = 10e9 / 8
# Constants of a broadcast from one of 64 workers in the code that the authors published with
# SPD-KFAC (ICDCS 2021, `estimate_bcast_time`): a start of 2 * 5 * 4 * 6.374e-6 s, spread over 63
# messages in a row here, and 1.840e-10 s per byte. The code does not name the network.
BROADCAST_START, _PER_BYTE = 2 * 5 * 4 * 6.374037687522862e-06, 1.840345743984339e-10
ETHERNET = DearNetwork(
    name="10GbE",
    ring=Ring(latency=_latency(_10_GBIT), bandwidth=_10_GBIT),
    assumed_by_mg_wfbp=_ring(3 * 0.0023476410788581382, 9.643300782166769e-10),
)
INFINIBAND = DearNetwork(
    name="100GbIB",
    ring=Ring(latency=BROADCAST_START / (NUM_WORKERS - 1), bandwidth=1 / _PER_BYTE),
    assumed_by_mg_wfbp=_ring(0.00080632079996292579, 1.8 * 3.2713239529771973e-10),
)
NETWORKS = (ETHERNET, INFINIBAND)


@dataclass(frozen=True, slots=True)
class DearModel:
    """A row of Table I."""

    name: str
    batch: int  # samples of each GPU
    layers: Callable[[], list[LearnableLayer]]
    is_image: bool = True


_bert = partial(TransformerShape, sequence=64, vocabulary=30528)  # 30522, to a multiple of 8
_BASE = _bert(num_blocks=12, hidden=768, num_heads=12)
_LARGE = _bert(num_blocks=24, hidden=1024, num_heads=16)
MODELS = (
    DearModel("ResNet-50", 64, partial(resnet50, 224)),
    DearModel("DenseNet-201", 32, partial(densenet201, 224)),
    DearModel("Inception-v4", 64, partial(inceptionv4, 224)),
    DearModel("BERT-Base", 64, partial(bert, _BASE), is_image=False),
    DearModel("BERT-Large", 32, partial(bert, _LARGE), is_image=False),
)


@dataclass(frozen=True, slots=True)
class ComputeTimes:
    """Compute times and gradient sizes of one step on one GPU."""

    layers: tuple[LayerTimes, ...]
    tensors: tuple[LayerTimes, ...]  # the first tensor of a layer has all of its time

    @property
    def compute(self) -> Seconds:
        return sum(layer.forward + layer.backward for layer in self.layers)

    def bounds(self, ring: Ring) -> StepTimes:
        """Equations 6 to 8: all gradients at once, at full bandwidth, without latency."""
        size = sum(layer.size for layer in self.layers)
        return StepTimes(
            forward=sum(layer.forward for layer in self.layers),
            backward=sum(layer.backward for layer in self.layers),
            reduce_scatter=size / ring.bandwidth,
            all_gather=size / ring.bandwidth,
        )


@cache
def compute_times(model: DearModel, batch: int = 0, gpu: Gpu = GPU) -> ComputeTimes:
    """Times of a step with the batch of Table I, unless another is given."""
    layers, tensors = [], []
    for layer in model.layers():
        times = layer.times(batch or model.batch, gpu)
        layers.append(times)
        first, *others = (ELEMENT_BYTES * parameters for parameters in layer.tensors)
        tensors.append(LayerTimes(size=first, forward=times.forward, backward=times.backward))
        tensors += [LayerTimes(size=size, forward=0.0, backward=0.0) for size in others]
    return ComputeTimes(tuple(layers), tuple(tensors))
