"""The compiled part from outside: made of a job, told what to do, asked what happened."""

import warnings
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from polyrhythm.cost.step import Schedule
from polyrhythm.simulate.engine import execute, sharing
from polyrhythm.simulate.engine.hosts import DRAWS, free_flows, made_hosts, made_pauses, made_slow
from polyrhythm.simulate.engine.state import (
    CHANNEL,
    HEAP_FULL,
    MEETS,
    NEEDS_LUCK,
    NO_LIMIT,
    NONE,
    NOTHING,
    NUM_ACTIONS,
    NUM_EVENTS,
    NUM_RECORDS,
    RECORD,
    RECORDS_FULL,
    RUN,
    Records,
    State,
    referred,
)
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.types import Action, Op, Seconds

_RECORDS = 65_536


class Happened(NamedTuple):
    """STEP_ENDED of a run, or FLOWS_ENDED of an owner."""

    kind: int
    of: int
    time: Seconds


class Record(NamedTuple):
    """An action that was executed."""

    run: int
    action: Action
    step: int
    start: Seconds
    end: Seconds
    waited: Seconds  # for its message, before


class Engine:
    def __init__(self, job: SimulatedJob, *, records: bool = False) -> None:
        self.first_run = [0, *accumulate(len(pipeline.runs) for pipeline in job.pipelines)]
        self._lists: dict[int, tuple[int, list[int]]] = {}  # where the actions of a schedule begin
        self._kept: list[Schedule] = []  # so that no other gets the identity of one
        actions: list[int] = []
        runs, channels = self._runs(job, actions)
        hosts = made_hosts(job.cluster)
        slow, self._chances, bins = made_slow(job.scenario, job.cluster, hosts)
        pauses = made_pauses(job.scenario, job.cluster, hosts)
        most = max(len(one) // 2 for pipeline in job.pipelines for one in pipeline.schedule)
        places = max(most, *(limit + 1 for limit in job.in_flight or (0,)))
        num_flows = 4 * len(runs) + 4 * len(job.pipelines) * len(job.stages)
        regions = len(job.cluster.regions)
        places_on_heap = 4 * (len(runs) + num_flows) + 256
        # Messages of a step that are sent anew while others wait: two steps' worth at the most.
        self.state = State(
            runs=runs,
            hosts=hosts,
            channels=channels,
            flows=free_flows(num_flows),
            slow=slow,
            records=np.zeros(_RECORDS if records else 0, RECORD),
            actions=np.array(actions, np.int64),
            inbox=np.full((2, len(runs), places), np.inf),
            queues=np.zeros((len(channels), 2 * places), np.int64),
            links=np.array([job.cluster.latency, job.cluster.bandwidth], np.float64),
            sent=np.zeros((regions, regions)),
            luck=np.zeros((len(slow), DRAWS)),
            bins=bins,
            pauses=pauses,
            owners=np.zeros(num_flows, np.int64),
            counts=np.zeros(7, np.int64),
            times=np.zeros(places_on_heap),
            sequences=np.zeros(places_on_heap, np.int64),
            codes=np.zeros(places_on_heap, np.int64),
        )
        self._compiled = referred(self.state)
        connected = (hosts["up"][:-1] < NO_LIMIT).any() or (hosts["down"][:-1] < NO_LIMIT).any()
        self.shares = bool(connected or job.scenario.link)  # connections, or links that change
        self._next: Seconds = 0.0  # nothing happens before
        self._free_owners = list(range(num_flows - 1, -1, -1))
        self._records: list[Record] = []
        self._told: set[int] = set()  # entries whose trace is known to have ended

    @property
    def num_events(self) -> int:
        return int(self.state.counts[NUM_EVENTS])

    @property
    def num_actions(self) -> int:
        return int(self.state.counts[NUM_ACTIONS])

    def advance(self, until: Seconds) -> Happened | None:
        """The next that others decide about; None if that is after `until`."""
        while self._next <= until:
            kind, index, time = execute.advance(self._compiled, until, self.shares)
            if kind == NOTHING:
                self._next = time
                return None
            if kind == NEEDS_LUCK:
                self._draw(index)
            elif kind == HEAP_FULL:
                self._grow()
            elif kind == RECORDS_FULL:
                self._records.extend(self._taken_records())
            else:
                return Happened(kind, index, time)
        return None

    def release(self, run: int, time: Seconds, gate: Seconds = 0.0) -> None:
        """It begins its next step; the first forward does not end before `gate`."""
        self._next = min(self._next, time)
        execute.release(self._compiled, run, time, gate)

    def stop(self, run: int) -> None:
        execute.stop(self._compiled, run)

    def restart(self, run: int, time: Seconds) -> None:
        """One that was gone begins a step, with an empty pipeline."""
        self.state.runs[run]["step"] = -1
        self.release(run, time)

    def set_schedule(self, run: int, schedule: Schedule, place: int) -> None:
        """From its next step on."""
        first, lengths = self._list(schedule, None)
        state = self.state.runs[run]
        state["list"] = first + sum(lengths[:place])
        state["num_actions"] = lengths[place]

    def new_owner(self) -> int:
        return self._free_owners.pop()

    def free_owner(self, owner: int) -> None:
        self._free_owners.append(owner)

    def flows_to_many(
        self,
        now: Seconds,
        sources: Sequence[int],
        size: float,
        most: Sequence[float],
        num_targets: int,
        owner: int,
    ) -> None:
        """Of so many bytes each, in all, and no faster than `most`."""
        self._next = now
        given = np.array(sources), size, np.array(most), float(num_targets), owner
        execute.flows_to_many(self._compiled, now, *given)

    def flow_to_one(self, now: Seconds, source: int, target: int, size: float, owner: int) -> None:
        self._next = now
        execute.flow_to_one(self._compiled, now, source, target, size, owner)

    def change_link(
        self, now: Seconds, source: int, target: int, latency: Seconds, bandwidth: float
    ) -> None:
        """From one region to another, from now on."""
        self._next = now
        self.state.links[:, source, target] = latency, bandwidth
        sharing.change_rates(self._compiled, now)

    def last_action(self, run: int) -> tuple[Seconds, Seconds]:
        """When the last action of the step that it has ended began, and ended."""
        state = self.state.runs[run]
        assert state["at"] == MEETS, "its step has ended"
        return float(state["last_began"]), float(state["since"])

    def began(self, run: int) -> Seconds:
        """Its step."""
        return float(self.state.runs[run]["began"])

    def take_records(self) -> list[Record]:
        """Of all that was executed since the last time, in the order in which it ended."""
        found = [*self._records, *self._taken_records()]
        self._records = []
        return found

    def _taken_records(self) -> list[Record]:
        count = int(self.state.counts[NUM_RECORDS])
        self.state.counts[NUM_RECORDS] = 0
        return [
            Record(run, Action(Op.B if code & 1 else Op.F, code >> 1), step, start, end, waited)
            for run, code, step, start, end, waited in self.state.records[:count].tolist()
        ]

    def _draw(self, device: int) -> None:
        hosts = self.state.hosts
        for entry in range(hosts[device]["slow"], hosts[device + 1]["slow"]):
            self.state.luck[entry] = self._chances[entry].random_sample(DRAWS)
            self.state.slow[entry]["used"] = 0
        self.warn_of_traces()

    def warn_of_traces(self) -> None:
        """Of those that have ended, once."""
        for entry in np.flatnonzero(self.state.slow["has_ended"]).tolist():
            if not self._told:
                warnings.warn(
                    "a trace has ended before the simulation: held at its last value", stacklevel=2
                )
            self._told.add(entry)

    def _grow(self) -> None:
        columns = {
            name: np.concatenate([column, np.zeros_like(column)])
            for name, column in self.state._asdict().items()
            if name in ("times", "sequences", "codes")
        }
        self._replace(**columns)

    def _replace(self, **arrays: Any) -> None:
        self.state = self.state._replace(**arrays)
        self._compiled = referred(self.state)

    def _runs(self, job: SimulatedJob, actions: list[int]) -> tuple[Records, Records]:
        speeds = [device.speed for device in job.cluster.devices]
        runs, channels = (
            np.zeros(self.first_run[-1], RUN),
            np.zeros(2 * self.first_run[-1], CHANNEL),
        )
        for first, pipeline in zip(self.first_run, job.pipelines, strict=False):
            start, lengths = self._list(pipeline.schedule, actions)
            last = len(pipeline.runs) - 1
            for place, (device, stage, end) in enumerate(pipeline.runs):
                index, work = first + place, job.stages[stage:end]
                run = runs[index]
                run["device"] = device
                run["before"] = index - 1 if place else NONE
                run["after"] = index + 1 if place < last else NONE
                run["forward"] = sum(one.forward for one in work) / speeds[device]
                run["backward"] = sum(one.backward for one in work) / speeds[device]
                run["list"], run["num_actions"] = start + sum(lengths[:place]), lengths[place]
                run["in_flight"] = job.in_flight[place] if job.in_flight else 0
                run["step"], run["at"] = -1, MEETS
                down, up = channels[2 * index], channels[2 * index + 1]
                down["source"] = up["source"] = index
                down["target"], up["target"] = index + 1, index - 1
                down["size"] = work[-1].activation_bytes
                up["size"] = job.stages[stage - 1].activation_bytes if stage else 0.0
        return runs, channels

    def _list(self, schedule: Schedule, actions: list[int] | None) -> tuple[int, list[int]]:
        """Where its actions begin, and how many each stage has."""
        key = id(schedule)
        if key not in self._lists:
            self._kept.append(schedule)
            codes = [
                2 * action.microbatch + (action.op is Op.B) for one in schedule for action in one
            ]
            if actions is None:
                first = len(self.state.actions)
                longer = np.concatenate([self.state.actions, np.array(codes, np.int64)])
                self._replace(actions=longer)
            else:
                first = len(actions)
                actions.extend(codes)
            self._lists[key] = first, [len(one) for one in schedule]
        return self._lists[key]
