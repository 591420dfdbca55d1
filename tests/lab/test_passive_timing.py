"""Links are measured passively: latency, clock offsets, and how long messages occupy a link."""

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.lab.lab import Lab
from polyrhythm.run.pipeline import autotune
from polyrhythm.run.pipeline.autotune import measure_offsets
from polyrhythm.run.pipeline.executor import Executor
from polyrhythm.run.pipeline.partition import linear_wiring
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.pipeline.transport import Connections, Transfer
from polyrhythm.types import Op
from tests.lab.hosts import cluster
from tests.lab.stages import lines, start

pytestmark = pytest.mark.alone  # measures time

LATENCY = 0.02
BANDWIDTH = 2.5e6
NUM_MICROBATCHES = 6
NUM_FLOATS = 31_250  # 125 kB: 50 ms on the link
NUM_STEPS = 3
SHIFT = 1234.5


def shift_clock() -> None:
    """Shift the clock of this process, as if it ran on another machine."""
    real = time.perf_counter
    time.perf_counter = lambda: real() + SHIFT


def connections(stage: int, num_stages: int) -> Connections:
    return Connections(
        range(num_stages),
        stage,
        linear_wiring(stage, num_stages),
        device=torch.device("cpu"),
        pipeline=0,
        timeout=30,
    )


@pytest.mark.timeout(60)
def test_latency_and_clock_offset_are_measured_over_a_slow_link(tmp_path: Path) -> None:
    """Three stages, and the clock of the middle one is ahead."""

    def work(stage: int) -> None:
        if stage == 1:
            shift_clock()
        connected = connections(stage, 3)
        found = [measure_offsets(connected) for _ in range(3)]
        for name in found[0]:
            side = "after" if name == f"s{stage + 1}p0" else "before"
            latency, ahead = min(each[name] for each in found)
            print(side, latency, ahead if side == "after" else -ahead, flush=True)
        connected.close()

    with Lab(cluster(3, latency=LATENCY)) as lab:
        stages = start(lab, tmp_path, work, timeout=30)
        assert lab.wait(stages, timeout=40), [stage.reason for stage in stages]
    assert [stage.status for stage in stages] == [0, 0, 0], [stage.reason for stage in stages]
    for sender, receiver, shift in ((0, 1, SHIFT), (1, 2, -SHIFT)):
        (after,), (before,) = lines(stages[sender], "after"), lines(stages[receiver], "before")
        assert after == before, "both ends hold the same numbers"
        latency, ahead = map(float, after)
        assert latency == pytest.approx(LATENCY, rel=0.3)
        assert ahead == pytest.approx(shift, abs=0.3 * LATENCY)


class SleepFunction(torch.autograd.Function):
    """Sleep instead of computing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class SleepModule(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self._seconds = nn.Parameter(torch.ones(1)), seconds

    def forward(self, x: Tensor) -> Tensor:
        return SleepFunction.apply(x * self.weight, self._seconds)


def record_transfers() -> list[tuple[Executor, list[Transfer]]]:
    """Record the transfers that the tuner measures after every step in this process."""
    real, kept = Executor.pop_transfers, []

    def taken(executor: Executor) -> list[tuple[str, Transfer]]:
        transfers = real(executor)
        kept.append((executor, [transfer for _, transfer in transfers]))
        return transfers

    Executor.pop_transfers = taken
    return kept


def train(stage: int, *, schedule: str, compute: float, window: int, shifted: bool) -> None:
    """Print the measured and expected busy time of each message after the first step."""
    if shifted and stage == 1:
        shift_clock()
    kept = record_transfers()
    batch = torch.ones(NUM_MICROBATCHES, NUM_FLOATS)
    with Pipeline(
        SleepModule(compute),
        loss_fn=functional.mse_loss,
        n_microbatches=NUM_MICROBATCHES,
        schedule=schedule,
        window=window,
        timeout=30,
    ) as pipeline:
        for _ in range(NUM_STEPS):
            pipeline.step(*([batch] if stage == 0 else []), target=batch)
        connected = kept[0][0].connections
        assert connected is not None
        (clock,) = measure_offsets(connected).values()
        # Skip the first step, in which TCP finds the bandwidth.
        transfers = [transfer for _, step in kept[1:] for transfer in step]
        if stage == 0:
            assert {transfer.action.op for transfer in transfers} == {Op.B}
            found = autotune._busy(transfers, clock)
        else:
            assert {transfer.action.op for transfer in transfers} == {Op.F}
            found = autotune._busy(transfers, clock)
        for transfer, seconds in zip(transfers, found, strict=True):
            print("busy", seconds, transfer.nbytes / BANDWIDTH)
        dist.barrier()


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("schedule", "compute", "window", "shifted"),
    [
        pytest.param("1f1b", 0.07, 4, False, id="one at a time", marks=pytest.mark.long),
        pytest.param(
            "1f1b", 0.07, 4, True, id="one at a time, shifted clock", marks=pytest.mark.long
        ),
        pytest.param("gpipe", 0.0, 4, False, id="back to back", marks=pytest.mark.long),
        pytest.param(
            "gpipe", 0.0, 4, True, id="back to back, shifted clock", marks=pytest.mark.long
        ),
        pytest.param("gpipe", 0.0, 1, True, id="receives posted late, shifted clock"),
    ],
)
def test_link_busy_time_is_measured_during_training(
    tmp_path: Path, schedule: str, compute: float, window: int, shifted: bool
) -> None:
    work = partial(train, schedule=schedule, compute=compute, window=window, shifted=shifted)
    with Lab(cluster(2, latency=LATENCY, bandwidth=BANDWIDTH)) as lab:
        stages = start(lab, tmp_path, work, timeout=30)
        assert lab.wait(stages, timeout=60), [stage.reason for stage in stages]
    for stage in stages:
        assert stage.status == 0, stage.reason
        ratios = [float(found) / float(true) for found, true in lines(stage, "busy")]
        assert len(ratios) == NUM_MICROBATCHES * (NUM_STEPS - 1)
        assert statistics.median(ratios) == pytest.approx(1.0, rel=0.25), ratios
