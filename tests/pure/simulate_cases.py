"""Small jobs and scenarios for tests of the simulator."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hypothesis import strategies as st

from polyrhythm.cost.step import Replica, Schedule, StageRun, StageWork
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.scenario import Join, Kill, LinkChange, Scenario, Slow
from polyrhythm.events import Event, read_run
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.simulate.engine.engine import ActionRecord, Engine
from polyrhythm.simulate.job import EMPTY_SCENARIO, SimulatedJob, replicas
from polyrhythm.simulate.result import SimulationResult
from polyrhythm.sync.setup import Setup
from polyrhythm.types import BytesPerSecond, Seconds

Rows = Sequence[Sequence[float]]
NO_LIMIT = 1e18  # of an uplink: links are the only limit


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


def region_per_device(
    num_devices: int,
    *,
    latency: Rows | float = 0.0,
    bandwidth: Rows | float = 1e9,
    uplink: float | None = NO_LIMIT,
    speeds: Sequence[float] | None = None,
) -> Cluster:
    """Devices d0, d1, ... in regions r0, r1, ..., one each."""

    def rows(value: Rows | float) -> tuple[tuple[float, ...], ...]:
        if isinstance(value, int | float):
            return ((float(value),) * num_devices,) * num_devices
        return tuple(tuple(map(float, row)) for row in value)

    return Cluster(
        name="apart",
        devices=tuple(
            Device(
                name=f"d{number}",
                region=f"r{number}",
                uplink=uplink,
                speed=1.0 if speeds is None else speeds[number],
            )
            for number in range(num_devices)
        ),
        regions=tuple(f"r{number}" for number in range(num_devices)),
        latency=rows(latency),
        bandwidth=rows(bandwidth),
    )


def one_pipeline(
    cluster: Cluster,
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    activation_bytes: Sequence[float] | None = None,
    *,
    in_flight: tuple[int, ...] | None = None,
    scenario: Scenario = EMPTY_SCENARIO,
) -> SimulatedJob:
    """One pipeline with stage s on device s."""
    num_stages = len(forward)
    sizes = activation_bytes or [0.0] * num_stages
    return SimulatedJob(
        cluster=cluster,
        stages=tuple(
            StageWork(forward=f, backward=b, activation_bytes=size, gradient_bytes=0.0)
            for f, b, size in zip(forward, backward, sizes, strict=True)
        ),
        pipelines=(
            Replica(
                runs=tuple(StageRun(stage, stage, stage + 1) for stage in range(num_stages)),
                schedule=schedule,
            ),
        ),
        sync=Setup(policy="local", num_stages=num_stages, num_pipelines=1),
        in_flight=in_flight,
        scenario=scenario,
    )


def three_pipelines(policy: str, scenario: Scenario, **more: object) -> SimulatedJob:
    """Three pipelines of two stages (one for balanced); d0 and d1 are the first pipeline's."""
    settings: dict[str, object] = {
        "num_stages": 1 if policy == "balanced" else 2,
        "num_pipelines": 3,
        "forward": 0.1,
        "backward": 0.2,
        "activation_bytes": 1e5,
        "gradient_bytes": 1e6,
        "latency": 0.001,
        "bandwidth": 1e8,
        "num_microbatches": 4,
        **more,
    }
    return equal_job(policy=policy, scenario=scenario, **settings)  # type: ignore[arg-type]


def one_step(job: SimulatedJob, ready: Sequence[float] | None = None) -> list[list[ActionRecord]]:
    """Records of each run's first step, which starts at its `ready` time."""
    engine = Engine(job, records=True)
    num_runs = engine.first_run[-1]
    for run in range(num_runs):
        engine.release(run, 0.0 if ready is None else ready[run])
    while engine.advance(float("inf")) is not None:
        pass
    records: list[list[ActionRecord]] = [[] for _ in range(num_runs)]
    for record in engine.take_records():
        records[record.run].append(record)
    return records


def actions_of(folder: Path) -> dict[str, list[Event]]:
    """Action events by worker, in order of time."""
    actions: dict[str, list[Event]] = {}
    for event in read_run(folder):
        if event.kind == "action":
            actions.setdefault(str(event.worker), []).append(event)
    return actions


def slowed(*slow: Slow, seed: int = 0) -> Scenario:
    return Scenario(name="slowed", seed=seed, slow=slow)


def kills_and_joins(
    kill: Sequence[tuple[str, float]] = (), join: Sequence[tuple[str, float]] = ()
) -> Scenario:
    return Scenario(
        name="kills and joins",
        kill=tuple(Kill(device=device, at=at) for device, at in kill),
        join=tuple(Join(device=device, at=at) for device, at in join),
    )


def linked(*link: LinkChange) -> Scenario:
    return Scenario(name="linked", link=link)


def lost(at: float, a: str = "here", b: str = "here") -> LinkChange:
    return LinkChange(at=at, source=a, target=b, up=False)


def back(at: float, a: str = "here", b: str = "here") -> LinkChange:
    return LinkChange(at=at, source=a, target=b, up=True)


windows = st.sampled_from([(0.0, None), (0.0, 7.0), (3.0, None), (2.5, 11.0)])


@st.composite
def slow_entries(draw: st.DrawFn, device: str = "*") -> Slow:
    """A slowdown by factor, probability or trace, in a window of time."""
    start, until = draw(windows)
    kind = draw(st.integers(0, 2))
    if kind == 0:
        return Slow(device=device, factor=draw(st.floats(1, 5)), start=start, until=until)
    if kind == 1:
        return Slow(
            device=device,
            probability=draw(st.floats(0, 1)),
            sleep_factor=draw(st.floats(0, 4)),
            start=start,
            until=until,
        )
    return Slow(
        device=device,
        trace="sdpipe_16gpu",
        trace_worker=draw(st.one_of(st.none(), st.integers(0, 15))),
        trace_duration=1e4,  # outlasts every test
        start=start,
        until=until,
    )


def steps_after_first(found: SimulationResult) -> float:
    """Seconds per step, from the end of each pipeline's first step to that of its last."""
    spans = [(ends[-1] - ends[0]) / (len(ends) - 1) for ends in found.ends if len(ends) > 1]
    return sum(spans) / len(spans)
