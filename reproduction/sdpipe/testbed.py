"""SDPipe's testbed: two models on nodes of eight A100s with 10 Gb Ethernet, and the methods.

The splits into stages are those of the authors' published scripts: four of ResNet-50's sixteen
blocks per stage; 2, 4, 4 and 2 of BERT-base's twelve layers, since the first and the last stage
also have the embedding and the head. With fewer stages, neighbours are joined.

A pipeline is within a node, so replicas of a stage are in different nodes, as in the scripts. All
GPUs of a node share its connection. Averages are NCCL rings: a group sends its bytes through a
node's connection once, however many members it has there, and not at all if all of them are in that
node. HetPipe's server is on the first node, whose GPUs reach it without Ethernet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from polyrhythm.cost.step import StageWork
from polyrhythm.describe.cluster import Device
from polyrhythm.describe.layer_work import LayerWork
from polyrhythm.describe.resnet_work import resnet50
from polyrhythm.describe.scenario import Scenario, Slow
from polyrhythm.describe.transformer_work import bert
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.simulate.job import SimulatedJob, replicas
from polyrhythm.sync.members import Limits
from polyrhythm.sync.setup import Setup
from polyrhythm.types import BytesPerSecond, Seconds
from reproduction.sdpipe.matching import MatchingSetup
from reproduction.simulation import node_cluster

# The data sheet's 19.5 TFLOPS in single precision; the scripts ask for CUDA 10.2, which has no
# TF32. ResNet-50 reaches half of that in single precision: Lambda Labs measured 294 images per
# second on an RTX 2080 Ti, 54 % of its 13.45 TFLOPS.
_A100 = 0.5 * 19.5e12
BATCH = 64  # of each pipeline, in all of the scripts
_ELEMENT_BYTES = 4
_GPUS_PER_NODE = 8
ETHERNET: BytesPerSecond = 1.25e9  # section 5.1: 10 Gb/s
_NVLINK: BytesPerSecond = 300e9  # one direction, by the data sheet of the A100
_LATENCY: Seconds = 50e-6  # of a message over TCP; the same inside a node, where little is sent
_SLEEP_PROBABILITY = 0.1  # section 5.1
# HetPipe in the published code pushes after every mini-batch and pulls after every tenth: 1.1
# transfers where a worker here makes two.
TRANSFERS = 1.1 / 2
# T of the published code is never longer. Its P = 10 counts ten updates of each worker: as many as
# in 5 N groups of two, and T is meant to catch about one more worker.
LONGEST_WINDOW: Seconds = 0.01
_GROUPS_PER_WORKER = 5

ALL_REDUCE, AD_PSGD, HETPIPE, SDPIPE = "All-Reduce", "AD-PSGD", "HetPipe", "SDPipe"
METHODS = (SDPIPE, ALL_REDUCE, AD_PSGD, HETPIPE)
BY_TEXT = "SDPipe by its text"  # T is 1/N of an iteration, which is longer; P is ten groups
TRUE_AD_PSGD = "AD-PSGD proper"  # does not wait for a partner
_LONG_TIMEOUTS = Limits(floor=200.0)  # the paper's systems have no timeouts
_POLICIES = {
    SDPIPE: "adaptive",
    BY_TEXT: "adaptive",
    ALL_REDUCE: "all_reduce",
    AD_PSGD: "static",  # costs no messages to a coordinator: workers know their partners
    TRUE_AD_PSGD: "pairwise",
    HETPIPE: "ssp",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SdpipeModel:
    name: str
    layers: tuple[LayerWork, ...]
    split: tuple[int, ...]  # layers of each of four stages, without the first and the last layer
    sleeps: dict[str, Seconds]  # section 5.1, by setting


RESNET = SdpipeModel(
    name="ResNet-50",
    layers=tuple(resnet50()),
    split=(4, 4, 4, 4),
    sleeps={"homogeneous": 0.0, "A": 0.1, "B": 0.3},
)
BERT = SdpipeModel(
    name="BERT-base",
    layers=tuple(bert("base", sequence=128)),
    split=(2, 4, 4, 2),
    sleeps={"homogeneous": 0.0, "A": 0.2, "B": 0.6},
)
MODELS = (RESNET, BERT)


def stages_of(model: SdpipeModel, num_stages: int) -> tuple[StageWork, ...]:
    """Split the model into one, two or four stages."""
    first, *blocks, last = model.layers
    parts: list[list[LayerWork]] = [[] for _ in range(num_stages)]
    parts[0].append(first)
    for place, count in enumerate(model.split):
        parts[place * num_stages // len(model.split)] += blocks[:count]
        blocks = blocks[count:]
    parts[-1].append(last)
    return tuple(_stage(part) for part in parts)


def _stage(layers: Sequence[LayerWork]) -> StageWork:
    return StageWork(
        forward=sum(BATCH * layer.operations for layer in layers) / _A100,
        backward=sum(BATCH * layer.operations * layer.backward_ratio for layer in layers) / _A100,
        activation_bytes=BATCH * _ELEMENT_BYTES * layers[-1].outputs,
        gradient_bytes=sum(_ELEMENT_BYTES * layer.parameters for layer in layers),
    )


@dataclass(frozen=True, slots=True)
class SdpipeGrid:
    num_stages: int  # M
    num_pipelines: int  # N

    @property
    def pipelines_per_node(self) -> int:
        return _GPUS_PER_NODE // self.num_stages

    def __str__(self) -> str:
        return f"{self.num_stages} x {self.num_pipelines}"


def job_of(
    method: str, model: SdpipeModel, grid: SdpipeGrid, scenario: Scenario, *, seed: int = 0
) -> SimulatedJob:
    """The job under one of METHODS, BY_TEXT or TRUE_AD_PSGD."""
    stages = stages_of(model, grid.num_stages)
    if method == HETPIPE:
        stages = tuple(
            replace(one, gradient_bytes=TRANSFERS * one.gradient_bytes) for one in stages
        )
    gpus = [
        Device(name=_device_name(p, s), region=f"w{p // grid.pipelines_per_node}")
        for p in range(grid.num_pipelines)
        for s in range(grid.num_stages)
    ]
    cluster, gateways = node_cluster(
        str(grid),
        gpus,
        server=Device(name="server", region=gpus[0].region, uplink=_NVLINK),
        port=ETHERNET,
        inside=_NVLINK,
        between=ETHERNET,
        latency=_LATENCY,
    )
    schedule = ScheduleSpec.parse("1f1b").build(num_stages=grid.num_stages, num_microbatches=1)
    return SimulatedJob(
        cluster=cluster,
        stages=stages,
        pipelines=replicas(schedule, grid.num_pipelines),
        sync=_setup(method, grid, seed),
        in_flight=tuple(range(grid.num_stages, 0, -1)),
        scenario=scenario,
        coordinator=len(cluster.devices) - 1 if method == HETPIPE else None,
        gateways=gateways,
    )


def sleeps(model: SdpipeModel, grid: SdpipeGrid, setting: str, seed: int = 0) -> Scenario:
    """Sleeps before each forward and each backward, as the published code draws them."""
    stages = stages_of(model, grid.num_stages)
    sleep = model.sleeps[setting]
    entries = [
        Slow(
            device=_device_name(pipeline, number),
            probability=_SLEEP_PROBABILITY,
            sleep_factor=sleep / (stage.forward + stage.backward),
        )
        for pipeline in range(grid.num_pipelines)
        for number, stage in enumerate(stages)
    ]
    return Scenario(name=setting, seed=seed, slow=tuple(entries if sleep else ()))


def _device_name(pipeline: int, stage: int) -> str:
    return f"p{pipeline}s{stage}"


def _setup(method: str, grid: SdpipeGrid, seed: int) -> Setup:
    options: dict[str, dict[str, object]] = {
        SDPIPE: {"window": LONGEST_WINDOW, "last_groups": _GROUPS_PER_WORKER * grid.num_pipelines},
        BY_TEXT: {"window": "paper", "last_groups": 10},
    }
    setup_class = MatchingSetup if method == AD_PSGD else Setup
    return setup_class(
        policy=_POLICIES[method],
        num_stages=grid.num_stages,
        num_pipelines=grid.num_pipelines,
        options=options.get(method, {}),
        seed=seed,
        limits=_LONG_TIMEOUTS,
    )
