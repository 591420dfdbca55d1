"""The simulator: runs a job's schedules and policies on one virtual clock.

The engine (`engine/`) executes actions and sends bytes; the coordinator calls the runtime's
scheduler; averaging connects both. All decisions are made by the code that also trains.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from polyrhythm.cost.step import Schedule
from polyrhythm.describe.cluster import Cluster
from polyrhythm.errors import PlanError, PolicyError, ScheduleError
from polyrhythm.schedule.builders import build
from polyrhythm.simulate.averaging import Observer, SimulatedAveraging, SimulatedWorker
from polyrhythm.simulate.clock import Clock
from polyrhythm.simulate.coordinator import SimulatedCoordinator
from polyrhythm.simulate.decoupled import DecoupledAllReduce, all_gather_arrivals, traffic_factor
from polyrhythm.simulate.engine.engine import (
    NO_WAIT,
    ActionRecord,
    BucketArrivals,
    Engine,
    EngineEvent,
)
from polyrhythm.simulate.engine.state import NUM_ACTIONS, NUM_EVENTS, STEP_ENDED
from polyrhythm.simulate.faults import FaultInjector
from polyrhythm.simulate.job import SimulatedJob, split_regions
from polyrhythm.simulate.network import SimulatedNetwork
from polyrhythm.simulate.parameter_server import SimulatedParameterServer
from polyrhythm.simulate.result import SimulationResult
from polyrhythm.simulate.run_log import RunLog
from polyrhythm.sync.policies.balanced import MicrobatchBalancer
from polyrhythm.sync.protocol import Abort, Assign, Commit, CopyFrom, Leave, Skip
from polyrhythm.types import Seconds, Worker

# A job is stalled if this has passed since the engine's last event and the scenario's last change:
# it is longer than any wait of the scheduler.
_STALL_TIMEOUT: Seconds = 3600.0
_STALL_FACTOR = 100  # times the longest step, if that is longer


def simulate(
    job: SimulatedJob,
    *,
    num_steps: int,
    each: bool = False,
    observers: Sequence[Observer] = (),
    run: Path | None = None,
    replans: bool = False,
    reroutes: bool = False,
) -> SimulationResult:
    """Simulate `num_steps` steps per pipeline on average: fast pipelines may run more.

    With `each`, every pipeline runs exactly `num_steps` and leaves. `run` is a folder for the log,
    as training writes it.

    In an exact mode `num_steps` are steps of the job: after a loss the survivors compute the whole
    batch (`simulate/epochs.py`). With `replans` they divide the layers anew where that is predicted
    to pay off, and with `reroutes` pipelines with a hole go on where that is faster than dissolving
    them (`plan/reroute.py`), which the runtime does not do yet.
    """
    from polyrhythm.simulate.epochs import simulate_epochs  # late: it imports this module

    if num_steps < 1:
        raise PlanError(f"num_steps={num_steps}", expected="1 or more", fix="simulate 20")
    split = split_regions(job)
    if split.has_epochs:
        result = simulate_epochs(
            split,
            num_steps,
            each=each,
            observers=observers,
            run=run,
            replans=replans,
            reroutes=reroutes,
        )
    else:
        log = None if run is None else RunLog(run, split)
        result = Simulation(split, num_steps, each, observers, log).result()
    if split is job:
        return result
    return replace(result, bytes_sent=_sum_by_region(result.bytes_sent, job.cluster))


class Simulation:
    """One simulation of fixed workers: `result` runs it; or `start`, `run` and `collect` in turn.

    It begins at `start` on the clock of the job's scenario.
    """

    def __init__(
        self,
        job: SimulatedJob,
        num_steps: int,
        each: bool,
        observers: Sequence[Observer],
        log: RunLog | None,
        *,
        start: Seconds = 0.0,
    ) -> None:
        self._job, self._num_steps, self._each = job, num_steps, each
        self._clock, self._network = Clock(start), SimulatedNetwork(job.cluster, job.gateways)
        self._log = log
        self._engine = Engine(job, records=log is not None)
        self._pipelines = _members(job, self._engine)
        members = [member for pipeline in self._pipelines for member in pipeline]
        self._workers_of_run: list[list[SimulatedWorker]] = [
            [] for _ in range(self._engine.first_run[-1])
        ]
        for member in members:
            self._workers_of_run[member.run].append(member)
        num_runs = len(self._workers_of_run)
        self._num_pending = [0] * num_runs  # workers of a run whose step has not ended
        self._buckets = [NO_WAIT] * num_runs  # that the next forward waits for
        self._steps = StepCounter(self._engine.first_run)
        self._goal = num_steps * len(job.pipelines)
        self._traffic_factor = traffic_factor(members)
        mode, parts = job.sync.mode, (self._clock, self._engine, self._network)
        self._balancer = SimulatedBalancer(job) if mode.balances_microbatches else None
        self._coordinator_device = members[0].device if job.coordinator is None else job.coordinator
        self._reports_step_begin = mode.asks_ahead or bool(observers)
        self._server = None
        if mode.has_server:
            self._server = SimulatedParameterServer(self._coordinator_device, *parts, observers)
        self._all_reduce = None
        if job.decoupled and mode.exact:
            self._all_reduce = DecoupledAllReduce(
                members, *parts, self._on_step_done, job.num_buckets, observers
            )
        self._averaging = self._make_averaging(members, observers)
        self.set_latency()
        self._faults = FaultInjector(job, self._pipelines, self._averaging, *parts, self)
        # Of progress: the scheduler may retry for ever.
        self._deadline = max(start, self._faults.last) + _STALL_TIMEOUT

    def _make_averaging(
        self, members: Sequence[SimulatedWorker], observers: Sequence[Observer]
    ) -> SimulatedAveraging:
        job, log = self._job, self._log
        coordinator = SimulatedCoordinator(
            job.setup, self._clock, self._on_command, None if log is None else log.decisions
        )
        hides_all_gather = job.decoupled and self._all_reduce is None
        return SimulatedAveraging(
            members,
            self._clock,
            self._engine,
            self._network,
            coordinator,
            self._on_step_done,
            setup=job.sync,
            overlap=job.overlap,
            decoupled=self._all_gather_arrivals if hides_all_gather else None,
            server=self._server,
            observers=observers,
            finished=None if log is None else log.averages,
        )

    def result(self) -> SimulationResult:
        self.start()
        stop_reason = self.run()
        if self._log is not None:
            self._log.write(self._log.events(self.take_records()), self._num_steps)
        return self.collect(stop_reason)

    @property
    def now(self) -> Seconds:
        return self._clock.now

    @property
    def is_done(self) -> bool:
        """Whether all steps are done."""
        return self._steps.total >= self._goal

    @property
    def num_done(self) -> int:
        """The number of steps that all pipelines have ended."""
        return min(map(len, self._steps.ends))

    def start(self) -> None:
        self._faults.start()

    def take_records(self) -> list[ActionRecord]:
        """Return all actions that have ended."""
        records = self._engine.take_records()
        return [record for record in records if record.end <= self._clock.now]

    def collect(self, stop_reason: str) -> SimulationResult:
        self._engine.warn_of_traces()
        state, averaging, job = self._engine.state, self._averaging, self._job
        runs, first = state.runs, [workers[0].worker for workers in self._workers_of_run]
        held = runs["held_before"].tolist()  # waits of forwards for buckets
        waited = [sum(both) for both in zip(self._steps.waited, held, strict=True)]
        samples = [len(pipeline.schedule[0]) // 2 for pipeline in job.pipelines]
        return SimulationResult(
            ends=tuple(map(tuple, self._steps.ends)),
            samples=job.samples or tuple(samples),
            duration=self._clock.now,
            active_time=tuple(self._steps.active_time(self._clock.now)),
            present=tuple(self._faults.present()),
            busy=dict(zip(first, runs["busy_before"].tolist(), strict=True)),
            starved=dict(zip(first, runs["starved_before"].tolist(), strict=True)),
            waited=dict(zip(first, waited, strict=True)),
            group_sizes=averaging.sizes,
            spread=fmean(averaging.spread) if averaging.spread else 0.0,
            bytes_sent=np.array(state.sent),
            num_events=int(state.counts[NUM_EVENTS]),
            num_actions=int(state.counts[NUM_ACTIONS]),
            stop_reason=stop_reason,
        )

    def run_step(self, until: Seconds) -> str:
        """Run until all pipelines have ended one more step, or until then; return as `run`."""
        goal, self._goal, why = self._goal, self._steps.total, ""
        target = self.num_done + 1
        while self.num_done < target and self._clock.now < until and not why:
            self._goal += 1
            why = self.run(until)
        self._goal = goal
        return why

    def run(self, until: Seconds = float("inf")) -> str:
        """Run all steps, or until a time; return why nothing can go on, or an empty text."""
        clock, engine = self._clock, self._engine
        while not self.is_done:
            next_time = min(clock.next_time, until)
            event = engine.advance(next_time)
            if event is not None:
                clock.now = event.time
                timeout = max(_STALL_TIMEOUT, _STALL_FACTOR * self._steps.longest)
                self._deadline = max(self._deadline, event.time + timeout)
                self._handle(event)
            elif until <= clock.next_time and until < float("inf"):
                clock.now = until
                break
            elif (
                until < float("inf")
                or next_time < self._deadline
                or (next_time < float("inf") and not clock.only_retries)
            ):
                clock.run_next()
            else:
                return self._stall_reason()
        return ""

    def _stall_reason(self) -> str:
        why = "links are lost" if self._job.scenario.link else ""
        if self._faults.no_pipeline_is_complete:
            why = "every pipeline had lost a device"
        if why:
            last = max((end for pipeline in self._steps.ends for end in pipeline), default=0.0)
            return f"no pipeline could continue after {last:.4g} s: {why}"
        raise ScheduleError(
            f"a deadlock after {self._clock.now:.3g} s: {self._steps.total} of {self._goal} steps",
            expected="stages that can all finish their actions",
            fix="check the schedule with schedule.check, which names the defect",
        )

    def _handle(self, event: EngineEvent) -> None:
        if event.kind != STEP_ENDED:
            sender = self._averaging if self._server is None else self._server
            sender.flows_ended(event.entity)
            return
        run = event.entity
        if not self._has_gradients(run):
            self._release(run, NO_WAIT)
            return
        duration = self._steps.end_compute(run, event.time)
        if self._balancer is not None:
            self._balancer.step_ended(run, duration)
        self._num_pending[run], self._buckets[run] = len(self._workers_of_run[run]), NO_WAIT
        sync = self._averaging if self._all_reduce is None else self._all_reduce
        for member in self._workers_of_run[run]:
            sync.step_ended(member)

    def _has_gradients(self, run: int) -> bool:
        """Whether the step had a backward: a pipeline that is never flushed fills first."""
        if self._job.in_flight is None:
            return True
        state = self._engine.state.runs[run]
        return bool(state["step"] >= state["in_flight"] - 1)

    def _on_step_done(self, member: SimulatedWorker, buckets: BucketArrivals) -> None:
        run = member.run
        self._num_pending[run] -= 1
        if buckets.last > self._buckets[run].last:
            self._buckets[run] = buckets
        if self._num_pending[run]:
            return
        steps, now = self._steps, self._clock.now
        number = steps.number[run]
        start_and_end = steps.finish_step(run, member.worker.pipeline, now)
        if self._log is not None:
            self._log.steps.append((run, number, *start_and_end, now))
        if self._each and number + 1 >= self._num_steps:
            self._leave(run)
        else:
            self._release(run, self._buckets[run])

    def _leave(self, run: int) -> None:
        for member in self._workers_of_run[run]:
            self._averaging.coordinator.send(member.worker, Leave, member.incarnation)
            if self._all_reduce is not None:
                self._all_reduce.leave(member)

    def _release(self, run: int, buckets: BucketArrivals) -> None:
        if self._balancer is not None:  # a run is a pipeline
            self._engine.set_schedule(run, self._balancer.schedule(run), 0)
        self._steps.begin(run, self._clock.now)
        self._engine.release(run, self._clock.now, buckets)
        if self._reports_step_begin:
            for member in self._workers_of_run[run]:
                self._averaging.step_began(member)

    def has_steps_left(self, pipeline: int) -> bool:
        """Whether a pipeline has steps left to run, and may join again."""
        return not self._each or len(self._steps.ends[pipeline]) < self._num_steps

    def begin(self, pipeline: int) -> None:
        """Start a pipeline, all of whose devices are present."""
        self._steps.restart_pipeline(pipeline, self._clock.now)
        first, end = self._engine.first_run[pipeline : pipeline + 2]
        for run in range(first, end):
            self._steps.begin(run, self._clock.now)
            self._engine.restart(run, self._clock.now, self._steps.number[run])
            if self._balancer is not None:
                self._balancer.add(run)
            if self._reports_step_begin:
                for member in self._workers_of_run[run]:
                    self._averaging.step_began(member)

    def end(self, pipeline: int) -> None:
        """Stop a pipeline that has lost a device."""
        self._steps.stop_pipeline(pipeline, self._clock.now)
        first, end = self._engine.first_run[pipeline : pipeline + 2]
        for run in range(first, end):
            self._engine.stop(run)

    def _on_command(
        self, worker: Worker, command: Assign | Commit | Abort | Skip | CopyFrom
    ) -> None:
        if isinstance(command, CopyFrom):
            self._faults.copy_from(command)
        else:
            self._averaging.on_command(worker, command)

    def _all_gather_arrivals(self, members: Sequence[SimulatedWorker]) -> BucketArrivals:
        """Arrivals of a group's all-gather, which the next forward hides."""
        devices = [member.device for member in members]
        busy = self._network.phase_time(devices, members[0].size) * self._traffic_factor(members)
        latency = self._network.max_round_trip(devices)
        return all_gather_arrivals(self._clock.now, busy, latency, self._job.num_buckets)

    def set_latency(self) -> None:
        """Set the latencies to the coordinator and back; 0 if training has none."""
        members = self._averaging.members.values()
        host, latency = self._coordinator_device, self._network.latency
        latencies = {m.worker: (latency(m.device, host), latency(host, m.device)) for m in members}
        if not self._job.sync.mode.has_coordinator:
            latencies = dict.fromkeys(latencies, (0.0, 0.0))
        self._averaging.coordinator.set_latency(latencies)


def _sum_by_region(sent: NDArray[np.float64], cluster: Cluster) -> NDArray[np.float64]:
    """Sum the bytes between devices, each of which was a region, by the original regions."""
    total = np.zeros((len(cluster.regions),) * 2)
    regions = [cluster.regions.index(device.region) for device in cluster.devices]
    np.add.at(total, np.ix_(regions, regions), sent)
    return total


def _members(job: SimulatedJob, engine: Engine) -> list[list[SimulatedWorker]]:
    """The workers of each pipeline."""
    return [
        [
            _member(Worker(stage, number), device, first + i, job)
            for i, (device, start, end) in enumerate(pipeline.runs)
            for stage in range(start, end)
        ]
        for number, (pipeline, (first, _)) in enumerate(
            zip(job.pipelines, pairwise(engine.first_run), strict=True)
        )
    ]


def _member(worker: Worker, device: int, run: int, job: SimulatedJob) -> SimulatedWorker:
    work = job.stages[worker.stage]
    gradients, parameters = work.gradient_bytes, work.parameter_bytes
    parameters = gradients if parameters is None else parameters
    size = gradients if job.sync.mode.averages == "gradients" else parameters
    return SimulatedWorker(worker, device, run, size, parameters)


class StepCounter:
    """Count finished steps: of each run, of each pipeline, and in total."""

    def __init__(self, first_run: list[int]) -> None:
        """`first_run` holds the first run of each pipeline, and the number of all runs."""
        num_runs = first_run[-1]
        self.total = 0  # steps of pipelines
        self.ends: list[list[Seconds]] = [[] for _ in first_run[:-1]]  # [pipeline][step]
        self.waited: list[Seconds] = [0.0] * num_runs  # from the last action to the next step
        self.longest: Seconds = 0.0
        self.number = [0] * num_runs  # current step of each run
        self._first_run, self._num_runs = first_run, [b - a for a, b in pairwise(first_run)]
        self._step_start: list[Seconds] = [0.0] * num_runs
        self._compute_end: list[Seconds] = [0.0] * num_runs
        self._active_since: list[Seconds | None] = [None] * len(self.ends)
        self._active_time: list[Seconds] = [0.0] * len(self.ends)
        self._counts: list[dict[int, int]] = [{} for _ in self.ends]  # runs that finished a step

    def begin(self, run: int, now: Seconds) -> None:
        self._step_start[run] = now

    def end_compute(self, run: int, now: Seconds) -> Seconds:
        """Record that all actions of a step are done; return their duration."""
        self._compute_end[run] = now
        return now - self._step_start[run]

    def finish_step(self, run: int, pipeline: int, now: Seconds) -> tuple[Seconds, Seconds]:
        """Record the end of a step; return its start, and the end of its actions."""
        self.waited[run] += now - self._compute_end[run]
        if now - self._step_start[run] > self.longest:
            self.longest = now - self._step_start[run]
        counts, step = self._counts[pipeline], self.number[run]
        number = counts[step] = counts.get(step, 0) + 1
        if number == self._num_runs[pipeline]:
            del counts[step]
            self.ends[pipeline].append(now)
            self.total += 1
        self.number[run] += 1
        return self._step_start[run], self._compute_end[run]

    def active_time(self, now: Seconds) -> list[Seconds]:
        """Time for which each pipeline was active until now."""
        return [
            before + (0.0 if since is None else now - since)
            for before, since in zip(self._active_time, self._active_since, strict=True)
        ]

    def stop_pipeline(self, pipeline: int, now: Seconds) -> None:
        """Stop a pipeline that has lost a device."""
        since = self._active_since[pipeline]
        self._active_time[pipeline] += 0.0 if since is None else now - since
        self._active_since[pipeline] = None

    def restart_pipeline(self, pipeline: int, now: Seconds) -> None:
        """Restart a pipeline with the step after the last one that ended on all its stages."""
        self._active_since[pipeline] = now
        self._counts[pipeline].clear()
        first, end = self._first_run[pipeline : pipeline + 2]
        self.number[first:end] = [len(self.ends[pipeline])] * (end - first)


class SimulatedBalancer:
    """Assigns micro-batches by speed when all step times are known, as the runtime does."""

    def __init__(self, job: SimulatedJob) -> None:
        if any(len(pipeline.runs) > 1 for pipeline in job.pipelines):
            raise PolicyError(
                "balanced in a job with pipelines",
                expected="replicas of the whole model, each on one device",
                fix="use adaptive or age, or one stage",
            )
        self._counts = [len(pipeline.schedule[0]) // 2 for pipeline in job.pipelines]
        self._balancer = MicrobatchBalancer(sum(self._counts))
        self._step_times: dict[int, Seconds] = {}
        self._present: set[int] = set()
        self._num_microbatches = list(self._counts)
        self._built: dict[int, Schedule] = {}

    def add(self, pipeline: int) -> None:
        self._present.add(pipeline)

    def step_ended(self, pipeline: int, duration: Seconds) -> None:
        self._step_times[pipeline] = duration
        self._rebalance_if_all_ended()

    def schedule(self, pipeline: int) -> Schedule:
        """The schedule of the pipeline's next step."""
        count = self._num_microbatches[pipeline]
        if count not in self._built:
            self._built[count] = build("1f1b", num_stages=1, num_microbatches=count)
        return self._built[count]

    def _rebalance_if_all_ended(self) -> None:
        """Rebalance once all step times are known; latencies may let some start before that."""
        if not self._step_times or set(self._step_times) != self._present:
            return
        for pipeline, duration in sorted(self._step_times.items()):
            self._balancer.record(Worker(0, pipeline), self._num_microbatches[pipeline], duration)
        shares = self._balancer.assign(Worker(0, p) for p in sorted(self._step_times))
        for worker, count in shares.items():
            self._num_microbatches[worker.pipeline] = count
        self._step_times = {}
