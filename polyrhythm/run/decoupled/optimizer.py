"""Data parallelism whose all-reduce hides behind the backward and the next forward (DeAR).

    optimizer = pr.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
    for batch in data:
        loss(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

Gradients are averaged in buckets during backward. `step` updates this worker's shard of each
bucket; the other shards arrive during the next forward, which waits for each at its first use. So
the optimizer state is sharded over all workers, and no update is computed twice.

The first step makes the buckets, in the order in which the forward has used the parameters: before
there is any optimizer state to move.

Source: Zhang et al., "DeAR", ICDCS 2023. Departures: it gathers updated parameters, not gradients,
as ZeRO does: the update is made in `step`, with the learning rate of that step; buckets follow the
measured order in which the forward uses parameters; parameters that only some steps use, shared
parameters and modules that are called twice behave as in single-process training.
"""

import contextlib
import hashlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from polyrhythm.errors import PeerError, PolicyError
from polyrhythm.renamed import RenamedAttribute
from polyrhythm.run.checkpoint.state import StagedCopies
from polyrhythm.run.comm.forward_hooks import ForwardOrder, gradient_hooks, state_hooks
from polyrhythm.run.comm.process_groups import (
    DEFAULT_TIMEOUT,
    NUM_FIRST_STEPS,
    Replicas,
    replica_ranks,
    set_timeout,
    step_timeout,
)
from polyrhythm.run.comm.reduce_scatter import HALF_PRECISION, NcclCollectives
from polyrhythm.run.decoupled.buckets import (
    Bucket,
    BucketSpec,
    ParameterOrder,
    ParameterShard,
    assign_buckets,
    has_gradient,
)
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
    copied,
    copy_state_to_cpu,
    full_state,
    gather_buckets,
    on_cpu,
    shard_state,
    unsharded_param_groups,
)
from polyrhythm.run.pipeline.loss import scale_by, squared_norm
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.sync.fusion.tuner import (
    ALL_SIZES,
    NOISE,
    BayesianSearch,
    BucketCandidate,
    BucketDecision,
    BucketMode,
    BucketTuner,
    EqualWorkTuner,
    Space,
    TimedStep,
)
from polyrhythm.types import AUTO, AverageTimings, Bytes, Seconds, Worker

_logger = logging.getLogger(__name__)

_CONSTRUCTOR = "DistributedOptimizer()"  # the calls that all workers make together
_STEP, _CLIP, _GRADIENTS = "step()", "clip_grad_norm_()", "the mean gradients"
_FIRST_MEAN, _ATTACH = "the first mean of gradients", "attach()"
_STATE_DICT, _ASYNC_STATE_DICT, _CLOSE = "state_dict()", "async_state_dict()", "close()"


@dataclass(slots=True)
class _CurrentBuckets:
    """What a call may change, in an object of its own: the caller may be a wrapper of Fabric.

    It imitates the class of the optimizer, so that attributes which a method sets are its own.
    """

    candidate: BucketCandidate
    is_made: bool = False
    order: ParameterOrder = field(default_factory=lambda: ParameterOrder(()))
    unseen: Sequence[int] = ()  # parameters that no forward hook waits for
    shard_of: dict[int, ParameterShard] = field(default_factory=dict)  # by index of a parameter
    background: BackgroundGather | None = None
    copies: StagedCopies | None = None  # of the state, which a GPU may still make


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
        site: str | None = AUTO,
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
        (`hierarchical`) is tried, too. Workers of the same `site` average over NCCL, sites among
        each other over gloo; None for gloo alone. By default all have the same site whose process
        group has NCCL for their device.

        `elementwise=True` asserts that an optimizer which is not torch's own updates each element
        independently.

        With a Pipeline, each stage is averaged with its replicas: every `num_stages` consecutive
        ranks make one pipeline, or `process_group` contains the replicas of this stage. All stages
        of all replicas try the same size and mode in the same steps.
        """
        stage = model if isinstance(model, Pipeline) else None
        module = model.module if isinstance(model, Pipeline) else model
        check(optimizer, module, elementwise=elementwise)
        check_mode(mode)
        size = parse_bucket_bytes(bucket_bytes)
        self._inner, self._stage, self._module, self._timeout = optimizer, stage, module, timeout
        self._names, self._parameters = parameters_of(optimizer, module)
        ranks, group = replica_ranks(process_group, 1 if stage is None else stage.num_stages)
        self._replicas = Replicas(ranks, "averaging gradients", timeout=timeout)
        self._collectives = ReplicaCollectives(
            self._replicas,
            group,
            self._parameters[0].device,
            site=site,
            node=node,
            call=_CONSTRUCTOR,
            timeout=timeout,
            worker=None if stage is None else stage.worker,
        )
        self._num_steps = 0
        settings = {"bucket_bytes": bucket_bytes, "mode": mode}
        check_consistent(self._replicas, optimizer, self._names, settings, _CONSTRUCTOR)
        self._broadcast_model(_CONSTRUCTOR)
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
            lambda: stage is not None and stage.is_loss_scaled,
            lambda: self._step_supports_amp_scaling,
        )
        self._is_updating = False
        self._autotuner: BucketAutotuner | None = None
        self._modes = allowed_modes(mode, has_hierarchy=self._collectives.has_hierarchy)
        self._is_auto = bucket_bytes == "auto" and (stage is None or len(ranks) > 1)
        self._tuned = self._replicas  # the workers that try the same candidates
        if self._is_auto and stage is not None:
            pipelines = self._replicas.all_gather_object(stage.ranks, _CONSTRUCTOR)
            all_ranks = sorted(rank for pipeline in pipelines for rank in pipeline)
            self._tuned = Replicas(all_ranks, "tuning buckets", timeout=timeout)
        self._current = _CurrentBuckets(BucketCandidate(size, self._modes[0]))
        # Of whole parameters, until the first step; on the CPU: shards need less memory on a GPU.
        self._initial_state: State = {
            index: {key: on_cpu(value) for key, value in optimizer.state.pop(p).items()}
            for p, index in indices.items()
            if p in optimizer.state
        }
        self._set_timeout()
        self._add_hooks()
        self.__setstate__({"defaults": optimizer.defaults})  # creates the step hooks of Optimizer

    def _set_timeout(self) -> None:
        """Bound the waits of the next step: longer in the first ones, in which others compile."""
        timeout = step_timeout(self._timeout, self._num_steps)
        self._collectives.set_timeout(timeout)
        set_timeout(self._tuned.group, timeout)

    def _broadcast_model(self, call: str) -> None:
        model = self._module
        self._replicas.broadcast_initial_state(
            call, list(model.parameters()), list(model.buffers())
        )

    def _add_hooks(self) -> None:
        module = self._module
        self._forward = ForwardOrder(module, self._parameters, self._before_forward)
        indices = [i for i in range(len(self._parameters)) if i not in self._tied]
        self._hooks = [
            *gradient_hooks({self._parameters[i]: self._gradient_sync.hook_of(i) for i in indices}),
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

        After backward, reading them waits for the gradients, which a GradScaler reads here. Before
        the first backward they hold the whole parameters.
        """
        if self._gradient_sync.has_gradients:
            self._average()
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        self._wait_for_copies()  # the caller may change it
        return self._inner.state

    @property
    def parameter_names(self) -> Sequence[str]:
        """The names in the model, in the order in which `state_dict` numbers parameters."""
        return self._names

    @property
    def candidate(self) -> BucketCandidate:
        """The current size of buckets, and mode."""
        return self._current.candidate

    @property
    def is_tuned(self) -> bool:
        """Whether `candidate` is final."""
        return not self._is_auto or (self._autotuner is not None and self._autotuner.is_over)

    @property
    def pinned_bytes(self) -> Bytes:
        """Size of the pinned memory through which buckets on a GPU pass over gloo."""
        return self._collectives.pinned_bytes

    @property
    def whole_param_groups(self) -> list[dict[str, Any]]:
        """The groups as in `state_dict`, without the gather of the state."""
        return unsharded_param_groups(self._inner.param_groups, self._group_of)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise PolicyError(
            "a parameter group added to a DistributedOptimizer",
            expected="all groups in the wrapped optimizer from the start",
            fix="save its state_dict(), close() it, and wrap a new optimizer with all groups",
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._gradient_sync.has_gradients:  # a backward without a step
            if self._current.is_made:
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
        self._gradient_sync.check_in_place()
        self._gradient_sync.post_weight_receives()
        self._average()
        if not self._num_steps:
            self._replicas.all_gather_number(0.0, _STEP)  # refuses a worker in another call
        self._update()
        self._num_steps += 1
        if self._num_steps == NUM_FIRST_STEPS:
            self._set_timeout()
        self._gradient_sync.mark_changed()
        self._gradient_sync.empty()
        self._gradient_sync.wait_for_parameters(self._current.unseen)
        self._tune()
        return loss

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the mean gradients to a norm of at most `max_norm`; return the norm before.

        If a gradient of any replica or stage is not finite, the norm is nan or inf, and `step`
        changes no weight, or over NCCL what gradients of 0 change.
        """
        self._gradient_sync.check_has_gradients(_CLIP)
        self._average()
        not_owned = set() if self._stage is None else self._stage.tied_not_owned
        shards = [s for s in self._gradient_sync.shards if s.parameter.grad is not None]
        counted = [s.gradient for s in shards if self._parameters[s.index] not in not_owned]
        total = _norm_of(counted, norm_type, self._parameters[0].device)
        if self._clips_on_device and norm_type != math.inf:
            return self._clip_on_device(total, max_norm, norm_type, [s.gradient for s in shards])
        if not self._gradient_sync.is_all_reduce:
            norms = self._replicas.all_gather_number(total.item(), _CLIP)
            total = _norm_of(list(torch.tensor(norms)), norm_type)
        total = total.cpu() + torch.as_tensor(self.non_finite_mark).cpu()
        if self._stage is not None:
            total = self._stage.norm_over_stages(total, norm_type)
        norm = total.item()
        if math.isnan(norm) or norm == norm_type == math.inf:  # on one stage: all skip the step
            for shard in shards:
                shard.parameter.grad = None
        elif norm > max_norm - 1e-6:
            scale_by(max_norm / (norm + 1e-6), (shard.gradient for shard in shards))
        return total.float().to(self._parameters[0].device)

    @property
    def _clips_on_device(self) -> bool:
        """Whether all that counts for a norm is on GPUs that NCCL connects."""
        is_whole = self._stage is None or self._stage.num_stages == 1
        return is_whole and isinstance(self._gradient_sync.collectives, NcclCollectives)

    def _clip_on_device(
        self, own: Tensor, max_norm: float, norm_type: float, gradients: Sequence[Tensor]
    ) -> Tensor:
        """Clip by the norm over all replicas; the host does not wait for it."""
        collectives = self._gradient_sync.collectives
        assert isinstance(collectives, NcclCollectives), "as _clips_on_device says"
        total = own
        if not self._gradient_sync.is_all_reduce:
            powers = own.double().reshape(1) ** norm_type
            collectives.all_reduce_sum(powers)
            total = (powers ** (1.0 / norm_type)).squeeze().float()
        scale_by((max_norm / (total + 1e-6)).clamp(max=1.0), gradients)
        return (total + self.non_finite_mark).float()

    def gradient_squares(self) -> Tensor | float:
        """Return the sum of squares of this worker's shards of the mean gradients, after backward.

        nan if a gradient of any replica is not finite. A parameter that several stages hold counts
        on the stage that owns it.
        """
        self._gradient_sync.check_has_gradients(_GRADIENTS)
        self._average()
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

        It is the time of both collectives; 0 with NCCL. In the modes of a plain all-reduce it is
        that of the last trial in another mode, 0 if there was none.
        """
        return AverageTimings(*self._gradient_sync.pop_timings(), self._replicas.num_workers)

    def state_dict(self) -> dict[str, Any]:
        """Gather the whole state, in torch's format; all workers call this together."""
        _check_initialized()
        return {
            "state": self._full_state(_STATE_DICT),
            "param_groups": self.whole_param_groups,
        }

    def async_state_dict(self) -> Future[dict[str, Any]]:
        """Copy this worker's shard and gather the rest during training; called by all.

        On a GPU the copy overlaps the next forward and backward, and the host does not wait for it.
        """
        _check_initialized()
        if not self._current.is_made:
            future: Future[dict[str, Any]] = Future()
            future.set_result(self.state_dict())
            return future
        self.synchronize()
        buckets = list(self._gradient_sync.buckets)
        groups = self.whole_param_groups
        if self._current.background is None:
            self._current.background = BackgroundGather(
                self._replicas.ranks, self._parameters[0].device, timeout=self._timeout
            )
        background, mode = self._current.background, self._current.candidate.mode
        owners = self._collectives.shard_owners(hierarchical=mode.is_hierarchical)
        self._wait_for_copies()  # of the call before, if there was no update
        memory = background.take_memory()
        state, copies = copy_state_to_cpu(buckets, self._inner.state, memory)
        self._current.copies = copies
        arguments = (
            buckets,
            state,
            background.collectives(owners),
            background.replicas,
            _ASYNC_STATE_DICT,
            torch.device("cpu"),
        )

        def gather() -> dict[str, Any]:
            copies.wait()
            found = {"state": full_state(*arguments), "param_groups": groups}
            background.unused_memory.append(memory)
            return found

        # A wait for it ends: its waits for workers have timeouts, and a copy that follows kernels
        # of NCCL waits until the timeout of their group.
        return background.thread.start(gather).future

    def _wait_for_copies(self) -> None:
        """Before the state changes: let a GPU wait for its copies; the host does not wait."""
        if self._current.copies is not None:
            self._current.copies.wait_on_device()

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
        state = cast_state(state_dict["state"], self._parameters)
        self._inner.state.clear()
        if self._current.is_made:
            self._adopt_state(state)
        else:  # a copy: the loaded state may be that of an optimizer in use
            self._initial_state = {
                index: {key: on_cpu(copied(value)) for key, value in entry.items()}
                for index, entry in state.items()
            }

    def detach(self) -> None:
        """Complete the parameters and leave the model as if it were not wrapped, until `attach`.

        The state stays sharded: `state_dict`, `load_state_dict` and `close` work as before.
        """
        self.synchronize()
        self._remove_hooks()

    def attach(self) -> None:
        """Continue with the model after `detach`; broadcast the weights of rank 0 if they differ.

        All workers call this together.
        """
        self._gradient_sync.recover_weights()
        self._broadcast_model(_ATTACH)
        self._add_hooks()

    def close(self) -> None:
        """Receive all parameters of the last step, finish the sends to other workers, and end.

        All workers call it; over NCCL it waits until all have their parameters. Without it, the
        interpreter waits some seconds at exit for those sends, then drops them.
        """
        try:
            self.synchronize()
            self._gradient_sync.finish_flags()
            if self._collectives.has_nccl:
                self._collectives.finish_on_device()
                self._gradient_sync.warn_of_non_finite()
                # An abort drops what NCCL has taken from this GPU and not yet sent to another.
                with contextlib.suppress(PeerError):  # a worker that is lost needs nothing
                    self._replicas.all_gather_number(0.0, _CLOSE)
        finally:
            self._remove_hooks()
            if self._current.background is not None:
                self._current.background.thread.close()
            self._collectives.comm_thread.close()

    def abort(self) -> None:
        """End after a failure, without waiting for other workers: their next wait for this fails.

        Parameters and gradients may be those of different steps.
        """
        self._remove_hooks()
        self._collectives.comm_thread.abort()
        if (
            self._current.background is not None
        ):  # a checkpoint that is being saved may still need it
            self._current.background.thread.close()

    def _remove_hooks(self) -> None:
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

    def _name_step(self) -> tuple[int, Worker]:
        """Return the number of the current step and this worker, for a warning."""
        if self._stage is None:
            return self._num_steps, Worker(0, self._replicas.rank)
        return self._stage.num_steps - 1, Worker(self._stage.stage, self._replicas.rank)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether the wrapped optimizer skips a step by itself, if it gets `found_inf`.

        Not with dampening: it has no effect in the first step that is applied, of which a fused
        SGD would not know.
        """
        return bool(getattr(self._inner, "_step_supports_amp_scaling", False)) and all(
            group.get("fused") and not group.get("dampening") for group in self._inner.param_groups
        )

    def _update(self) -> None:
        """Step the wrapped optimizer once, as its counters expect, and gather the weights."""
        self._wait_for_copies()
        self._current.copies = None
        marks = self._marks()
        self._gradient_sync.found_inf.grad = None  # it is not a weight
        if "found_inf" in marks:
            self._begin_momentum()
        for name, mark in marks.items():
            setattr(self._inner, name, mark)
        self._is_updating = True
        try:
            self._inner.step()
        finally:
            self._is_updating = False
            for name in marks:
                delattr(self._inner, name)
        self._gradient_sync.gather_weights()

    def _marks(self) -> dict[str, Tensor]:
        """Return what tells a fused optimizer to skip the step: of a GradScaler, or over NCCL."""
        of_scaler = {n: getattr(self, n) for n in ("grad_scale", "found_inf") if hasattr(self, n)}
        is_on_device = isinstance(self._gradient_sync.collectives, NcclCollectives)
        if of_scaler or not is_on_device or not self._step_supports_amp_scaling:
            return of_scaler
        mark = self._gradient_sync.found_inf.grad
        assert mark is not None, "it is set when the gradients are averaged"
        return {"found_inf": mark.isnan().float().squeeze()}

    def _begin_momentum(self) -> None:
        """Begin the momentum of SGD with 0: a first step that is skipped leaves it undefined."""
        groups = self._inner.param_groups if isinstance(self._inner, torch.optim.SGD) else []
        for group in groups:
            for parameter in group["params"]:
                if group["momentum"] and parameter.grad is not None:
                    state = self._inner.state[parameter]
                    if state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = torch.zeros_like(parameter)

    def _average(self) -> None:
        """Wait for the mean gradients, after backward; the first time make the buckets."""
        if not self._current.is_made:
            self._make_buckets()
        self._gradient_sync.finish()

    def _make_buckets(self) -> None:
        """Make the buckets in forward order, before the first update."""
        seen_and_frozen = list(self._forward.order), sorted(self._frozen())
        seen, frozen = self._replicas.broadcast_object(seen_and_frozen, _FIRST_MEAN)
        self._current.order = ParameterOrder.of(
            seen, len(self._parameters), self._tied.union(frozen)
        )
        self._current.unseen = self._current.order.indices[len(seen) :]
        self._replace_buckets(self._current.candidate)
        self._adopt_state(self._initial_state)
        self._current.is_made = True

    def _before_forward(self, indices: Iterable[int]) -> None:
        if self._stage is not None and self._autotuner is not None and torch.is_grad_enabled():
            self._autotuner.clock.begin()
        self._gradient_sync.wait_for_parameters(indices)

    def _tune(self) -> None:
        """After a step: time it, and change the buckets if all workers do."""
        if not self._is_auto:
            return
        if self._autotuner is None:
            self._autotuner = self._make_autotuner()
        elif not self._autotuner.is_over:
            work = "" if self._stage is None else f"{self._stage.sizes} {self._stage.last_spec}"
            candidate = self._autotuner.after_step(work, _STEP)
            if candidate is not None:
                self._change_buckets(candidate)
        if self._stage is None:  # a step lasts until the end of the next one
            self._autotuner.clock.begin()

    def _make_autotuner(self) -> "BucketAutotuner":
        """Make the tuner, when there is optimizer state, whose memory counts."""
        modes = self._modes if len(self._modes) == 1 else self._affordable_modes()
        own = [_digest(self._assign_buckets(size)) for size in ALL_SIZES]
        offers = self._tuned.all_gather_object(([mode.value for mode in modes], own), _STEP)
        modes = [mode for mode in modes if all(mode in offered for offered, _ in offers)]
        keys = dict(zip(ALL_SIZES, zip(*(each for _, each in offers), strict=True), strict=True))
        space = Space(lambda candidate: keys[candidate.bucket_bytes], modes)
        noise = None if self._stage is None else NOISE
        device = torch.device("cpu") if self._stage is None else self._parameters[0].device
        return BucketAutotuner(
            lambda: BucketTuner(BayesianSearch(space=space), noise=noise),
            self._tuned,
            StepClock(device),
        )

    def _affordable_modes(self) -> list[BucketMode]:
        """Leave out modes in which the whole optimizer state does not fit into the GPU."""
        device = self._parameters[0].device
        if device.type != "cuda" or self._current.candidate.mode.is_all_reduce:
            return self._modes
        values = [v for entry in self._inner.state.values() for v in entry.values()]
        added = sum(v.nbytes for v in values if isinstance(v, Tensor)) * (self.num_replicas - 1)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
        fits = added <= torch.cuda.mem_get_info(device)[0] + cached
        return [mode for mode in self._modes if fits or not mode.is_all_reduce]

    def _assign_buckets(self, bucket_bytes: Bytes) -> tuple[BucketSpec, ...]:
        return assign_buckets(self._parameters, self._current.order, bucket_bytes)

    def _change_buckets(self, candidate: BucketCandidate) -> None:
        """Move weights and state to other buckets, one at a time; all workers make this call."""
        self.synchronize()
        collectives, state = self._gradient_sync.collectives, dict(self._inner.state)
        self._inner.state.clear()
        old = self._replace_buckets(candidate)
        for bucket, gathered in zip(
            old, gather_buckets(old, state, collectives, self._replicas, _STEP), strict=True
        ):
            for shard in bucket.shards:
                state.pop(shard.parameter, None)
            self._adopt_state(gathered)
        collectives.release_buffers()  # of the old sizes

    def _replace_buckets(self, candidate: BucketCandidate) -> list[Bucket]:
        """Move the weights to other buckets, with no collective in flight; return the old ones."""
        self._current.candidate = candidate
        self._current.shard_of.clear()  # they hold gradients
        old = self._gradient_sync.rebuild_buckets(
            self._assign_buckets(candidate.bucket_bytes),
            self._collectives.get(hierarchical=candidate.mode.is_hierarchical),
            all_reduce=candidate.mode.is_all_reduce,
        )
        self._current.shard_of = {shard.index: shard for shard in self._gradient_sync.shards}
        for group in self._inner.param_groups:
            group["params"] = []
        for index, shard in self._current.shard_of.items():
            self._inner.param_groups[self._group_of[index]]["params"].append(shard.parameter)
        self._inner.param_groups[0]["params"].append(self._gradient_sync.found_inf)
        return old

    def _full_state(self, call: str) -> State:
        """Gather the whole state; all workers make this call."""
        if not self._current.is_made:
            return {i: {k: copied(v) for k, v in e.items()} for i, e in self._initial_state.items()}
        self.synchronize()
        return full_state(
            self._gradient_sync.buckets,
            self._inner.state,
            self._gradient_sync.collectives,
            self._replicas,
            call,
        )

    def _adopt_state(self, state: State) -> None:
        """Keep this worker's shards of the state of whole parameters, which is emptied."""
        while state:
            index, full = state.popitem()
            shard = self._current.shard_of.get(index)
            if shard is not None and full:
                group = self._inner.param_groups[self._group_of[index]]
                fused = bool(group.get("fused") or group.get("capturable"))
                self._inner.state[shard.parameter] = shard_state(
                    full, shard, self._parameters[index], fused=fused
                )


class BucketAutotuner:
    """Tunes the buckets in training: all `workers` time their steps, and the first decides."""

    def __init__(
        self, new_tuner: Callable[[], BucketTuner], workers: Replicas, clock: "StepClock"
    ) -> None:
        self._tuner, self._workers, self.clock = EqualWorkTuner(new_tuner), workers, clock
        self.current, self.is_over = self._tuner.current, False
        self._works: list[str] = []  # of the steps of the current trial on this worker

    def after_step(self, work: str, call: str) -> BucketCandidate | None:
        """Return the candidate to switch to now, None for no change; all workers make the call."""
        self.clock.end()
        self._works.append(work)
        if len(self._works) < self._tuner.num_steps:
            return None
        own = list(zip(self.clock.pop(), self._works, strict=True))
        self._works.clear()
        gathered = self._workers.all_gather_object(own, call)
        decision: BucketDecision = self._workers.run_on_first(
            lambda: self._decide(gathered), call, as_type=BucketDecision
        )
        previous, self.current = self.current, decision.candidate
        self.is_over = decision.is_final
        return None if previous == self.current else self.current

    def _decide(self, gathered: Sequence[Sequence[tuple[Seconds, str]]]) -> BucketDecision:
        steps = [[TimedStep(seconds, work) for seconds, work in each] for each in gathered]
        with torch.enable_grad():  # to fit the Gaussian process, also if step() runs under no_grad
            decision = self._tuner.after_steps(steps)
        _logger.info("gradient buckets of %s: %s", decision.candidate, decision.why)
        return decision


class StepClock:
    """Times steps from `begin` to `end`; on a GPU by events in its stream, which nobody waits for.

    What happens between steps, such as an evaluation, does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._start: Any = None
        self._steps: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """Begin a step; does nothing inside of one."""
        if self._start is None:
            self._start = self._now()

    def end(self) -> None:
        assert self._start is not None, "a step has begun"
        self._steps.append((self._start, self._now()))
        self._start = None

    def pop(self) -> list[Seconds]:
        """Return the times of the steps since the last call; on a GPU wait for them."""
        steps, self._steps = self._steps, []
        if not self._is_cuda:
            return [end - start for start, end in steps]
        steps[-1][1].synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in steps]

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _norm_of(
    tensors: Sequence[Tensor], norm_type: float, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the norm of all tensors as one, in single precision or better; 0 for no tensors."""
    wide = [t.float() if t.dtype in HALF_PRECISION else t for t in tensors]
    norms = [torch.linalg.vector_norm(t, norm_type) for t in wide]
    return torch.linalg.vector_norm(
        torch.stack([torch.zeros((), device=device), *norms]), norm_type
    )


def _digest(specs: Sequence[BucketSpec]) -> str:
    return hashlib.blake2b(repr(specs).encode(), digest_size=8).hexdigest()


def _check_initialized() -> None:
    if not dist.is_initialized():
        raise PolicyError(
            "a DistributedOptimizer after destroy_process_group()",
            expected="the process group that it was created with",
            fix="destroy the group after the last step and the last state_dict()",
        )
