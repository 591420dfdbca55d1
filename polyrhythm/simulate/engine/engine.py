"""The interface of the compiled engine: starts runs and flows, returns events."""

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
from polyrhythm.simulate.engine.hosts import DRAWS
from polyrhythm.simulate.engine.state import (
    HEAP_FULL,
    NEEDS_DRAWS,
    NONE,
    NOTHING,
    NUM_RECORDS,
    RECORDS_FULL,
    SYNCING,
    as_struct,
)
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.types import Action, BytesPerSecond, Op, Seconds


class EngineEvent(NamedTuple):
    """STEP_ENDED of a run, or FLOWS_ENDED of an owner, which is the `entity`."""

    kind: int
    entity: int
    time: Seconds


class BucketArrivals(NamedTuple):
    """Arrival times of the buckets that a forward waits for, evenly from the first to the last.

    A forward ends at the later of two times: it waits for the first bucket and for no other; or it
    waits for the last bucket, and then computes the fraction of the forward that this one is.
    """

    first: Seconds = 0.0
    last: Seconds = 0.0
    bucket_fraction: float = 1.0  # of the forward, per bucket


NO_WAIT = BucketArrivals()


class ActionRecord(NamedTuple):
    """An executed action."""

    run: int
    action: Action
    step: int
    start: Seconds
    end: Seconds
    waited: Seconds  # for its message, before the start


class Engine:
    def __init__(self, job: SimulatedJob, *, records: bool = False) -> None:
        self.first_run, self._lists = first_runs(job), ActionLists()
        self.state, self._rngs, self._traces = make_state(job, self._lists, records=records)
        self._compiled = as_struct(self.state)
        # Messages are flows if uplinks are known or links change; averages are flows, too, if
        # several share a host.
        self._shares = bool(self.state.hosts["is_known"].any() or job.scenario.link)
        several = any(run.end - run.first > 1 for p in job.pipelines for run in p.runs)
        self.averages_share = self._shares or several or job.sync.mode.has_server
        self._use_fast_path = not (self._shares or job.scenario.kill or job.scenario.join)
        self._next: Seconds = 0.0  # lower bound of the next event
        self._free_owners = list(range(len(self.state.owners) - 1, -1, -1))
        self._records: list[ActionRecord] = []
        self._has_warned = not (self.state.slow["bins"] != NONE).any()  # of a trace that has ended

    def advance(self, until: Seconds) -> EngineEvent | None:
        """Return the next event for the simulator; None if there is none by `until`."""
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
                self._drain_records()
            else:
                return EngineEvent(kind, index, time)
        return None

    def release(self, run: int, time: Seconds, buckets: BucketArrivals = NO_WAIT) -> None:
        """Start the next step of a run."""
        if time < self._next:
            self._next = time
        execute.release(self._compiled, run, time, *buckets)

    def stop(self, run: int) -> None:
        """Stop a lost run and discard its events."""
        execute.stop(self._compiled, run)

    def restart(self, run: int, time: Seconds, number: int) -> None:
        """Restart a run with an empty pipeline; `number` is that of its first complete step."""
        state = self.state.runs[run]
        state["step"], state["first"] = -1, number - max(0, int(state["in_flight"]) - 1)
        self.release(run, time)

    def set_schedule(self, run: int, schedule: Schedule, place: int) -> None:
        """Set the schedule of a run from its next step on."""
        state = self.state.runs[run]
        state["list"], state["num_actions"] = self._lists.place(schedule, place)
        if len(self._lists.actions) > len(self.state.actions):
            self._replace(actions=np.array(self._lists.actions, np.int64))

    def new_owner(self) -> int:
        """Return a new owner of flows; FLOWS_ENDED follows when its last flow has ended."""
        if not self._free_owners:
            count = len(self.state.owners)
            self._free_owners = list(range(2 * count - 1, count - 1, -1))
            self._replace(owners=np.concatenate([self.state.owners, np.zeros(count, np.int64)]))
        return self._free_owners.pop()

    def free_owner(self, owner: int) -> None:
        self._free_owners.append(owner)

    def drop_flows(self, now: Seconds, owner: int) -> None:
        """Drop all flows of an owner."""
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
        """Start a flow of `size` bytes per source, up to `max_rate`; each counts as `weight`."""
        self._next = now
        self._reserve(len(sources))
        args = np.array(sources), size, np.array(max_rate), float(weight), owner
        execute.flows_to_many(self._compiled, now, *args)

    def flow_to_one(self, now: Seconds, source: int, target: int, size: float, owner: int) -> None:
        self._next = now
        self._reserve(1)
        execute.flow_to_one(self._compiled, now, source, target, size, owner)

    def change_rates(
        self, now: Seconds, max_rate: Mapping[tuple[int, int], BytesPerSecond]
    ) -> None:
        """Update all flows to the current links; `max_rate` is for flows to many receivers."""
        self._next = now
        self._reserve(0)
        for flow in self.state.flows:
            if flow["source"] != NONE and flow["target"] == NONE:
                flow["max_rate"] = max_rate[int(flow["owner"]), int(flow["source"])]
        flows.change_rates(self._compiled, now)

    def last_action(self, run: int) -> tuple[Seconds, Seconds]:
        """Start and end of the last action of a run whose step has ended."""
        state = self.state.runs[run]
        assert state["status"] == SYNCING, f"the step of run {run} has not ended"
        return float(state["last_start"]), float(state["since"])

    def take_records(self) -> list[ActionRecord]:
        """Records of all actions since the last call; for each run in the order of time.

        A pipeline on the fast path also has actions that end later than now.
        """
        self._drain_records()
        records, self._records = self._records, []
        return records

    def warn_of_traces(self) -> None:
        """Warn once if a trace has ended."""
        if not self._has_warned and self.state.slow["has_ended"].any():
            self._has_warned = True
            entry = int(self.state.slow["has_ended"].argmax())
            name, end = self._traces[entry]
            warnings.warn(
                f"the trace {name!r} has ended after {show(end, Seconds)}: held at its last value",
                stacklevel=2,
            )

    def _drain_records(self) -> None:
        count = int(self.state.counts[NUM_RECORDS])
        self.state.counts[NUM_RECORDS] = 0
        for run, code, *rest in self.state.records[:count].tolist():
            action = Action(Op.B if code & 1 else Op.F, code >> 1)
            self._records.append(ActionRecord(run, action, *rest))

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
