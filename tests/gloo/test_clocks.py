"""Pings between stages measure the latency and the clock offset; events that of a GPU."""

import time
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
    StageReport,
    combined_times,
    measure_offsets,
)
from polyrhythm.run.pipeline.executor import DeviceClock, Moment
from polyrhythm.run.pipeline.partition import linear_wiring
from polyrhythm.run.pipeline.transport import Connections

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
    """An event that a GPU runs at a time of its own clock."""

    def __init__(self, ran_at: float) -> None:
        self.ran_at = ran_at

    def elapsed_time(self, later: "GpuEvent") -> float:
        return (later.ran_at - self.ran_at) * 1e3  # in milliseconds, as CUDA does


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
