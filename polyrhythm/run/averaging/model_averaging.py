"""Average models at the end of steps, in the groups of the scheduler.

If training waits for the average, all members of a group continue from exact copies. With `overlap`
training continues at once, and at the end of the next step adds the difference to the current
weights; a group then has a whole step to form, and its window costs no time. A step of several
micro-batches may apply the average sooner, between two of them: the remaining gradients are then
those of the averaged model.

`local` uses the mean of the models as a direction, in which an outer optimizer makes one step.
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
        takes_requests: bool,
        outer: OuterNesterov | None,
    ) -> None:
        self.num_steps = 0
        self._model, self._client = model, client
        self.overlap, self._every, self._takes_requests = overlap, every, takes_requests
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
        """Add the difference instead of writing the mean, which would undo an optimizer step."""
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
        if self._takes_requests and (self.num_steps + 1) % self._every == 0:
            self._client.request()

    def _apply_and_read(self, result: AverageResult | None) -> Tensor:
        self._apply(result)
        return self._model.flat().read()

    def _apply(self, result: AverageResult | None, *, unmoved: Tensor | None = None) -> None:
        """`unmoved`: the published buffer, if the weights have not changed since."""
        if result is None:
            return
        if self._outer is not None:
            result = self._outer.step(result)
        if result.published is unmoved:
            self._model.flat().write(result.value)
        else:
            self._model.flat().add(result.difference)


class _Outer:
    """The outer optimizer's anchor and velocity, equal on all workers; of the weights only."""

    def __init__(self, optimizer: OuterNesterov, model: ReplicaState) -> None:
        self._optimizer, self._num_weights = optimizer, model.num_weights
        self._anchor = model.flat().read()[: self._num_weights]
        self._velocity = torch.zeros_like(self._anchor)

    def step(self, result: AverageResult) -> AverageResult:
        """Return the result with the outer optimizer's weights in place of the mean."""
        weights, rest = result.value.split(
            [self._num_weights, result.value.numel() - self._num_weights]
        )
        self._anchor, self._velocity = self._optimizer.step(
            self._anchor, pseudo_gradient(self._anchor, weights), self._velocity
        )
        return AverageResult(result.published, torch.cat([self._anchor, rest]))
