"""Pings between stages measure the latency and the clock offset; events the times of a GPU."""

import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyrhythm.cost.memory import StageMemory
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.pipeline import autotune
from polyrhythm.run.pipeline.autotune import (
    ClockOffset,
    ScheduleAutotuner,
    StageReport,
    combined_times,
    measure_offsets,
)
from polyrhythm.run.pipeline.batch import BatchHeader
from polyrhythm.run.pipeline.executor import DeviceClock, Moment, StageCompute, Timing
from polyrhythm.run.pipeline.partition import linear_wiring
from polyrhythm.run.pipeline.transport import Connections
from polyrhythm.types import Op

NUM_STAGES = 4
ROUNDS = 5


def connected(ctx: DistContext) -> Connections:
    return Connections(
        range(ctx.world_size),
        ctx.rank,
        linear_wiring(ctx.rank, ctx.world_size),
        device=torch.device("cpu"),
        pipeline=0,
        timeout=30,
    )


def measured(folder: Path, shifts: list[float]) -> list[list[dict[str, ClockOffset]]]:
    """Measure offsets to the neighbours by stage and round; clocks are ahead by `shifts`."""

    def work(ctx: DistContext) -> None:
        shift = shifts[ctx.rank]
        autotune.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() + shift)
        with ctx.process_group(30):
            connections = connected(ctx)
            rounds = [measure_offsets(connections) for _ in range(ROUNDS)]
            connections.close()
        plain = [{name: tuple(clock) for name, clock in each.items()} for each in rounds]
        torch.save(plain, folder / f"{ctx.rank}.pt")

    with LocalJob(work, NUM_STAGES, output_folder=folder) as job:
        assert job.wait(40), "not done in time"
    saved = [torch.load(folder / f"{stage}.pt") for stage in range(NUM_STAGES)]
    return [
        [{name: ClockOffset(*clock) for name, clock in each.items()} for each in rounds]
        for rounds in saved
    ]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "shifts", [[0.0] * NUM_STAGES, [0.0, 5000.0, -3.25, 0.125]], ids=["one clock", "four clocks"]
)
def test_clock_offset_error_is_at_most_half_the_round_trip(
    tmp_path: Path, shifts: list[float]
) -> None:
    """The processes share a clock apart from the shift, so this holds under any load."""
    offsets = measured(tmp_path, shifts)
    for stage in range(NUM_STAGES - 1):
        for here, there in zip(offsets[stage], offsets[stage + 1], strict=True):
            after, before = here[f"s{stage + 1}p0"], there[f"s{stage}p0"]
            expected = ClockOffset(after.latency, -after.offset)
            assert before == expected, "both ends of a link have the same numbers"
            assert after.latency > 0
            true = shifts[stage + 1] - shifts[stage]
            assert abs(after.offset - true) <= after.latency + 1e-9
    assert all(list(each) == ["s1p0"] for each in offsets[0])
    assert all(list(each) == [f"s{NUM_STAGES - 2}p0"] for each in offsets[-1])


@pytest.mark.timeout(60)
def test_fastest_round_trip_is_used(tmp_path: Path) -> None:
    """Two of three answers are delayed: the latency is that of the third."""
    delay = 1.5

    def work(ctx: DistContext) -> None:
        with ctx.process_group(30):
            connections = connected(ctx)
            if ctx.rank == 1:
                real, delays = autotune._send_times, iter([delay, 0.0, delay])

                def slow_send(*args: object) -> None:
                    time.sleep(next(delays))
                    real(*args)

                autotune._send_times = slow_send
            after = measure_offsets(connections).get("s1p0")
            assert after is None or after.latency < delay / 2
            connections.close()

    with LocalJob(work, 2, output_folder=tmp_path) as job:
        assert job.wait(40), "not done in time"


class GpuEvent:
    """An event that a GPU runs at a time of its own clock, which shows `now`."""

    now, num_waits = 0.0, 0

    def __init__(self, ran_at: float) -> None:
        self.ran_at = ran_at

    def elapsed_time(self, later: "GpuEvent") -> float:
        return (later.ran_at - self.ran_at) * 1e3  # in milliseconds, as CUDA does

    def query(self) -> bool:
        return self.ran_at <= GpuEvent.now

    def synchronize(self) -> None:
        GpuEvent.num_waits += 1
        GpuEvent.now = max(GpuEvent.now, self.ran_at)


def moment(ran_at: float, recorded: float) -> Moment:
    made = Moment(GpuEvent(ran_at))  # type: ignore[arg-type]  # there is no GPU here
    made.recorded = recorded
    return made


def test_device_clock_is_exact_once_the_gpu_has_waited_for_the_host() -> None:
    """The GPU's clock shows 5 s less; the first event runs as soon as it is recorded."""
    clock, base = DeviceClock(), time.perf_counter() - 10.0
    ahead = [(0.0, 0.0), (1.0, 0.2), (2.0, 0.4), (3.0, 0.6)]  # the host runs ahead
    times = [clock.read(moment(base - 5 + ran, base + recorded)) for ran, recorded in ahead]
    assert times == pytest.approx([base + ran for ran, _ in ahead], abs=1e-6)


def test_device_clock_follows_a_drift_and_stays_within_the_bounds() -> None:
    """A time is never before the record of an event, nor after it was found complete."""
    clock, base = DeviceClock(), time.perf_counter() - 100.0
    for drift in (0.999, 1.001):
        for second in range(1, 40):
            recorded = base + second
            found = clock.read(moment(drift * second, recorded))
            assert recorded - 1e-6 <= found <= time.perf_counter()


def test_transfers_over_nccl_have_the_times_of_their_senders() -> None:
    """Messages over gloo are timed by their receivers; of others, only the headers go over gloo."""
    memory = StageMemory(weights=0, gradients=0, optimizer=0, activation=0, message=0)

    def report(**links: Any) -> StageReport:
        times = {"forward": 1.0, "backward": 2.0, "latency": 0.5, "step": 9.0, "deciding": 0.0}
        links = {"activations": [], "gradients": []} | links
        return StageReport(**times, memory=memory, limit=None, **links)

    found = combined_times(
        [
            report(nccl_activation=0.1),
            report(gradients=[0.3, 0.3], nccl_gradient=0.2),
            report(activations=[0.4, 0.4]),
        ]
    )
    links = [(link.busy, link.latency) for link in (*found.activations, *found.gradients)]
    assert links == [((0.1,), 0.0), ((0.4,), 0.5), ((0.2,), 0.0), ((0.3,), 0.5)]


class GpuStage(StageCompute):
    """A stage on a GPU, which runs one action after the other."""

    __slots__ = ("_ends_at",)

    def __init__(self) -> None:
        super().__init__(call=lambda: None, stage=0, is_last=True, device=torch.device("cpu"))
        self._ends_at = GpuEvent.now = 0.0
        GpuEvent.num_waits = 0

    def queue(self, op: Op, kind: int, seconds: float) -> None:
        start, self._ends_at = self._ends_at, self._ends_at + seconds
        now = time.perf_counter()
        timing = Timing(moment(start, now), moment(self._ends_at, now))
        self._timings.append((op, kind, timing))

    def queue_step(self, header: BatchHeader, seconds: float = 1.0) -> None:
        for op in (Op.F, Op.B):
            for kind in header.kinds:
                self.queue(op, kind, seconds)


def test_durations_are_those_of_actions_that_the_gpu_has_run() -> None:
    """The others follow in the next calls, in order; the host waits for none."""
    stage = GpuStage()
    for seconds in (1.0, 2.0, 3.0):
        stage.queue(Op.F, 7, seconds)
    found = []
    for now in (0.5, 3.5, 3.6, 6.0):
        GpuEvent.now = now
        found.append([seconds for _, _, seconds in stage.durations()])
    assert found == [[], pytest.approx([1.0, 2.0]), [], pytest.approx([3.0])]
    assert GpuEvent.num_waits == 0


SIZE_2, SIZE_1 = 12, 11  # kinds of micro-batches, of these sizes
HEADERS = BatchHeader(True, ((SIZE_2, 2, 2),)), BatchHeader(True, ((SIZE_1, 1, 4),))


def tuner_of(sizes: tuple[int, ...] | None = (2,)) -> ScheduleAutotuner:
    fixed = StageMemory(weights=0, gradients=0, optimizer=0, activation=0, message=0)
    return ScheduleAutotuner(
        microbatch_sizes=sizes, every=4, memory=fixed, limit=2**40, connections=None, log=None
    )


def test_schedule_tuner_waits_for_the_gpu_only_where_nothing_is_measured() -> None:
    """A host that is two steps ahead of the GPU waits in the first decision, and never again."""
    tuner, stage, header = tuner_of(), GpuStage(), HEADERS[0]
    for step in range(14):
        stage.queue_step(header, seconds=5.0 if step == 0 else 1.0)
        GpuEvent.now = max(GpuEvent.now, stage._ends_at - 8.0)
        tuner.after_step(step, header, stage.durations, [], {})
        if step == 1:
            assert GpuEvent.num_waits == 1
    assert GpuEvent.num_waits == 1
    times = tuner._times[2]
    assert (times.forward, times.backward) == ((1.0,), (1.0,)), "without the first step"


def test_actions_of_the_first_step_of_a_trial_are_not_measured() -> None:
    """It compiles kernels; the GPU ends it after the host has gone on."""
    tuner, stage = tuner_of(sizes=(2, 1)), GpuStage()
    for step in range(4):
        header = HEADERS[step // 2]
        stage.queue_step(header, seconds=1.0 if step % 2 else 9.0)
        tuner.after_step(step, header, stage.durations, [], {})
    assert {size: times.forward for size, times in tuner._times.items()} == {2: (1.0,), 1: (1.0,)}


def test_stages_report_the_same_kind_whatever_their_gpus_have_run() -> None:
    """The most frequent kind of a step; a GPU has first run micro-batches of the other one."""
    header, nbytes = BatchHeader(True, ((SIZE_1, 1, 1), (SIZE_2, 2, 2))), {SIZE_1: 10, SIZE_2: 20}
    found = []
    for ended in (0.0, 1.0, 2.0, 4.0, 6.0):  # of the six actions of the measured step
        tuner, stage = tuner_of(sizes=None), GpuStage()
        for step in range(2):
            stage.queue_step(header)
            GpuEvent.now = 6.0 * step + ended
            tuner.after_step(step, header, stage.durations, [], nbytes)
        found += [memory.activation for memory in tuner._memory[1]]
    assert found == [nbytes[SIZE_2]] * 5


def test_schedule_tuner_keeps_the_times_of_a_kind_that_came_early_and_most_often() -> None:
    """More actions follow it than a stage keeps."""
    tuner = tuner_of(sizes=None)
    stage = StageCompute(call=lambda x: x, stage=0, is_last=True, device=torch.device("cpu"))
    stage._timings = deque(maxlen=8)  # the actions of a step
    for step in range(2 + 4):
        kind = SIZE_1 if step < 5 else SIZE_2
        for op in (Op.F, Op.B):
            for _ in range(4):
                stage._end_timing(op, kind, stage._start_timing())
        tuner.after_step(step, BatchHeader(True, ((kind, 1, 4),)), stage.durations, [], {})
    assert 1 in tuner._times
