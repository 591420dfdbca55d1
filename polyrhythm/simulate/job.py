"""A job to simulate: cluster, stages, pipelines with their schedules, sync setup, scenario.

It consists of the runtime's own data: schedules are lists of actions, the setup creates the
scheduler that a coordinator serves, the scenario is the file that a lab plays.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from polyrhythm.cost.step import Replica, Schedule, StageRun, StageWork
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.scenario import Scenario
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.sync.setup import Setup
from polyrhythm.types import BytesPerSecond, Seconds

EMPTY_SCENARIO = Scenario(name="calm")


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    cluster: Cluster
    stages: tuple[StageWork, ...]
    pipelines: tuple[Replica, ...]  # runs by index of device; a schedule for each run
    sync: Setup
    overlap: bool = False  # continue at once, and apply the average at the next step's end
    decoupled: bool = False  # reduce-scatter and all-gather are hidden by backward and forward
    num_buckets: int = 8  # of a stage's gradients, if decoupled
    in_flight: tuple[int, ...] | None = None  # per run: limits of a pipeline that is never flushed
    scenario: Scenario = EMPTY_SCENARIO
    coordinator: int | None = None  # its device; None for that of the first worker
    samples: tuple[int, ...] | None = None  # per step of each pipeline; None for micro-batches
    nodes: tuple[str, ...] | None = None  # the machine of each device; None for its region
    # For each device, the device whose uplink represents the shared uplink of its machine; averages
    # are then rings through these, as in NCCL. None: every device has its own uplink.
    gateways: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        from polyrhythm.simulate.check_job import check_job  # it imports this module

        check_job(self)


def replicas(schedule: Schedule, num_pipelines: int) -> tuple[Replica, ...]:
    """Pipelines with one device per worker: device s + num_stages * p runs worker (s, p)."""
    count = len(schedule)
    return tuple(
        Replica(
            runs=tuple(StageRun(p * count + s, s, s + 1) for s in range(count)), schedule=schedule
        )
        for p in range(num_pipelines)
    )


def equal_job(
    *,
    num_stages: int = 1,
    num_pipelines: int,
    forward: Seconds,  # of a micro-batch, on one stage
    backward: Seconds,
    activation_bytes: float = 0.0,
    gradient_bytes: float = 0.0,  # of one stage
    num_microbatches: int = 1,
    schedule: str = "1f1b",
    policy: str = "all_reduce",
    options: Mapping[str, object] | None = None,
    latency: Seconds = 0.0,
    bandwidth: BytesPerSecond = 1e15,
    uplink: BytesPerSecond | None = None,  # None: limited by each link only
    overlap: bool = False,
    decoupled: bool = False,
    in_flight: tuple[int, ...] | None = None,
    scenario: Scenario = EMPTY_SCENARIO,
    nodes: tuple[str, ...] | None = None,
    seed: int = 0,
) -> SimulatedJob:
    """A job on equal devices in one region, one per worker; see `replicas`."""
    num_devices = num_stages * num_pipelines
    rate = 1e18 if uplink is None else uplink
    cluster = Cluster(
        name="equal",
        devices=tuple(
            Device(name=f"d{number}", region="here", uplink=rate) for number in range(num_devices)
        ),
        regions=("here",),
        latency=((latency,),),
        bandwidth=((bandwidth,),),
    )
    stage = StageWork(
        forward=forward,
        backward=backward,
        activation_bytes=activation_bytes,
        gradient_bytes=gradient_bytes,
    )
    built = ScheduleSpec.parse(schedule).build(
        num_stages=num_stages, num_microbatches=num_microbatches
    )
    return SimulatedJob(
        cluster=cluster,
        stages=(stage,) * num_stages,
        pipelines=replicas(built, num_pipelines),
        sync=Setup(
            policy=policy,
            num_stages=num_stages,
            num_pipelines=num_pipelines,
            options=options or {},
            seed=seed,
        ),
        overlap=overlap,
        decoupled=decoupled,
        in_flight=in_flight,
        scenario=scenario,
        nodes=nodes,
    )
