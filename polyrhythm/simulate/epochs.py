"""A simulated job in an exact mode whose devices are lost or return: one simulation per epoch.

As in training (`run/trainer/elastic.py`), a loss ends the epoch for all. The step that it cuts is
repeated: the survivors, as `plan/survivors.py` assigns them, compute the whole batch, after a pause
in which the loss is noticed and they connect again. In each epoch pipelines have the numbers that
they have in training.

Departures: devices may return, which the runtime does not allow yet: the epoch ends after a step as
soon as they make one more pipeline, or fill a hole. If none is whole, the job waits for that, as if
it went on from a checkpoint of its last step. What replicas send one another when shards of the
optimizer's state are divided anew takes no time. If asked to, micro-batches are rerouted around
lost devices (`rerouted.py`).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyrhythm.cost.memory import peak_in_flight
from polyrhythm.cost.step import Replica, Schedule, StageRun, StageWork
from polyrhythm.errors import PlanError
from polyrhythm.events import Event
from polyrhythm.plan.after_loss import decide_after_loss
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.plan.predict import predict
from polyrhythm.plan.recompute import recomputed_layers
from polyrhythm.plan.reroute import RerouteDecision, decide_rerouting
from polyrhythm.plan.rerouted_order import Rerouting
from polyrhythm.plan.routes import GridTimes
from polyrhythm.plan.survivors import Assignment, assign_survivors, first_assignment
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.simulate.averaging import Observer
from polyrhythm.simulate.faults import STATE_FACTOR
from polyrhythm.simulate.from_plan import num_buckets
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.simulate.network import SimulatedNetwork
from polyrhythm.simulate.rerouted import ReroutedSimulation, grid_times
from polyrhythm.simulate.result import EpochChange, SimulationResult
from polyrhythm.simulate.run_log import RunLog
from polyrhythm.simulate.simulator import Simulation
from polyrhythm.types import AUTO, Seconds, Worker

# Of killed processes with emulated compute on one machine (`polyrhythm bench faults`). A machine
# that stops answering is noticed later, by its heartbeats.
NOTICE: Seconds = 0.1  # from a loss until all others have stopped
RECONNECT: Seconds = 0.3  # from then on, until they compute again
_OTHER_DRAWS = 1_000_003  # between the seeds of two epochs: delays are drawn anew in each


def simulate_epochs(
    job: SimulatedJob,
    num_steps: int,
    *,
    each: bool,
    observers: Sequence[Observer],
    run: Path | None,
    replans: bool,
    reroutes: bool = False,
) -> SimulationResult:
    """Simulate `num_steps` steps of the job; see `simulate`."""
    return _Epochs(job, num_steps, each, observers, run, replans, reroutes).result()


class _Fault(NamedTuple):
    at: Seconds
    is_join: bool  # False first: a loss at the same time
    device: str


class _Choice(NamedTuple):
    """How the devices that are present go on."""

    assignment: Assignment | None  # of whole pipelines; if rerouted, with places of lost ones
    pause: Seconds  # before
    why: str
    rerouting: Rerouting | None = None
    workers: Mapping[int, Worker] = {}  # by member: its place, if it has one


class _Devices:
    """The devices that are present, as time goes on."""

    def __init__(self, job: SimulatedJob) -> None:
        scenario = job.scenario
        self.names = [device.name for device in job.cluster.devices]
        self.present = {*self.names} - scenario.absent_at_start
        self._faults = sorted(
            [_Fault(kill.at, False, kill.device) for kill in scenario.kill]
            + [_Fault(join.at, True, join.device) for join in scenario.join],
            reverse=True,
        )
        self._since = dict.fromkeys(self.names, 0.0)
        self._seconds = dict.fromkeys(self.names, 0.0)

    @property
    def next_at(self) -> Seconds:
        """The time of the next fault; inf if there is none."""
        return self._faults[-1].at if self._faults else math.inf

    @property
    def next_loss_at(self) -> Seconds:
        return min((fault.at for fault in self._faults if not fault.is_join), default=math.inf)

    def advance(self, until: Seconds) -> list[_Fault]:
        """Apply all faults up to a time, and return those that change something."""
        applied = []
        while self._faults and self.next_at <= until:
            fault = self._faults.pop()
            if fault.is_join == (fault.device in self.present):
                continue
            applied.append(fault)
            if fault.is_join:
                self.present.add(fault.device)
                self._since[fault.device] = fault.at
            else:
                self.present.remove(fault.device)
                self._seconds[fault.device] += fault.at - self._since[fault.device]
        return applied

    def seconds(self, now: Seconds) -> tuple[Seconds, ...]:
        """Seconds for which each device was present until now."""
        return tuple(
            self._seconds[name] + (now - self._since[name] if name in self.present else 0.0)
            for name in self.names
        )


@dataclass(slots=True)
class _Totals:
    """Sums over epochs. Pipelines are those of the same number, workers of the same name."""

    bytes_sent: NDArray[np.float64]
    ends: list[list[Seconds]]
    shares: list[list[float]]
    active: list[Seconds]
    spans: Counter[tuple[str, Worker]] = field(default_factory=Counter)
    group_sizes: Counter[int] = field(default_factory=Counter)
    num_events: int = 0
    num_actions: int = 0

    def add(
        self, found: SimulationResult, num_steps: int, start: Seconds, samples: Sequence[float]
    ) -> None:
        for number, ends in enumerate(found.ends):
            if number == len(self.ends):
                self.ends.append([])
                self.shares.append([])
                self.active.append(0.0)
            self.ends[number] += ends[:num_steps]
            self.shares[number] += [samples[number]] * len(ends[:num_steps])
            self.active[number] += found.duration - start
        for name in ("busy", "starved", "waited"):
            for worker, seconds in getattr(found, name).items():
                self.spans[name, worker] += seconds
        self.bytes_sent = self.bytes_sent + found.bytes_sent
        self.group_sizes += found.group_sizes
        self.num_events += found.num_events
        self.num_actions += found.num_actions

    def of(self, name: str) -> dict[Worker, Seconds]:
        return {worker: span for (kind, worker), span in self.spans.items() if kind == name}


class _Epochs:
    """One simulation of a job, in one call of `result`."""

    def __init__(
        self,
        job: SimulatedJob,
        num_steps: int,
        each: bool,
        observers: Sequence[Observer],
        run: Path | None,
        replans: bool,
        reroutes: bool,
    ) -> None:
        self._reroutes = reroutes
        self._job, self._num_steps, self._each, self._observers = job, num_steps, each, observers
        self._run, self._replans, self._devices = run, replans, _Devices(job)
        self._first = _plan_of(job)
        self._assignment = first_assignment(self._first)
        self._rerouting: Rerouting | None = None
        self._workers = self._assignment.workers  # of those who have a place, by member
        self._known = _devices_of(self._first)
        self._running: Assignment | None = None  # the last one that has computed
        self._ran: Mapping[int, Worker] = {}  # its workers
        self._kept_state = set[str]()  # devices that have been present since it began
        self._replicas: tuple[Replica, ...] = ()  # of the assignment
        self._now, self._num_done, self._number = 0.0, 0, 0
        self._changes: list[EpochChange] = []
        count, num_regions = len(job.pipelines), len(job.cluster.regions)
        self._totals = _Totals(
            bytes_sent=np.zeros((num_regions, num_regions)),
            ends=[[] for _ in range(count)],
            shares=[[] for _ in range(count)],
            active=[0.0] * count,
        )
        self._log: RunLog | None = None  # of the first epoch
        self._events: list[Event] = []

    def result(self) -> SimulationResult:
        stop_reason = self._form(0.0, "")
        while not stop_reason and self._num_done < self._num_steps:
            stop_reason = self._compute()
        if self._log is not None:
            self._log.write(self._events, self._num_steps)
        totals, job = self._totals, self._job
        return SimulationResult(
            ends=tuple(map(tuple, totals.ends)),
            samples=job.samples or tuple(map(_num_microbatches, job.pipelines)),
            duration=self._now,
            active_time=tuple(totals.active),
            present=self._devices.seconds(self._now),
            busy=totals.of("busy"),
            starved=totals.of("starved"),
            waited=totals.of("waited"),
            group_sizes=totals.group_sizes,
            spread=0.0,
            bytes_sent=totals.bytes_sent,
            num_events=totals.num_events,
            num_actions=totals.num_actions,
            stop_reason=stop_reason,
            shares=tuple(map(tuple, totals.shares)),
            changes=tuple(self._changes),
        )

    def _compute(self) -> str:
        """Simulate an epoch, and what follows it; return why the job cannot go on."""
        self._number += 1
        self._running, self._ran, start = self._assignment, self._workers, self._now
        self._kept_state = {*self._devices.present}
        job = self._job_of(self._running)
        num_left = self._num_steps - self._num_done
        simulation: Simulation | ReroutedSimulation
        if self._rerouting is None:
            log = self._new_log(job)
            simulation = Simulation(job, num_left, self._each, self._observers, log, start=start)
        else:
            log, times = None, self._grid_times(self._running)
            simulation = ReroutedSimulation(job, self._rerouting, times, num_left, start=start)
        why, lost = self._simulate_epoch(simulation)
        num_done = num_left if simulation.is_done else min(simulation.num_done, num_left)
        samples = self._samples_of(self._running.plan)
        self._totals.add(simulation.collect(why), num_done, start, samples)
        if log is not None:
            assert isinstance(simulation, Simulation), "others have no log"
            self._events += log.events(simulation.take_records(), num_done)
        self._now, self._num_done = simulation.now, self._num_done + num_done
        if why or self._num_done == self._num_steps:
            return why
        if not lost:
            return self._form(self._now, "devices return")
        what = f"{', '.join(sorted(lost))} {'is' if len(lost) == 1 else 'are'} lost"
        return self._form(self._now + NOTICE, what)

    def _simulate_epoch(self, simulation: Simulation | ReroutedSimulation) -> tuple[str, list[str]]:
        """Simulate until the epoch ends; return why it cannot go on, and which devices it lost."""
        simulation.start()
        grows = False
        while True:
            until, why = self._devices.next_at, ""
            if until > simulation.now:  # no device has returned while others connected again
                why = simulation.run_step(until) if grows else simulation.run(until)
            # All is done, or a step after which the epoch ends.
            if why or simulation.is_done or simulation.now < until:
                return why, []
            faults = self._advance(until)
            lost = [f.device for f in faults if not f.is_join and self._is_member(f.device)]
            if lost:
                return "", lost
            grows = self._would_grow()

    def _advance(self, until: Seconds) -> list[_Fault]:
        """Apply all faults up to a time; a device that is lost and returns has no state."""
        faults = self._devices.advance(until)
        self._kept_state -= {fault.device for fault in faults if not fault.is_join}
        return faults

    def _form(self, at: Seconds, what: str) -> str:
        """Assign those that are left, from `at` on; return why the job cannot go on."""
        ended, from_checkpoint = self._now, False
        while True:
            self._advance(at)
            choice = self._decide()
            found, pause, why = choice.assignment, choice.pause, choice.why
            if found is None:
                at, from_checkpoint = self._devices.next_at, True
                if at == math.inf:
                    return self._stopped("every pipeline had lost a device")
                continue
            if not from_checkpoint and (lost := self._lost_shard()):
                self._now = at
                return self._stopped(lost)
            if self._devices.next_loss_at > at + pause:
                break
            at = self._devices.next_loss_at + NOTICE
        try:
            self._replicas = self._replicas_of(found)
        except PlanError as error:  # it does not fit into memory
            self._now = at
            return self._stopped(error.wrong)
        self._assignment, self._first, self._now = found, found.first, at + pause
        self._rerouting, self._workers = choice.rerouting, choice.workers
        if self._running is None and not self._known <= self._devices.present:
            what = "devices are missing"
        if what:
            self._changes.append(EpochChange(at=ended, resumed=self._now, what=what, why=why))
        return ""

    def _stopped(self, why: str) -> str:
        last = max((end for ends in self._totals.ends for end in ends), default=0.0)
        return f"no pipeline could continue after {last:.4g} s: {why}"

    def _decide(self) -> _Choice:
        kept = self._kept()
        pause = 0.0 if self._running is None else RECONNECT
        why = "" if kept is None else kept.why
        planned = self._job.planned
        left = self._known & self._devices.present
        if self._replans and planned is not None and left != _devices_of(self._first):
            decision = decide_after_loss(
                (kept or self._assignment).plan,
                left,
                planned.problem,
                steps=self._num_steps - self._num_done,
            )
            why = f"{why}; {decision.why}" if why else decision.why
            if decision.plan is not None:
                found = first_assignment(decision.plan)
                return _Choice(found, pause + decision.pause, why, None, found.workers)
        if self._reroutes and (rerouted := self._rerouted()).rerouting is not None:
            before, workers = rerouted.before, rerouted.workers
            pause += self._copy_time(before, workers)
            return _Choice(before, pause, rerouted.why, rerouted.rerouting, workers)
        if kept is None:
            return _Choice(None, pause, why)
        return _Choice(kept, pause + self._copy_time(kept, kept.workers), why, None, kept.workers)

    def _rerouted(self) -> RerouteDecision:
        """Decide whether micro-batches are rerouted around lost workers."""
        before = self._before()
        times = self._grid_times(before)
        return decide_rerouting(
            before,
            self._members(),
            times,
            max_in_flight=self._max_in_flight(before.plan),
        )

    def _grid_times(self, assignment: Assignment) -> GridTimes:
        stages, replicas = self._stages_of(assignment.plan), self._replicas_of(assignment)
        return grid_times(self._job.cluster, stages, replicas)

    def _max_in_flight(self, plan: Plan) -> tuple[int, ...] | None:
        """Return how many micro-batches fit on each stage; None if memory is not known."""
        if self._job.planned is None:
            return None
        problem, size, batch = self._job.planned.problem, plan.microbatch_size, plan.batch
        assert size is not None, "it was predicted"
        assert batch is not None, "it was predicted"
        fits = [
            [
                problem.max_in_flight(
                    problem.index[part.device],
                    plan.layers(part.first),
                    size,
                    batch // size,
                    recomputed_layers(plan, part),
                    num_pipelines=plan.num_pipelines,
                )
                for part in pipeline.parts
            ]
            for pipeline in plan.pipelines
        ]
        return tuple(max(1, min(of_stage)) for of_stage in zip(*fits, strict=True))

    def _members(self) -> list[int]:
        """Return the members that are present."""
        return [
            rank
            for rank in range(self._first.num_workers)
            if _device(self._first, rank) in self._devices.present
        ]

    def _before(self) -> Assignment:
        """Return the assignment that the next one follows from; the first if devices returned."""
        known = {*self._members()} <= {*self._assignment.members}
        return self._assignment if known else first_assignment(self._first)

    def _kept(self) -> Assignment | None:
        """Return the assignment of the devices that are present, with their layers kept."""
        return assign_survivors(self._before(), self._members())

    def _would_grow(self) -> bool:
        """Whether devices that have returned are of use."""
        choice = self._decide()
        if choice.assignment is None:
            return False
        is_divided_anew = choice.assignment.first is not self._first
        return is_divided_anew or len(choice.workers) > len(self._workers)

    def _is_member(self, device: str) -> bool:
        return any(_device(self._first, rank) == device for rank in self._assignment.members)

    def _lost_shard(self) -> str:
        """Return which shard of the optimizer's state is lost; empty if none is.

        In decoupled, a replica's buddy is the next one, and has a copy of its shard.
        """
        before, ran = self._running, self._ran
        if before is None or not self._job.decoupled:
            return ""
        for stage in range(before.plan.num_stages):
            replicas = sorted((m for m in ran if ran[m].stage == stage), key=ran.__getitem__)
            names = [_device(before.first, member) for member in replicas]
            for name, buddy in zip(names, [*names[1:], names[0]], strict=True):
                if not {name, buddy} & self._kept_state:
                    return f"{name} and its buddy {buddy} were lost before others had their shard"
        return ""

    def _copy_time(self, found: Assignment, workers: Mapping[int, Worker]) -> Seconds:
        """Return how long members without state, such as spares, copy that of another one.

        At the links' speeds in the cluster. Nothing is copied to a stage that nobody is left of.
        """
        before = self._running
        if before is None:
            return 0.0
        network = SimulatedNetwork(self._job.cluster, self._job.gateways)
        index = {name: number for number, name in enumerate(self._devices.names)}
        place = {member: index[_device(found.first, member)] for member in workers}
        stages, longest = self._stages_of(found.plan), 0.0
        holders = {m for m in self._ran if _device(before.first, m) in self._kept_state}
        for member in workers.keys() - holders:
            stage = workers[member].stage
            work = stages[stage]
            size = work.gradient_bytes if work.parameter_bytes is None else work.parameter_bytes
            times = [
                network.transfer(place[source], place[member], STATE_FACTOR * size)
                for source in workers.keys() & holders
                if workers[source].stage == stage
            ]
            longest = max(longest, min(times, default=0.0))
        return longest

    def _stages_of(self, plan: Plan) -> tuple[StageWork, ...]:
        planned = self._job.planned
        if planned is None:
            return self._job.stages
        assert plan.microbatch_size is not None, "it was predicted"
        return planned.problem.stages(plan.layers_per_stage, plan.microbatch_size, plan.recompute)

    def _job_of(self, assignment: Assignment) -> SimulatedJob:
        """Return the job of an epoch; its scenario has no losses."""
        job, plan, number = self._job, assignment.plan, self._number
        stages = self._stages_of(plan)
        scenario = replace(
            job.scenario,
            kill=(),
            join=(),
            link=tuple(sorted(job.scenario.link, key=lambda change: change.at)),
            seed=job.scenario.seed + (number - 1) * _OTHER_DRAWS,
        )
        return replace(
            job,
            stages=stages,
            pipelines=self._replicas,
            sync=replace(job.sync, num_stages=plan.num_stages, num_pipelines=plan.num_pipelines),
            num_buckets=job.num_buckets if job.planned is None else num_buckets(plan, stages),
            scenario=scenario,
            samples=None,
        )

    def _replicas_of(self, assignment: Assignment) -> tuple[Replica, ...]:
        """Return the pipelines of an epoch; their schedules are those of the job where they can.

        Raises PlanError if a device lacks memory.
        """
        plan, planned = assignment.plan, self._job.planned
        if planned is not None:
            return predict(plan, planned.problem).replicas
        of_device = {name: number for number, name in enumerate(self._devices.names)}
        known = {
            (pipeline.schedule, len(replica.runs), pipeline.num_microbatches): replica.schedule
            for pipeline, replica in zip(
                assignment.first.pipelines, self._job.pipelines, strict=True
            )
        }
        replicas = []
        for pipeline in plan.pipelines:
            parts, count = pipeline.parts, pipeline.num_microbatches
            assert count is not None, "each pipeline of the job has micro-batches"
            key = pipeline.schedule, len(parts), count
            if key not in known:
                known[key] = _build(pipeline.schedule, len(parts), count)
            runs = tuple(StageRun(of_device[part.device], part.first, part.end) for part in parts)
            replicas.append(Replica(runs=runs, schedule=known[key]))
        return tuple(replicas)

    def _samples_of(self, plan: Plan) -> list[float]:
        """Return the samples per step of each pipeline; together they are always the batch."""
        numbers = [pipeline.num_microbatches or 0 for pipeline in plan.pipelines]
        job = self._job
        batch = sum(job.samples or map(_num_microbatches, job.pipelines))
        return [batch * number / sum(numbers) for number in numbers]

    def _new_log(self, job: SimulatedJob) -> RunLog | None:
        if self._run is None:
            return None
        log = RunLog(self._run, job, number=self._number, first_step=self._num_done)
        self._log = self._log or log
        return log


def _plan_of(job: SimulatedJob) -> Plan:
    """Return the plan of the job; without one, each pipeline keeps its in-flight limits."""
    sync = "decoupled" if job.decoupled else "all_reduce"  # `balanced` is no sync of plans
    if job.planned is not None:
        return replace(job.planned.plan, sync=sync)
    pipelines = []
    for replica in job.pipelines:
        limits = ",".join(str(peak_in_flight(actions)) for actions in replica.schedule)
        pipelines.append(
            PipelinePlan(
                devices=tuple(
                    job.cluster.devices[run.device].name
                    for run in replica.runs
                    for _ in range(run.first, run.end)
                ),
                num_microbatches=_num_microbatches(replica),
                schedule=f"bounded:{limits}",
            )
        )
    return Plan(layers_per_stage=(1,) * len(job.stages), pipelines=tuple(pipelines), sync=sync)


def _build(schedule: str, num_parts: int, num_microbatches: int) -> Schedule:
    spec = ScheduleSpec.parse("1f1b" if schedule == AUTO else schedule)
    return spec.build(num_stages=num_parts, num_microbatches=num_microbatches)


def _num_microbatches(replica: Replica) -> int:
    return len(replica.schedule[0]) // 2


def _devices_of(plan: Plan) -> set[str]:
    return {name for pipeline in plan.pipelines for name in pipeline.devices}


def _device(first: Plan, member: int) -> str:
    """Return the device of a process, by its rank in the first plan."""
    worker = first.worker(member)
    return first.pipelines[worker.pipeline].devices[worker.stage]
