"""Data parallelism whose all-reduce hides behind the backward and the next forward (DeAR).

    optimizer = pr.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
    for batch in data:
        loss(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

Gradients are averaged in buckets during backward. `step` updates this worker's shard of each
bucket; the other shards arrive during the next forward, which waits for each at its first use. So
the optimizer state is sharded over all workers, and no update is computed twice.

Source: Zhang et al., "DeAR", ICDCS 2023. Departures: it gathers updated parameters, not gradients,
as ZeRO does: the update is made in `step`, with the learning rate of that step; buckets follow the
measured order in which the forward uses parameters; parameters that only some steps use, shared
parameters and modules that are called twice behave as in single-process training.
"""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from polyrhythm.errors import PolicyError
from polyrhythm.renamed import RenamedAttribute
from polyrhythm.run.comm.forward_hooks import ForwardOrder, gradient_hooks, state_hooks
from polyrhythm.run.comm.process_groups import DEFAULT_TIMEOUT, Replicas, replica_ranks
from polyrhythm.run.comm.reduce_scatter import HALF_PRECISION
from polyrhythm.run.decoupled.buckets import ParameterOrder, assign_buckets, has_gradient
from polyrhythm.run.decoupled.checks import (
    Mode,
    allowed_modes,
    check,
    check_consistent,
    check_mode,
    check_same_parameters,
    parameters_of,
    parse_bucket_bytes,
)
from polyrhythm.run.decoupled.gradient_sync import GradientSync, ReplicaCollectives
from polyrhythm.run.decoupled.state_dict import (
    BackgroundGather,
    State,
    cast_state,
    check_groups,
    check_state,
    copy_state_to_cpu,
    full_state,
    shard_state,
    unsharded_param_groups,
)
from polyrhythm.run.pipeline.loss import squared_norm
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.sync.fusion.tuner import (
    BayesianSearch,
    BucketCandidate,
    BucketDecision,
    BucketTuner,
    Space,
)
from polyrhythm.types import AverageTimings, Seconds, Worker

_logger = logging.getLogger(__name__)

_CONSTRUCTOR = "DistributedOptimizer()"  # the calls that all workers make together
_STEP, _CLIP, _GRADIENTS = "step()", "clip_grad_norm_()", "the mean gradients"
_STATE_DICT, _ASYNC_STATE_DICT = "state_dict()", "async_state_dict()"


class DistributedOptimizer(Optimizer):
    """Wraps an elementwise optimizer; created by all workers together."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | Pipeline,
        bucket_bytes: int | str = "auto",
        process_group: dist.ProcessGroup | None = None,
        *,
        mode: Mode = "auto",
        node: str | None = None,
        elementwise: bool = False,
        timeout: Seconds = DEFAULT_TIMEOUT,
    ) -> None:
        """Broadcast the parameters and buffers of rank 0, and take over `optimizer`.

        Afterwards the groups of `optimizer` hold this worker's shards. `timeout` bounds every wait
        for other workers.

        With `bucket_bytes="auto"` the first hundred steps try bucket sizes and a plain all-reduce
        (`all_reduce`, where every worker has the whole optimizer state), and keep the fastest.
        `mode` restricts that to one mode; with a given size the default mode is `decoupled`. `node`
        names the machine, by default torchrun's node rank, or else the host name: if several
        machines have several workers each, averaging inside machines and then across them
        (`hierarchical`) is tried, too.

        `elementwise=True` asserts that an optimizer which is not torch's own updates each element
        independently.

        With a Pipeline, each stage is averaged with its replicas: every `num_stages` consecutive
        ranks make one pipeline, or `process_group` contains the replicas of this stage. Sizes are
        not tuned there: a stage would measure the changes of other stages as its own.
        """
        stage = model if isinstance(model, Pipeline) else None
        module = model.module if isinstance(model, Pipeline) else model
        check(optimizer, module, elementwise=elementwise)
        check_mode(mode)
        size = parse_bucket_bytes(bucket_bytes)
        self._inner, self._stage, self._timeout = optimizer, stage, timeout
        self._names, self._parameters = parameters_of(optimizer, module)
        ranks, group = replica_ranks(process_group, 1 if stage is None else stage.num_stages)
        self._replicas = Replicas(ranks, "averaging gradients", timeout=timeout)
        self._collectives = ReplicaCollectives(
            self._replicas,
            group,
            self._parameters[0].device,
            node=node,
            call=_CONSTRUCTOR,
            timeout=timeout,
        )
        self._background: BackgroundGather | None = None
        self._num_steps = 0
        settings = {"bucket_bytes": bucket_bytes, "mode": mode}
        check_consistent(self._replicas, optimizer, self._names, settings, _CONSTRUCTOR)
        self._replicas.broadcast_initial_state(
            _CONSTRUCTOR, list(module.parameters()), list(module.buffers())
        )
        param_groups = enumerate(optimizer.param_groups)
        self._group_of = [number for number, each in param_groups for _ in each["params"]]
        indices = {parameter: index for index, parameter in enumerate(self._parameters)}
        tied = set() if stage is None else stage.tied
        self._tied = frozenset(indices[p] for p in tied if p in indices)
        self._gradient_sync = GradientSync(
            self._parameters,
            self._names,
            self._tied,
            self._collectives,
            (lambda: None) if stage is None else stage.pop_divisor,
            self._name_step,
        )
        self._order = ParameterOrder(tuple(indices.values()), self._tied | self._frozen())
        self._unseen: Sequence[int] = ()  # parameters that no forward hook waits for
        self._is_ordered = self._is_updating = False
        self._autotuner: BucketAutotuner | None = None
        self._modes = allowed_modes(mode, has_hierarchy=self._collectives.has_hierarchy)
        self._is_auto = bucket_bytes == "auto" and stage is None
        initial_state = {
            index: dict(optimizer.state[p]) for p, index in indices.items() if p in optimizer.state
        }
        self._rebuild_buckets(BucketCandidate(size, self._modes[0]), initial_state)
        self._add_hooks(module)
        self.__setstate__({"defaults": optimizer.defaults})  # creates the step hooks of Optimizer

    def _add_hooks(self, module: nn.Module) -> None:
        self._forward = ForwardOrder(
            module, self._parameters, self._gradient_sync.wait_for_parameters
        )
        indices = [i for i in range(len(self._parameters)) if i not in self._tied]
        self._hooks = [
            *gradient_hooks({self._parameters[i]: self._hook(i) for i in indices}),
            *state_hooks(
                module,
                before=self.synchronize,
                after_load=lambda: check_same_parameters(module, self._names, self._parameters),
            ),
            self._inner.register_step_pre_hook(self._check_updating),
        ]
        if self._stage is not None:
            self._stage.set_accumulation_context(self.no_sync)
            self._stage.defer_division(True)  # by the labels of all pipelines

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the wrapped optimizer, with this worker's shards of the parameters.

        After backward, reading them waits for the gradients, which a GradScaler reads here.
        """
        if self._gradient_sync.has_gradients:
            self._gradient_sync.finish()
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._inner.state

    @property
    def parameter_names(self) -> Sequence[str]:
        """The names in the model, in the order in which `state_dict` numbers parameters."""
        return self._names

    @property
    def is_tuned(self) -> bool:
        """Whether `candidate` is final."""
        return not self._is_auto or (self._autotuner is not None and self._autotuner.is_over)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise PolicyError(
            "a parameter group added to a DistributedOptimizer",
            expected="all groups in the wrapped optimizer from the start",
            fix="save its state_dict(), close() it, and wrap a new optimizer with all groups",
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._gradient_sync.has_gradients:  # a backward without a step
            self._gradient_sync.finish()
            self._gradient_sync.empty()
        for parameter in self._parameters:
            parameter.grad = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging; use it for all backwards but the last."""
        # Not an attribute of this object: it may be Fabric's wrapper, which imitates the class.
        was_paused, self._gradient_sync.is_paused = self._gradient_sync.is_paused, True
        try:
            yield
        finally:
            self._gradient_sync.is_paused = was_paused

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _check_initialized()
        self._gradient_sync.check_has_gradients(_STEP)
        for bucket in self._gradient_sync.buckets:
            bucket.check_in_place(self._names)
        self._gradient_sync.post_weight_receives()
        self._gradient_sync.finish()
        self._update()
        self._num_steps += 1
        self._gradient_sync.mark_changed()
        self._gradient_sync.empty()
        self._gradient_sync.wait_for_parameters(self._unseen)
        if not self._is_ordered:
            self._reorder_buckets()
        self._tune()
        return loss

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the mean gradients to a norm of at most `max_norm`; return the norm before."""
        self._gradient_sync.check_has_gradients(_CLIP)
        self._gradient_sync.finish()
        not_owned = set() if self._stage is None else self._stage.tied_not_owned
        shards = [s for s in self._gradient_sync.shards if s.parameter.grad is not None]
        counted = [s.gradient for s in shards if self._parameters[s.index] not in not_owned]
        total = _norm_of(counted, norm_type, self._parameters[0].device)
        if not self._gradient_sync.is_all_reduce:
            norms = self._replicas.all_gather_number(total.item(), _CLIP)
            total = _norm_of(list(torch.tensor(norms)), norm_type)
        if self._stage is not None:
            total = self._stage.norm_over_stages(total.cpu(), norm_type).float()
        factor = min(1.0, max_norm / (total.item() + 1e-6))
        for shard in shards if factor < 1.0 else ():
            shard.gradient.mul_(factor)
        return total.to(self._parameters[0].device)

    def gradient_squares(self) -> Tensor | float:
        """Return the sum of squares of this worker's shards of the mean gradients, after backward.

        nan if a gradient of any replica is not finite. A parameter that several stages hold counts
        on the stage that owns it.
        """
        self._gradient_sync.check_has_gradients(_GRADIENTS)
        self._gradient_sync.finish()
        not_owned, tensors = set() if self._stage is None else self._stage.tied_not_owned, []
        for bucket in self._gradient_sync.buckets:
            used = [s for s in bucket.shards if s.parameter.grad is not None]
            shards = [s.gradient for s in used if self._parameters[s.index] not in not_owned]
            is_whole = shards and len(shards) == len(bucket.shards)
            tensors += [bucket.owned_gradients] if is_whole else shards  # fewer and larger ones
        return squared_norm(tensors) + self.non_finite_mark

    @property
    def non_finite_mark(self) -> Tensor | float:
        """0 after backward, or nan if a gradient of any replica is not finite."""
        mark = self._gradient_sync.found_inf.grad
        assert mark is not None, "it is set when the gradients are averaged"
        return mark.item() if mark.is_cpu else mark.double().squeeze()

    def drop_non_finite(self) -> bool:
        """Without finite gradients on all stages and replicas, let `step` change no weight.

        Return whether the gradients are dropped; all workers call it, between backward and step.
        With NCCL it waits for the GPU.
        """
        squares = float(self.gradient_squares())
        total = torch.tensor(sum(self._replicas.all_gather_number(squares, _GRADIENTS)))
        if self._stage is not None:
            total = self._stage.norm_over_stages(total.sqrt(), 2.0)
        if is_dropped := not total.isfinite():
            for shard in self._gradient_sync.shards:
                shard.parameter.grad = None
        return is_dropped

    @property
    def num_replicas(self) -> int:
        return 1 if self._gradient_sync.is_all_reduce else self._replicas.num_workers

    def synchronize(self) -> None:
        """Wait until this worker has all parameters of the last step."""
        self._gradient_sync.wait_for_all()

    def pop_stats(self) -> AverageTimings:
        """Return, since the last call, the wait of training and the longest exchange, over gloo.

        It is the time of both collectives; 0 with NCCL and in the modes of a plain all-reduce.
        """
        return AverageTimings(*self._gradient_sync.pop_timings(), self._replicas.num_workers)

    def state_dict(self) -> dict[str, Any]:
        """Gather the whole state, in torch's format; all workers call this together."""
        _check_initialized()
        return {
            "state": self._full_state(_STATE_DICT),
            "param_groups": unsharded_param_groups(self._inner.param_groups, self._group_of),
        }

    def async_state_dict(self) -> Future[dict[str, Any]]:
        """Copy this worker's shard now and gather the rest during training; called by all."""
        _check_initialized()
        self.synchronize()
        buckets = list(self._gradient_sync.buckets)
        groups = unsharded_param_groups(self._inner.param_groups, self._group_of)
        if self._background is None:
            self._background = BackgroundGather(self._replicas.ranks, timeout=self._timeout)
        mode = self.candidate.mode
        owners = self._collectives.shard_owners(hierarchical=mode.is_hierarchical)
        arguments = (
            buckets,
            copy_state_to_cpu(buckets, self._inner.state),
            self._background.collectives(owners),
            self._background.replicas,
            _ASYNC_STATE_DICT,
            torch.device("cpu"),
        )
        work = self._background.thread.start(
            lambda: {"state": full_state(*arguments), "param_groups": groups}
        )
        return work.future  # every wait of the function has a timeout: a wait for it ends, too

    pop_timings = RenamedAttribute("pop_stats()")
    state_later = RenamedAttribute("async_state_dict()")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this or of a plain optimizer; all workers load the same one."""
        groups, own_groups = state_dict["param_groups"], self._inner.param_groups
        counts = Counter(self._group_of)
        check_groups(groups, [counts[number] for number in range(len(own_groups))])
        check_state(state_dict["state"], self._parameters, self._names)
        self.synchronize()
        for loaded, own in zip(groups, own_groups, strict=True):
            own |= {k: v for k, v in loaded.items() if k != "params"}
        self._adopt_state(cast_state(state_dict["state"], self._parameters))

    def close(self) -> None:
        """Receive all parameters of the last step, finish the sends to other workers, and end.

        Without it, the interpreter waits some seconds at exit for those sends, then drops them.
        """
        try:
            self.synchronize()
        finally:
            self._detach()
            if self._background is not None:
                self._background.thread.close()
            self._collectives.comm_thread.close()

    def abort(self) -> None:
        """End after a failure, without waiting for other workers: their next wait for this fails.

        Parameters and gradients may be those of different steps.
        """
        self._detach()
        self._collectives.comm_thread.abort()
        if self._background is not None:  # a checkpoint that is being saved may still need it
            self._background.thread.close()

    def _detach(self) -> None:
        """Remove what this object has added to the model and its parameters."""
        self._forward.remove()
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            if not has_gradient(parameter):
                parameter.grad = None
        if self._stage is not None:
            self._stage.set_accumulation_context(contextlib.nullcontext)
            self._stage.defer_division(False)

    def __getstate__(self) -> dict[str, Any]:
        raise PolicyError(
            "a copy of a DistributedOptimizer",
            expected="one per model, created by all workers together",
            fix="copy or save its state_dict()",
        )

    def _check_updating(self, *_: Any) -> None:
        """Refuse a step() of the wrapped optimizer that this object has not called."""
        if not self._is_updating:
            raise PolicyError(
                "step() of the wrapped optimizer",
                expected="step() of the DistributedOptimizer around it, which averages first",
                fix="call step() and zero_grad() of the DistributedOptimizer",
            )

    def _frozen(self) -> frozenset[int]:
        return frozenset(i for i, p in enumerate(self._parameters) if not p.requires_grad)

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def on_gradient(parameter: Tensor) -> None:
            self._gradient_sync.check_received(index)
            if not self._gradient_sync.is_paused:
                self._gradient_sync.add_gradient(index)

        return on_gradient

    def _name_step(self) -> tuple[int, Worker]:
        """Return the number of the current step and this worker, for a warning."""
        if self._stage is None:
            return self._num_steps, Worker(0, self._replicas.rank)
        return self._stage.num_steps - 1, Worker(self._stage.stage, self._replicas.rank)

    def _update(self) -> None:
        """Step the wrapped optimizer once, as its counters expect, and gather the weights."""
        self._gradient_sync.found_inf.grad = None  # it is not a weight
        self._is_updating = True
        try:
            self._inner.step()
        finally:
            self._is_updating = False
        self._gradient_sync.gather_weights()

    def _reorder_buckets(self) -> None:
        """Rebuild the buckets in forward order; once, after the first step."""
        self._is_ordered = True
        seen_and_frozen = list(self._forward.order), sorted(self._frozen())
        seen, frozen = self._replicas.broadcast_object(seen_and_frozen, _STEP)
        late = self._tied.union(frozen)
        self._order = ParameterOrder.of(seen, len(self._parameters), late)
        self._unseen = self._order.indices[len(seen) :]
        self._rebuild_buckets(self.candidate, self._full_state(_STEP))
        if self._is_auto:
            space = Space(self._assign_buckets, self._modes)
            self._autotuner = BucketAutotuner(space, self._replicas)

    def _tune(self) -> None:
        tuner = self._autotuner
        if tuner is not None and (candidate := tuner.after_step(_STEP)) is not None:
            self._rebuild_buckets(candidate, self._full_state(_STEP))
            tuner.restart()

    def _assign_buckets(self, candidate: BucketCandidate) -> Any:
        return assign_buckets(self._parameters, self._order, candidate.bucket_bytes)

    def _rebuild_buckets(self, candidate: BucketCandidate, state: State) -> None:
        """Replace the buckets, with no collective in flight; `state` is of whole parameters."""
        self.candidate = candidate  # the current size of buckets, and the mode of averaging
        self._gradient_sync.rebuild_buckets(
            self._assign_buckets(candidate),
            self._collectives.get(hierarchical=candidate.mode.is_hierarchical),
            all_reduce=candidate.mode.is_all_reduce,
        )
        for group in self._inner.param_groups:
            group["params"] = []
        for shard in self._gradient_sync.shards:
            group = self._inner.param_groups[self._group_of[shard.index]]
            group["params"].append(shard.parameter)
        self._inner.param_groups[0]["params"].append(self._gradient_sync.found_inf)
        self._adopt_state(state)

    def _full_state(self, call: str) -> State:
        """Gather the whole state; all workers make this call."""
        self.synchronize()
        return full_state(
            self._gradient_sync.buckets,
            self._inner.state,
            self._gradient_sync.collectives,
            self._replicas,
            call,
        )

    def _adopt_state(self, state: State) -> None:
        self._inner.state.clear()
        for shard in self._gradient_sync.shards:
            full, parameter = state.get(shard.index), self._parameters[shard.index]
            if full:
                group = self._inner.param_groups[self._group_of[shard.index]]
                fused = bool(group.get("fused") or group.get("capturable"))
                self._inner.state[shard.parameter] = shard_state(
                    full, shard, parameter, fused=fused
                )


class BucketAutotuner:
    """Tunes the buckets in training: all workers time their steps, and rank 0 decides."""

    def __init__(self, space: Space, replicas: Replicas) -> None:
        self._trials = BucketTuner(BayesianSearch(space=space))
        self._replicas = replicas
        self.current, self.is_over = self._trials.current, False
        self._seconds: list[Seconds] = []  # step times of the current trial on this worker
        self.restart()

    def restart(self) -> None:
        """Restart the clock: the time since the last step belongs to no step."""
        self._last_step_end = time.perf_counter()

    def after_step(self, call: str) -> BucketCandidate | None:
        """Return the candidate to switch to now, None for no change; all workers make the call."""
        now = time.perf_counter()
        if self.is_over:
            return None
        self._seconds.append(now - self._last_step_end)
        self._last_step_end = now
        if len(self._seconds) < self._trials.num_steps:
            return None
        gathered = self._replicas.all_gather_object(self._seconds, call)
        slowest = [max(times) for times in zip(*gathered, strict=True)]
        self._seconds.clear()
        decision: BucketDecision = self._replicas.run_on_first(
            lambda: self._decide(slowest), call, as_type=BucketDecision
        )
        previous, self.current = self.current, decision.candidate
        self.is_over = decision.is_final
        return None if previous == self.current else self.current

    def _decide(self, slowest: list[Seconds]) -> BucketDecision:
        decision: BucketDecision | None = None
        with torch.enable_grad():  # to fit the Gaussian process, also if step() runs under no_grad
            for seconds in slowest:
                decision = self._trials.after_step(seconds)
        assert decision is not None, "a trial has at least one step"
        _logger.info("gradient buckets of %s: %s", decision.candidate, decision.why)
        return decision


def _norm_of(
    tensors: Sequence[Tensor], norm_type: float, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the norm of all tensors as one, in single precision or better; 0 for no tensors."""
    wide = [t.float() if t.dtype in HALF_PRECISION else t for t in tensors]
    norms = [torch.linalg.vector_norm(t, norm_type) for t in wide]
    return torch.linalg.vector_norm(
        torch.stack([torch.zeros((), device=device), *norms]), norm_type
    )


def _check_initialized() -> None:
    if not dist.is_initialized():
        raise PolicyError(
            "a DistributedOptimizer after destroy_process_group()",
            expected="the process group that it was created with",
            fix="destroy the group after the last step and the last state_dict()",
        )
