"""Group averaging in any training loop: keep replicas consistent without waiting for stragglers.

    sync = pr.GroupSync(model, optimizer, policy="adaptive")
    for batch in data:
        loss(model(batch)).backward()
        optimizer.step()
        sync.step()
        optimizer.zero_grad()
    sync.average_all()
    sync.close()

Most policies average models, in `step`. `all_reduce` and `balanced` average gradients, in a
pre-hook of the optimizer's step. The scheduler (`sync/`) forms the groups, except under `static`,
where a fixed rule does.
"""

import math
import socket
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from polyrhythm.errors import PolicyError
from polyrhythm.events import worker_log
from polyrhythm.renamed import RenamedAttribute, renamed_arguments
from polyrhythm.run.averaging.buffers import (
    OptimizerStateMode,
    ReplicaState,
    trainable_parameters,
)
from polyrhythm.run.averaging.reduced_variance import ReducedVarianceAdamW
from polyrhythm.run.averaging.rendezvous import Rendezvous, check_timeout
from polyrhythm.run.averaging.rounds import GroupClient
from polyrhythm.run.averaging.strategies import (
    BalancedGradientAveraging,
    DecoupledModelAveraging,
    GradientAveraging,
    ModelAveraging,
    ServerAveraging,
    StaticAveraging,
)
from polyrhythm.run.comm.process_groups import DEFAULT_TIMEOUT, NUM_SOCKETS, check_member
from polyrhythm.run.coordinator.client import CoordinatorClient
from polyrhythm.run.decoupled.checks import check_not_averaged, unwrapped
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.sync.dispatch import SamplerState
from polyrhythm.sync.members import Limits
from polyrhythm.sync.modes import SYNC_MODES
from polyrhythm.sync.policies.local import OuterNesterov
from polyrhythm.sync.setup import Setup
from polyrhythm.types import AverageTimings, Bytes, Seconds, Worker

# Of the timeout: the scheduler reports the missing workers before this worker's wait ends.
_AVERAGE_ALL_SHARE = 0.9


class GroupSync:
    """The group averaging of one worker; every worker of the job creates one for its replica."""

    @renamed_arguments(dispense="sampler_state=")
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
        timeout: Seconds = DEFAULT_TIMEOUT,
        process_group: dist.ProcessGroup | None = None,
        log: EventLog | Path | str | None = None,
        name: str = "sync",
    ) -> None:
        """`policy` and its `options` are those of `polyrhythm.sync`; `every`: steps per average.

        `overlap`: continue at once, and apply the average at the end of the next step. `decoupled`:
        continue once the average is committed, and wait for each module's part in the next forward.
        `state`: whether optimizer state such as momentum is averaged. `outer`: the outer optimizer
        of `local`. `sampler_state`: the sample positions that a SampleDispatcher hands out, equal
        in all processes; only under policies with a scheduler.

        `process_group` (default: the job) contains all stages and replicas. Each stage of a
        Pipeline synchronises separately. Without a Pipeline every process is a replica, unless
        `worker`, `num_stages` and `num_pipelines` are given. `node` names the machine.
        `coordinator` and `keys`: address and key file of a separate `polyrhythm coordinator`; by
        default the process of the first worker hosts it. `timeout` bounds every wait for other
        workers. `log`: an event log, or a run folder to create one in; the log of a Pipeline takes
        precedence.

        All workers start with the parameters and buffers of the first pipeline. `name`: a different
        one for each GroupSync of a job, the same in all its processes.
        """
        check_timeout(timeout)
        module = model.module if isinstance(model, Pipeline) else model
        setup, worker = _make_setup(
            model,
            worker,
            process_group,
            num_stages=num_stages,
            num_pipelines=num_pipelines,
            policy=policy,
            options=options or {},
            every=every,
            seed=seed,
            sampler_state=sampler_state,
            limits=Limits(average_all_timeout=_AVERAGE_ALL_SHARE * timeout),
            steps_ahead=float(overlap) if _has_flush(model) else math.inf,
        )
        _check_model(module, optimizer)
        _check_options(
            setup,
            overlap=overlap,
            decoupled=decoupled,
            state=state,
            outer=outer,
            coordinator=coordinator,
            keys=keys,
        )
        _check_flush(model, decoupled)
        # A wrapper may step or not; the hooks belong to the optimizer that steps.
        self._model = ReplicaState(module, unwrapped(optimizer), state, decoupled)
        if isinstance(model, Pipeline):
            self._model.check_received = model.check_received
        _check_worker(module, setup, worker, process_group)
        num = NUM_SOCKETS if any(parameter.is_cuda for parameter in module.parameters()) else 1
        self._rendezvous = Rendezvous(
            setup, worker, timeout=timeout, name=name, process_group=process_group, num_sockets=num
        )
        self._own_log: EventLog | None = None
        if isinstance(model, Pipeline):
            log = model.log or log
        if isinstance(log, str | Path):
            log = self._own_log = EventLog(worker_log(Path(log), worker), worker)
        self._last_step_at = time.perf_counter()
        self._client: GroupClient | None = None
        try:
            self._wait_for_equal_replicas(node or socket.gethostname())
            if setup.mode.has_coordinator:
                self._client = GroupClient(
                    self._rendezvous, self._model, coordinator=coordinator, keys=keys, log=log
                )
            pipeline = model if isinstance(model, Pipeline) else None
            self._strategy = _make_strategy(
                self._model, self._client, self._rendezvous, overlap, outer, pipeline
            )
        except BaseException as error:
            if self._client is not None:
                self._client.close(graceful=False)
            self._rendezvous.report_failure(error)
            raise
        # A thread that waits in gloo when the interpreter exits would abort the process.
        self._finalizer = weakref.finalize(self, self._strategy.close, graceful=False)

    def _wait_for_equal_replicas(self, node: str) -> None:
        rendezvous, optimizer = self._rendezvous, self._model.optimizer
        rendezvous.check_settings(type(optimizer).__name__)
        rendezvous.wait_for_all(node)
        rendezvous.check_same_shapes(self._model.shape())
        rendezvous.broadcast_initial_state(self._model.all_tensors())
        if isinstance(optimizer, ReducedVarianceAdamW):
            optimizer.set_synced(_num_averaged(rendezvous.setup))

    refresh = RenamedAttribute("apply_pending()")
    averaged = RenamedAttribute("pop_stats()")
    take = RenamedAttribute("SampleDispatcher(sync).acquire()")
    used = RenamedAttribute("SampleDispatcher(sync).acknowledge()")
    supply = RenamedAttribute("SampleDispatcher(sync).sampler_state()")
    pop_timings = RenamedAttribute("pop_stats()")
    acquire = RenamedAttribute("SampleDispatcher(sync).acquire()")
    acknowledge = RenamedAttribute("SampleDispatcher(sync).acknowledge()")
    sampler_state = RenamedAttribute("SampleDispatcher(sync).sampler_state()")

    @property
    def worker(self) -> Worker:
        return self._rendezvous.me.worker

    @property
    def timeout(self) -> Seconds:
        """The longest wait for other workers."""
        return self._rendezvous.timeout

    @property
    def num_steps(self) -> int:
        """Number of steps of this worker."""
        return self._strategy.num_steps

    @property
    def overlap(self) -> bool:
        """Whether training continues at once; each worker may change it between steps.

        Not in a pipeline whose stages may wait for one another's groups: the scheduler, which ends
        such waits, knows it from the beginning.
        """
        return isinstance(self._strategy, ModelAveraging) and self._strategy.overlap

    @overlap.setter
    def overlap(self, overlap: bool) -> None:
        setup = self._rendezvous.setup
        _check_overlap(setup, overlap, self._model.decoupled)
        if overlap != self.overlap and setup.ends_deadlocks:
            raise PolicyError(
                f"overlap={overlap} after the start, with {setup.policy!r} and "
                f"{setup.num_stages} stages",
                expected="the same overlap in all steps, or a policy that knows pipelines",
                fix="pass overlap= to GroupSync, or use 'adaptive' or 'age'",
            )
        if isinstance(self._strategy, ModelAveraging):
            self._strategy.overlap = overlap

    def step(self) -> None:
        """Average with the group that the policy forms, if due; call after optimizer.step()."""
        self._check_open()
        self._strategy.step()
        if self._own_log is not None:
            start, self._last_step_at = self._last_step_at, time.perf_counter()
            self._own_log.write("step", start=self._own_log.at(start), step=self.num_steps - 1)

    def apply_pending(self) -> None:
        """With overlap, apply an average that has arrived; call between micro-batches.

        With decoupled, wait for the whole average; call before reading weights outside a forward.
        Never call between a forward and its backward, which needs the forward's weights.
        """
        self._check_open()
        if isinstance(self._strategy, ModelAveraging):
            self._strategy.apply_pending()

    def average_gradients(self) -> None:
        """Average gradients now, under `all_reduce` and `balanced`, not in optimizer.step().

        Needed before gradient clipping, or with a GradScaler, which may skip the step. Does nothing
        under other policies: they average models.
        """
        self._check_open()
        if isinstance(self._strategy, GradientAveraging):
            self._strategy.average_gradients()

    def share(self, num_microbatches: int) -> range:
        """Return the micro-batches of the global batch for this worker, under `balanced`.

        Call backward for each, without dividing the loss: the gradient becomes the mean over all.
        """
        if not isinstance(self._strategy, BalancedGradientAveraging):
            raise PolicyError(
                f"share() under {self._rendezvous.setup.policy}",
                expected="the policy balanced, which assigns micro-batches",
                fix='use GroupSync(..., policy="balanced"), or split the batch equally',
            )
        return self._strategy.share(num_microbatches)

    def pop_stats(self) -> AverageTimings:
        """Return the time spent on averages since the last call; zero under `static`."""
        return AverageTimings(0.0, 0.0, 1) if self._client is None else self._client.pop_timings()

    @property
    def pinned_bytes(self) -> Bytes:
        """Size of the pinned memory for gradients on a GPU; allocated in the first step."""
        strategy = self._strategy
        return strategy.pinned_bytes if isinstance(strategy, GradientAveraging) else 0

    def lost_pipelines(self) -> set[int]:
        """Return the pipelines that have lost a worker; only the coordinator's host knows them."""
        return set() if self._client is None else self._client.lost_pipelines()

    def average_all(self) -> None:
        """Average over all workers of the stage; all must call this: to evaluate, save or finish.

        Workers that have closed their GroupSync or died are not waited for.
        """
        self._check_open()
        self._strategy.average_all()

    def close(self) -> None:
        """Leave the job; the others continue. The coordinator's host waits until they leave."""
        if isinstance(optimizer := self._model.optimizer, ReducedVarianceAdamW):
            optimizer.set_synced(None)
        if self._finalizer.detach() is not None:
            self._strategy.close(graceful=True)
        if self._own_log is not None:
            self._own_log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:  # not a graceful close: this worker has not finished
            self._finalizer()
            self.close()

    def sample_client(self) -> CoordinatorClient:
        """Return the connection of a SampleDispatcher; raises PolicyError if there is none."""
        self._check_open()
        if self._client is None or self._rendezvous.setup.sampler_state is None:
            raise PolicyError(
                f"{self.worker} uses sample dispatch without sampler_state",
                expected="GroupSync(..., sampler_state=SamplerState(limit=...)) in all processes",
                fix="pass sampler_state=, or use a sampler that depends on rank and step only",
            )
        return self._client.coordinator_client

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise PolicyError(
                f"{self.worker} uses a GroupSync that is closed",
                expected="close() after the last step, and after average_all()",
                fix="close it later, or create a GroupSync with another name= in all workers",
            )


def _make_setup(
    model: nn.Module | Pipeline,
    worker: Worker | None,
    process_group: dist.ProcessGroup | None,
    *,
    num_stages: int | None,
    num_pipelines: int | None,
    **policy_args: Any,
) -> tuple[Setup, Worker]:
    """Return the setup of the job and this process's worker, by default from rank and size."""
    check_member(process_group)
    rank = dist.get_rank(process_group) if dist.is_initialized() else 0
    world = dist.get_world_size(process_group) if dist.is_initialized() else 1
    if isinstance(model, Pipeline):
        num_stages = model.num_stages
        pipeline = rank // num_stages if worker is None else worker.pipeline
        ranks = dist.get_process_group_ranks(process_group) if dist.is_initialized() else [0]
        in_order = ranks[pipeline * num_stages :][:num_stages] == model.ranks
        if not (in_order if worker is None else set(model.ranks) <= set(ranks)):
            raise PolicyError(
                f"a Pipeline on the ranks {model.ranks} in a process group of {ranks}",
                expected="all stages of all pipelines; without worker=, each on consecutive ranks",
                fix="omit process_group=, or pass the group of all stages; only "
                "DistributedOptimizer takes the group of one stage's replicas",
            )
        worker = Worker(model.stage, pipeline)
    num_stages = num_stages or 1
    if num_pipelines is None:  # the parameter server is not a replica
        mode = SYNC_MODES.get(policy_args["policy"])  # Setup refuses unknown names
        num_training = world - (mode is not None and mode.has_server)
        num_pipelines = max(num_training // num_stages, 1)
    setup = Setup(num_stages=num_stages, num_pipelines=num_pipelines, **policy_args)
    return setup, worker or Worker(0, rank)


def _make_strategy(
    model: ReplicaState,
    client: GroupClient | None,
    rendezvous: Rendezvous,
    overlap: bool,
    outer: OuterNesterov | None,
    pipeline: Pipeline | None,
) -> GradientAveraging | ModelAveraging | ServerAveraging | StaticAveraging:
    setup, mode = rendezvous.setup, rendezvous.setup.mode
    if client is None:
        return StaticAveraging(model, rendezvous)
    if mode.has_server:
        return ServerAveraging(model, client, rendezvous)
    if mode.balances_microbatches:
        return BalancedGradientAveraging(model, client, setup.num_pipelines, pipeline)
    if mode.averages == "gradients":
        return GradientAveraging(model, client, pipeline)
    if model.decoupled:
        return DecoupledModelAveraging(model, client, rendezvous)
    if mode.has_outer_optimizer and outer is None:
        outer = OuterNesterov()
    return ModelAveraging(model, client, setup, overlap=overlap, outer=outer)


def _num_averaged(setup: Setup) -> float | None:
    """Return the number of updates in an average after each step; None if the user chooses it."""
    if setup.mode.averages == "gradients":
        return 1.0  # they were averaged before the step
    # Not the size of a group: within a few steps an update reaches all replicas.
    at_each_step = setup.mode.averages == "model" and setup.steps_between == 1
    return float(setup.num_pipelines) if at_each_step else None


def _check_model(module: nn.Module, optimizer: Optimizer) -> None:
    if not isinstance(module, nn.Module) or not isinstance(optimizer, Optimizer):
        raise PolicyError(
            f"GroupSync({type(module).__name__}, {type(optimizer).__name__})",
            expected="a model (nn.Module or Pipeline), then an optimizer of torch.optim",
            fix="GroupSync(model, optimizer, policy=...)",
        )
    if not trainable_parameters(module):
        raise PolicyError(
            f"a {type(module).__name__} without a trainable parameter",
            expected="a model with at least one trainable parameter",
            fix="pass the model that the optimizer updates, unfrozen",
        )
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(parameter) in updated for parameter in trainable_parameters(module)):
        raise PolicyError(
            f"an optimizer that updates no parameter of this {type(module).__name__}",
            expected="the optimizer of the model; a DistributedOptimizer averages by itself",
            fix="create the optimizer from model.parameters() after the model is complete",
        )


def _check_worker(
    module: nn.Module, setup: Setup, worker: Worker, process_group: dist.ProcessGroup | None
) -> None:
    """Check that the job has a process for each worker, and that `worker` is in the plan."""
    if not dist.is_initialized():
        return  # Rendezvous refuses that
    check_not_averaged(module, dist.get_process_group_ranks(process_group))
    num_workers, world = len(setup.workers), dist.get_world_size(process_group)
    plan = f"{setup.num_stages} x {setup.num_pipelines}" if setup.num_stages > 1 else num_workers
    if setup.mode.has_server and world <= num_workers:
        raise PolicyError(
            f"{setup.policy} with {plan} workers in a job of {world} processes",
            expected="one more process, on the last rank, which is the parameter server",
            fix=f"start {num_workers + 1} processes; on rank {num_workers} call "
            f"ParameterServer(num_pipelines={setup.num_pipelines}).serve() instead of training",
        )
    if num_workers > world:
        raise PolicyError(
            f"{plan} workers in a job of {world} processes",
            expected="a process for each worker",
            fix=f"start {num_workers} processes, or omit num_pipelines",
        )
    if worker not in setup.workers:
        raise PolicyError(
            f"{worker} in a job of {setup.num_stages} stages x {setup.num_pipelines} pipelines",
            expected=f"a worker from s0p0 to {setup.workers[-1]}: the rank, unless worker= is set",
            fix="put processes that do not train on the last ranks, and create no GroupSync there",
        )


def _check_options(
    setup: Setup,
    *,
    overlap: bool,
    decoupled: bool,
    state: OptimizerStateMode,
    outer: OuterNesterov | None,
    coordinator: str | None,
    keys: object,
) -> None:
    _check_overlap(setup, overlap, decoupled)
    if state == "average" and setup.mode.has_server:
        raise PolicyError(
            f'state="average" under {setup.policy}',
            expected="a policy that averages models: the parameter server holds weights only",
            fix='use state="local", or another policy, such as adaptive',
        )
    if decoupled:
        _check_decoupled(setup)
    if outer is not None and not setup.mode.has_outer_optimizer:
        raise PolicyError(
            f"an outer optimizer under {setup.policy}",
            expected="the policy local",
            fix="omit outer, or use policy='local'",
        )
    if coordinator is not None and not setup.mode.has_coordinator:
        raise PolicyError(
            f"coordinator={coordinator!r} under {setup.policy}",
            expected="no coordinator: a fixed rule forms the groups",
            fix="omit coordinator, or use a policy with a scheduler, such as adaptive",
        )
    if keys is not None and coordinator is None:
        raise PolicyError(
            f"keys={str(keys)!r} without a coordinator",
            expected="the address of the `polyrhythm coordinator` whose keys these are",
            fix="pass coordinator='tcp://HOST:PORT', or omit keys",
        )


def _has_flush(model: object) -> bool:
    return isinstance(model, Pipeline) and model.is_flushed


def _check_flush(model: object, decoupled: bool) -> None:
    if decoupled and isinstance(model, Pipeline) and not model.is_flushed:
        raise PolicyError(
            "decoupled=True with a Pipeline with flush=False",
            expected="one version of the weights: flush=False copies them before each forward",
            fix="use flush=True, or overlap=True instead of decoupled=True",
        )


def _check_decoupled(setup: Setup) -> None:
    if setup.mode.averages == "gradients":
        raise PolicyError(
            f"decoupled=True under {setup.policy}",
            expected=f"a policy that averages models; {setup.policy} averages gradients",
            fix="use polyrhythm.DistributedOptimizer, which decouples the gradients' all-reduce",
        )
    if not setup.mode.can_decouple:
        raise PolicyError(
            f"decoupled=True under {setup.policy}",
            expected=f"a policy whose averages can be split; {setup.mode.why_not_decoupled}",
            fix="use age or adaptive, or decoupled=False",
        )


def _check_overlap(setup: Setup, overlap: bool, decoupled: bool) -> None:
    if overlap and decoupled:
        raise PolicyError(
            "overlap=True and decoupled=True",
            expected="one of them: with overlap no worker waits for an average or a part of it",
            fix="use decoupled=True for exact copies, or overlap=True to hide slow groups",
        )
    if overlap and not setup.mode.can_overlap:
        raise PolicyError(
            f"overlap under {setup.policy}",
            expected="a policy that averages models in groups of the scheduler",
            fix="use age or adaptive, or overlap=False",
        )
