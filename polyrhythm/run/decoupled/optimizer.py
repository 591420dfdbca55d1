"""Data parallelism whose all-reduce hides behind the backward and the next forward (DeAR).

    optimizer = pr.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
    for batch in data:
        loss(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

Gradients are averaged in buckets as they come. `step` updates this worker's part of each bucket;
the others' parts arrive during the next forward, which waits for each where it is needed first. So
the state of the optimizer is spread over all workers, and nobody computes an update twice.

Source: Zhang et al., "DeAR", ICDCS 2023. Departures: it gathers updated parameters, not gradients,
as ZeRO does: the update is made in `step`, with the learning rate of that step; buckets follow the
order in which the forward was seen to use parameters; parameters that only some steps use, shared
ones and modules that are called twice are as without this.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from polyrhythm.errors import PolicyError
from polyrhythm.run.decoupled.bucket import Bucket
from polyrhythm.run.decoupled.checks import check, parameters_of
from polyrhythm.run.decoupled.forward_order import ForwardOrder
from polyrhythm.run.decoupled.grouping import completed, grouped
from polyrhythm.run.decoupled.halves import PeerHalves, Pending
from polyrhythm.run.decoupled.portable import (
    State,
    all_gathered,
    check_state,
    segment_state,
    whole_state,
)
from polyrhythm.run.decoupled.reducing import Reducing, Task
from polyrhythm.run.groups import new_group
from polyrhythm.types import Bytes, Seconds

BUCKET: Bytes = 25_000_000  # to begin with, as DDP has it


class DistributedOptimizer(Optimizer):
    """Wraps an optimizer that updates each number by itself; made by all workers together."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        bucket_bytes: Bytes = BUCKET,
        process_group: dist.ProcessGroup | None = None,
        *,
        timeout: Seconds = 600.0,
    ) -> None:
        """All workers begin with the parameters and buffers of the first one.

        `optimizer` is this one's from now on: its groups hold what this worker updates. `timeout`
        bounds every wait for other workers.
        """
        check(optimizer, model)
        self._inner, self._model, self._timeout = optimizer, model, timeout
        self._names, self._parameters = parameters_of(optimizer, model)
        self._gathered = all_gathered(process_group)
        _agree(self._gathered, self._names, self._parameters)
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        group = new_group(ranks, "averaging gradients", deadline=timeout)
        self._halves = PeerHalves(group, timeout=timeout)
        self._reducing = Reducing(group)
        self._group_of = {
            id(parameter): number
            for number, of in enumerate(optimizer.param_groups)
            for parameter in of["params"]
        }
        self._begin_alike(process_group)
        whole = _indexed(optimizer.state, self._parameters)
        self._syncing = True
        self._gathering: dict[int, Pending] = {}  # by number of bucket
        self._scattering: dict[int, Task] = {}
        self._is_ordered = self._has_gradients = self._is_finished = False
        self._regroup(range(len(self._parameters)), bucket_bytes, whole)
        self._order = ForwardOrder(
            model, {p: i for i, p in enumerate(self._parameters)}, self._before_forward
        )
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._hook(index))
        model.register_state_dict_pre_hook(lambda *_: self.synchronize())
        model.register_load_state_dict_pre_hook(lambda *_: self.synchronize())
        self.__setstate__({"defaults": optimizer.defaults})  # hooks of a step, as others have

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the wrapped optimizer, with this worker's part of the parameters.

        After backward their gradients are waited for: a GradScaler looks at them here.
        """
        if self._has_gradients:
            self._finish_backward()
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._has_gradients:  # of a backward that no step has followed
            self._finish_backward()
            self._empty()
        for parameter in self._parameters:
            parameter.grad = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here add to gradients and average nothing; for all but the last one."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._has_gradients:
            raise PolicyError(
                "step() without a backward()",
                expected="loss.backward() before each step, outside of no_sync() at least once",
                fix="call backward first; after zero_grad() there is nothing to step with",
            )
        self._finish_backward()
        first, *others = self._buckets
        self._update([first])
        self._update(others)
        self._empty()
        if not self._is_ordered:
            self._follow_forward()
        return loss

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the mean gradients so that their norm is at most `max_norm`; the norm before."""
        self._finish_backward()
        found = [s.gradient for s in self._segments() if s.parameter.grad is not None]
        norms = torch.stack(
            [torch.linalg.vector_norm(g.float(), norm_type) for g in found] or [torch.zeros(())]
        )
        own = torch.linalg.vector_norm(norms, norm_type)
        if self._is_whole:
            total = own
        else:
            every = torch.stack([torch.as_tensor(n) for n in self._gathered(own.item())])
            total = torch.linalg.vector_norm(every, norm_type)
        factor = min(1.0, max_norm / (total.item() + 1e-6))
        if factor < 1.0:
            for gradient in found:
                gradient.mul_(factor)
        return total

    def synchronize(self) -> None:
        """Wait until this worker has all parameters of the last step."""
        for number in list(self._gathering):
            self._gathering.pop(number).wait()

    def state_dict(self) -> dict[str, Any]:
        """Of all workers, who call this together; as the wrapped optimizer alone would have it."""
        self.synchronize()
        state = whole_state(self._buckets, self._inner.state, self._halves, self._gathered)
        groups = [{k: v for k, v in of.items() if k != "params"} for of in self._inner.param_groups]
        for of in groups:
            of["params"] = []
        for index, parameter in enumerate(self._parameters):
            groups[self._group_of[id(parameter)]]["params"].append(index)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict`, or that of the wrapped optimizer without this, has given."""
        groups, ours = state_dict["param_groups"], self._inner.param_groups
        sizes = [len(of["params"]) for of in groups]
        counts = [0] * len(ours)
        for number in self._group_of.values():
            counts[number] += 1
        if sizes != counts:
            raise PolicyError(
                f"a checkpoint with parameter groups of {sizes}",
                expected=f"groups of {counts}, as this optimizer has",
                fix="load the checkpoint of the same model and the same groups",
            )
        check_state(state_dict["state"], self._parameters, self._names)
        self.synchronize()
        for of, into in zip(groups, ours, strict=True):
            into |= {k: v for k, v in of.items() if k != "params"}
        self._adopt_state(state_dict["state"])

    def close(self) -> None:
        """End; the model and its parameters stay as they are."""
        self.synchronize()
        self._order.remove()
        self._reducing.close()

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def on_gradient(parameter: Tensor) -> None:
            if not self._syncing:
                return
            if self._is_finished:  # looked at, but not stepped with
                self._empty()
            self._has_gradients = True
            self._used[index] = 1
            self._bucket_of[index].fill(index)
            self._start_full()

        return on_gradient

    def _before_forward(self, indices: Iterable[int]) -> None:
        for index in indices:
            pending = self._gathering.pop(self._bucket_of[index].number, None)
            if pending is not None:
                pending.wait()

    def _start_full(self) -> None:
        """Buckets from the last on: all workers send them in one order."""
        while self._next >= 0 and self._buckets[self._next].is_full:
            bucket = self._buckets[self._next]
            self._next -= 1
            if not torch.isfinite(bucket.gradients.sum()):
                self._used[-1] = 1
            pending = self._halves.scatter(bucket.gradients, bucket.number)
            self._scattering[bucket.number] = self._reducing.start(self._reduce(bucket, pending))

    def _reduce(self, bucket: Bucket, pending: Pending) -> Callable[[], None]:
        def reduce() -> None:
            pending.wait()
            if bucket.is_whole:
                self._halves.gather(bucket.gradients, bucket.number).wait()

        return reduce

    def _finish_backward(self) -> None:
        """Until the mean of all gradients is there; those that nobody has computed are None."""
        if self._is_finished:
            return
        for bucket in self._buckets:
            for index in bucket.missing:
                self._used[index] = self._parameters[index].grad is not None
                bucket.fill(index)
        self._start_full()
        flags = self._halves.unite(self._used, 0)
        for task in self._scattering.values():
            task.wait(self._timeout)
        flags.wait()
        self._scattering.clear()
        for segment in self._segments():
            segment.parameter.grad = segment.gradient if self._used[segment.index] else None
            if self._used[-1]:  # a GradScaler finds it on all workers, or else they would part
                segment.gradient[0] = torch.nan
        self._is_finished = True

    def _update(self, buckets: Sequence[Bucket]) -> None:
        """With the gradients of these alone, and send on what has become of them."""
        own = {id(s.parameter) for bucket in buckets for s in bucket.segments}
        kept = {s.parameter: s.parameter.grad for s in self._segments()}
        for parameter, gradient in kept.items():
            parameter.grad = gradient if id(parameter) in own else None
        self._inner.step()
        for parameter, gradient in kept.items():
            parameter.grad = gradient
        for bucket in buckets:
            if not bucket.is_whole:
                self._gathering[bucket.number] = self._halves.gather(bucket.weights, bucket.number)

    def _empty(self) -> None:
        """Ready for the next backward."""
        for bucket in self._buckets:
            bucket.empty()
        self._used.zero_()
        self._next = len(self._buckets) - 1
        self._has_gradients = self._is_finished = False

    def _follow_forward(self) -> None:
        """Once, after the first step: buckets in the order in which the forward uses them."""
        self._is_ordered = True
        self.synchronize()
        order = completed(self._gathered(list(self._order.seen))[0], len(self._parameters))
        state = whole_state(self._buckets, self._inner.state, self._halves, self._gathered)
        self._regroup(order, self._bucket_bytes, state)

    def _regroup(self, order: Iterable[int], bucket_bytes: Bytes, state: State) -> None:
        """With nothing on its way; `state` is the optimizer's, of whole parameters."""
        self._bucket_bytes, self._is_whole = bucket_bytes, False
        self._buckets = [
            Bucket(
                number,
                [(index, self._parameters[index]) for index in indices],
                rank=self._halves.rank,
                num_workers=self._halves.num_workers,
                whole=self._is_whole,
            )
            for number, indices in enumerate(grouped(self._parameters, list(order), bucket_bytes))
        ]
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.parameters}
        # By parameter, whether there is a gradient; and last, whether one is not finite.
        self._used = torch.zeros(len(self._parameters) + 1, dtype=torch.uint8)
        self._empty()
        for of in self._inner.param_groups:
            of["params"] = []
        for segment in self._segments():
            of = self._inner.param_groups[self._group_of[id(self._parameters[segment.index])]]
            of["params"].append(segment.parameter)
        self._adopt_state(state)

    def _adopt_state(self, state: State) -> None:
        self._inner.state.clear()
        for segment in self._segments():
            whole, parameter = state.get(segment.index), self._parameters[segment.index]
            if whole:
                self._inner.state[segment.parameter] = segment_state(whole, segment, parameter)

    def _segments(self) -> Iterator[Any]:
        return (segment for bucket in self._buckets for segment in bucket.segments)

    def _begin_alike(self, group: dist.ProcessGroup | None) -> None:
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            dist.broadcast(tensor.detach(), group=group, group_src=0)


def _agree(
    gathered: Callable[[Any], list[Any]], names: Sequence[str], parameters: Sequence[nn.Parameter]
) -> None:
    mine = [(n, tuple(p.shape), str(p.dtype)) for n, p in zip(names, parameters, strict=True)]
    for rank, theirs in enumerate(gathered(mine)):
        if theirs != mine:
            place = next(
                (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
                min(len(mine), len(theirs)),
            )
            here, there = (
                f"{found[place][0]!r} {found[place][1]} {found[place][2]}"
                if place < len(found)
                else "missing"
                for found in (mine, theirs)
            )
            raise PolicyError(
                f"parameter {place} is {here} here, and {there} on rank {rank}",
                expected="the same parameters in the same order on all workers",
                fix="build the same model and optimizer in every process",
            )


def _indexed(state: Any, parameters: Sequence[nn.Parameter]) -> State:
    return {i: dict(state[p]) for i, p in enumerate(parameters) if p in state}
