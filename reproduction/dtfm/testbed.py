"""The model, the five networks of section 4, and the layouts: planned or drawn at random.

The model is GPT3-XL with 24, 32 and 40 layers and batches of 1024, 2048 and 4096 (section 4). Width
and length are those of Brown et al., arXiv:2005.14165, table 2.1. The published runtime splits
batches into sequences, sends activations and gradients in fp16 and recomputes every layer's forward
before its backward (DS3Lab/DT-FM, gpt3_xl_pp8_dp8.sh and gpt_modules.py).

Layouts are planned on the tables of the published planner (`describe/networks`), as in the paper.
Steps run on the networks of the paper's text: in the data centres of cases 1 and 2 100 Gbit/s
inside a machine, and 25 or 10 Gbit/s to other machines, shared by all GPUs of the machine; in case
3 10 Gbit/s within an organisation. The planner's tables differ: 3.125 and 1.25 for 25 and 10
Gbit/s, and 5 for case 3.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyrhythm.cost.dtfm import PUBLISHED, PairTimes, device_links, pair_times
from polyrhythm.cost.sync import Links
from polyrhythm.describe.cluster import Cluster
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

NUM_GPUS, NUM_STAGES = 64, 8
SEEDS = (2022, 2023, 2024)  # of random layouts, appendix B.1

_HIDDEN = 2048
_SEQUENCE = 2048  # tokens
ELEMENT_BYTES = 2  # fp16
# Four matrices of attention and two of the perceptron, with biases, and two norms.
PARAMETERS_PER_LAYER = 12 * _HIDDEN**2 + 13 * _HIDDEN
_EMBEDDING = (50257 + _SEQUENCE) * _HIDDEN  # parameters for words and positions, in the first stage
# Of one sequence: two per weight and token, and the scores and sums of attention.
FORWARD_FLOPS_PER_LAYER = 24 * _SEQUENCE * _HIDDEN**2 + 4 * _SEQUENCE**2 * _HIDDEN
BACKWARD = 3  # forwards: one recomputed, and two for the gradients
_MODEL_FLOPS = 3  # forwards that count for PFLOPS: the recomputed one does not
# "V100 GPUs peak at 125 TeraFLOPS", "50% device utilization" (section 1). Megatron's authors
# measured 62.4 TFLOPS on a V100 with a model of this size (nv-adlr.github.io/MegatronLMV1).
GPU_FLOPS = 0.5 * 125e12
ACTIVATION_BYTES: Bytes = _SEQUENCE * _HIDDEN * ELEMENT_BYTES  # of a sequence, between two layers

_GBIT: BytesPerSecond = 1e9 / 8
_INSIDE = 100 * _GBIT  # a machine

Layout = tuple[tuple[int, ...], ...]  # [stage][pipeline]: a device
Flow = tuple[int, int]  # from a device to a device


class GptWorkload(NamedTuple):
    num_layers: int
    batch: int  # sequences per step, of all pipelines


WORKLOADS = tuple(
    GptWorkload(num_layers, batch) for num_layers in (24, 32, 40) for batch in (1024, 2048, 4096)
)


def forward_time(num_layers: float) -> Seconds:
    """Forward of one sequence on one GPU."""
    return num_layers * FORWARD_FLOPS_PER_LAYER / GPU_FLOPS


def gradient_bytes(num_layers: int, num_stages: int) -> tuple[float, ...]:
    """Gradient bytes of each stage; every stage has the same number of layers."""
    layers = num_layers / num_stages * PARAMETERS_PER_LAYER * ELEMENT_BYTES
    return (layers + _EMBEDDING * ELEMENT_BYTES, *[layers] * (num_stages - 1))


def petaflops(workload: GptWorkload, iteration: Seconds) -> float:
    """PFLOPS of all GPUs together."""
    flops = _MODEL_FLOPS * FORWARD_FLOPS_PER_LAYER * workload.num_layers * workload.batch
    return flops / iteration / 1e15


@dataclass(frozen=True, eq=False)
class DtfmNetwork:
    name: str  # of the bundled table
    title: str
    latency: NDArray[np.float64]  # from device to device
    bandwidth: NDArray[np.float64]  # of a transfer that shares no link
    machines: tuple[tuple[int, ...], ...]  # the GPUs of each
    outside: BytesPerSecond  # of a machine, to all others together

    @cached_property
    def machine_of(self) -> tuple[int, ...]:
        where = {gpu: index for index, gpus in enumerate(self.machines) for gpu in gpus}
        return tuple(where[gpu] for gpu in range(len(where)))

    @cached_property
    def busy_links(self) -> Links:
        """Links while every GPU sends to another machine."""
        sizes = np.array([len(self.machines[machine]) for machine in self.machine_of])
        share = self.outside / np.maximum(sizes[:, None], sizes)
        apart = np.not_equal.outer(self.machine_of, self.machine_of)
        return self._links(np.where(apart, np.minimum(self.bandwidth, share), self.bandwidth))

    def links(self, flows: Iterable[Flow]) -> Links:
        """Links while these transfers, or the reverse ones, run; other links are unshared."""
        bandwidth = self.bandwidth.copy()
        for (a, b), rate in self.rates(flows).items():
            bandwidth[a, b] = bandwidth[b, a] = rate
        return self._links(bandwidth)

    def rates(self, flows: Iterable[Flow]) -> dict[Flow, BytesPerSecond]:
        """Rates of concurrent transfers; those that leave or enter a machine share its network."""
        flows = list(flows)
        ends = [(self.machine_of[a], self.machine_of[b]) for a, b in flows]
        leaving = Counter(a for a, b in ends if a != b)
        entering = Counter(b for a, b in ends if a != b)
        rates = {}
        for flow, (a, b) in zip(flows, ends, strict=True):
            shared = self.outside / max(leaving[a], entering[b]) if a != b else np.inf
            rates[flow] = min(float(self.bandwidth[flow]), shared)
        return rates

    def _links(self, bandwidth: NDArray[np.float64]) -> Links:
        unlimited = np.full(len(bandwidth), np.inf)  # sharing is already in the bandwidth
        return Links(latency=self.latency, bandwidth=bandwidth, uplinks=unlimited)


def networks() -> tuple[DtfmNetwork, ...]:
    """Cases 1 to 5."""
    return (
        _data_centre("case1_datacenter_ondemand", "data centre, on demand", 25 * _GBIT),
        _data_centre("case2_datacenter_spot", "data centre, spot", 10 * _GBIT),
        _emulated("case3_multi_datacenter", "two data centres", inside_region=10 * _GBIT),
        _emulated("case4_regional", "four regions"),
        _emulated("case5_worldwide", "world-wide"),
    )


def planning_times(name: str) -> PairTimes:
    """Pair times of the published planner, which are the same for every depth and batch."""
    latency, bandwidth = device_links(Cluster.load(name))
    return pair_times(latency, bandwidth, PUBLISHED, num_stages=NUM_STAGES)


def random_ranks(seed: int) -> list[int]:
    """Rank of each device as the published script draws it: device 0 keeps rank 0."""
    others = np.arange(1, NUM_GPUS)
    np.random.RandomState(seed).shuffle(others)
    return [0, *others.tolist()]


def random_order(seed: int) -> tuple[int, ...]:
    """Devices by rank; Megatron has "the same random layouts" (appendix B.2)."""
    return tuple(np.argsort(random_ranks(seed)).tolist())


def random_layout(seed: int) -> Layout:
    """The layout of DT-FM without its scheduler: consecutive ranks form a pipeline."""
    by_rank = np.array(random_order(seed))
    return tuple(map(tuple, by_rank.reshape(-1, NUM_STAGES).T.tolist()))


def launcher_order(seed: int, network: DtfmNetwork) -> tuple[int, ...]:
    """Devices by rank as a launcher numbers them: another reading for Megatron.

    The machines are drawn, but the GPUs of a machine have consecutive ranks. With the layouts as
    stated, the (2, 4, 8) that the paper finds best in case 1 splits layers across machines.
    """
    ranks = random_ranks(seed)
    machines = sorted(network.machines, key=lambda gpus: ranks[gpus[0]])
    return tuple(gpu for gpus in machines for gpu in gpus)


def _data_centre(name: str, title: str, outside: BytesPerSecond) -> DtfmNetwork:
    cluster = Cluster.load(name)
    machines: dict[str, list[int]] = {}
    for index, device in enumerate(cluster.devices):
        has_own_machine = device.region == "standalone"  # 32 machines of one GPU in one region
        machines.setdefault(device.name if has_own_machine else device.region, []).append(index)
    latency, _ = device_links(cluster)
    bandwidth = np.full(latency.shape, outside)
    for gpus in machines.values():
        bandwidth[np.ix_(gpus, gpus)] = _INSIDE
    return DtfmNetwork(
        name, title, latency, bandwidth, tuple(map(tuple, machines.values())), outside
    )


def _emulated(name: str, title: str, inside_region: BytesPerSecond | None = None) -> DtfmNetwork:
    """A network on which every GPU is a machine and every link has its own bandwidth."""
    cluster = Cluster.load(name)
    latency, bandwidth = device_links(cluster)
    if inside_region is not None:
        regions = [device.region for device in cluster.devices]
        bandwidth = np.where(np.equal.outer(regions, regions), inside_region, bandwidth)
    machines = tuple((gpu,) for gpu in range(len(latency)))
    return DtfmNetwork(name, title, latency, bandwidth, machines, outside=np.inf)
