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
from polyrhythm.run.averaging.buffers import OptimizerStateMode, ReplicaState
from polyrhythm.run.averaging.checks import (
    check_flush,
    check_model,
    check_options,
    check_overlap,
    check_worker,
)
from polyrhythm.run.averaging.decoupled_averaging import DecoupledModelAveraging
from polyrhythm.run.averaging.gradient_averaging import BalancedGradientAveraging, GradientAveraging
from polyrhythm.run.averaging.group_client import AverageTimings, GroupClient
from polyrhythm.run.averaging.model_averaging import ModelAveraging
from polyrhythm.run.averaging.parameter_server import ParameterServerClient
from polyrhythm.run.averaging.reduced_variance import ReducedVarianceAdamW
from polyrhythm.run.averaging.rendezvous import Rendezvous, check_timeout, next_name
from polyrhythm.run.averaging.server_averaging import ServerAveraging
from polyrhythm.run.averaging.static_averaging import StaticAveraging
from polyrhythm.run.coordinator.sample_requests import SampleFuture
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.sync.dispatch import Ranges, SamplerState
from polyrhythm.sync.policies.local import OuterNesterov
from polyrhythm.sync.setup import Setup
from polyrhythm.sync.timeouts import Limits
from polyrhythm.types import Seconds, Worker

_AVERAGE_ALL_SHARE = (
    0.9  # of the timeout: the scheduler then says who did not come, before it has passed
)
_Strategy = GradientAveraging | ModelAveraging | ServerAveraging | StaticAveraging


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
        state: OptimizerStateMode = "local",
        outer: OuterNesterov | None = None,
        sampler_state: SamplerState | None = None,
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

        `overlap`: go on at once, and acquire in the average at the next step's end. `decoupled`: go on
        when the average is certain, and wait for each module's part of it in the next forward.
        `state`: whether momentum and the like are averaged, too. `outer` is the outer optimizer of
        `local`. `sampler_state`: positions of samples to be dealt by `acquire`, all alike; under policies
        with a scheduler.

        Of a Pipeline, each stage synchronises on its own. Otherwise every process of the job is a
        replica, or `worker`, `num_stages` and `num_pipelines` say what it is. `node` names the
        machine; `coordinator` and `keys` a `polyrhythm coordinator` that runs on its own: without,
        the process of rank 0 serves. `timeout` bounds every wait for other workers. `log` is an
        event log, or the folder of a run to write one in; a Pipeline's own log is used, too.

        All begin with the parameters and buffers of the first pipeline. A process may have several
        of these: all processes make them in the same order, or give each a `name`, used once.
        """
        check_timeout(timeout)
        module = model.module if isinstance(model, Pipeline) else model
        setup, worker = _make_setup(
            model,
            worker,
            num_stages=num_stages,
            num_pipelines=num_pipelines,
            policy=policy,
            options=options or {},
            every=every,
            seed=seed,
            sampler_state=sampler_state,
            limits=Limits(average_all_timeout=_AVERAGE_ALL_SHARE * timeout),
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
        self._model = ReplicaState(module, optimizer, state, decoupled)
        check_worker(setup, worker)
        self._rendezvous = Rendezvous(setup, worker, timeout=timeout, name=name or next_name(setup))
        self._own_log: EventLog | None = None
        if isinstance(model, Pipeline):
            log = model.log or log
        if isinstance(log, str | Path):
            log = self._own_log = EventLog(worker_log(Path(log), worker), worker)
        self._last_step_at = time.perf_counter()
        self._client: GroupClient | None = None
        try:
            self._start(
                log=log,
                node=node or socket.gethostname(),
                coordinator=coordinator,
                keys=keys,
                overlap=overlap,
                outer=outer,
                pipeline=model if isinstance(model, Pipeline) else None,
            )
        except BaseException as error:
            self._rendezvous.report_failure(error)
            raise
        # Threads that wait in gloo when the interpreter ends would abort it.
        self._finalizer = weakref.finalize(self, self._strategy.close, graceful=False)

    def _start(
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
        setup, rendezvous, optimizer = (
            self._rendezvous.setup,
            self._rendezvous,
            self._model.optimizer,
        )
        rendezvous.wait_for_all()
        rendezvous.check(self._model.shape())
        rendezvous.broadcast_initial_state(self._model.all_tensors())
        if isinstance(optimizer, ReducedVarianceAdamW) and _averages_models_at_each_step(setup):
            # Not the size of a group: within a few steps an update has come to all of them.
            optimizer.num_averaged = float(setup.num_pipelines)
        if setup.policy == "static":
            self._strategy: _Strategy = StaticAveraging(
                self._model, rendezvous, node=node, every=setup.steps_between
            )
            return
        shape = self._model.shape()
        client = self._client = GroupClient(
            rendezvous,
            shape,
            node=node,
            coordinator=coordinator,
            keys=keys,
            log=log,
            decoupled=self._model.decoupled,
        )
        try:
            self._strategy = _make_strategy(
                self._model, client, rendezvous, overlap=overlap, outer=outer, pipeline=pipeline
            )
        except BaseException:
            client.close(graceful=False)
            raise

    @property
    def worker(self) -> Worker:
        return self._rendezvous.me.worker

    @property
    def num_steps(self) -> int:
        """That this worker has made."""
        return self._strategy.num_steps

    @property
    def overlap(self) -> bool:
        """Whether training goes on at once; may be changed between steps, by each for itself."""
        return isinstance(self._strategy, ModelAveraging) and self._strategy.overlap

    @overlap.setter
    def overlap(self, overlap: bool) -> None:
        check_overlap(self._rendezvous.setup, overlap, self._model.decoupled)
        if isinstance(self._strategy, ModelAveraging):
            self._strategy.overlap = overlap

    def step(self) -> None:
        """After the optimizer's step: average if it is time, with whom the policy says."""
        self._check_open()
        self._strategy.step()
        if self._own_log is not None:
            began, self._last_step_at = self._last_step_at, time.perf_counter()
            start = self._own_log.at(began)
            self._own_log.write("step", start=start, step=self.num_steps - 1)

    def refresh(self) -> None:
        """With overlap, between micro-batches: take in an average that has come meanwhile.

        With decoupled, wait for the rest of it, before weights are read other than in a forward.
        Not between a forward and its backward, which needs the weights that the forward had.
        """
        self._check_open()
        if isinstance(self._strategy, ModelAveraging):
            self._strategy.refresh()

    def average_gradients(self) -> None:
        """Under `all_reduce` and `balanced`: now, before the optimizer's step does it by itself.

        For what needs the mean, such as clipping, or a GradScaler, which may leave the step out.
        Under other policies nothing happens: they average models.
        """
        self._check_open()
        if isinstance(self._strategy, GradientAveraging):
            self._strategy.average_gradients()

    def share(self, num_microbatches: int) -> range:
        """Under `balanced`: which micro-batches of the global batch this worker is to compute.

        Call backward for each of them, and do not divide: the gradient becomes the mean over all.
        """
        if not isinstance(self._strategy, BalancedGradientAveraging):
            raise PolicyError(
                f"a share under {self._rendezvous.setup.policy}",
                expected="the policy balanced, which deals micro-batches",
                fix='use GroupSync(..., policy="balanced"), or split the batch equally',
            )
        return self._strategy.share(num_microbatches)

    def acquire(self, number: int, count: int, until: int | None = None) -> SampleFuture[Ranges]:
        """Ask for the next `count` positions of samples to train on, and return at once.

        `wait()` of what is returned gives them, as ranges (start, end): fewer where they end, which
        is at the limit of `sampler_state`, or before `until`; none if all before that were used. Ask for
        chunk k + 1 before computing chunk k: then nobody waits for the answer. It comes late only
        when other pipelines have the last positions; so finish and report chunk k before waiting.

        Chunks have numbers, from 0 on. All processes of a pipeline that ask for a number get the
        same; after none, the same number is asked for again, with another `until`.
        """
        return self._dispatch_client().acquire(number, count, until)

    def acknowledge(self, number: int) -> None:
        """After the optimizer's step, before `step`: all chunks up to `number` are used.

        By each process that took them. What a pipeline has not used when it dies, or closes, is
        dealt to another one.
        """
        self._dispatch_client().acknowledge(number)

    def sampler_state(self, *, last_batch: int | None = None) -> SamplerState:
        """Which positions are used by now: for a checkpoint, and for `sampler_state` after it.

        `last_batch`: deal no more, for anybody, when the batch of so many that is begun is dealt.
        """
        return self._dispatch_client().sampler_state(last_batch)

    def averaged(self) -> AverageTimings:
        """What averages took since this was asked the last time; nothing under `static`."""
        return AverageTimings(0.0, 0.0, 1) if self._client is None else self._client.averaged()

    def average_all(self) -> None:
        """Average over all workers of the stage, who all call this: to evaluate, save or end.

        Those who have closed theirs, or died, are not waited for.
        """
        self._check_open()
        self._strategy.average_all()

    def close(self) -> None:
        """Leave; the others go on without this worker. Who serves them waits until they leave."""
        if self._finalizer.detach() is not None:
            self._strategy.close(graceful=True)
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
            self._finalizer()
            self.close()

    def _dispatch_client(self) -> GroupClient:
        self._check_open()
        setup = self._rendezvous.setup
        if self._client is None or setup.sampler_state is None:
            raise PolicyError(
                f"{self.worker} asks for positions, and none are dealt",
                expected="GroupSync(..., dispense=Supply(limit=...)), in all processes alike",
                fix="give it, or let each worker find its share by its rank and its step",
            )
        return self._client

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise PolicyError(
                f"{self.worker} goes on after its GroupSync was closed",
                expected="close() after the last step, and after consolidate()",
                fix="close it later, or make a new one: all workers do",
            )


def _make_setup(
    model: nn.Module | Pipeline,
    worker: Worker | None,
    *,
    num_stages: int | None,
    num_pipelines: int | None,
    **policy_args: Any,
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
        num_training = world - (policy_args["policy"] == "ssp")
        num_pipelines = max(num_training // num_stages, 1)
    setup = Setup(num_stages=num_stages, num_pipelines=num_pipelines, **policy_args)
    return setup, worker or Worker(0, rank)


def _make_strategy(
    model: ReplicaState,
    client: GroupClient,
    rendezvous: Rendezvous,
    *,
    overlap: bool,
    outer: OuterNesterov | None,
    pipeline: Pipeline | None,
) -> GradientAveraging | ModelAveraging | ServerAveraging:
    setup = rendezvous.setup
    if setup.policy == "ssp":
        return ServerAveraging(
            model, client, ParameterServerClient(rendezvous), every=setup.steps_between
        )
    if setup.policy == "balanced":
        later_stage = None if pipeline is None or pipeline.is_first else pipeline
        return BalancedGradientAveraging(model, client, setup.num_pipelines, later_stage)
    if setup.averages_gradients:
        return GradientAveraging(model, client)
    if model.decoupled:
        return DecoupledModelAveraging(
            model, client, rendezvous, every=setup.steps_between, asks_ahead=setup.asks_ahead
        )
    if setup.policy == "local" and outer is None:
        outer = OuterNesterov()
    return ModelAveraging(
        model,
        client,
        every=setup.steps_between,
        overlap=overlap,
        asks_ahead=setup.asks_ahead,
        outer=outer,
    )


def _averages_models_at_each_step(setup: Setup) -> bool:
    return setup.steps_between == 1 and setup.policy not in ("all_reduce", "balanced", "ssp")
