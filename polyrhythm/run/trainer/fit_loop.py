"""One call of `fit`: a sequence of phases, each of which trains in one sync mode.

A job with a fixed sync mode has one phase. Under `sync="auto"` a phase ends when another mode is
predicted to be faster: all replicas average to equal weights, rank 0 broadcasts which samples are
left, and the next phase starts from there. A preemption notice also ends the phase
(`preemption.py`).
"""

import io
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.optim import Optimizer

from polyrhythm.plan.plan import AUTO
from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.comm.process_groups import new_gloo_group
from polyrhythm.run.data.prefetch import Prefetcher
from polyrhythm.run.trainer.fit_context import FitContext, TrainProgress
from polyrhythm.run.trainer.rank_assignment import LEADER
from polyrhythm.run.trainer.sampler import BatchSampler, make_sampler
from polyrhythm.run.trainer.step_loop import StepEnd, StepLoop
from polyrhythm.run.trainer.sync_strategy import (
    LOCKSTEP,
    DecoupledStrategy,
    NoSync,
    make_sync_strategy,
)
from polyrhythm.run.trainer.sync_tuner import StepTimeExchange
from polyrhythm.sync.dispatch import SamplerState
from polyrhythm.sync.replay import DECOUPLED, GROUPS, JobShape, StepTiming
from polyrhythm.types import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncDecision:
    """The leader's decision at the end of a window or of a phase: how the fit continues."""

    sync_mode: str | None  # of the next phase; None: the fit is over
    sampler_state: SamplerState  # which samples are left
    is_preempted: bool = False  # the fit ends early, after a preemption notice


@dataclass(frozen=True, slots=True)
class _Phase:
    """A phase of training and the objects that run it."""

    sync_mode: str
    strategy: NoSync
    sampler: BatchSampler
    loop: StepLoop
    in_lockstep: bool


class FitLoop:
    def __init__(
        self, name: str, context: FitContext, progress: TrainProgress, num_steps: int
    ) -> None:
        """`num_steps` counts from the start of training; `name` is unique to this fit."""
        self._context, self._progress, self._num_steps = context, progress, num_steps
        self._name, self._num_decisions = name, 0
        self._prefetcher = Prefetcher(context.samples.load)
        self._exchange: StepTimeExchange | None = None
        if context.config.sync == AUTO and context.num_pipelines > 1:
            num_stages = context.pipeline.num_stages
            shape = JobShape(shares=context.shares, num_stages=num_stages, overlap=True)
            timeout = context.config.timeout
            self._exchange = StepTimeExchange(
                f"{name}/auto", context.worker, shape, context.log, timeout
            )
        self._next_sync_mode: str | None = None  # on rank 0: the mode to switch to
        self._has_ended_samples = False
        self.step_ends: list[StepEnd] = []
        self.is_stopped = False  # by a preemption notice

    def run(self) -> None:
        sync = self._context.config.sync
        sync_mode: str | None = DECOUPLED if sync == AUTO else sync
        try:
            while sync_mode is not None:
                sync_mode = self._train(sync_mode)
        finally:
            self._prefetcher.close()

    def _train(self, sync_mode: str) -> str | None:
        """Train one phase and return the sync mode of the next; None ends the fit."""
        if self._exchange is not None:
            self._exchange.begin(sync_mode, self._progress.step)
        strategy = self._make_strategy(sync_mode)
        try:
            phase = self._make_phase(sync_mode, strategy)
            decision = self._in_lockstep(phase) if phase.in_lockstep else self._in_groups(phase)
            progress = self._progress
            progress.sampler_state = decision.sampler_state
            progress.step = decision.sampler_state.num_used // self._context.global_batch.size
            phase.loop.advance_lr_scheduler(progress.step)  # to the same step on all workers
            progress.lr_state = phase.loop.lr_state()
            self.is_stopped = decision.is_preempted
            if decision.sync_mode is None:
                self._save_last(strategy)
            self._close_strategy(strategy)
        except BaseException:
            strategy.abort()
            raise
        if sync_mode in GROUPS and decision.sync_mode is not None:
            _broadcast_optimizer_state(progress.optimizer, self._context)
        return decision.sync_mode

    def _in_lockstep(self, phase: _Phase) -> SyncDecision:
        """Train in fixed windows; after each window rank 0 may switch the sync mode."""
        exchange, loop = self._exchange, phase.loop
        window = None if exchange is None else exchange.num_steps
        while True:
            self.step_ends += loop.run(window)
            if loop.is_over:
                phase.strategy.average_all()
                return self._decide(lambda: self._final_decision(phase.sampler.sampler_state()))
            assert exchange is not None, "without windows, run() ends the phase"
            if self._context.pipeline.is_first:
                exchange.publish()
            decision = self._decide(lambda: self._after_window(phase))
            if decision.sync_mode != phase.sync_mode:
                phase.strategy.average_all()
                return decision

    def _decide(self, decide: Callable[[], SyncDecision]) -> SyncDecision:
        """Call `decide` on the leader and return its decision on every worker."""
        self._num_decisions += 1
        store, members = self._context.store, self._context.members
        name, last_but_one = (
            f"sync decision {number} of {self._name}"
            for number in (self._num_decisions, self._num_decisions - 2)
        )
        decision: SyncDecision = store.run_on_leader(name, decide, members, as_type=SyncDecision)
        if self._context.worker == LEADER:  # all have read the last but one, or would not be here
            store.delete(last_but_one, members)
        return decision

    def _after_window(self, phase: _Phase) -> SyncDecision:
        assert self._exchange is not None, "only sync='auto' trains in windows"
        sampler_state = phase.sampler.sampler_state()
        decision = self._exchange.after_window(self._progress.step)
        is_over = sampler_state.num_used >= self._end_of_samples
        return SyncDecision(
            sync_mode=phase.sync_mode if is_over else decision.sync_mode,
            sampler_state=sampler_state,
        )

    def _in_groups(self, phase: _Phase) -> SyncDecision:
        """Train until the samples run out; rank 0 may end them early."""
        self._next_sync_mode, self._has_ended_samples = None, False
        self.step_ends += phase.loop.run()
        phase.strategy.average_all()
        return self._decide(lambda: self._after_groups(phase))

    def _after_groups(self, phase: _Phase) -> SyncDecision:
        sampler_state = replace(phase.sampler.sampler_state(), limit=None)
        if self._next_sync_mode is not None and sampler_state.num_used < self._end_of_samples:
            return SyncDecision(sync_mode=self._next_sync_mode, sampler_state=sampler_state)
        return self._final_decision(sampler_state)

    def _final_decision(self, sampler_state: SamplerState) -> SyncDecision:
        return SyncDecision(
            sync_mode=None,
            sampler_state=sampler_state,
            is_preempted=self._context.preemption.is_stop_requested,
        )

    @property
    def _end_of_samples(self) -> int:
        return self._num_steps * self._context.global_batch.size

    def _make_phase(self, sync_mode: str, strategy: NoSync) -> _Phase:
        context, config = self._context, self._context.config
        sampler = make_sampler(
            sync_mode,
            context.global_batch,
            context.shares,
            context.worker.pipeline,
            self._progress.sampler_state,
            self._num_steps,
            strategy.sync if context.pipeline.is_first else None,
        )
        lr_scheduler = self._progress.make_lr_scheduler(context, strategy.optimizer)
        in_lockstep = sync_mode in LOCKSTEP or strategy.sync is None

        def may_start_step() -> bool:
            return not in_lockstep or context.preemption.may_start_step(self._progress.step)

        def on_step_timing(timing: StepTiming) -> None:
            if self._exchange is not None:
                self._exchange.add_timing(timing)
            if not in_lockstep:
                self._check_phase_end(strategy)

        def save_if_due(step: int) -> None:
            progress, every = self._progress, config.checkpoint_every
            before, progress.step = progress.step, max(progress.step, step)
            is_due = every and step // every > before // every and step < self._num_steps
            if context.checkpointer is not None and is_due:
                progress.lr_state = None if lr_scheduler is None else lr_scheduler.state_dict()
                context.checkpointer.save(
                    step, strategy, progress.extra(context, sampler.sampler_state())
                )

        loop = StepLoop(
            pipeline=context.pipeline,
            strategy=strategy,
            sampler=sampler,
            load=self._prefetcher.load,
            loss=context.loss,
            lr_scheduler=lr_scheduler,
            precision=config.precision,
            log=context.log,
            callbacks=tuple(config.callbacks),
            save_if_due=save_if_due,
            may_start_step=may_start_step,
            on_step_timing=on_step_timing,
        )
        return _Phase(sync_mode, strategy, sampler, loop, in_lockstep)

    def _check_phase_end(self, strategy: NoSync) -> None:
        """In groups, after a step of a first stage: end the phase if rank 0 decides so."""
        if self._exchange is not None and not self._has_ended_samples:
            decision = self._exchange.after_step(self._progress.step)
            if decision is not None and decision.switches:
                self._next_sync_mode = decision.sync_mode
        ends_phase = self._next_sync_mode is not None or self._context.preemption.is_stop_requested
        if self._context.worker == LEADER and ends_phase and not self._has_ended_samples:
            assert strategy.sync is not None, "called in groups only"
            strategy.sync.sampler_state(last_batch=self._context.global_batch.size)
            self._has_ended_samples = True

    def _make_strategy(self, sync_mode: str) -> NoSync:
        context, config = self._context, self._context.config
        return make_sync_strategy(
            context.pipeline,
            self._progress.optimizer,
            config.clip_grad_norm,
            sync_mode=sync_mode,
            overlap=sync_mode in GROUPS if config.sync == AUTO else config.overlap,
            options=config.sync_options,
            worker=context.worker,
            num_pipelines=context.num_pipelines,
            seed=config.seed,
            timeout=config.timeout,
            sampler_state=replace(self._progress.sampler_state, limit=self._end_of_samples),
            name=f"{self._name}/{self._num_decisions}",  # each phase ends with a decision
        )

    def _save_last(self, strategy: NoSync) -> None:
        context, progress = self._context, self._progress
        is_due = context.config.checkpoint_every or self.is_stopped
        if context.checkpointer is not None and is_due:
            extra = progress.extra(context, progress.sampler_state)
            context.checkpointer.save(progress.step, strategy, extra, blocking=True)

    def _close_strategy(self, strategy: NoSync) -> None:
        state = strategy.optimizer.state_dict() if isinstance(strategy, DecoupledStrategy) else None
        strategy.close()
        if state is not None:  # it was sharded over the replicas
            self._progress.optimizer = self._context.new_optimizer()
            self._progress.optimizer.load_state_dict(state)


def _broadcast_optimizer_state(optimizer: Optimizer, context: FitContext) -> None:
    """Broadcast the first pipeline's state to all workers of this stage; all of them call it.

    In groups each replica has its own state, from its own samples. With equal gradients but unequal
    momentum the replicas would diverge, and a lockstep mode does not average weights again.
    """
    num_stages, stage = context.pipeline.num_stages, context.worker.stage
    ranks = [pipeline * num_stages + stage for pipeline in range(context.num_pipelines)]
    group = new_gloo_group(ranks, "the optimizer's state", timeout=context.config.timeout)
    is_first, packed = context.worker.pipeline == 0, torch.empty(0, dtype=torch.uint8)
    if is_first:
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        packed = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    size = torch.tensor([packed.numel()])
    with peer_errors(Worker(stage, 0), "sharing the optimizer's state"):
        group.broadcast(size, 0).wait()
        packed = packed if is_first else torch.empty(int(size), dtype=torch.uint8)
        group.broadcast(packed, 0).wait()
    if not is_first:
        state = torch.load(
            io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=False
        )
        optimizer.load_state_dict(state)
