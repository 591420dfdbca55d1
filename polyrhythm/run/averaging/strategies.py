"""What a GroupSync does in each step: average gradients, or models in one of several ways.

`GradientAveraging` averages the gradients of all workers before the optimizer's step, so that all
replicas are equal; with a Pipeline, bucket by bucket while backward computes them. `balanced`
yields the mean over the micro-batches of the global batch, of which each worker computes as many as
it can in equal time; every worker's step time is sent with the gradients, so that all assign the
same micro-batches.

The others average models at the end of steps: in groups of the scheduler, by a fixed rule, or on a
server. If training waits for the average, all members of a group continue from exact copies. With
`overlap` training continues at once, and at the end of the next step adds the difference to the
current weights (and applies it to state as far as the state still holds what was published); a
group then has a whole step to form, and its window costs no time. A step of several micro-batches
may apply the average sooner, between two of them: the remaining gradients are then those of the
averaged model. With `decoupled` the next forward all-gathers the average.

`local` uses the mean of the models as a direction, in which an outer optimizer makes one step; a
worker that is alone takes its own model as the mean.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from polyrhythm.errors import PeerError, PolicyError, SingleWorkerError
from polyrhythm.run.averaging.buffers import (
    GradientBuckets,
    MeanNumbers,
    ReplicaState,
    check_finite,
    trainable_parameters,
)
from polyrhythm.run.averaging.exchange import all_reduce_mean
from polyrhythm.run.averaging.parameter_server import ParameterServerClient
from polyrhythm.run.averaging.rendezvous import Rendezvous
from polyrhythm.run.averaging.rounds import AverageResult, GroupClient
from polyrhythm.run.averaging.split_all_reduce import FillingBuffer, StreamingBuffer
from polyrhythm.run.comm.forward_hooks import ForwardOrder, state_hooks
from polyrhythm.run.pipeline.executor import local
from polyrhythm.run.pipeline.loss import NonFiniteWarnings, divide_by
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.sync.policies.balanced import MicrobatchBalancer
from polyrhythm.sync.policies.local import OuterNesterov, pseudo_gradient
from polyrhythm.sync.policies.static import NodeLayout
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Bytes, Seconds, Worker

_FAILED_TIMEOUT: Seconds = 2.0  # for the rest of an average after training has failed


class GradientAveraging:
    """Average gradients; with a Pipeline during the last backward of a step, else after it.

    Gradients that change between backward and the average are published again, as they are then.
    """

    def __init__(
        self,
        model: ReplicaState,
        client: GroupClient,
        pipeline: Pipeline | None,
        *,
        num_extra: int = 0,
    ) -> None:
        """`num_extra`: numbers that are averaged with the gradients."""
        self.num_steps = 0
        self._model, self._client, self._pipeline = model, client, pipeline
        # Whether to start in the backward; if not, hooks would only cost time.
        self._streams = pipeline is not None and pipeline.has_last_backward
        self._is_streaming = False  # in the last backward
        self._gradients = GradientBuckets(
            model.module,
            late=(lambda: pipeline.tied) if pipeline is not None else tuple,
            num_extra=num_extra,
            on_gradient=self._on_gradient if self._streams else None,
        )
        self._filling: FillingBuffer | None = None  # published, but not averaged yet
        if pipeline is not None:
            pipeline.defer_division(True)  # by the labels of all pipelines
            if self._streams:
                pipeline.set_last_backward_context(self._last_backward)
        self._is_averaged = False  # the user called average_gradients() before optimizer.step()
        self._warnings, self._is_mean_finite = NonFiniteWarnings(), True  # of the last gradients
        self._hook = model.optimizer.register_step_pre_hook(self._before_update)

    @property
    def pinned_bytes(self) -> Bytes:
        """Size of the pinned memory of gradients on a GPU."""
        return self._gradients.pinned_bytes

    def average_gradients(self) -> None:
        self.num_steps += 1
        self._average()
        self._is_averaged = True

    def step(self) -> None:
        """Do nothing: the gradients were averaged before the optimizer's step."""

    def average_all(self) -> None:
        """Average the models, which differ only in local state such as running statistics."""
        result = self._client.average_all(lambda _: self._model.flat().read(), self.num_steps - 1)
        if result is not None:
            self._model.flat().write(result.value)

    def close(self, *, graceful: bool) -> None:
        if self._pipeline is not None:
            self._pipeline.defer_division(False)
            if self._pipeline.has_last_backward:
                self._pipeline.set_last_backward_context(contextlib.nullcontext)
        self._gradients.close()
        self._hook.remove()
        self._client.close(graceful=graceful)

    @contextlib.contextmanager
    def _last_backward(self) -> Iterator[None]:
        """Publish gradients while the last backward of a step computes them."""
        if self._filling is not None:
            self._stop_streaming("gradients of several steps are accumulated")
        elif self._streams:
            self._gradients.prepare()
        self._is_streaming = self._streams
        try:
            with self._retract_on_error():
                yield
        finally:
            self._is_streaming = False

    @contextlib.contextmanager
    def _retract_on_error(self) -> Iterator[None]:
        """After an error, let the exchange fail at once: the others would wait for the rest."""
        try:
            yield
        except BaseException as error:
            self._retract(f"its gradients are not complete: {type(error).__name__}")
            raise

    def _on_gradient(self, index: int) -> None:
        """In a hook: the gradient of a parameter is complete."""
        if not self._is_streaming:
            return
        if self._filling is None:
            self._publish()
        if self._gradients.is_filled(index):
            # As by checkpoints with use_reentrant=True: the first one may be on its way.
            self._stop_streaming("a gradient is computed in several parts")
        else:
            self._gradients.fill(index)

    def _publish(self) -> None:
        self._filling = self._gradients.begin()
        self._client.publish_filling(self._filling)

    def _retract(self, why: str) -> None:
        if self._filling is not None:
            self._filling = None
            self._client.retract(why)
            self._gradients.clear()

    def _stop_streaming(self, why: str) -> None:
        """From now on, start after backward; the average in flight would be wrong."""
        self._streams = self._is_streaming = False
        self._retract(why)

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_averaged:
            self.average_gradients()
        self._is_averaged = False
        if not self._is_mean_finite:
            for parameter in trainable_parameters(self._model.module):
                parameter.grad = None  # the optimizer skips this step

    def _average(self) -> None:
        with self._retract_on_error():
            self._fill()
            divisor = self._pop_divisor()
            self._gradients.fill_numbers(divisor or 0.0)
        self._write_mean(divisor)

    def _fill(self) -> None:
        """Fill in and publish what is left of the gradients; wait until the GPU has done so."""
        if self._filling is not None and self._gradients.has_changed:
            self._stop_streaming("its gradients were changed after backward")
        if self._filling is None:
            self._gradients.prepare()
        self._gradients.check_dense()
        if self._filling is None:
            self._publish()
        self._gradients.fill_rest()

    def _write_mean(self, divisor: float | None) -> list[float]:
        """Wait for the mean and write it; return the extra numbers, empty for a single worker.

        What is not finite is averaged, so that all replicas see it and skip the step: it is written
        as inf, for a GradScaler.
        """
        filling, self._filling = self._filling, None
        assert filling is not None, "the gradients are published"
        self._client.wait(self.num_steps - 1, needed="averaging gradients")
        worker, step = self._client.me.worker, self.num_steps - 1
        is_scaled = self._pipeline is not None and self._pipeline.is_loss_scaled
        is_fine = is_scaled or filling.is_finite
        self._warnings.after(is_finite=is_fine, step=step, worker=worker)
        if self._client.pop_result() is None:  # this worker is the only one
            self._is_mean_finite = divisor is None or filling.is_finite
            numbers = MeanNumbers([], [], divisor or 0.0, self._is_mean_finite)
            if self._is_mean_finite:
                gradients = (p.grad for p in trainable_parameters(self._model.module))
                divide_by(numbers.divisor, [local(g) for g in gradients if g is not None])
        else:
            numbers = self._gradients.mean_numbers()
            self._is_mean_finite = numbers.is_finite
            if self._is_mean_finite:
                self._gradients.write(numbers, divides=divisor is not None)
        if not self._is_mean_finite:
            for parameter in trainable_parameters(self._model.module):
                if parameter.grad is not None:
                    parameter.grad.fill_(math.inf)
        return numbers.extra

    def _pop_divisor(self) -> float | None:
        """Return the divisor of this pipeline's gradients; None if labels are not counted."""
        divisor = None if self._pipeline is None else self._pipeline.pop_divisor()
        return None if divisor is None else float(divisor)


class BalancedGradientAveraging(GradientAveraging):
    def __init__(
        self,
        model: ReplicaState,
        client: GroupClient,
        num_pipelines: int,
        pipeline: Pipeline | None,
    ) -> None:
        # For each worker its number of micro-batches, then for each its seconds per micro-batch.
        super().__init__(model, client, pipeline, num_extra=2 * num_pipelines)
        self._is_later_stage = pipeline is not None and not pipeline.is_first
        self._index = client.me.worker.pipeline
        self._workers = [Worker(client.me.worker.stage, p) for p in range(num_pipelines)]
        self._present = self._workers
        self._balancer: MicrobatchBalancer | None = None
        self._count = 0  # micro-batches of this worker in this step
        self._step_start: Seconds = 0.0

    def share(self, num_microbatches: int) -> range:
        if self._is_later_stage:
            raise PolicyError(
                f"a share for {self._workers[self._index]}",
                expected="share() on the first stage, which sends the batches to the others",
                fix="call sync.share() where pipeline.is_first, pass it on by step(metadata=...)",
            )
        if self._balancer is None or self._balancer.num_microbatches != num_microbatches:
            self._balancer = MicrobatchBalancer(num_microbatches)
        counts = self._balancer.assign(self._present)
        first = sum(counts[worker] for worker in self._present if worker.pipeline < self._index)
        self._count, self._step_start = counts[self._workers[self._index]], time.perf_counter()
        return range(first, first + self._count)

    def _average(self) -> None:
        with self._retract_on_error():
            self._check_share()
            self._fill()
            # Until the own gradients are computed: waiting for other workers is no part of it.
            elapsed = time.perf_counter() - self._step_start
            divisor = self._pop_divisor()
            divisor = self._count if divisor is None else divisor
            counts, seconds = ([0.0] * len(self._workers) for _ in range(2))
            counts[self._index], seconds[self._index] = self._count, elapsed / self._count
            self._gradients.fill_numbers(divisor, [*counts, *seconds])
        extra = self._write_mean(divisor) or [*counts, *seconds]
        if self._balancer is not None:
            num = len(self._workers)
            self._update_speeds(extra[:num], extra[num:], self._balancer)
        self._count = 0

    def _check_share(self) -> None:
        if self._pipeline is not None and self._is_later_stage:
            self._count = len(self._pipeline.sizes)
        elif self._balancer is None or self._count == 0:
            raise PolicyError(
                "a step under balanced without share()",
                expected="sync.share(num_microbatches) before each step",
                fix="compute exactly the micro-batches that share() returns",
            )

    def _update_speeds(
        self, counts: list[float], seconds: list[float], balancer: MicrobatchBalancer
    ) -> None:
        """Record every worker's speed from the means: only the proportions matter."""
        self._present = [w for w in self._workers if counts[w.pipeline] > 0]
        for worker in self._present:
            balancer.record(worker, 1, seconds[worker.pipeline])


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

    def apply_pending(self) -> None:
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
            self._model.flat().apply(result.published, result.value)


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

    def apply_pending(self) -> None:
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


class ForwardWaitHooks:
    """Write an average into the model while it arrives: modules wait for their tensors in forward.

    Everything else that reads or writes the model waits for the whole average: state_dict,
    load_state_dict, the optimizer's step, a forward in evaluation. `start` waits for all tensors
    that no hook has seen yet. The hooks run in the training thread.

    A tensor's number is its index in `ReplicaState.averaged_tensors`; optimizer state follows.
    """

    def __init__(self, model: ReplicaState, *, timeout: Seconds) -> None:
        self._model, self._timeout = model, timeout
        self._streaming_buffer: StreamingBuffer | None = None
        self._missing: dict[int, tuple[Tensor, Tensor, int]] = {}  # tensor, mean, end in buffer
        self._forwards = ForwardOrder(model.module, model.averaged_tensors(), self._copy_received)
        self._seen, optimizer = self._forwards.order, model.optimizer

        def finish(*_: Any) -> None:
            self.finish()

        self._handles = state_hooks(model.module, before=finish)
        self._handles.append(optimizer.register_step_pre_hook(finish))
        self._handles.append(optimizer.register_state_dict_pre_hook(finish))
        self._handles.append(optimizer.register_load_state_dict_pre_hook(finish))

    def order(self) -> list[int]:
        """Return tensor numbers in forward order, preceded by those that no hook has seen."""
        num = len(self._model.averaged_tensors())
        return [*(i for i in range(num) if i not in self._seen), *self._seen]

    def start(self, streaming_buffer: StreamingBuffer) -> None:
        """Start to write the mean of the current model; return when the forward may start."""
        assert not self._missing, "the previous average is complete"
        self._streaming_buffer, flat = streaming_buffer, self._model.flat()
        numbers, stop = [*self._model.order], 0
        for index, (tensor, mean) in enumerate(flat.views(streaming_buffer.value)):
            stop += mean.numel()
            number = numbers[index] if index < len(numbers) else index
            self._missing[number] = tensor, mean, stop
        self._copy_received([i for i in numbers if i not in self._seen])

    def finish(self, timeout: Seconds | None = None) -> None:
        """Wait for the whole average and write it."""
        self._copy_received(list(self._missing), timeout)

    def remove(self) -> None:
        self._forwards.remove()
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _copy_received(self, numbers: Iterable[int], timeout: Seconds | None = None) -> None:
        if not self._missing:
            return
        streaming_buffer = self._streaming_buffer
        for number in numbers:
            if number in self._missing:
                assert streaming_buffer is not None, "an average is arriving"
                tensor, mean, stop = self._missing[number]
                streaming_buffer.wait(stop, self._timeout if timeout is None else timeout)
                tensor.copy_(mean)
                del self._missing[number]
        if not self._missing:
            self._streaming_buffer = None


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
        own = flat.read()
        try:
            check_finite(own, connections.me.worker)
            has_failed = self._rendezvous.has_failed
            connections.connect(others, str(number), timeout=timeout, should_stop=has_failed)
            flat.write(
                all_reduce_mean(connections, members, weights, own, number=number, timeout=timeout)
            )
            connections.flush(timeout)  # there is no acknowledgement
        except (PolicyError, SingleWorkerError) as error:
            self._rendezvous.report_failure(error)  # the others would wait for this worker
            raise
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
        self._server.init(self._pulled, model.num_weights)

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
        check_finite(weights, self._client.me.worker)
        update = weights.clone()  # changes of weights, then statistics as they are
        update[: self._model.num_weights] -= self._pulled[: self._model.num_weights]
        self._server.push(update)
        wait(weights)
        self._pulled = self._server.pull(weights)
        flat.write(self._pulled)

    def _wait(self, weights: Tensor) -> None:
        self._client.publish(lambda _: weights)
        self._client.wait(self.num_steps - 1)

    def _average_all(self, weights: Tensor) -> None:
        self._client.average_all(lambda _: weights, self.num_steps - 1)
