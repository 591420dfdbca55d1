"""Order the actions of workers whose micro-batches take routes through several pipelines.

A greedy list scheduler runs the step in virtual time: whenever a worker is idle, it takes one of
the messages that have arrived, and what it takes is its list. So its idle time is filled by
micro-batches of other pipelines. It runs a forward while fewer micro-batches than its limit are in
flight, but after a forward it prefers a backward; of several it takes the one that is earliest in
its batch. More micro-batches in flight on the stages up to the last hole let the workers there run
ahead, and never wait for gradients; the search raises those limits while that shortens the step.

Why no list deadlocks: messages between two workers are used in the order in which they are sent,
and the lists, together with the messages, follow the order of time in which they were made; so no
action waits for a later one, whatever the times are when they run. And the greedy run itself ends:
a last stage with anything in flight runs its backward; if it has nothing in flight, it runs what
has arrived, since all limits are at least 1; once it has run all that the stage before it has sent,
the gradients of that stage's micro-batches in flight have been sent, and so on up to the first.
"""

import heapq
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from polyrhythm.cost.memory import peak_in_flight
from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes
from polyrhythm.errors import ScheduleError
from polyrhythm.plan.routes import GridTimes, Routes, least_length
from polyrhythm.schedule.limits import limits_for, one_f_one_b_limits
from polyrhythm.types import Action, Op, Seconds, Worker

_GOOD_ENOUGH = 1.01  # times the bound: no longer search is worth its time
_SHORTER = 0.995  # times the best length: less is not worth the memory
_MAX_FRUITLESS = 2  # limits raised without a shorter step


class RoutedAction(NamedTuple):
    """An action of a micro-batch of a pipeline, which its worker may not belong to."""

    op: Op
    pipeline: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op}{self.microbatch}p{self.pipeline}"


RoutedActions = Mapping[Worker, tuple[RoutedAction, ...]]


@dataclass(frozen=True, kw_only=True)
class Rerouting:
    """Routes, and the list of actions of each worker."""

    routes: Routes
    actions: RoutedActions
    length: Seconds  # of a step, as predicted

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """The most micro-batches in flight per stage, of all its workers."""
        peaks = [0] * self.routes.num_stages
        for worker, actions in self.actions.items():
            plain = [Action(op, microbatch) for op, _, microbatch in actions]
            peaks[worker.stage] = max(peaks[worker.stage], peak_in_flight(plain))
        return tuple(peaks)

    def source(self, worker: Worker, action: RoutedAction) -> Worker | None:
        """Return who sends what an action needs; None if it needs no message."""
        stage = worker.stage + (-1 if action.op is Op.F else 1)
        return self._neighbour(stage, action)

    def target(self, worker: Worker, action: RoutedAction) -> Worker | None:
        """Return who gets the result of an action; None if nobody does."""
        stage = worker.stage + (1 if action.op is Op.F else -1)
        return self._neighbour(stage, action)

    def _neighbour(self, stage: int, action: RoutedAction) -> Worker | None:
        if not 0 <= stage < self.routes.num_stages:
            return None
        return self.routes.worker(stage, action.pipeline, action.microbatch)


def order_actions(
    routes: Routes, times: GridTimes, *, max_in_flight: Sequence[int] | None = None
) -> Rerouting:
    """Return lists of actions with a short step.

    `max_in_flight` is how many micro-batches fit into the memory of a worker of each stage; no
    list has more. None allows twice as many as 1F1B with these transfers. Without lost workers
    nothing is gained over a schedule.
    """
    usual = _usual_limits(routes, times)
    most = tuple(2 * limit for limit in usual) if max_in_flight is None else tuple(max_in_flight)
    if len(most) != routes.num_stages or min(most) < 1:
        raise ScheduleError(
            f"max_in_flight={most}",
            expected=f"at least 1 micro-batch on each of {routes.num_stages} stages",
            fix="use smaller micro-batches, or give the stages more memory",
        )
    enough = _GOOD_ENOUGH * least_length(routes, times)
    best: Rerouting | None = None
    num_fruitless = 0
    for limits in _raised_limits(usual, most, max((w.stage for w in routes.lost), default=-1)):
        run = _GreedyRun(routes, times, limits)
        run.finish()
        actions = {worker: tuple(run.actions[worker]) for worker in routes.workers}
        num_fruitless += 1
        if best is None or run.now < best.length * _SHORTER:
            best, num_fruitless = Rerouting(routes=routes, actions=actions, length=run.now), 0
        if best.length <= enough or num_fruitless > _MAX_FRUITLESS:
            break
    assert best is not None, "there is at least one choice of limits"
    return best


def _usual_limits(routes: Routes, times: GridTimes) -> tuple[int, ...]:
    """Return limits per stage that hide the slowest transfers, as without a loss."""
    if (period := max(map(times.per_microbatch, routes.workers))) <= 0:
        return one_f_one_b_limits(routes.num_stages)
    transfers = [0.0] * (routes.num_stages - 1)
    for route in {route for of_pipeline in routes.by_pipeline for route in of_pipeline}:
        for stage, transfer in enumerate(transfers):
            a, b = (Worker(s, route[s]) for s in (stage, stage + 1))
            both = times.link(a, b).transfer + times.link(b, a).transfer
            transfers[stage] = max(transfer, both / 2)
    return limits_for(period=period, transfers=transfers)


def _raised_limits(
    usual: tuple[int, ...], most: tuple[int, ...], last_hole: int
) -> Iterator[tuple[int, ...]]:
    """Yield the usual limits, then more and more for the stages up to the last hole."""
    previous: tuple[int, ...] = ()
    for more in range(max(most) + 1):
        raised = [limit + more * (stage <= last_hole) for stage, limit in enumerate(usual)]
        limits = tuple(map(min, raised, most))
        if limits == previous:
            return
        previous = limits
        yield limits


class _Message(NamedTuple):
    """What an action has sent, or that it has ended; ordered by time, then by number."""

    at: Seconds
    number: int
    worker: Worker
    action: RoutedAction
    source: Worker | int  # or the pipeline whose batch it is from; the worker itself: it has ended


class _GreedyRun:
    """One step in virtual time, in which workers choose their actions."""

    def __init__(self, routes: Routes, times: GridTimes, limits: Sequence[int]) -> None:
        self._routes, self._times, self._limits = routes, times, limits
        self.now: Seconds = 0.0
        self.actions: dict[Worker, list[RoutedAction]] = {w: [] for w in routes.workers}
        self._in_flight = dict.fromkeys(routes.workers, 0)
        self._is_busy = dict.fromkeys(routes.workers, False)
        # By worker and operation, then by sender: messages in the order sent.
        self._arrived: dict[tuple[Worker, Op], dict[Worker | int, deque[RoutedAction]]] = {
            (worker, op): {} for worker in routes.workers for op in Op
        }
        self._free: dict[tuple[Worker, Worker], Seconds] = {}  # links
        self._means: dict[tuple[Worker, Worker], tuple[Seconds, Seconds]] = {}
        self._events: list[_Message] = []
        self._num_events = 0
        for pipeline, of_pipeline in enumerate(routes.by_pipeline):
            for microbatch, route in enumerate(of_pipeline):
                action = RoutedAction(Op.F, pipeline, microbatch)
                self._add(0.0, Worker(0, route[0]), action, pipeline)

    def finish(self) -> None:
        """Run all actions; `now` is the end of the last one."""
        while self._events:
            self.now, idle = self._events[0].at, set[Worker]()
            while self._events and self._events[0].at == self.now:
                message = heapq.heappop(self._events)
                worker, action, source = message[2:]
                idle.add(worker)
                if source == worker:
                    self._is_busy[worker] = False
                    self._send(worker, action)
                else:
                    queues = self._arrived[worker, action.op]
                    queues.setdefault(source, deque()).append(action)
            for worker in sorted(idle):
                if not self._is_busy[worker]:
                    self._begin_action(worker)

    def _begin_action(self, worker: Worker) -> None:
        is_full = self._in_flight[worker] >= self._limits[worker.stage]
        done = self.actions[worker]
        order = [Op.F, Op.B] if not done or done[-1].op is Op.B else [Op.B, Op.F]
        for op in order:
            queues = [queue for queue in self._arrived[worker, op].values() if queue]
            if queues and not (op is Op.F and is_full):
                action = min(queues, key=lambda queue: self._progress(queue[0])).popleft()
                done.append(action)
                self._in_flight[worker] += 1 if op is Op.F else -1
                self._is_busy[worker] = True
                self._add(self.now + self._times.duration(worker, op), worker, action, worker)
                return

    def _progress(self, action: RoutedAction) -> tuple[float, int]:
        """Return the fraction of its batch before a micro-batch; then the pipeline."""
        size = self._routes.num_microbatches[action.pipeline]
        return action.microbatch / size, action.pipeline

    def _send(self, worker: Worker, action: RoutedAction) -> None:
        op, pipeline, microbatch = action
        stage = worker.stage + (1 if op is Op.F else -1)
        if stage < 0:
            return
        if stage == self._routes.num_stages:  # its own backward follows, without a message
            queues = self._arrived[worker, Op.B]
            queues.setdefault(worker, deque()).append(action._replace(op=Op.B))
            return
        target = self._routes.worker(stage, pipeline, microbatch)
        link = worker, target
        if link not in self._means:
            known = self._times.link(*link)
            self._means[link] = known.transfer - known.latency, known.latency
        busy, latency = self._means[link]
        self._free[link] = max(self._free.get(link, 0.0), self.now) + busy
        self._add(self._free[link] + latency, target, action, worker)

    def _add(self, at: Seconds, worker: Worker, action: RoutedAction, source: Worker | int) -> None:
        self._num_events += 1
        heapq.heappush(self._events, _Message(at, self._num_events, worker, action, source))


def replay(
    rerouting: Rerouting, times: GridTimes, ready: Mapping[Worker, Seconds] | None = None
) -> dict[Worker, tuple[Seconds, ...]]:
    """Return when each action ends if the lists run with other times.

    `ready` is the time at which each worker may start, by default 0. Raises ScheduleError for a
    deadlock. Messages between two workers are sent and used in one order: see `check_rerouting`.
    """
    arrivals: dict[tuple[Worker, RoutedAction], Seconds] = {}
    free: dict[tuple[Worker, Worker], Seconds] = {}
    ends: dict[Worker, list[Seconds]] = {worker: [] for worker in rerouting.actions}
    runnable = deque(sorted(rerouting.actions))
    while runnable:
        worker = runnable.popleft()
        actions, done = rerouting.actions[worker], ends[worker]
        while len(done) < len(actions):
            action = actions[len(done)]
            now = done[-1] if done else (ready or {}).get(worker, 0.0)
            if rerouting.source(worker, action) is not None:
                if (worker, action) not in arrivals:
                    break
                now = max(now, arrivals[worker, action])
            done.append(now + times.duration(worker, action.op))
            if (target := rerouting.target(worker, action)) is not None:
                link = times.link(worker, target)
                busy = link.transfer - link.latency
                free[worker, target] = max(free.get((worker, target), 0.0), done[-1]) + busy
                arrivals[target, action] = free[worker, target] + link.latency
                runnable.append(target)
    stuck = [w for w in sorted(ends) if len(ends[w]) < len(rerouting.actions[w])]
    if stuck:
        named = [f"{w} before {rerouting.actions[w][len(ends[w])]}" for w in stuck]
        raise ScheduleError(
            f"deadlock: {', '.join(named)} wait for messages that are never sent",
            expected="workers that can all finish their lists",
            fix="order the lists with order_actions",
        )
    return {worker: tuple(of_worker) for worker, of_worker in ends.items()}


def check_rerouting(rerouting: Rerouting) -> None:
    """Raise ScheduleError unless the lists can be executed with any times.

    Each worker runs forward and backward of its micro-batches once, in this order. Messages between
    two workers are used in the order in which they are sent. And there is no deadlock.
    """
    routes, actions = rerouting.routes, rerouting.actions
    expected: dict[Worker, set[tuple[int, int]]] = {worker: set() for worker in routes.workers}
    for pipeline, of_pipeline in enumerate(routes.by_pipeline):
        for microbatch, route in enumerate(of_pipeline):
            for stage, runs_at in enumerate(route):
                expected[Worker(stage, runs_at)].add((pipeline, microbatch))
    for worker, own in expected.items():
        _check_complete(worker, actions.get(worker, ()), own)
    sent: dict[tuple[Worker, Worker], list[RoutedAction]] = {}
    used: dict[tuple[Worker, Worker], list[RoutedAction]] = {}
    for worker in routes.workers:
        for action in actions[worker]:
            if (target := rerouting.target(worker, action)) is not None:
                sent.setdefault((worker, target), []).append(action)
            if (source := rerouting.source(worker, action)) is not None:
                used.setdefault((source, worker), []).append(action)
    for (source, target), in_order in sorted(sent.items()):
        if used[source, target] != in_order:
            raise ScheduleError(
                f"{target} uses the messages of {source} in another order than they are sent: "
                f"{' '.join(map(str, used[source, target]))}",
                expected=f"the order {' '.join(map(str, in_order))}",
                fix="order the lists with order_actions",
            )
    nothing = PipelineTimes(
        forward=(0.0,) * routes.num_stages,
        backward=(0.0,) * routes.num_stages,
        activations=(LinkTimes(busy=(0.0,)),) * (routes.num_stages - 1),
        gradients=(LinkTimes(busy=(0.0,)),) * (routes.num_stages - 1),
    )
    replay(rerouting, GridTimes(pipelines=(nothing,) * routes.num_pipelines))


def _check_complete(
    worker: Worker, actions: Sequence[RoutedAction], expected: Collection[tuple[int, int]]
) -> None:
    every = sorted(RoutedAction(op, *each) for op in Op for each in expected)
    if sorted(actions) != every:
        raise ScheduleError(
            f"{worker} runs {' '.join(map(str, actions)) or 'nothing'}",
            expected="forward and backward of each of its micro-batches, once",
            fix="order the lists with order_actions",
        )
    places = {action: place for place, action in enumerate(actions)}
    for pipeline, microbatch in expected:
        forward, backward = (RoutedAction(op, pipeline, microbatch) for op in (Op.F, Op.B))
        if places[backward] < places[forward]:
            raise ScheduleError(
                f"{worker} runs {backward} before {forward}",
                expected=f"{forward} first",
                fix="order the lists with order_actions",
            )
