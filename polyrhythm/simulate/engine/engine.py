"""The compiled part from outside: made of a job, told what to do, asked what happened."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from polyrhythm.cost.step import Schedule
from polyrhythm.describe.units import show
from polyrhythm.simulate.engine import execute, flows
from polyrhythm.simulate.engine.build import ActionLists, first_runs, make_state
from polyrhythm.simulate.engine.capacity import (
    grow_events,
    grow_flows,
    needs_more_events,
    needs_more_flows,
)
from polyrhythm.simulate.engine.hosts import DRAWS, trace_names
from polyrhythm.simulate.engine.state import (
    HEAP_FULL,
    NEEDS_DRAWS,
    NONE,
    NOTHING,
    NUM_ACTIONS,
    NUM_EVENTS,
    NUM_RECORDS,
    RECORDS_FULL,
    SYNCING,
    as_struct,
)
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.types import Action, BytesPerSecond, Op, Seconds


class EngineEvent(NamedTuple):
    """STEP_ENDED of a run, or FLOWS_ENDED of an owner."""

    kind: int
    entity: int
    time: Seconds


class BucketArrivals(NamedTuple):
    """When buckets that a forward waits for are there, evenly from the first to the last.

    A forward that meets them one by one ends no sooner than if it had to wait for the first, and
    then for none, or for the last, with its part of the forward left to do.
    """

    first: Seconds = 0.0
    last: Seconds = 0.0
    bucket_fraction: float = 1.0  # of the forward, that a bucket is


NO_WAIT = BucketArrivals()


class ActionRecord(NamedTuple):
    """An action that was executed."""

    run: int
    action: Action
    step: int
    start: Seconds
    end: Seconds
    waited: Seconds  # for its message, before


class Engine:
    def __init__(self, job: SimulatedJob, *, records: bool = False) -> None:
        self.first_run, self._lists = first_runs(job), ActionLists()
        self.state, self._rngs = make_state(job, self._lists, records=records)
        self._compiled = as_struct(self.state)
        self._traces = trace_names(job.scenario, job.cluster)
        # Messages are flows, if their connections are known, or links change; averages are, too, if
        # they meet one another at a host.
        self._shares = bool(self.state.hosts["is_known"].any() or job.scenario.link)
        several = any(run.end - run.first > 1 for one in job.pipelines for run in one.runs)
        self.averages_share = self._shares or several or job.sync.policy == "ssp"
        self._use_fast_path = not (self._shares or job.scenario.kill or job.scenario.join)
        self._next: Seconds = 0.0  # nothing happens before
        self._free_owners = list(range(len(self.state.owners) - 1, -1, -1))
        self._records: list[ActionRecord] = []
        self._has_warned = not (self.state.slow["bins"] != NONE).any()  # that a trace has ended

    @property
    def num_events(self) -> int:
        return int(self.state.counts[NUM_EVENTS])

    @property
    def num_actions(self) -> int:
        return int(self.state.counts[NUM_ACTIONS])

    def advance(self, until: Seconds) -> EngineEvent | None:
        """The next that others decide about; None if that is after `until`."""
        while self._next <= until:
            kind, index, time = execute.advance(
                self._compiled, until, self._shares, self._use_fast_path
            )
            if kind == NOTHING:
                self._next = time
                return None
            if kind == NEEDS_DRAWS:
                self._draw(index)
            elif kind == HEAP_FULL:
                self._replace(**grow_events(self.state, 0))
            elif kind == RECORDS_FULL:
                self._records.extend(self._drain_records())
            else:
                return EngineEvent(kind, index, time)
        return None

    def release(self, run: int, time: Seconds, buckets: BucketArrivals = NO_WAIT) -> None:
        """It begins its next step."""
        if time < self._next:
            self._next = time
        execute.release(self._compiled, run, time, *buckets)

    def stop(self, run: int) -> None:
        """It is gone: nothing of it happens any more."""
        execute.stop(self._compiled, run)

    def restart(self, run: int, time: Seconds, number: int) -> None:
        """It begins with an empty pipeline; the first step that has gradients has this number."""
        state = self.state.runs[run]
        state["step"], state["first"] = -1, number - max(0, int(state["in_flight"]) - 1)
        self.release(run, time)

    def set_schedule(self, run: int, schedule: Schedule, place: int) -> None:
        """From its next step on."""
        state = self.state.runs[run]
        state["list"], state["num_actions"] = self._lists.place(schedule, place)
        if len(self._lists.actions) > len(self.state.actions):
            self._replace(actions=np.array(self._lists.actions, np.int64))

    def new_owner(self) -> int:
        """Of flows; FLOWS_ENDED when the last one of them has."""
        if not self._free_owners:
            count = len(self.state.owners)
            self._free_owners = list(range(2 * count - 1, count - 1, -1))
            self._replace(owners=np.concatenate([self.state.owners, np.zeros(count, np.int64)]))
        return self._free_owners.pop()

    def free_owner(self, owner: int) -> None:
        self._free_owners.append(owner)

    def drop_flows(self, now: Seconds, owner: int) -> None:
        """What an owner waits for is given up."""
        self._reserve(0)
        flows.drop_flows(self._compiled, now, owner)
        self.free_owner(owner)

    def flows_to_many(
        self,
        now: Seconds,
        sources: Sequence[int],
        size: float,
        max_rate: Sequence[BytesPerSecond],
        weight: float,
        owner: int,
    ) -> None:
        """Of so many bytes each, in all, no faster than `max_rate`; each stands for `weight` flows."""
        self._next = now
        self._reserve(len(sources))
        given = np.array(sources), size, np.array(max_rate), float(weight), owner
        execute.flows_to_many(self._compiled, now, *given)

    def flow_to_one(self, now: Seconds, source: int, target: int, size: float, owner: int) -> None:
        self._next = now
        self._reserve(1)
        execute.flow_to_one(self._compiled, now, source, target, size, owner)

    def set_link(
        self, source: int, target: int, latency: Seconds, bandwidth: BytesPerSecond
    ) -> None:
        """From one region to another."""
        self.state.links[:, source, target] = latency, bandwidth

    def change_rates(
        self, now: Seconds, max_rate: Mapping[tuple[int, int], BytesPerSecond]
    ) -> None:
        """Of all flows, by what links are now; `max_rate` of those to many, by owner and source."""
        self._next = now
        self._reserve(0)
        for flow in self.state.flows:
            if flow["source"] != NONE and flow["target"] == NONE:
                flow["max_rate"] = max_rate[int(flow["owner"]), int(flow["source"])]
        flows.change_rates(self._compiled, now)

    def last_action(self, run: int) -> tuple[Seconds, Seconds]:
        """When the last action of the step that it has ended began, and ended."""
        state = self.state.runs[run]
        assert state["status"] == SYNCING, "its step has ended"
        return float(state["last_began"]), float(state["since"])

    def take_records(self) -> list[ActionRecord]:
        """Of all that was executed since the last time; of each run in the order of time.

        Of a pipeline that runs ahead there are also actions that end later than now.
        """
        found = [*self._records, *self._drain_records()]
        self._records = []
        return found

    def warn_of_traces(self) -> None:
        """Of those that have ended, once."""
        if not self._has_warned and self.state.slow["has_ended"].any():
            self._has_warned = True
            entry = int(self.state.slow["has_ended"].argmax())
            name, ends = self._traces[entry]
            warnings.warn(
                f"the trace {name!r} has ended after {show(ends, Seconds)}: held at its last value",
                stacklevel=2,
            )

    def _drain_records(self) -> list[ActionRecord]:
        count = int(self.state.counts[NUM_RECORDS])
        self.state.counts[NUM_RECORDS] = 0
        return [
            ActionRecord(
                run, Action(Op.B if code & 1 else Op.F, code >> 1), step, start, end, waited
            )
            for run, code, step, start, end, waited in self.state.records[:count].tolist()
        ]

    def _draw(self, device: int) -> None:
        hosts = self.state.hosts
        for entry in range(hosts[device]["slow"], hosts[device + 1]["slow"]):
            self.state.draws[entry] = self._rngs[entry].random_sample(DRAWS)
            self.state.slow[entry]["used"] = 0
        self.warn_of_traces()

    def _reserve(self, num_flows: int) -> None:
        if needs_more_events(self.state, num_flows):
            self._replace(**grow_events(self.state, num_flows))
        if needs_more_flows(self.state, num_flows):
            self._replace(**grow_flows(self.state, num_flows))

    def _replace(self, **arrays: Any) -> None:
        self.state = self.state._replace(**arrays)
        self._compiled = as_struct(self.state)
