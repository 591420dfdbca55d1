"""Samples per second of the Trainer with worker processes against a loop over torch's DataLoader.

Both read items that take 5 ms, with 8 workers, and train a small model, so that reading is what
takes the time. Times start after the first batches: neither side counts the start of processes.
"""

import statistics
import time
import warnings

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

import polyrhythm as pr

NUM_WORKERS, BATCH = 8, 64
ITEM_SECONDS = 0.005
_WARM_UP = 24  # batches: more than are read ahead


class SlowItems(Dataset[tuple[Tensor, Tensor]]):
    """Items that a disk or a decoder delivers in 5 ms."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(ITEM_SECONDS)
        x = torch.full((64,), index / self._num_samples)
        return x, x[:8]


def measure(*, quick: bool) -> dict[str, float]:
    """Return the ratio `loader` and both rates; runs of both sides alternate."""
    num_steps, num_pairs = (16, 1) if quick else (96, 5)
    pairs = [(_trainer(num_steps), _plain(num_steps)) for _ in range(num_pairs)]
    return {
        "loader": statistics.median(own / plain for own, plain in pairs),
        "loader_samples_per_s": statistics.median(own for own, _ in pairs),
        "loader_plain_samples_per_s": statistics.median(plain for _, plain in pairs),
    }


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))


def _trainer(num_steps: int) -> float:
    ends = list[float]()
    with pr.Trainer(
        _model,
        mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        SlowItems(BATCH * (_WARM_UP + num_steps)),
        batch_size=BATCH,
        microbatch_size=BATCH,
        device="cpu",
        data=pr.DataConfig(num_workers=NUM_WORKERS),
    ) as trainer:
        trainer.fit(
            max_steps=_WARM_UP + num_steps,
            callbacks=[lambda info: ends.append(time.perf_counter())],
        )
    return _rate(ends, num_steps)


def _plain(num_steps: int) -> float:
    model, data = _model(), SlowItems(BATCH * (_WARM_UP + num_steps))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    ends = list[float]()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # few cores
        for inputs, target in DataLoader(data, BATCH, shuffle=True, num_workers=NUM_WORKERS):
            loss = mse_loss(model(inputs), target)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            ends.append(time.perf_counter())
    return _rate(ends, num_steps)


def _rate(ends: list[float], num_steps: int) -> float:
    times = ends[_WARM_UP - 1 :]
    assert len(times) == num_steps + 1, "all batches"
    # Eight batches end at about the same time; a line through all ends does not depend on which
    # of the eight is the last.
    return BATCH / statistics.linear_regression(range(len(times)), times).slope
