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

With `buddy=True` each shard has a copy at the next worker, its buddy, which gets the same gradients
and makes the same updates. If one worker is lost, no state is: see `reshard`.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from polyrhythm.errors import PolicyError
from polyrhythm.renamed import RenamedAttribute
from polyrhythm.run.checkpoint.state import StagedCopies
from polyrhythm.run.comm.forward_hooks import ForwardOrder, gradient_hooks, state_hooks
from polyrhythm.run.comm.process_groups import (
    DEFAULT_TIMEOUT,
    NUM_FIRST_STEPS,
    Replicas,
    replica_ranks,
    run_bounded,
    set_timeout,
    step_timeout,
)
from polyrhythm.run.comm.reduce_scatter import HALF_PRECISION, NcclCollectives
from polyrhythm.run.decoupled.buckets import (
    Bucket,
    BucketSpec,
    ParameterOrder,
    ParameterShard,
    Segment,
    assign_buckets,
    flat_view,
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
    flat_state,
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
class _BucketChange:
    """What a worker still holds while state moves to other buckets, and what it has already.

    With buddies the shards of an old bucket are kept until every worker has its new ones.
    """

    shards: dict[int, list[ParameterShard]]  # by number of an old bucket; without memory
    state: dict[Tensor, dict[str, Any]]  # of these shards
    adopted: set[int] = field(default_factory=set)  # parameters whose state has moved

    def release(self, number: int) -> None:
        """Free the state of an old bucket."""
        for shard in self.shards.pop(number, ()):
            self.state.pop(shard.parameter, None)


@dataclass(slots=True)
class _CurrentBuckets:
    """What a call may change, in an object of its own: the caller may be a wrapper of Fabric.

    It imitates the class of the optimizer, so that attributes which a method sets are its own.
    """

    candidate: BucketCandidate
    is_made: bool = False
    order: ParameterOrder = field(default_factory=lambda: ParameterOrder(()))
    # By index of a parameter: the own shard, the copy of another one, or both.
    shards_of: dict[int, list[ParameterShard]] = field(default_factory=dict)
    change: _BucketChange | None = None  # one that is in progress, or has failed
    needs_reshard: bool = False  # weights and state come from the optimizers before
    shard_epoch: int = 0  # one more after each `reshard`
    num_earlier_steps: int = 0  # of the optimizers before
    # While another worker may not know that this object has all it needs: the one before.
    predecessor: Optimizer | None = None
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
        buddy: bool = False,
        commit: Callable[[], None] | None = None,
        for_reshard: bool = False,
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

        `buddy=True` keeps a copy of each shard at the next worker: `has_buddies` tells whether it
        can. `commit` is called once per step, when all gradients have arrived and nothing has
        changed yet: if it raises, nothing changes; if it returns, this worker's update follows,
        whoever is lost. With `for_reshard=True` nothing is broadcast: pass this object to
        `reshard` before the first step.

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
        self._num_steps, self.commit = 0, commit
        self._has_buddies = buddy and self._replicas.num_workers > 1
        settings = {"bucket_bytes": bucket_bytes, "mode": mode, "buddy": buddy}
        check_consistent(self._replicas, optimizer, self._names, settings, _CONSTRUCTOR)
        if not for_reshard:
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
        self._is_updating = self._is_aborted = False
        self._autotuner: BucketAutotuner | None = None
        self._modes = allowed_modes(mode, has_hierarchy=self._collectives.has_hierarchy)
        self._is_auto = bucket_bytes == "auto" and (stage is None or len(ranks) > 1)
        self._tuned = self._replicas  # the workers that try the same candidates
        if self._is_auto and stage is not None:
            pipelines = self._replicas.all_gather_object(stage.ranks, _CONSTRUCTOR)
            all_ranks = sorted(rank for pipeline in pipelines for rank in pipeline)
            self._tuned = Replicas(all_ranks, "tuning buckets", timeout=timeout)
        first = BucketCandidate(size, self._modes[0])
        self._current = _CurrentBuckets(first, needs_reshard=for_reshard)
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
        if self._gradient_sync.has_gradients and not self._is_aborted:
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
    def has_buddies(self) -> bool:
        """Whether the loss of one worker loses no state."""
        return self._has_buddies

    @property
    def buddy_bytes(self) -> Bytes:
        """Memory of the copies of another worker's weights and state."""
        copies = [s.parameter for b in self._gradient_sync.buckets for s in b.buddy_shards]
        state = [value for p in copies for value in self._inner.state.get(p, {}).values()]
        return sum(value.nbytes for value in (*copies, *state) if isinstance(value, Tensor))

    @property
    def num_steps(self) -> int:
        """The number of updates, also of the optimizers before `reshard`.

        One whose new weights cannot be sent counts.
        """
        return self._current.num_earlier_steps + self._num_steps

    @property
    def is_prepared(self) -> bool:
        """Whether a step waits for its commit: gradients have arrived, and nothing has changed."""
        return self._gradient_sync.is_prepared

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
        if self.commit is not None:
            self.prepare_step()
            self.commit()
        elif not self.is_prepared:  # else its caller has committed it: it must not fail any more
            self._prepare_without_commit()
        self._gradient_sync.begin_update()
        self._update()
        self._gradient_sync.gather_weights()
        if self._num_steps == NUM_FIRST_STEPS:
            self._set_timeout()
        self._gradient_sync.mark_changed()
        self._gradient_sync.empty()
        self._gradient_sync.wait_for_parameters(self._current.order.unseen)
        self._tune()
        return loss

    def _prepare_without_commit(self) -> None:
        if self._has_buddies and self._collectives.has_nccl:
            self.prepare_step()
            self._replicas.all_gather_number(0.0, _STEP)  # in place of a commit
            return
        self._check_step()
        self._gradient_sync.post_weight_receives()  # other workers may be ahead
        self._average_first()

    def prepare_step(self) -> None:
        """Wait for all that the next `step` needs: then it makes its update, whoever is lost.

        For a caller that commits a step by itself, between this call and `step`.
        """
        if not self.is_prepared:
            self._check_step()
            self._gradient_sync.wait_for_all()  # the weights of the step before
            self._average_first()
            self._gradient_sync.confirm()
            self._gradient_sync.is_prepared = True

    def _check_step(self) -> None:
        _check_initialized()
        self._gradient_sync.check_has_gradients(_STEP)
        self._gradient_sync.check_in_place()

    def _average_first(self) -> None:
        """Average before a step; before the first one refuse a worker in another call."""
        self._average()
        if not self._num_steps:
            self._replicas.all_gather_number(0.0, _STEP)

    def complete_step(self) -> None:
        """Make the update whose `commit` has raised here, as it has returned on another worker.

        Call it after `abort`: the new weights are not sent.
        """
        assert self._gradient_sync.is_prepared, "its gradients have arrived"
        self._gradient_sync.trust_weights()
        self._gradient_sync.copy_buddy_weights()
        self._update()
        self._gradient_sync.mark_incomplete()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the mean gradients to a norm of at most `max_norm`; return the norm before.

        If a gradient of any replica or stage is not finite, the norm is nan or inf, and `step`
        changes no weight, or over NCCL what gradients of 0 change.
        """
        self._gradient_sync.check_has_gradients(_CLIP)
        self._average()
        not_owned = set() if self._stage is None else self._stage.tied_not_owned
        held = [s for s in self._gradient_sync.held_shards if s.parameter.grad is not None]
        counted = [
            s.gradient for s in held if s.is_own and self._parameters[s.index] not in not_owned
        ]
        total = _norm_of(counted, norm_type, self._parameters[0].device)
        if self._clips_on_device and norm_type != math.inf:
            return self._clip_on_device(total, max_norm, norm_type, [s.gradient for s in held])
        if not self._gradient_sync.is_all_reduce:
            norms = self._replicas.all_gather_number(total.item(), _CLIP)
            total = _norm_of(list(torch.tensor(norms)), norm_type)
        total = total.cpu() + torch.as_tensor(self.non_finite_mark).cpu()
        if self._stage is not None:
            total = self._stage.norm_over_stages(total, norm_type)
        norm = total.item()
        if math.isnan(norm) or norm == norm_type == math.inf:  # on one stage: all skip the step
            for shard in held:
                shard.parameter.grad = None
        elif norm > max_norm - 1e-6:
            scale_by(max_norm / (norm + 1e-6), (shard.gradient for shard in held))
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
            for shard in self._gradient_sync.held_shards:
                shard.parameter.grad = None
        return is_dropped

    @property
    def num_replicas(self) -> int:
        return 1 if self._gradient_sync.is_all_reduce else self._replicas.num_workers

    def synchronize(self) -> None:
        """Wait until this worker has all parameters of the last step; with NCCL for the GPU, too.

        Raises PeerError if they have not come: another worker is lost.
        """
        self._gradient_sync.wait_for_all()
        self._gradient_sync.confirm()

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
        self._gradient_sync.wait_for_all()
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

    def held_segments(self) -> list[Segment]:
        """Return the pieces of parameters whose weights and state this worker holds, as views.

        Also after `abort`, and if a change of buckets has failed.
        """
        if not self._current.is_made:
            return [
                Segment(
                    index,
                    0,
                    parameter.numel(),
                    flat_view(parameter),
                    flat_state(state, parameter),
                    True,
                )
                for index, parameter in enumerate(self._parameters)
                for state in [self._initial_state.get(index, {})]
            ]
        if (device := self._parameters[0].device).type == "cuda":  # copies of gathered weights
            finish = partial(torch.cuda.synchronize, device)
            run_bounded(finish, timeout=self._timeout, action="the last kernels of an epoch")
        state: Mapping[Tensor, dict[str, Any]] = self._inner.state
        held = [(shard, state) for shard in self._gradient_sync.held_shards]
        if (change := self._current.change) is not None:
            held = [each for each in held if each[0].index in change.adopted]
            held += [(s, change.state) for shards in change.shards.values() for s in shards]
        weights_of = self._gradient_sync.held_weights_of
        return [
            Segment(s.index, s.start, s.stop, weights_of(s), state.get(s.parameter, {}), s.is_own)
            for s, state in held
        ]

    @property
    def parameter_order(self) -> ParameterOrder | None:
        """The order of the buckets; None before the first step."""
        return self._current.order if self._current.is_made else None

    @property
    def needs_reshard(self) -> bool:
        """Whether it was made for `reshard`, which has not given it weights and state yet."""
        return self._current.needs_reshard

    @property
    def shard_epoch(self) -> int:
        """The number of times that `reshard` has moved the state, since the first replicas."""
        return self._current.shard_epoch

    @property
    def predecessor(self) -> Optimizer | None:
        """The optimizer before, until the first step of all workers."""
        return self._current.predecessor

    def succeed(self, predecessor: Optimizer | None, *, epoch: int, num_steps: int) -> None:
        """For `reshard`: go on, and keep the optimizer before if another worker may need it."""
        self._current.predecessor, self._current.shard_epoch = predecessor, epoch
        self._current.num_earlier_steps = num_steps

    @property
    def whole_parameters(self) -> list[nn.Parameter]:
        """The parameters of the model, in the order in which `state_dict` numbers them."""
        return self._parameters

    @property
    def num_workers(self) -> int:
        """The number of replicas, in any mode."""
        return self._replicas.num_workers

    def make_buckets(self, order: ParameterOrder) -> list[ParameterShard]:
        """For `reshard`: make buckets in a known order; return the shards that need state."""
        self._current.order = order
        self._replace_buckets(self._current.candidate)
        self._current.is_made = True
        return list(self._gradient_sync.held_shards)

    def adopt(
        self, state: Mapping[Tensor, dict[str, Any]], options: Sequence[Mapping[str, Any]]
    ) -> None:
        """For `reshard`: take over the state of the shards, and the options of the groups."""
        for group, loaded in zip(self._inner.param_groups, options, strict=True):
            group.update(loaded)
        self._inner.state.update(state)
        self._current.needs_reshard = False

    def adopt_whole(self, state: State, options: Sequence[Mapping[str, Any]]) -> None:
        """For `reshard` before the first step: take over the state of whole parameters."""
        self.adopt({}, options)
        self._initial_state = state

    def discard_gradients(self) -> None:
        """Free the memory of gradients, after an abort."""
        self._gradient_sync.is_prepared = False
        for bucket in self._gradient_sync.buckets:
            bucket.release_gradients()

    def close(self) -> None:
        """Receive all parameters of the last step, finish the sends to other workers, and end.

        All workers call it; over NCCL it waits until all have their parameters, and raises
        PeerError if one is lost before. Without it, the interpreter waits some seconds at exit for
        those sends, then drops them.
        """
        try:
            self.synchronize()
            self._gradient_sync.finish_flags()
            if self._collectives.has_nccl:
                self._gradient_sync.warn_of_non_finite()
                # An abort drops what NCCL has taken from this GPU and not yet sent to another;
                # without a worker that is lost, this one may have what was never sent.
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
        self._is_aborted = True
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
            return self.num_steps, Worker(0, self._replicas.rank)
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
        """Step the wrapped optimizer once, as its counters expect; whoever is lost."""
        self._wait_for_copies()
        self._current.copies = None
        self._current.predecessor = None  # gradients have come from all: they have what they need
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
        self._num_steps += 1
        self._gradient_sync.is_prepared = False

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
        if self._current.needs_reshard:
            raise PolicyError(
                "a step of a DistributedOptimizer(..., for_reshard=True)",
                expected="reshard() before, from which it gets weights and state",
                fix="pass it to reshard(), or omit for_reshard",
            )
        if not self._current.is_made:
            self._make_buckets()
        self._gradient_sync.finish()

    def _make_buckets(self) -> None:
        """Make the buckets in forward order, before the first update."""
        seen_and_frozen = list(self._forward.order), sorted(self._frozen())
        seen, frozen = self._replicas.broadcast_object(seen_and_frozen, _FIRST_MEAN)
        late = self._tied.union(frozen)
        self.make_buckets(ParameterOrder.of(seen, len(self._parameters), late))
        self._adopt_state(self._initial_state)

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
        state = self._inner.state
        held, own = (
            sum(v.nbytes for p in some for v in state.get(p, {}).values() if _is_tensor(v))
            for some in (state, [shard.parameter for shard in self._gradient_sync.shards])
        )
        added = own * self.num_replicas - held
        cached = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
        fits = added <= torch.cuda.mem_get_info(device)[0] + cached
        return [mode for mode in self._modes if fits or not mode.is_all_reduce]

    def _assign_buckets(self, bucket_bytes: Bytes) -> tuple[BucketSpec, ...]:
        return assign_buckets(self._parameters, self._current.order, bucket_bytes)

    def _change_buckets(self, candidate: BucketCandidate) -> None:
        """Move weights and state to other buckets, one at a time; all workers make this call.

        Without buddies the memory of a bucket's old state is free when the next one is gathered.
        With them it is when all workers are known to have what they need of it: then the next one
        has been gathered. All-reduce buckets need no other worker: each has the whole state.
        """
        self.synchronize()
        if self._has_buddies and self._collectives.has_nccl:  # old copies lose their memory
            self._replicas.all_gather_number(0.0, _STEP)
            self._gradient_sync.trust_weights()
        collectives, state = self._gradient_sync.collectives, dict(self._inner.state)
        self._inner.state.clear()
        old = self._replace_buckets(candidate)
        change = _BucketChange({bucket.number: bucket.held_shards for bucket in old}, state)
        self._current.change = change
        is_kept = self._has_buddies and not old[0].is_all_reduce

        def release_earlier(gathered: Bucket) -> None:
            for bucket in old[: gathered.number]:
                change.release(bucket.number)
                change.adopted.update(bucket.parameters)

        found = gather_buckets(
            *(old, state, collectives, self._replicas, _STEP),
            on_gathered=release_earlier if is_kept else None,
        )
        for bucket, gathered in zip(old, found, strict=True):
            if not is_kept:
                change.release(bucket.number)
                change.adopted.update(bucket.parameters)
            self._adopt_state(gathered)
        if is_kept:
            self._replicas.all_gather_number(0.0, _STEP)  # all have what they need of the last
        self._current.change = None
        collectives.release_buffers()  # of the old sizes

    def _replace_buckets(self, candidate: BucketCandidate) -> list[Bucket]:
        """Move the weights to other buckets, with no collective in flight; return the old ones."""
        self._current.candidate = candidate
        self._current.shards_of.clear()  # they hold gradients
        is_hierarchical, all_reduce = candidate.mode.is_hierarchical, candidate.mode.is_all_reduce
        old = self._gradient_sync.rebuild_buckets(
            self._assign_buckets(candidate.bucket_bytes),
            self._collectives.get(hierarchical=is_hierarchical),
            all_reduce=all_reduce,
            buddy_links=self._collectives.buddy_links(hierarchical=is_hierarchical)
            if self._has_buddies and not all_reduce
            else None,
        )
        for group in self._inner.param_groups:
            group["params"] = []
        for shard in self._gradient_sync.held_shards:
            self._current.shards_of.setdefault(shard.index, []).append(shard)
            self._inner.param_groups[self._group_of[shard.index]]["params"].append(shard.parameter)
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
            for shard in self._current.shards_of.get(index, ()) if full else ():
                self._inner.state[shard.parameter] = shard_state(
                    full, shard, self._parameters[index], fused=self.counts_on_device(index)
                )

    def counts_on_device(self, index: int) -> bool:
        """Whether the wrapped optimizer counts the steps of this parameter on a GPU."""
        group = self._inner.param_groups[self._group_of[index]]
        return bool(group.get("fused") or group.get("capturable"))


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


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _digest(specs: Sequence[BucketSpec]) -> str:
    return hashlib.blake2b(repr(specs).encode(), digest_size=8).hexdigest()


def _check_initialized() -> None:
    if not dist.is_initialized():
        raise PolicyError(
            "a DistributedOptimizer after destroy_process_group()",
            expected="the process group that it was created with",
            fix="destroy the group after the last step and the last state_dict()",
        )
