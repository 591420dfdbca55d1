"""What happened in a run, in memory that its workers share with the process that started them.

At fixed moments the mean of all workers' models is kept, to be evaluated when the run is over: that
costs no measured time. A worker's model at a moment is the one it held then, between the end of one
step and the end of the next. Workers also share a counter, from which each takes the number of its
next batch: a run ends after a fixed number of batches, whoever has learned from them.
"""

import math
import mmap
import multiprocessing
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from benchmarks.converge.curve import Curve
from polyrhythm.errors import LaunchError
from polyrhythm.types import Seconds

_LONGEST_HOLD: Seconds = 30.0  # of the lock; a worker has it for a millisecond

_fork = multiprocessing.get_context("fork")


class Record:
    """Made before the workers are forked."""

    def __init__(
        self,
        *,
        num_workers: int,
        num_batches: int,
        num_weights: int,
        every: Seconds,
        num_moments: int,
    ) -> None:
        self.num_workers, self.num_batches, self.every = num_workers, num_batches, every
        self._lock = _fork.Lock()
        self._clock = shared(3, np.float64)  # began, ended, and the loss of the final model
        self._taken = shared(1, np.int64)
        self._done_at = shared(num_batches, np.float64)
        self._done_at[:] = math.inf
        self._is_late = shared(num_batches, np.int64)
        self.steps = shared(num_workers, np.int64)
        self.distances = shared(num_workers, np.float64)  # from the mean, at the end
        self._sums = shared((num_moments, num_weights), np.float32)
        self._arrived = shared(num_moments, np.int64)
        self._losses = shared(num_moments, np.float64)
        self.final = shared(num_weights, np.float32)  # the consolidated model

    def begin(self) -> None:
        self._clock[0] = time.monotonic()

    def end(self) -> None:
        self._clock[1] = self.now()

    def now(self) -> Seconds:
        return time.monotonic() - float(self._clock[0])

    @property
    def ended(self) -> Seconds:
        return float(self._clock[1])

    @property
    def late_share(self) -> float:
        """Of steps whose real compute took longer than they were to take."""
        return float(self._is_late.mean())

    @property
    def final_loss(self) -> float:
        return float(self._clock[2])

    @final_loss.setter
    def final_loss(self, loss: float) -> None:
        self._clock[2] = loss

    def take(self) -> int | None:
        """The number of the next batch; None if there are no more."""
        with self._locked():
            number = int(self._taken[0])
            if number == self.num_batches:
                return None
            self._taken[0] = number + 1
            return number

    def done(self, number: int, *, is_late: bool) -> None:
        self._done_at[number], self._is_late[number] = self.now(), is_late

    def moment(self, number: int) -> Seconds:
        """When it is; inf past the last of them."""
        return (number + 1) * self.every if number < len(self._arrived) else math.inf

    def add(self, number: int, weights: np.ndarray) -> None:
        with self._locked():
            self._sums[number] += weights
            self._arrived[number] += 1

    def means(self) -> list[np.ndarray]:
        """The mean models, of the moments that all workers have seen."""
        return [self._sums[i] / self.num_workers for i in range(self._num_complete)]

    def keep_loss(self, number: int, loss: float) -> None:
        self._losses[number] = loss

    def curve(self) -> Curve:
        """After the models have been evaluated; the last point is the end, consolidated."""
        times = [self.moment(i) for i in range(self._num_complete)]
        losses = self._losses[: len(times)].tolist()
        ends = np.sort(self._done_at)
        return Curve(
            times=(*times, self.ended),
            batches=(*np.searchsorted(ends, times).tolist(), self.num_batches),
            losses=(*losses, self.final_loss),
        )

    @property
    def _num_complete(self) -> int:
        return int((self._arrived == self.num_workers).sum())

    def _locked(self) -> "_Hold":
        return _Hold(self._lock)


class Track:
    """One worker's part of a record."""

    def __init__(self, record: Record, worker: int, model: nn.Module) -> None:
        self._record, self._worker, self._model = record, worker, model
        self._held, self._next = weights_of(model), 0

    def step(self, number: int, *, is_late: bool) -> None:
        """A step has ended, with another model."""
        self._record.done(number, is_late=is_late)
        self._record.steps[self._worker] += 1
        self._pass_moments()
        self._held = weights_of(self._model)

    def finish(self, mean: nn.Module) -> None:
        """All workers have: `mean` is the consolidated model."""
        self._pass_moments()
        weights = weights_of(mean)
        self._record.distances[self._worker] = np.linalg.norm(self._held - weights)
        if self._worker == 0:
            self._record.final[:] = weights
            self._record.end()

    def _pass_moments(self) -> None:
        while self._record.moment(self._next) <= self._record.now():
            self._record.add(self._next, self._held)
            self._next += 1


def weights_of(model: nn.Module) -> np.ndarray:
    flat: Tensor = parameters_to_vector(p.detach() for p in model.parameters())
    return flat.numpy()


def load_weights(model: nn.Module, weights: np.ndarray) -> None:
    torch.nn.utils.vector_to_parameters(torch.from_numpy(weights), model.parameters())


class _Hold:
    """The lock, within bounds: who has it may have died."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=_LONGEST_HOLD):
            raise LaunchError(
                f"a worker has held the record for {_LONGEST_HOLD:g} s",
                expected="a millisecond",
                fix="see why it stands still: its output says so",
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def shared(shape: int | tuple[int, int], dtype: type) -> np.ndarray:
    """Zeros, in memory that forked processes share."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)
