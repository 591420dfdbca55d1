"""Average models at the end of steps, with whom the scheduler says.

If training waits for the average, all members of a group continue from exact copies. With `overlap`
it goes on at once, and at the end of the next step adds the difference to what the weights have
become; a group then has a whole step to come about, and its window costs nobody any time. A step of
several micro-batches may take it in sooner, between two of them: the gradients of those that follow
are then of the averaged model.

`local` takes the mean of the models as a direction, in which an outer optimizer makes one step.
"""

import torch
from torch import Tensor

from polyrhythm.run.average.averager import Outcome
from polyrhythm.run.average.flat import Model
from polyrhythm.run.average.scheduled import Scheduled
from polyrhythm.sync.local import OuterNesterov, pseudo_gradient


class ModelRounds:
    def __init__(
        self,
        model: Model,
        line: Scheduled,
        *,
        every: int,
        overlap: bool,
        asks_ahead: bool,
        outer: OuterNesterov | None,
    ) -> None:
        self.num_steps = 0
        self._model, self._line = model, line
        self.overlap, self._every, self._asks_ahead = overlap, every, asks_ahead
        self._outer = None if outer is None else _Outer(outer, model)
        self._ask()

    def step(self) -> None:
        self.num_steps += 1
        if self.num_steps % self._every == 0:
            self._wait()
            published = self._line.publish(self._refreshed)
            if not self.overlap:
                self._wait()
                self._take_in(self._line.take(), unmoved=published)
        self._ask()

    def refresh(self) -> None:
        """Added, not written: should the optimizer have made its step already, that stays."""
        self._take_in(self._line.take())

    def consolidate(self) -> None:
        self._wait()
        outcome = self._line.gather(self._refreshed, self.num_steps - 1)
        if outcome is not None:
            self._model.flat().write(outcome.value)
        self._ask()

    def close(self, *, in_order: bool) -> None:
        self._line.close(in_order=in_order)

    def _wait(self) -> None:
        self._line.wait(self.num_steps - 1)

    def _ask(self) -> None:
        if self._asks_ahead and (self.num_steps + 1) % self._every == 0:
            self._line.ask()

    def _refreshed(self, outcome: Outcome | None) -> Tensor:
        self._take_in(outcome)
        return self._model.flat().read()

    def _take_in(self, outcome: Outcome | None, *, unmoved: Tensor | None = None) -> None:
        """`unmoved` is what the model still is, if it is that."""
        if outcome is None:
            return
        if self._outer is not None:
            outcome = self._outer.step(outcome)
        if outcome.published is unmoved:
            self._model.flat().write(outcome.value)
        else:
            self._model.flat().add(outcome.difference)


class _Outer:
    """The outer optimizer's point and velocity, the same on all workers; of the weights alone."""

    def __init__(self, optimizer: OuterNesterov, model: Model) -> None:
        self._optimizer, self._num_weights = optimizer, model.num_weights
        self._anchor = model.flat().read()[: self._num_weights]
        self._velocity = torch.zeros_like(self._anchor)

    def step(self, outcome: Outcome) -> Outcome:
        """Where the model is to be instead of the mean."""
        weights, rest = outcome.value.split(
            [self._num_weights, outcome.value.numel() - self._num_weights]
        )
        self._anchor, self._velocity = self._optimizer.step(
            self._anchor, pseudo_gradient(self._anchor, weights), self._velocity
        )
        return Outcome(outcome.published, torch.cat([self._anchor, rest]))
