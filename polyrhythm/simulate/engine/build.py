"""The initial state of a job: its runs, the channels between them, and capacity for events."""

from itertools import accumulate

import numpy as np

from polyrhythm.cost.step import Schedule
from polyrhythm.simulate.engine.capacity import free_flows
from polyrhythm.simulate.engine.hosts import DRAWS, make_hosts, make_pauses, make_slow
from polyrhythm.simulate.engine.state import (
    CHANNEL,
    NONE,
    RECORD,
    RUN,
    SYNCING,
    EngineState,
    Records,
)
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.types import Op, Seconds

_RECORDS = 65_536  # capacity for action records, if they are kept


class ActionLists:
    """The concatenated actions of all schedules."""

    def __init__(self) -> None:
        self.actions: list[int] = []
        self._known: dict[int, tuple[int, list[int]]] = {}  # by id: first action, and lengths
        self._kept: list[Schedule] = []  # so that no id is reused

    def place(self, schedule: Schedule, run: int) -> tuple[int, int]:
        """Index of the first action of a run, and the number of its actions."""
        key = id(schedule)
        if key not in self._known:
            self._kept.append(schedule)
            self._known[key] = len(self.actions), [len(actions) for actions in schedule]
            self.actions += [2 * m + (op is Op.B) for actions in schedule for op, m in actions]
        first, lengths = self._known[key]
        return first + sum(lengths[:run]), lengths[run]


def make_state(
    job: SimulatedJob, lists: ActionLists, *, records: bool
) -> tuple[EngineState, list["np.random.RandomState"], list[tuple[str | None, Seconds]]]:
    """Create the state; and a random generator, a trace and its end for each slowness entry."""
    runs, channels = _runs(job, lists)
    hosts = make_hosts(job.cluster)
    slow, rngs, traces, bins = make_slow(job.scenario, job.cluster, hosts)
    num_microbatches = max(len(a) // 2 for pipeline in job.pipelines for a in pipeline.schedule)
    inbox_size = max(num_microbatches, *(limit + 1 for limit in job.in_flight or (0,)))
    num_flows = 2 * len(channels)  # one message of each channel, and averages
    num_regions, num_events = len(job.cluster.regions), 4 * (len(runs) + num_flows) + 256
    state = EngineState(
        runs=runs,
        hosts=hosts,
        channels=channels,
        flows=free_flows(num_flows),
        slow=slow,
        records=np.zeros(_RECORDS if records else 0, RECORD),
        actions=np.array(lists.actions, np.int64),
        inbox=np.full((2, len(runs), inbox_size), np.inf),
        # A restarted run sends again while old messages wait: at most two steps of messages.
        queues=np.zeros((len(channels), 2 * inbox_size), np.int64),
        links=np.array([job.cluster.latency, job.cluster.bandwidth], np.float64),
        sent=np.zeros((num_regions, num_regions)),
        draws=np.zeros((len(slow), DRAWS)),
        bins=bins,
        pauses=make_pauses(job.scenario, job.cluster, hosts),
        owners=np.zeros(num_flows, np.int64),
        stack=np.zeros(len(runs), np.int64),
        counts=np.zeros(7, np.int64),
        times=np.zeros(num_events),
        sequences=np.zeros(num_events, np.int64),
        codes=np.zeros(num_events, np.int64),
    )
    return state, rngs, traces


def first_runs(job: SimulatedJob) -> list[int]:
    """The first run of each pipeline, and the number of all runs."""
    return [0, *accumulate(len(pipeline.runs) for pipeline in job.pipelines)]


def _runs(job: SimulatedJob, lists: ActionLists) -> tuple[Records, Records]:
    speeds = [device.speed for device in job.cluster.devices]
    firsts = first_runs(job)
    runs, channels = np.zeros(firsts[-1], RUN), np.zeros(2 * firsts[-1], CHANNEL)
    for first, pipeline in zip(firsts, job.pipelines, strict=False):
        last = len(pipeline.runs) - 1
        for i, (device, stage, end) in enumerate(pipeline.runs):
            index, work = first + i, job.stages[stage:end]
            run = runs[index]
            run["device"] = device
            run["before"] = index - 1 if i else NONE
            run["after"] = index + 1 if i < last else NONE
            run["forward"] = sum(s.forward for s in work) / speeds[device]
            run["backward"] = sum(s.backward for s in work) / speeds[device]
            run["list"], run["num_actions"] = lists.place(pipeline.schedule, i)
            run["in_flight"] = job.in_flight[i] if job.in_flight else 0
            run["step"], run["status"] = -1, SYNCING
            down, up = channels[2 * index], channels[2 * index + 1]
            down["source"] = up["source"] = index
            down["target"], up["target"] = index + 1, index - 1
            down["size"] = work[-1].activation_bytes
            up["size"] = job.stages[stage - 1].activation_bytes if stage else 0.0
    return runs, channels
