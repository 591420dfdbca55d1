"""What a data-parallel worker of the synchronisation benchmark does: compute is a sleep.

Weights are drawn to zero; the gradient is the weights plus noise of the worker's own, so that
workers drift apart as far as they do not synchronise.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor, nn

from benchmarks.sync.settings import MICROBATCHES_PER_WORKER, Setting, Side
from polyrhythm.describe.slowness import Slowness
from polyrhythm.events import EventLog, LogReader
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.types import Seconds

_NUM_REPORTED = 2000  # weights, which tell how far workers are apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Times are those of time.monotonic(), one clock for all hosts of the lab."""

    begin: Seconds
    completions: list[Seconds]  # of steps with an update
    weights: list[float]  # after the last step that was over in time
    group_sizes: list[int]  # of the averages this worker had a part in; empty where nobody logs
    gradient_error: float  # of `balanced`: the largest difference, relative to the largest gradient
    cpu: Seconds


class Weights(nn.Module):
    def __init__(self, num_floats: int, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_floats))
        self._noise = torch.Generator().manual_seed(seed)

    def gradient(self, weight: Tensor) -> Tensor:
        noise = torch.empty_like(weight).normal_(generator=self._noise)
        return weight.detach() + noise


@dataclass(slots=True, kw_only=True)
class Training(ABC):
    """One worker's part in one order."""

    setting: Setting
    side: Side
    model: Weights
    optimizer: torch.optim.Optimizer
    slowness: Slowness
    log: EventLog
    sync: GroupSync | None = None
    begin: Seconds = 0.0
    gradient_error: float = 0.0
    _completions: list[Seconds] = field(default_factory=list)

    @property
    def end(self) -> Seconds:
        return self.begin + self.setting.length

    def run(self, begin: Seconds) -> Answer:
        """Train from `begin` until the setting's time is over, then leave."""
        self.begin = begin
        time.sleep(max(0.0, begin - time.monotonic()))
        cpu, weights = time.process_time(), self.model.weight.detach().clone()
        for has_update in self._steps():
            now = time.monotonic()
            if has_update:
                self._completions.append(now)
            if now <= self.end:
                weights = self.model.weight.detach().clone()
        cpu = time.process_time() - cpu
        if self.sync is not None:
            self.sync.average_all()  # nobody leaves while others may be averaging with it
            self.sync.close()
        self.log.close()
        return Answer(
            begin=begin,
            completions=self._completions,
            weights=weights[:_NUM_REPORTED].tolist(),
            group_sizes=_group_sizes(self.log),
            gradient_error=self.gradient_error,
            cpu=cpu,
        )

    def emulate(self, work: Seconds, *, since: Seconds, until: Seconds) -> Seconds:
        """In place of `work` seconds of compute: sleep them, and as long as this worker is slower.

        Returns when that is over, for the next work to begin there: sleeps are late by a little,
        which would add up. Not beyond `until`: nobody is to wait for a step that will not count.
        """
        setting = self.setting
        delay = self.slowness.delay(since - self.begin, work, setting.forward + setting.backward)
        over = min(since + work + delay, until)
        time.sleep(max(0.0, over - time.monotonic()))
        return over

    @abstractmethod
    def _steps(self) -> Iterator[bool]:
        """Make steps until the time is over; after each, whether it had an update."""


class Plain(Training):
    """A data-parallel worker: forward, backward, update, average."""

    def _steps(self) -> Iterator[bool]:
        setting, weight, end = self.setting, self.model.weight, self.end
        numbers: Iterable[int] = count()
        if self.side.policy == "static":
            # Nobody tells the partners of one that leaves the static schedule: all make equally
            # many steps, as many as fit into the time if averages took none.
            step = setting.forward + setting.backward
            numbers, end = range(math.ceil((self.end - self.begin) / step)), math.inf
        for _ in numbers:
            between = self.emulate(setting.forward, since=time.monotonic(), until=end)
            self.emulate(setting.backward, since=between, until=end)
            if time.monotonic() >= end:
                return
            weight.grad = self.model.gradient(weight)
            self.optimizer.step()
            if self.sync is not None:
                self.sync.step()
            yield True


class Balanced(Training):
    """Computes its share of the global batch. The gradient of each micro-batch is fixed."""

    def _steps(self) -> Iterator[bool]:
        assert self.sync is not None, "balanced is a policy"
        setting, weight, end = self.setting, self.model.weight, self.end
        num_microbatches = MICROBATCHES_PER_WORKER * setting.num_workers
        fixed = torch.Generator().manual_seed(0)
        gradients = torch.empty(num_microbatches, setting.num_floats).normal_(generator=fixed)
        mean = gradients.double().mean(dim=0)
        while True:
            total, now = torch.zeros_like(weight), time.monotonic()
            for microbatch in self.sync.share(num_microbatches):
                for work in (setting.forward, setting.backward):
                    now = self.emulate(work / MICROBATCHES_PER_WORKER, since=now, until=end)
                total += gradients[microbatch]
            if time.monotonic() >= end:
                return
            weight.grad = total
            self.optimizer.step()
            if time.monotonic() < end:  # else some may have left, and nobody had their share
                error = (weight.grad - mean).abs().max() / mean.abs().max()
                self.gradient_error = max(self.gradient_error, error.item())
            self.sync.step()
            yield True


def _group_sizes(log: EventLog) -> list[int]:
    """Without those of everybody, before the start and after the end."""
    averages = [event for event in LogReader(log.path).new() if event.kind == "average"]
    return [
        len(str(event.values["members"]).split())
        for event in averages
        if event.why != "average_all"
    ]
