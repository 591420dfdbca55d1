"""Average models at the end of steps: in groups of the scheduler, by a fixed rule, or on a server.

If training waits for the average, all members of a group continue from exact copies. With `overlap`
training continues at once, and at the end of the next step adds the difference to the current
weights; a group then has a whole step to form, and its window costs no time. A step of several
micro-batches may apply the average sooner, between two of them: the remaining gradients are then
those of the averaged model.

`local` uses the mean of the models as a direction, in which an outer optimizer makes one step.
"""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from polyrhythm.errors import PeerError
from polyrhythm.run.averaging.averager import AverageResult
from polyrhythm.run.averaging.buffers import ReplicaState
from polyrhythm.run.averaging.exchange import all_reduce_mean
from polyrhythm.run.averaging.group_client import GroupClient
from polyrhythm.run.averaging.parameter_server import ParameterServerClient
from polyrhythm.run.averaging.rendezvous import Rendezvous
from polyrhythm.run.averaging.streaming import ForwardWaitHooks
from polyrhythm.sync.policies.local import OuterNesterov, pseudo_gradient
from polyrhythm.sync.policies.static import NodeLayout
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds, Worker

_FAILED_TIMEOUT: Seconds = 2.0  # for the rest of an average after training has failed


class ModelAveraging:
    """Average in the groups of the scheduler."""

    def __init__(
        self,
        model: ReplicaState,
        client: GroupClient,
        setup: Setup,
        *,
        overlap: bool = False,
        outer: OuterNesterov | None = None,
    ) -> None:
        self.num_steps, self.overlap = 0, overlap
        self._model, self._client = model, client
        self._every, self._asks_ahead = setup.steps_between, setup.mode.asks_ahead
        self._outer = None if outer is None else _OuterOptimizer(outer, model)
        self._request_group()

    def step(self) -> None:
        self.num_steps += 1
        if self.num_steps % self._every == 0:
            self._wait()
            published = self._client.publish(self._apply_and_read)
            if not self.overlap:
                self._wait()
                self._apply(self._client.pop_result(), unchanged=published)
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
        if self._asks_ahead and (self.num_steps + 1) % self._every == 0:
            self._client.request()

    def _apply_and_read(self, result: AverageResult | None) -> Tensor:
        self._apply(result)
        return self._model.flat().read()

    def _apply(self, result: AverageResult | None, *, unchanged: Tensor | None = None) -> None:
        """`unchanged`: the published buffer, if the weights have not changed since."""
        if result is None:
            return
        if self._outer is not None:
            result = self._outer.step(result)
        if result.published is unchanged:
            self._model.flat().write(result.value)
        else:
            self._model.flat().add(result.difference)


class _OuterOptimizer:
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


class DecoupledModelAveraging(ModelAveraging):
    """Average in groups, and all-gather the averages during the next forward.

    `step` returns when the average is committed: each member has its shard of the mean and has sent
    Done. The forward waits for each part of the model where it uses it, so it computes with the
    same weights as if it had waited for all of them.

    Buckets are in the order of a forward. The first worker that stores its order fixes it for all
    workers of the stage, without waiting for anyone.
    """

    def __init__(self, model: ReplicaState, client: GroupClient, rendezvous: Rendezvous) -> None:
        self._rendezvous, self._is_ordered = rendezvous, False
        self._forward_hooks = ForwardWaitHooks(model, timeout=rendezvous.timeout)
        super().__init__(model, client, rendezvous.setup)

    def step(self) -> None:
        self._forward_hooks.finish()
        self._agree_on_order()
        super().step()

    def refresh(self) -> None:
        self._forward_hooks.finish()

    def average_all(self) -> None:
        """Average without splitting: there is no forward to hide the all-gather behind."""
        self._forward_hooks.finish()
        self._agree_on_order()
        super().average_all()

    def close(self, *, graceful: bool) -> None:
        try:
            if graceful:
                self._forward_hooks.finish()
                self._client.wait_idle()
            else:  # the caller may still read the weights
                with contextlib.suppress(PeerError):
                    self._forward_hooks.finish(_FAILED_TIMEOUT)
        finally:
            self._forward_hooks.remove()
            super().close(graceful=graceful)

    def _agree_on_order(self) -> None:
        if not self._is_ordered:
            name, members = (
                f"the order of stage {self._client.me.worker.stage}",
                self._rendezvous.stage,
            )
            order = self._rendezvous.store.set_once(name, self._forward_hooks.order(), members)
            self._model.order, self._is_ordered = order, True

    def _apply(self, result: AverageResult | None, *, unchanged: Tensor | None = None) -> None:
        if result is not None:
            assert result.published is unchanged, "training has waited for the Commit"
            assert result.streaming_buffer is not None, "the all-gather is running"
            self._forward_hooks.start(result.streaming_buffer)


class StaticAveraging:
    """Average by a fixed rule: every worker computes its group itself, without a scheduler.

    There is no Commit: the loss of a member ends the others' training with a PeerError, and their
    weights are those before the average or after it.
    """

    def __init__(self, model: ReplicaState, rendezvous: Rendezvous) -> None:
        self.num_steps, self._every = 0, rendezvous.setup.steps_between
        self._model, self._rendezvous = model, rendezvous
        nodes, stage = rendezvous.nodes, rendezvous.me.worker.stage
        self._layout = NodeLayout.of({w: at for w, at in nodes.items() if w.stage == stage})

    def step(self) -> None:
        self.num_steps += 1
        if self.num_steps % self._every == 0:
            number = self.num_steps // self._every - 1
            self._average(
                self._layout.members(self._rendezvous.me.worker, number), 2 * self.num_steps
            )

    def average_all(self) -> None:
        self._average(tuple(sorted(self._layout.workers)), 2 * self.num_steps + 1)

    def close(self, *, graceful: bool) -> None:
        self._rendezvous.connections.close()

    def _average(self, workers: tuple[Worker, ...], number: int) -> None:
        if len(workers) == 1:
            return
        connections, timeout = self._rendezvous.connections, self._rendezvous.timeout
        members = [self._rendezvous.peer(worker) for worker in workers]
        others = [peer for peer in members if peer != connections.me]
        weights, flat = [1 / len(members)] * len(members), self._model.flat()
        try:
            has_failed = self._rendezvous.has_failed
            connections.connect(others, str(number), timeout=timeout, should_stop=has_failed)
            flat.write(
                all_reduce_mean(
                    connections, members, weights, flat.read(), number=number, timeout=timeout
                )
            )
            connections.flush(timeout)  # there is no acknowledgement
        except PeerError as error:
            # Only the dead worker's peers see its loss; others see that those peers have ended.
            first = self._rendezvous.report_failure(error)
            if first.startswith(f"{connections.me.worker}: "):
                raise
            cause = f"{error.cause}; first error: {first}"
            raise PeerError(
                error.peer, action=error.action, waited=error.waited, cause=cause
            ) from None


class ServerAveraging:
    """Push to a parameter server and pull from it; the scheduler bounds each worker's lead."""

    def __init__(self, model: ReplicaState, client: GroupClient, rendezvous: Rendezvous) -> None:
        self.num_steps, self._every = 0, rendezvous.setup.steps_between
        self._model, self._client = model, client
        self._server = ParameterServerClient(rendezvous)
        self._pulled = model.flat().read()
        self._server.init(self._pulled)

    def step(self) -> None:
        self.num_steps += 1
        if self.num_steps % self._every == 0:
            self._push_pull(self._wait)

    def average_all(self) -> None:
        """Pull after all workers have pushed."""
        self._push_pull(self._average_all)

    def close(self, *, graceful: bool) -> None:
        self._client.close(graceful=graceful)
        self._server.close()

    def _push_pull(self, wait: Callable[[Tensor], object]) -> None:
        flat = self._model.flat()
        weights = flat.read()
        self._server.push(weights - self._pulled)
        wait(weights)
        self._pulled = self._server.pull(weights)
        flat.write(self._pulled)

    def _wait(self, weights: Tensor) -> None:
        self._client.publish(lambda _: weights)
        self._client.wait(self.num_steps - 1)

    def _average_all(self, weights: Tensor) -> None:
        self._client.average_all(lambda _: weights, self.num_steps - 1)
