"""Group averaging in any loop: replicas that keep together without waiting for the slowest.

    sync = pr.GroupSync(model, optimizer, policy="adaptive")
    for batch in data:
        loss(model(batch)).backward()
        optimizer.step()
        sync.step()
        optimizer.zero_grad()
    sync.consolidate()
    sync.close()

Most policies average models, in `step`. `all_reduce` and `balanced` average gradients, before the
optimizer uses them. Who averages with whom is for the scheduler to say (`sync/`), except under
`static`, where a rule says it.
"""

import socket
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from polyrhythm.errors import PolicyError
from polyrhythm.events import EventLog, worker_log
from polyrhythm.run.average.checks import (
    check_flush,
    check_model,
    check_options,
    check_overlap,
    check_place,
)
from polyrhythm.run.average.decoupled_rounds import DecoupledRounds
from polyrhythm.run.average.flat import Model, State
from polyrhythm.run.average.gradient_rounds import BalancedRounds, GradientRounds
from polyrhythm.run.average.meeting import Meeting, check_timeout, next_name
from polyrhythm.run.average.model_rounds import ModelRounds
from polyrhythm.run.average.parameter_server import ServerLine
from polyrhythm.run.average.reduced_variance import ReducedVarianceAdamW
from polyrhythm.run.average.scheduled import Averaged, Scheduled
from polyrhythm.run.average.server_rounds import ServerRounds
from polyrhythm.run.average.static_rounds import StaticRounds
from polyrhythm.run.coordinator.deals import Answer
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.sync.deadlines import Limits
from polyrhythm.sync.dispenser import Ranges, Supply
from polyrhythm.sync.local import OuterNesterov
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds, Worker

_GATHERING = 0.9  # of the timeout: the scheduler then says who did not come, before it has passed
_Rounds = GradientRounds | ModelRounds | ServerRounds | StaticRounds


class GroupSync:
    """One worker's; made by all workers of the job, each with a replica of the same model."""

    def __init__(
        self,
        model: nn.Module | Pipeline,
        optimizer: Optimizer,
        policy: str = "adaptive",
        *,
        options: Mapping[str, object] | None = None,
        every: int | None = None,
        overlap: bool = False,
        decoupled: bool = False,
        state: State = "local",
        outer: OuterNesterov | None = None,
        dispense: Supply | None = None,
        worker: Worker | None = None,
        num_stages: int | None = None,
        num_pipelines: int | None = None,
        node: str | None = None,
        coordinator: str | None = None,
        keys: Path | str | None = None,
        seed: int = 0,
        timeout: Seconds = 600.0,
        log: EventLog | Path | str | None = None,
        name: str | None = None,
    ) -> None:
        """`policy` and its `options` are those of `polyrhythm.sync`; `every`: steps per average.

        `overlap`: go on at once, and take in the average at the next step's end. `decoupled`: go on
        when the average is certain, and wait for each module's part of it in the next forward.
        `state`: whether momentum and the like are averaged, too. `outer` is the outer optimizer of
        `local`. `dispense`: positions of samples to be dealt by `take`, all alike; under policies
        with a scheduler.

        Of a Pipeline, each stage synchronises on its own. Otherwise every process of the job is a
        replica, or `worker`, `num_stages` and `num_pipelines` say what it is. `node` names the
        machine; `coordinator` and `keys` a `polyrhythm scheduler` that runs on its own: without,
        the process of rank 0 serves. `timeout` bounds every wait for other workers. `log` is an
        event log, or the folder of a run to write one in; a Pipeline's own log is used, too.

        All begin with the parameters and buffers of the first pipeline. A process may have several
        of these: all processes make them in the same order, or give each a `name`, used once.
        """
        check_timeout(timeout)
        module = model.module if isinstance(model, Pipeline) else model
        setup, worker = _setup_of(
            model,
            worker,
            num_stages=num_stages,
            num_pipelines=num_pipelines,
            policy=policy,
            options=options or {},
            every=every,
            seed=seed,
            supply=dispense,
            limits=Limits(gathering=_GATHERING * timeout),
        )
        check_model(module, optimizer)
        check_options(
            setup,
            overlap=overlap,
            decoupled=decoupled,
            outer=outer,
            coordinator=coordinator,
            keys=keys,
        )
        check_flush(model, decoupled)
        self._model = Model(module, optimizer, state, decoupled)
        check_place(setup, worker)
        self._meeting = Meeting(setup, worker, timeout=timeout, name=name or next_name(setup))
        self._own_log: EventLog | None = None
        if isinstance(model, Pipeline):
            log = model.log or log
        if isinstance(log, str | Path):
            log = self._own_log = EventLog(worker_log(Path(log), worker), worker)
        self._stepped = time.perf_counter()
        self._line: Scheduled | None = None
        try:
            self._begin(
                log=log,
                node=node or socket.gethostname(),
                coordinator=coordinator,
                keys=keys,
                overlap=overlap,
                outer=outer,
                pipeline=model if isinstance(model, Pipeline) else None,
            )
        except BaseException as error:
            self._meeting.give_up(error)
            raise
        # Threads that wait in gloo when the interpreter ends would abort it.
        self._end = weakref.finalize(self, self._rounds.close, in_order=False)

    def _begin(
        self,
        *,
        log: EventLog | None,
        node: str,
        coordinator: str | None,
        keys: Path | str | None,
        overlap: bool,
        outer: OuterNesterov | None,
        pipeline: Pipeline | None,
    ) -> None:
        setup, meeting, optimizer = self._meeting.setup, self._meeting, self._model.optimizer
        meeting.gather()
        meeting.check(self._model.shape())
        meeting.begin_equal(self._model.everything())
        if isinstance(optimizer, ReducedVarianceAdamW) and _averages_models_at_each_step(setup):
            # Not the size of a group: within a few steps an update has come to all of them.
            optimizer.num_averaged = float(setup.num_pipelines)
        if setup.policy == "static":
            self._rounds: _Rounds = StaticRounds(
                self._model, meeting, node=node, every=setup.steps_between
            )
            return
        shape = self._model.shape()
        line = self._line = Scheduled(
            meeting,
            shape,
            node=node,
            coordinator=coordinator,
            keys=keys,
            log=log,
            decoupled=self._model.decoupled,
        )
        try:
            self._rounds = _rounds(
                self._model, line, meeting, overlap=overlap, outer=outer, pipeline=pipeline
            )
        except BaseException:
            line.close(in_order=False)
            raise

    @property
    def worker(self) -> Worker:
        return self._meeting.me.worker

    @property
    def num_steps(self) -> int:
        """That this worker has made."""
        return self._rounds.num_steps

    @property
    def overlap(self) -> bool:
        """Whether training goes on at once; may be changed between steps, by each for itself."""
        return isinstance(self._rounds, ModelRounds) and self._rounds.overlap

    @overlap.setter
    def overlap(self, overlap: bool) -> None:
        check_overlap(self._meeting.setup, overlap, self._model.decoupled)
        if isinstance(self._rounds, ModelRounds):
            self._rounds.overlap = overlap

    def step(self) -> None:
        """After the optimizer's step: average if it is time, with whom the policy says."""
        self._check_open()
        self._rounds.step()
        if self._own_log is not None:
            began, self._stepped = self._stepped, time.perf_counter()
            start = self._own_log.at(began)
            self._own_log.write("step", start=start, step=self.num_steps - 1)

    def refresh(self) -> None:
        """With overlap, between micro-batches: take in an average that has come meanwhile.

        With decoupled, wait for the rest of it, before weights are read other than in a forward.
        Not between a forward and its backward, which needs the weights that the forward had.
        """
        self._check_open()
        if isinstance(self._rounds, ModelRounds):
            self._rounds.refresh()

    def average_gradients(self) -> None:
        """Under `all_reduce` and `balanced`: now, before the optimizer's step does it by itself.

        For what needs the mean, such as clipping, or a GradScaler, which may leave the step out.
        Under other policies nothing happens: they average models.
        """
        self._check_open()
        if isinstance(self._rounds, GradientRounds):
            self._rounds.average_gradients()

    def share(self, num_microbatches: int) -> range:
        """Under `balanced`: which micro-batches of the global batch this worker is to compute.

        Call backward for each of them, and do not divide: the gradient becomes the mean over all.
        """
        if not isinstance(self._rounds, BalancedRounds):
            raise PolicyError(
                f"a share under {self._meeting.setup.policy}",
                expected="the policy balanced, which deals micro-batches",
                fix='use GroupSync(..., policy="balanced"), or split the batch equally',
            )
        return self._rounds.share(num_microbatches)

    def take(self, number: int, count: int, until: int | None = None) -> Answer[Ranges]:
        """Ask for the next `count` positions of samples to train on, and return at once.

        `wait()` of what is returned gives them, as ranges (start, end): fewer where they end, which
        is at the limit of `dispense`, or before `until`; none if all before that were used. Ask for
        chunk k + 1 before computing chunk k: then nobody waits for the answer. It comes late only
        when other pipelines have the last positions; so finish and report chunk k before waiting.

        Chunks have numbers, from 0 on. All processes of a pipeline that ask for a number get the
        same; after none, the same number is asked for again, with another `until`.
        """
        return self._dispensing().take_positions(number, count, until)

    def used(self, number: int) -> None:
        """After the optimizer's step, before `step`: all chunks up to `number` are used.

        By each process that took them. What a pipeline has not used when it dies, or closes, is
        dealt to another one.
        """
        self._dispensing().use_positions(number)

    def supply(self, *, last_batch: int | None = None) -> Supply:
        """Which positions are used by now: for a checkpoint, and for `dispense` after it.

        `last_batch`: deal no more, for anybody, when the batch of so many that is begun is dealt.
        """
        return self._dispensing().supply(last_batch)

    def averaged(self) -> Averaged:
        """What averages took since this was asked the last time; nothing under `static`."""
        return Averaged(0.0, 0.0, 1) if self._line is None else self._line.averaged()

    def consolidate(self) -> None:
        """Average over all workers of the stage, who all call this: to evaluate, save or end.

        Those who have closed theirs, or died, are not waited for.
        """
        self._check_open()
        self._rounds.consolidate()

    def close(self) -> None:
        """Leave; the others go on without this worker. Who serves them waits until they leave."""
        if self._end.detach() is not None:
            self._rounds.close(in_order=True)
        if self._own_log is not None:
            self._own_log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:  # the others must not take this worker for one that has finished
            self._end()
            self.close()

    def _dispensing(self) -> Scheduled:
        self._check_open()
        setup = self._meeting.setup
        if self._line is None or setup.supply is None:
            raise PolicyError(
                f"{self.worker} asks for positions, and none are dealt",
                expected="GroupSync(..., dispense=Supply(limit=...)), in all processes alike",
                fix="give it, or let each worker find its share by its rank and its step",
            )
        return self._line

    def _check_open(self) -> None:
        if not self._end.alive:
            raise PolicyError(
                f"{self.worker} goes on after its GroupSync was closed",
                expected="close() after the last step, and after consolidate()",
                fix="close it later, or make a new one: all workers do",
            )


def _setup_of(
    model: nn.Module | Pipeline,
    worker: Worker | None,
    *,
    num_stages: int | None,
    num_pipelines: int | None,
    **of_the_policy: Any,
) -> tuple[Setup, Worker]:
    """What the job is, and what this process is in it; by default, as ranks and sizes say."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    if isinstance(model, Pipeline):
        num_stages = model.num_stages
        pipeline = rank // num_stages if worker is None else worker.pipeline
        worker = Worker(model.stage, pipeline)
    num_stages = num_stages or 1
    if num_pipelines is None:  # a process that serves parameters is none of them
        num_training = world - (of_the_policy["policy"] == "ssp")
        num_pipelines = max(num_training // num_stages, 1)
    setup = Setup(num_stages=num_stages, num_pipelines=num_pipelines, **of_the_policy)
    return setup, worker or Worker(0, rank)


def _rounds(
    model: Model,
    line: Scheduled,
    meeting: Meeting,
    *,
    overlap: bool,
    outer: OuterNesterov | None,
    pipeline: Pipeline | None,
) -> GradientRounds | ModelRounds | ServerRounds:
    setup = meeting.setup
    if setup.policy == "ssp":
        return ServerRounds(model, line, ServerLine(meeting), every=setup.steps_between)
    if setup.policy == "balanced":
        told = None if pipeline is None or pipeline.is_first else pipeline
        return BalancedRounds(model, line, setup.num_pipelines, told)
    if setup.averages_gradients:
        return GradientRounds(model, line)
    if model.decoupled:
        return DecoupledRounds(
            model, line, meeting, every=setup.steps_between, asks_ahead=setup.asks_ahead
        )
    if setup.policy == "local" and outer is None:
        outer = OuterNesterov()
    return ModelRounds(
        model,
        line,
        every=setup.steps_between,
        overlap=overlap,
        asks_ahead=setup.asks_ahead,
        outer=outer,
    )


def _averages_models_at_each_step(setup: Setup) -> bool:
    return setup.steps_between == 1 and setup.policy not in ("all_reduce", "balanced", "ssp")
