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

from polyrhythm.run.averaging.averager import AverageResult
from polyrhythm.run.averaging.buffers import ReplicaState
from polyrhythm.run.averaging.group_client import GroupClient
from polyrhythm.sync.policies.local import OuterNesterov, pseudo_gradient


class ModelAveraging:
    def __init__(
        self,
        model: ReplicaState,
        client: GroupClient,
        *,
        every: int,
        overlap: bool,
        asks_ahead: bool,
        outer: OuterNesterov | None,
    ) -> None:
        self.num_steps = 0
        self._model, self._client = model, client
        self.overlap, self._every, self._asks_ahead = overlap, every, asks_ahead
        self._outer = None if outer is None else _Outer(outer, model)
        self._request_group()

    def step(self) -> None:
        self.num_steps += 1
        if self.num_steps % self._every == 0:
            self._wait()
            published = self._client.publish(self._apply_and_read)
            if not self.overlap:
                self._wait()
                self._apply(self._client.pop_result(), unmoved=published)
        self._request_group()

    def refresh(self) -> None:
        """Added, not written: should the optimizer have made its step already, that stays."""
        self._apply(self._client.pop_result())

    def average_all(self) -> None:
        self._wait()
        result = self._client.average_all(self._apply_and_read, self.num_steps - 1)
        if result is not None:
            self._model.flat().write(result.value)
        self._request_group()

    def close(self, *, graceful: bool) -> None:
        self._client.close(graceful=graceful)

    def _wait(self) -> None:
        self._client.wait(self.num_steps - 1)

    def _request_group(self) -> None:
        if self._asks_ahead and (self.num_steps + 1) % self._every == 0:
            self._client.request()

    def _apply_and_read(self, result: AverageResult | None) -> Tensor:
        self._apply(result)
        return self._model.flat().read()

    def _apply(self, result: AverageResult | None, *, unmoved: Tensor | None = None) -> None:
        """`unmoved` is what the model still is, if it is that."""
        if result is None:
            return
        if self._outer is not None:
            result = self._outer.step(result)
        if result.published is unmoved:
            self._model.flat().write(result.value)
        else:
            self._model.flat().add(result.difference)


class _Outer:
    """The outer optimizer's point and velocity, the same on all workers; of the weights alone."""

    def __init__(self, optimizer: OuterNesterov, model: ReplicaState) -> None:
        self._optimizer, self._num_weights = optimizer, model.num_weights
        self._anchor = model.flat().read()[: self._num_weights]
        self._velocity = torch.zeros_like(self._anchor)

    def step(self, result: AverageResult) -> AverageResult:
        """Where the model is to be instead of the mean."""
        weights, rest = result.value.split(
            [self._num_weights, result.value.numel() - self._num_weights]
        )
        self._anchor, self._velocity = self._optimizer.step(
            self._anchor, pseudo_gradient(self._anchor, weights), self._velocity
        )
        return AverageResult(result.published, torch.cat([self._anchor, rest]))
