"""The Trainer prefetches samples during compute, on the first stage and on the last."""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from polyrhythm.errors import WorkerError
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.trainer.config import DataConfig
from polyrhythm.run.trainer.sampler import FixedShareSampler, GlobalBatch, StepCursor
from polyrhythm.run.trainer.trainer import Trainer
from polyrhythm.sync.dispatch import SamplerState
from tests.gloo.trainer_jobs import BATCH, NUM_SAMPLES, plan_of, run_job, samples

STEPS = 6


class CountingDataset:
    """Records the thread that reads each sample, which takes so many `seconds`."""

    def __init__(self, failing: int | None = None, seconds: float = 0.0) -> None:
        self._data, self._failing, self._seconds = samples(), failing, seconds
        self._changed = threading.Condition()
        self.threads: list[str] = []

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, i: int) -> Any:
        if i == self._failing:
            raise OSError("torn")
        time.sleep(self._seconds)
        with self._changed:
            self.threads.append(threading.current_thread().name)
            self._changed.notify_all()
        return self._data[i]

    def wait_for(self, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self.threads) >= count, 20)


class WaitForPrefetch(nn.Module):
    """Waits in forward until the samples of the next step are being loaded."""

    def __init__(self, data: CountingDataset, share: int, steps: int) -> None:
        super().__init__()
        self._data, self._share, self._steps = data, share, steps
        self._num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        step, self._num_calls = self._num_calls * len(x) // self._share, self._num_calls + 1
        if step < self._steps:
            assert self._data.wait_for((step + 1) * self._share + 1), "nothing is prefetched"
        return torch.tanh(x)


def trainer(
    shape: tuple[int, int],
    data: CountingDataset,
    tanh: Callable[[], nn.Module],
    timeout: float = 30.0,
    **more: Any,
) -> Trainer:
    return Trainer(
        lambda: nn.Sequential(
            nn.Linear(8, 16), tanh(), nn.Linear(16, 16), tanh(), nn.Linear(16, 4)
        ),
        mse_loss,
        partial(torch.optim.SGD, lr=0.1),
        data,
        plan=plan_of(*shape),
        batch_size=BATCH,
        data=DataConfig(shuffle=False),
        timeout=timeout,
        **{"microbatch_size": 4, **more},
    )


@pytest.mark.parametrize(
    ("shape", "sync"), [((1, 1), "decoupled"), ((2, 1), "decoupled"), ((1, 2), "balanced")]
)
def test_next_batch_is_prefetched_during_compute(
    tmp_path: Path, shape: tuple[int, int], sync: str
) -> None:
    share = BATCH // shape[1]
    num_certain = STEPS - 1 if shape[1] == 1 else 1  # after step 1, shares may change

    def work(ctx: DistContext | None) -> list[str]:
        data = CountingDataset(seconds=0.001)  # 12 ms for a batch: prefetched at once

        def tanh() -> nn.Module:
            is_first = ctx is None or ctx.rank % shape[0] == 0  # later stages do not read
            return WaitForPrefetch(data, share, num_certain) if is_first else nn.Tanh()

        with trainer(shape, data, tanh, sync=sync) as made:
            made.fit(max_steps=STEPS)
        return data.threads

    for threads in run_job(shape[0] * shape[1], work, tmp_path)[:: shape[0]]:
        assert set(threads[share : (num_certain + 1) * share]) == {"prefetch"}
        if shape[1] == 1:
            assert threads.count("prefetch") == (STEPS - 1) * BATCH  # not more than needed


class CountingTanh(nn.Tanh):
    """Records how many samples were read during a forward, of one micro-batch per step."""

    def __init__(self, data: CountingDataset) -> None:
        super().__init__()
        self._data, self.counts = data, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05)  # so that a thread that reads has read all
        self.counts.append(len(self._data.threads))
        output = super().forward(x)
        output.register_hook(lambda _: time.sleep(0.05))  # likewise, in the backward
        return output


def test_samples_that_are_read_quickly_are_prefetched_during_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("polyrhythm.run.data.loader._MAX_DELAYED", 1e3)  # any machine is quick
    data = CountingDataset()
    tanh = CountingTanh(data)
    with trainer((1, 1), data, lambda: tanh, microbatch_size=BATCH) as made:
        made.fit(max_steps=STEPS)
    assert data.threads == ["MainThread"] * BATCH + ["prefetch"] * BATCH * (STEPS - 1)
    # The second batch is read at once, as it is not known yet how long that takes.
    assert tanh.counts[4::2] == [BATCH * step for step in range(3, STEPS + 1)]


def test_dispatched_samples_are_prefetched(tmp_path: Path) -> None:
    def work(ctx: DistContext | None) -> list[str]:
        data = CountingDataset()
        with trainer((2, 2), data, nn.Tanh, sync="adaptive") as made:
            made.fit(max_steps=STEPS)
        return data.threads

    found = run_job(4, work, tmp_path)
    for threads in found[::2]:
        assert set(threads[BATCH // 2 :]) <= {"prefetch"}
    assert found[1] == found[3] == []  # only first stages read


@pytest.mark.parametrize(("shape", "sync"), [((2, 1), "decoupled"), ((1, 2), "adaptive")])
def test_failing_sample_stops_the_job_at_its_step(
    tmp_path: Path, shape: tuple[int, int], sync: str
) -> None:
    failing = 3 * BATCH + 5  # also its position: samples are not shuffled

    def work(ctx: DistContext) -> None:
        made = trainer(shape, CountingDataset(failing), nn.Tanh, 90.0, sync=sync)
        try:
            made.fit(max_steps=STEPS)
        finally:
            (tmp_path / f"made{ctx.rank}").write_text(str(made.global_step))

    message = f"sample {failing}, at position {failing}: OSError: torn"
    with (
        LocalJob(work, shape[0] * shape[1], output_folder=tmp_path) as job,
        pytest.raises(WorkerError, match=message),
    ):
        job.wait(80)  # below the timeout of the other processes
    if shape[0] == 2:
        assert (tmp_path / "made0").read_text() == "3"


@given(st.data())
def test_predicted_positions_are_those_of_the_next_steps(data: st.DataObject) -> None:
    size, microbatch_size = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    bounds = sorted(data.draw(st.sets(st.integers(0, 40), min_size=4, max_size=4)))
    pool, outstanding = ((bounds[0], bounds[1]),), ((bounds[2], bounds[3]),)
    state = SamplerState(next=50, pool=pool, outstanding=outstanding)
    batch = GlobalBatch(size=size, microbatch_size=min(microbatch_size, size))
    shares = batch.equal_shares(data.draw(st.integers(1, batch.num_microbatches)))
    end, is_alone = batch.step_at(state.num_used) + 4, len(shares) == 1
    samplers = [
        FixedShareSampler(
            StepCursor(batch, state, end, is_alone=is_alone), shares, i, averages_gradients=True
        )
        for i in range(len(shares))
    ]
    ahead = [(each.peek(), *each.peek_ahead(9)) for each in samplers]
    found = [[each.next() for each in samplers] for _ in range(4)]
    assert [tuple(each.ranges for each in row) for row in found] == list(zip(*ahead, strict=True))
    assert all(each.next() is None for each in samplers)
    positions = [
        p for row in found for x in row for low, high in x.ranges for p in range(low, high)
    ]
    left = [p for low, high in (*pool, *outstanding) for p in range(low, high)]
    # A pipeline that is alone completes the step whose samples are used in part.
    num_samples = 4 * size - is_alone * (state.num_used % size)
    assert positions == [*left, *range(state.next, state.next + 4 * size)][:num_samples]
    for sampler in samplers:
        assert sampler.sampler_state().num_used == state.num_used + num_samples
    if is_alone:
        assert samplers[0].sampler_state().num_used == end * size
