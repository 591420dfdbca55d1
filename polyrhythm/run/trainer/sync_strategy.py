"""Sync strategies of the training loop: none, group averaging, or decoupled all-reduce.

All have the same interface: `update` after each batch, `average_all` before others read the
weights, `close` at the end. A decoupled one may `pause` between two fits instead, so that the
optimizer state stays sharded.
"""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from polyrhythm.errors import LaunchError, PeerError
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
from polyrhythm.run.pipeline.loss import squared_norm
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.sync.dispatch import SamplerState
from polyrhythm.sync.modes import SyncMode
from polyrhythm.types import AverageTimings, Seconds, Worker


class LossScaler(torch.amp.GradScaler):
    """torch's GradScaler of one stage, which also skips a step for the gradients of other stages.

    The scale is that of the mean loss over the global batch: with any number of pipelines,
    gradients overflow at the same scale. On a GPU the scale stays there, and no method waits for
    it, except that `step` does so if the optimizer is not fused.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device.type)
        self.device, self._one = device, torch.ones((), device=device)
        # The sum over pipelines of the weights of their losses, before gradients are averaged.
        self.sum_of_weights = 1

    def current(self) -> Tensor:
        """Return a copy of the current scale, on the device."""
        return self.scale(self._one)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        inverse = inv_scale * self.sum_of_weights
        return super()._unscale_grads_(optimizer, inverse, found_inf, allow_fp16)

    def unscale_(self, optimizer: Optimizer) -> None:
        super().unscale_(optimizer)
        found: dict[Any, Tensor] = self._found_inf_per_device(optimizer)
        if not found:  # this stage has no gradient: its layers are frozen
            found[self.device] = torch.zeros((), device=self.device)

    def forget(self) -> None:
        """After `unscale_`, without an update: the step is repeated."""
        self._per_optimizer_states.clear()

    def skip(self, optimizer: Optimizer) -> None:
        """Let `step` skip the update, and `update` lower the scale; after `unscale_`."""
        for found in self._found_inf_per_device(optimizer).values():
            found.fill_(1.0)


def skips_marked_steps(optimizer: Optimizer) -> bool:
    """Return whether a step changes nothing if `found_inf` of the optimizer is 1.

    Not by `_step_supports_amp_scaling`: others set it, for other contracts, or to False.
    """
    is_known = type(optimizer) in (Adam, AdamW, SGD)
    return is_known and all(group["fused"] for group in optimizer.param_groups)


def zero_momentum(optimizer: Optimizer) -> None:
    """Let the first step of a fused SGD be skipped: create its missing momentum buffers, as zeros.

    torch 2.13 allocates them in the first step, and the kernel of a skipped step does not fill
    them. The first momentum is the gradient, as from zeros, unless it is dampened.
    """
    for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
        if not (group["fused"] and group["momentum"]):
            continue
        for parameter in group["params"]:
            if optimizer.state[parameter].get("momentum_buffer") is not None:
                continue
            if group["dampening"]:
                raise LaunchError(
                    f"fused SGD with momentum={group['momentum']:g} and "
                    f"dampening={group['dampening']:g}, whose first step may be skipped",
                    expected="dampening=0: torch's first momentum is not dampened",
                    fix="omit dampening, or omit fused=True",
                )
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _clear_gradients(optimizer: Optimizer) -> None:
    """Call `zero_grad`, or do what torch's own does, in a third of its time on the host."""
    if getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


class NoSync:
    """The strategy of a single pipeline; base class of the others."""

    sync: GroupSync | None = None
    scaler: LossScaler | None = None  # of the loss in float16
    loss_scale: Tensor | None = None  # of the last step
    # Of the last gradients, before clipping: summed over stages and averaged over pipelines, the
    # square of their norm. On a GPU it may still be computed.
    grad_squares: Tensor | float = 0.0
    drops_non_finite = False  # gradients that are not finite are applied on no stage
    # Called when an update has all it needs; raises PeerError if it must not be made, since a
    # worker that is lost did not have that.
    commit: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, pipeline: Pipeline, optimizer: Optimizer, clip: float | None) -> None:
        self.optimizer = optimizer  # the one whose learning rates are scheduled
        self._pipeline, self._clip = pipeline, clip

    def scale_loss(self) -> None:
        """Before each step: scale the loss, if there is a scaler."""
        if self.scaler is not None:
            self.loss_scale = self.scaler.current()
            self._pipeline.set_loss_scale(self.loss_scale / self.scaler.sum_of_weights)

    def update(self, acknowledge: Callable[[], None]) -> None:
        """Step the optimizer, `acknowledge` the samples, then synchronise.

        In this order: a peer of the average may wait until the last samples are acknowledged.
        """
        if self.scaler is not None:
            self._step_scaled(self.scaler)
        elif self.drops_non_finite and self._skips_on_device:
            self.clip()
            self._commit()
            self._step_if_finite()
        elif self.drops_non_finite and self.drop_non_finite():
            self.grad_squares = math.nan
            self._commit()
            self.optimizer.step()
        else:
            self.clip()
            self._commit()
            self.optimizer.step()
        acknowledge()
        _clear_gradients(self.optimizer)

    def _commit(self) -> None:
        """Before the update, which must not fail after this."""
        self.commit()

    def _step_scaled(self, scaler: LossScaler) -> None:
        """Unscale, clip and step; if any stage has a gradient that is not finite, skip the step.

        Stages learn of it from the norm of all gradients, which clipping needs, too.
        """
        scaler.unscale_(self.optimizer)
        try:
            self.clip()
            if self._pipeline.num_stages > 1:
                squares = torch.tensor(float(self.grad_squares), dtype=torch.float64)
                if self._clip is None:
                    squares = self._pipeline.norm_over_stages(squares.sqrt(), 2.0)
                if not squares.isfinite():
                    scaler.skip(self.optimizer)
            self._commit()
        except PeerError:  # the step is repeated by those that are left
            scaler.forget()
            raise
        try:
            scaler.step(self.optimizer)
        finally:  # the update was made, though another worker may be lost
            scaler.update()

    @property
    def _skips_on_device(self) -> bool:
        """Whether the optimizer can skip a step without the host knowing whether it does."""
        is_alone = type(self) is NoSync and self._pipeline.num_stages == 1
        is_on_gpu = self._pipeline.device.type == "cuda"
        return is_alone and is_on_gpu and skips_marked_steps(self.optimizer)

    def _step_if_finite(self) -> None:
        """Step; a fused optimizer changes nothing if the norm of the gradients is not finite.

        It gets the mark that a GradScaler would give it, and skips the step as for one.
        """
        squares: Any = torch.as_tensor(self.grad_squares)
        optimizer: Any = self.optimizer
        optimizer.found_inf = squares.isfinite().logical_not().float()
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf

    def clip(self) -> None:
        """Clip the gradients if that is wanted, and measure their norm."""
        if self._clip is None:
            self.grad_squares = self._own_squares()
        else:
            norm = self._pipeline.clip_grad_norm_(self._clip).double()
            self.grad_squares = norm.square() / self._pipeline.num_stages

    def drop_non_finite(self) -> bool:
        """Remove the gradients on all stages if any is not finite: the step changes nothing."""
        norm = self._pipeline.norm_over_stages(torch.tensor(math.sqrt(self._own_squares())), 2.0)
        if is_dropped := not norm.isfinite():
            self._pipeline.module.zero_grad()
        return is_dropped

    def _own_squares(self) -> Tensor | float:
        return squared_norm(self._pipeline.gradients(owned=True))

    def pop_timings(self) -> AverageTimings:
        """Return the timings of averaging since the last call."""
        return AverageTimings(0.0, 0.0, 1)

    def synchronize(self) -> None:
        """Complete the weights of this worker, so that they can be read."""

    def async_state_dict(self) -> Future[dict[str, Any]] | None:
        """Gather the current optimizer state if it is sharded over replicas; all call it."""
        return None

    def average_all(self) -> None:
        """Give all replicas the same complete weights."""

    def close(self) -> None:
        """Leave the sync mode together with all replicas."""

    def abort(self) -> None:
        """Leave without waiting for peers, after a failure."""


class GroupSyncStrategy(NoSync):
    """Averaging by a policy of `GroupSync`."""

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: Optimizer,
        clip: float | None,
        sync: GroupSync,
        *,
        num_averaged: int,
    ) -> None:
        """`num_averaged`: pipelines without which an average of gradients is incomplete."""
        super().__init__(pipeline, optimizer, clip)
        self.sync: GroupSync = sync
        self._num_averaged, self._averaged = num_averaged, AverageTimings(0.0, 0.0, 1)

    def update(self, acknowledge: Callable[[], None]) -> None:
        self.sync.average_gradients()  # before clipping; does nothing if models are averaged
        averages_gradients = self._num_averaged > 1
        if averages_gradients:
            self._check_average()
        super().update(acknowledge)
        self.sync.step()
        if not averages_gradients:
            self._check_average()

    def _check_average(self) -> None:
        """Read the timings of the last average; refuse one without another pipeline's gradients."""
        self._averaged = self.sync.pop_stats()
        if self._averaged.num_members < self._num_averaged:
            raise PeerError(
                "another pipeline",
                action="averaging gradients",
                waited=self._averaged.waited,
                cause="it was lost or has left, and its share of the batch is missing",
            )

    def pop_timings(self) -> AverageTimings:
        return self._averaged

    def synchronize(self) -> None:
        self.sync.apply_pending()

    def average_all(self) -> None:
        self.sync.average_all()

    def close(self) -> None:
        self.sync.close()

    def abort(self) -> None:
        self.sync.__exit__(RuntimeError, RuntimeError(), None)


class DecoupledStrategy(NoSync):
    """Decoupled all-reduce of gradients by `DistributedOptimizer`."""

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: Optimizer,
        clip: float | None,
        *,
        process_group: dist.ProcessGroup | None,
        site: str | None,
        timeout: Seconds,
        buddy: bool,
        for_reshard: bool = False,
    ) -> None:
        """`buddy`, `for_reshard`: see DistributedOptimizer."""
        super().__init__(pipeline, optimizer, clip)
        self._distributed = DistributedOptimizer(
            optimizer,
            pipeline,
            process_group=process_group,
            site=site,
            timeout=timeout,
            buddy=buddy,
            for_reshard=for_reshard,
        )
        self.optimizer = self._distributed
        self._state_future: Future[dict[str, Any]] | None = None

    def clip(self) -> None:
        if self._clip is None:  # of this worker's shards; each is on one replica only
            squares = self._distributed.gradient_squares()
            self.grad_squares = squares * self._distributed.num_replicas
        else:
            norm = self._distributed.clip_grad_norm_(self._clip).double()
            # The norm leaves out gradients that are not finite.
            mark = self._distributed.non_finite_mark
            self.grad_squares = norm.square() / self._pipeline.num_stages + mark

    def drop_non_finite(self) -> bool:
        return self._distributed.drop_non_finite()

    def _commit(self) -> None:
        self._distributed.prepare_step()  # it needs other replicas
        self.commit()

    def pop_timings(self) -> AverageTimings:
        return self._distributed.pop_stats()

    def synchronize(self) -> None:
        self._distributed.synchronize()

    def async_state_dict(self) -> Future[dict[str, Any]]:
        self._wait_for_state()  # one at a time, to bound memory
        self._state_future = self._distributed.async_state_dict()
        return self._state_future

    def average_all(self) -> None:
        self.synchronize()

    def pause(self) -> None:
        """Complete the weights and leave the model free until `resume`, as between two fits."""
        self._distributed.detach()

    def resume(self) -> None:
        """Continue after `pause`; all replicas call it."""
        try:
            self._distributed.attach()
        except BaseException:
            self.abort()
            raise

    def close(self) -> None:
        self._wait_for_state()  # the first pipeline needs what this one sends
        self._distributed.close()

    def abort(self) -> None:
        self._distributed.abort()

    def _wait_for_state(self) -> None:
        if self._state_future is not None:
            wait([self._state_future])


def make_sync_strategy(
    pipeline: Pipeline,
    optimizer: Optimizer,
    clip: float | None,
    *,
    mode: SyncMode,
    overlap: bool,
    options: Mapping[str, object],
    worker: Worker,
    num_pipelines: int,
    process_group: dist.ProcessGroup | None,
    site: str | None,
    buddy: bool,
    seed: int,
    timeout: Seconds,
    sampler_state: SamplerState,
    name: str,
) -> NoSync:
    """Make the strategy of a sync mode: `decoupled`, or a policy; `name` is unique in the job.

    `process_group`: the replicas of this stage, if they are not all of the job's; `site`: those of
    the workers that communicate over NCCL; `buddy`: in `decoupled`, keep a copy of each shard.
    """
    if num_pipelines == 1:
        return NoSync(pipeline, optimizer, clip)
    if mode.decoupled:
        return DecoupledStrategy(
            pipeline,
            optimizer,
            clip,
            process_group=process_group,
            site=site,
            timeout=timeout,
            buddy=buddy,
        )
    sync = GroupSync(
        pipeline,
        optimizer,
        mode.name,
        overlap=overlap,
        options=options,
        worker=worker,
        num_pipelines=num_pipelines,
        seed=seed,
        timeout=timeout,
        sampler_state=None if mode.lockstep else sampler_state,
        name=name,
    )
    num_averaged = num_pipelines if mode.exact else 1
    return GroupSyncStrategy(pipeline, optimizer, clip, sync, num_averaged=num_averaged)
