"""Average gradients over all workers before the optimizer uses them: one model, kept in step.

`all_reduce` gives the mean of all workers' gradients. `balanced` gives the mean over the
micro-batches of the global batch, of which each worker has as many as it can compute in the same
time; how long everybody took travels along with the gradients, so that all deal alike.
"""

import time
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from polyrhythm.errors import PolicyError
from polyrhythm.run.average.flat import Gradients, Model
from polyrhythm.run.average.scheduled import Scheduled
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.sync.balanced import Dealer
from polyrhythm.types import Seconds, Worker


class GradientRounds:
    def __init__(self, model: Model, line: Scheduled) -> None:
        self.num_steps = 0
        self._model, self._line = model, line
        self._gradients = Gradients(model.module)
        self._is_averaged = False  # by the loop itself, before the optimizer's step
        self._hook = model.optimizer.register_step_pre_hook(self._before_update)

    def average_gradients(self) -> None:
        self.num_steps += 1
        self._average()
        self._is_averaged = True

    def step(self) -> None:
        """All is done before the optimizer's step."""

    def consolidate(self) -> None:
        """The models are equal but for what only one worker has seen, such as statistics."""
        outcome = self._line.gather(lambda _: self._model.flat().read(), self.num_steps - 1)
        if outcome is not None:
            self._model.flat().write(outcome.value)

    def close(self, *, in_order: bool) -> None:
        self._hook.remove()
        self._line.close(in_order=in_order)

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_averaged:
            self.average_gradients()
        self._is_averaged = False

    def _average(self) -> None:
        mean = self._mean(self._gradients.read())
        if mean is not None:
            self._gradients.write(mean)

    def _mean(self, flat: Tensor) -> Tensor | None:
        """None if this worker is the only one."""
        self._line.publish(lambda _: flat)
        self._line.wait(self.num_steps - 1, needed="averaging gradients")
        outcome = self._line.take()
        return None if outcome is None else outcome.value


class BalancedRounds(GradientRounds):
    def __init__(
        self,
        model: Model,
        line: Scheduled,
        num_pipelines: int,
        pipeline: Pipeline | None,
    ) -> None:
        """`pipeline` says how many micro-batches a stage had that has no say in it."""
        super().__init__(model, line)
        self._pipeline = pipeline
        self._place = line.me.worker.pipeline
        self._workers = [Worker(line.me.worker.stage, p) for p in range(num_pipelines)]
        self._present = self._workers
        self._dealer: Dealer | None = None
        self._count = 0  # micro-batches of this worker in this step
        self._began: Seconds = 0.0

    def share(self, num_microbatches: int) -> range:
        if self._pipeline is not None:
            raise PolicyError(
                f"a share for {self._workers[self._place]}",
                expected="one for the first stage, whose batches the others get",
                fix="call sync.share() where pipeline.is_first, and pass it on by step(note=...)",
            )
        if self._dealer is None or self._dealer.num_microbatches != num_microbatches:
            self._dealer = Dealer(num_microbatches)
        dealt = self._dealer.deal(self._present)
        first = sum(dealt[worker] for worker in self._present if worker.pipeline < self._place)
        self._count, self._began = dealt[self._workers[self._place]], time.perf_counter()
        return range(first, first + self._count)

    def _average(self) -> None:
        took = time.perf_counter() - self._began
        if self._pipeline is not None:
            self._count = len(self._pipeline.sizes)
        elif self._dealer is None or self._count == 0:
            raise PolicyError(
                "a step under balanced without a share",
                expected="sync.share(num_microbatches) before each step",
                fix="compute the micro-batches that it gives, and no others",
            )
        # Of each worker, in a place of its own: how many micro-batches, and seconds for each.
        told = torch.zeros(2, len(self._workers), device="cpu")
        told[0, self._place], told[1, self._place] = self._count, took / self._count
        gradients = self._gradients.read()
        flat = torch.cat([gradients, told.flatten().to(gradients.dtype)])
        mean = self._mean(flat)
        if mean is None:  # there is nobody else
            mean = flat
        gradients, heard = mean[: gradients.numel()], mean[gradients.numel() :].view_as(told)
        self._gradients.write(gradients, factor=1 / heard[0].float().sum().item())
        if self._dealer is not None:
            self._hear(heard, self._dealer)
        self._count = 0

    def _hear(self, heard: Tensor, dealer: Dealer) -> None:
        """How fast everybody was; of means, since only the proportions matter."""
        counts, seconds = heard.tolist()
        self._present = [w for w in self._workers if counts[w.pipeline] > 0]
        for worker in self._present:
            dealer.measured(worker, 1, seconds[worker.pipeline])
