"""Measure round trips with UDP echoes and goodput with TCP, by agents on the lab's hosts."""

import math
import time
from collections.abc import Sequence
from typing import Self

from polyrhythm.describe.cluster import Cluster
from polyrhythm.errors import PeerError
from polyrhythm.lab.agent import (
    ECHO_GAP,
    EXTRA_TIMEOUT,
    PACKET,
    Agent,
    Echo,
    MeasureWindow,
    MedianEchoTime,
    NoTask,
    Receive,
    Send,
    Task,
)
from polyrhythm.lab.channel import MIN_QUEUE, QUEUE_TIME
from polyrhythm.lab.lab import Lab
from polyrhythm.processes import end_all
from polyrhythm.types import BytesPerSecond, Seconds

Pair = tuple[str, str]  # source host, target host

NUM_ECHOES = 25
START_TIMEOUT: Seconds = 60.0  # longest wait for one more agent to start

_Agents = tuple[list[Agent], list[Agent]]  # at the sources, at the targets
_Tasks = tuple[Task, Task]  # at the source, at the target

_PORT = 7000
_INITIAL_WINDOW = 10  # segments that TCP sends before the first acknowledgement (RFC 6928)
_BURST = 8 * PACKET  # a host's smallest burst: tcp_min_tso_segs


def window_for(cluster: Cluster, pairs: Sequence[Pair]) -> MeasureWindow:
    """Return a window in which the slowest pair is past slow start and its rate is steady."""
    settle = length = loss_timeout = 0.0
    for a, b in pairs:
        link, round_trip = cluster.link(a, b), described_round_trip(cluster, (a, b))
        segments_in_flight = link.bandwidth * round_trip / PACKET
        doublings = math.log2(max(1.0, segments_in_flight / _INITIAL_WINDOW))
        settle = max(settle, 0.3 + (3 + doublings) * round_trip)
        length = max(length, 1.0, 4 * round_trip, 50 * _BURST / link.bandwidth)
        # A resent packet waits for the whole queue, maybe repeatedly: bursts are lost together.
        loss_timeout = max(loss_timeout, 3 * (round_trip + QUEUE_TIME + MIN_QUEUE / link.bandwidth))
    return MeasureWindow(settle, length, loss_timeout)


def described_round_trip(cluster: Cluster, pair: Pair) -> Seconds:
    a, b = pair
    return cluster.link(a, b).latency + cluster.link(b, a).latency


class Meter:
    """Measure in one lab repeatedly; the measuring processes end with the `with` block."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._agents: list[Agent] = []
        self._idle: dict[str, list[Agent]] = {host: [] for host in lab.hosts}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        end_all([agent.child for agent in self._agents])
        for agent in self._agents:
            agent.connection.close()

    def round_trips(self, pairs: Sequence[Pair], num_echoes: int = NUM_ECHOES) -> list[Seconds]:
        """Measure the round trips of all pairs concurrently."""
        longest = max(described_round_trip(self._lab.cluster, pair) for pair in pairs)
        agents = self._start_agents(pairs)
        deadline = time.monotonic() + num_echoes * ECHO_GAP + longest + EXTRA_TIMEOUT
        tasks: list[_Tasks] = [
            (MedianEchoTime(num_echoes, deadline, address), Echo(deadline, address[1]))
            for address in self._addresses(pairs)
        ]
        return self._run("round trip", agents, tasks, deadline)[0]

    def goodput(
        self, pairs: Sequence[Pair], window: MeasureWindow | None = None
    ) -> list[BytesPerSecond]:
        """Measure the goodput of all pairs concurrently; then wait until the links are empty."""
        window = window or window_for(self._lab.cluster, pairs)
        agents = self._start_agents(pairs)
        begin = time.monotonic() + window.settle
        # A pair that connects as late as `begin + EXTRA_TIMEOUT` still gets a whole window.
        longest = EXTRA_TIMEOUT + window.settle + window.length + 2 * window.loss_timeout
        deadline = begin + longest + EXTRA_TIMEOUT
        tasks: list[_Tasks] = [
            (Send(deadline, address), Receive(begin, window, address[1]))
            for address in self._addresses(pairs)
        ]
        _, rates = self._run("goodput", agents, tasks, deadline)
        self._drain(pairs)
        return rates

    def _start_agents(self, pairs: Sequence[Pair]) -> _Agents:
        """Return agents that run: to start many takes seconds on a slow machine."""
        targets = [self._idle_agent(b) for _, b in pairs]
        sources = [self._idle_agent(a) for a, _ in pairs]
        for agent in [*sources, *targets]:
            agent.submit("starting", NoTask())
        for agent in [*sources, *targets]:
            agent.result(time.monotonic() + START_TIMEOUT)
        return sources, targets

    def _idle_agent(self, host: str) -> Agent:
        """Return an idle agent of the host, or a new one if all of its agents are busy."""
        if idle := self._idle.get(host):
            return idle.pop()
        self._agents.append(Agent(self._lab, host))
        return self._agents[-1]

    def _addresses(self, pairs: Sequence[Pair]) -> list[tuple[str, int]]:
        """Return the address of each pair's target: every pair has its own port."""
        return [(self._lab.address(b), _PORT + number) for number, (_, b) in enumerate(pairs)]

    def _run(
        self, action: str, agents: _Agents, tasks: Sequence[_Tasks], deadline: Seconds
    ) -> tuple[list[float], list[float]]:
        """Run both tasks of every pair; return the results of all sources and of all targets."""
        sources, targets = agents
        for agent, (_, task) in zip(targets, tasks, strict=True):
            agent.submit(action, task)
        for agent, (task, _) in zip(sources, tasks, strict=True):
            agent.submit(action, task)
        # One second more: a task's own timeout has the more precise error.
        results = [agent.result(deadline + 1.0) for agent in [*sources, *targets]]
        for agent in [*sources, *targets]:
            self._idle[agent.host].append(agent)
        return results[: len(sources)], results[len(sources) :]

    def _drain(self, pairs: Sequence[Pair]) -> None:
        """Wait until the queues are empty: left-over packets would delay the next measurement."""
        cluster, start = self._lab.cluster, time.monotonic()
        slowest = min(cluster.link(*pair).bandwidth for pair in pairs)
        while queued := max((pair.backlog for pair in self._lab.report().pairs), default=0):
            waited = time.monotonic() - start
            if waited > EXTRA_TIMEOUT + 2 * (QUEUE_TIME + MIN_QUEUE / slowest):
                cause = f"{queued} bytes are still queued"
                raise PeerError("the links", action="emptying them", waited=waited, cause=cause)
            time.sleep(0.05)
        time.sleep(max(cluster.link(*pair).latency for pair in pairs))
