"""SDPipe's testbed: nodes of eight A100s on 10 Gb Ethernet, and the ways to keep in step on it.

A pipeline is within a node, so that replicas of a stage are in different ones, as in the authors'
scripts. All GPUs of a node share its connection. Averages are NCCL rings: a group sends its bytes
through a node's connection once, however many members it has there, and not at all if all of them
are in that node. HetPipe's server is on the first node: that node's GPUs reach it past Ethernet.
"""

from dataclasses import dataclass, replace

from polyrhythm.cost.step import Replica, StageWork
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.scenario import Scenario, Slow
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.simulate.job import SimulatedJob, replicas
from polyrhythm.sync.setup import Setup
from polyrhythm.sync.timeouts import Limits
from polyrhythm.types import BytesPerSecond, Seconds
from reproduction.sdpipe.matching import MatchingSetup
from reproduction.sdpipe.models import Workload, stages_of

GPUS = 8  # in a node
ETHERNET: BytesPerSecond = 1.25e9  # section 5.1: 10 Gb/s
NVLINK: BytesPerSecond = 300e9  # one direction, by the data sheet of the A100
LATENCY: Seconds = 50e-6  # of a message over TCP; inside a node as well, where little is sent
PROBABILITY = 0.1  # of a sleep, section 5.1
# HetPipe in the published code pushes after every mini-batch, and pulls after every tenth: 1.1
# transfers in the time of which a worker here makes two.
TRANSFERS = 1.1 / 2
# The published code's T is never longer, and its P = 10 is ten updates of each worker: that many
# are in 5 N groups of two, of which T is to catch about one more than itself.
LONGEST_WINDOW: Seconds = 0.01
GROUPS_PER_WORKER = 5

ALL_REDUCE, AD_PSGD, HETPIPE, SDPIPE = "All-Reduce", "AD-PSGD", "HetPipe", "SDPipe"
METHODS = (SDPIPE, ALL_REDUCE, AD_PSGD, HETPIPE)
BY_TEXT = "SDPipe by its text"  # T is 1/N of an iteration, and longer; P is ten groups
TRUE_AD_PSGD = "AD-PSGD proper"  # which waits for nobody
_PATIENT = Limits(floor=200.0)  # the paper's systems have no deadlines
_POLICIES = {
    SDPIPE: "adaptive",
    BY_TEXT: "adaptive",
    ALL_REDUCE: "all_reduce",
    TRUE_AD_PSGD: "pairwise",
    HETPIPE: "ssp",
}


@dataclass(frozen=True, slots=True)
class Grid:
    num_stages: int  # M
    num_pipelines: int  # N

    @property
    def per_node(self) -> int:
        """Pipelines."""
        return GPUS // self.num_stages

    @property
    def num_nodes(self) -> int:
        return self.num_pipelines // self.per_node

    def __str__(self) -> str:
        return f"{self.num_stages} x {self.num_pipelines}"


def job_of(
    method: str, workload: Workload, grid: Grid, scenario: Scenario, *, seed: int = 0
) -> SimulatedJob:
    """Under one of METHODS, BY_TEXT or TRUE_AD_PSGD."""
    stages = stages_of(workload, grid.num_stages)
    if method == HETPIPE:
        stages = tuple(
            replace(one, gradient_bytes=TRANSFERS * one.gradient_bytes) for one in stages
        )
    cluster = cluster_of(grid)
    num_gpus = grid.num_stages * grid.num_pipelines
    homes = [cluster.regions.index(device.region) for device in cluster.devices]
    return SimulatedJob(
        cluster=cluster,
        stages=stages,
        pipelines=_pipelines(grid),
        sync=_setup(method, grid, seed),
        in_flight=tuple(range(grid.num_stages, 0, -1)),
        scenario=scenario,
        coordinator=len(cluster.devices) - 1 if method == HETPIPE else None,
        gateways=tuple(num_gpus + home for home in homes),
    )


def sleeps(workload: Workload, grid: Grid, setting: str, seed: int = 0) -> Scenario:
    """Before each forward and each backward, as the published code draws them."""
    stages = stages_of(workload, grid.num_stages)
    sleep = workload.sleeps[setting]
    entries = [
        Slow(device=device.name, probability=PROBABILITY, sleep_factor=sleep / _work(stage))
        for device, stage in zip(
            cluster_of(grid).devices, stages * grid.num_pipelines, strict=False
        )
    ]
    return Scenario(name=setting, seed=seed, slow=tuple(entries if sleep else ()))


def cluster_of(grid: Grid) -> Cluster:
    """The GPUs pipeline by pipeline, what stands for each node's connection, and the server."""
    nodes = tuple(f"w{number}" for number in range(grid.num_nodes))
    gpus = [
        Device(name=f"p{p}s{s}", region=nodes[p // grid.per_node])
        for p in range(grid.num_pipelines)
        for s in range(grid.num_stages)
    ]
    ports = [Device(name=f"{node}/port", region=node, uplink=ETHERNET) for node in nodes]
    server = Device(name="server", region=nodes[0], uplink=NVLINK)
    return Cluster(
        name=f"{grid}",
        devices=(*gpus, *ports, server),
        regions=nodes,
        latency=((LATENCY,) * len(nodes),) * len(nodes),
        bandwidth=tuple(
            tuple(NVLINK if here == there else ETHERNET for there in nodes) for here in nodes
        ),
    )


def _work(stage: StageWork) -> Seconds:
    return stage.forward + stage.backward


def _pipelines(grid: Grid) -> tuple[Replica, ...]:
    schedule = ScheduleSpec.parse("1f1b").build(num_stages=grid.num_stages, num_microbatches=1)
    return replicas(schedule, grid.num_pipelines)


def _setup(method: str, grid: Grid, seed: int) -> Setup:
    if method == AD_PSGD:
        return MatchingSetup(
            num_stages=grid.num_stages,
            num_pipelines=grid.num_pipelines,
            seed=seed,
            limits=_PATIENT,
        )
    options: dict[str, dict[str, object]] = {
        SDPIPE: {"window": LONGEST_WINDOW, "last_groups": GROUPS_PER_WORKER * grid.num_pipelines},
        BY_TEXT: {"window": "paper", "last_groups": 10},
    }
    return Setup(
        policy=_POLICIES[method],
        num_stages=grid.num_stages,
        num_pipelines=grid.num_pipelines,
        options=options.get(method, {}),
        seed=seed,
        limits=_PATIENT,
    )
