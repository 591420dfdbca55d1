"""The paper's testbed: nodes of four GTX 1080 Ti with FDR InfiniBand (Fig. 14), and who uses what.

All-reduce and partial reduces are NCCL rings: a group sends its bytes through a node's one
InfiniBand connection once, however many members it has there, and shares it with other groups; if
all are in one node, over PCIe. The parameter server and AD-PSGD use TensorFlow's remote variables,
that is gRPC (section 7.1.3), where what a process can send and receive is the limit.
"""

from dataclasses import dataclass

from polyrhythm.cost.step import Replica, StageRun, StageWork
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.scenario import Scenario
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.simulate.job import EMPTY_SCENARIO, SimulatedJob
from polyrhythm.sync.setup import Setup
from polyrhythm.types import BytesPerSecond, Seconds
from reproduction.prague.models import Model

_EFFICIENCY = 0.8  # of what a data sheet says, as is usual for large transfers
INFINIBAND: BytesPerSecond = _EFFICIENCY * 4 * 14.0625e9 * 64 / 66 / 8  # FDR: four lanes, 64b/66b
PCIE: BytesPerSecond = _EFFICIENCY * 15.75e9  # version 3, 16 lanes
# What one process receives of another over gRPC, once TensorFlow had mended it: "800 MB/s"
# (github.com/tensorflow/tensorflow/issues/6116, August 2017).
GRPC: BytesPerSecond = 0.8e9
LATENCY: Seconds = 20e-6  # of a word between processes, over InfiniBand or on a node

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
_REMOTE = (SERVER, AD_PSGD)
_OPTIONS = {SERVER: {"staleness": 0}, RANDOM: {"group_size": 3}}  # section 7.1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """So many, on nodes of so many each."""

    number: int = 16
    per_node: int = 4

    def node(self, worker: int) -> int:
        return worker // self.per_node

    @property
    def num_nodes(self) -> int:
        return -(-self.number // self.per_node)


SIXTEEN = Workers()


def job(
    method: str,
    model: Model,
    workers: Workers = SIXTEEN,
    *,
    every: int = 1,  # steps from one average to the next
    scenario: Scenario = EMPTY_SCENARIO,
) -> SimulatedJob:
    is_remote = method in _REMOTE
    # A remote variable is read, then the average is written to it: one after the other.
    size = model.size * (2 if method == AD_PSGD else 1)
    built = ScheduleSpec.parse("1f1b").build(num_stages=1, num_microbatches=1)
    return SimulatedJob(
        cluster=_cluster(workers, GRPC if is_remote else PCIE),
        stages=(
            StageWork(
                forward=model.compute / 3,  # a backward is two forwards
                backward=model.compute * 2 / 3,
                activation_bytes=0.0,
                gradient_bytes=size,
            ),
        ),
        pipelines=tuple(
            Replica(runs=(StageRun(number, 0, 1),), schedule=built)
            for number in range(workers.number)
        ),
        sync=Setup(
            policy=_POLICIES[method],
            num_stages=1,
            num_pipelines=workers.number,
            options=_OPTIONS.get(method, {}),
            every=every,
        ),
        scenario=scenario,
        coordinator=workers.number + workers.num_nodes if method == SERVER else None,
        gateways=None if is_remote else _gateways(workers),
    )


def _gateways(workers: Workers) -> tuple[int, ...]:
    """Of workers, of what stands for the connection of each node, and of servers."""
    ports = [workers.number + node for node in range(workers.num_nodes)]
    of_workers = [ports[workers.node(number)] for number in range(workers.number)]
    return (*of_workers, *ports, len(of_workers) + len(ports))


def _cluster(workers: Workers, inside: BytesPerSecond) -> Cluster:
    """Workers node by node, what stands for each node's connection, and all servers as one."""
    nodes = tuple(f"n{node}" for node in range(workers.num_nodes))
    gpus = [
        Device(name=f"w{number}", region=nodes[workers.node(number)], uplink=inside)
        for number in range(workers.number)
    ]
    ports = [Device(name=f"{node}/port", region=node, uplink=INFINIBAND) for node in nodes]
    # As many servers as workers, each with an equal part of the variables.
    servers = Device(name="servers", region="elsewhere", uplink=workers.number * GRPC)
    regions = (*nodes, "elsewhere")
    return Cluster(
        name="maverick2",
        source="Prague, Fig. 14, and data sheets",
        devices=(*gpus, *ports, servers),
        regions=regions,
        latency=((LATENCY,) * len(regions),) * len(regions),
        bandwidth=((inside,) * len(regions),) * len(regions),
    )
