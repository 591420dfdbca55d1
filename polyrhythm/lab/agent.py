"""An agent: a process on a host that runs submitted tasks one by one and returns their results.

One process serves many tasks: a fork for every pair of hosts would take longer than most
measurements, and each would leave a file open.
"""

import math
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from polyrhythm.errors import PeerError
from polyrhythm.lab.lab import Lab
from polyrhythm.processes import end_all
from polyrhythm.types import Seconds

Task = Callable[..., float]  # a module's function, or a partial of one: pickled by name


class Agent:
    """One process on a host. Call `submit`, then `result`; agents work concurrently."""

    def __init__(self, lab: Lab, host: str) -> None:
        self.host = host
        self._action, self._submitted_at = "nothing", 0.0
        self.connection, other_end = multiprocessing.Pipe()
        self.child = lab.spawn(host, _serve, other_end)
        other_end.close()  # only the agent holds it open: its death closes the pipe at once

    def submit(self, action: str, task: Task, *args: object) -> None:
        """Start the task; a PeerError of `result` names `action`."""
        self._action, self._submitted_at = action, time.monotonic()
        self.connection.send((task, args))

    def result(self, deadline: Seconds) -> float:
        """Return the last task's result by `deadline` (time.monotonic()), or raise PeerError."""
        try:
            if not self.connection.poll(max(0.0, deadline - time.monotonic())):
                raise self._lost("no result")
            value, wrong = self.connection.recv()
        except (EOFError, ConnectionError):
            self.child.wait(1.0)
            raise self._lost(f"its process {self.child.reason}") from None
        if wrong is not None:
            raise self._lost(wrong)
        return float(value)

    def _lost(self, cause: str) -> PeerError:
        waited = time.monotonic() - self._submitted_at
        return PeerError(f"host {self.host}", action=self._action, waited=waited, cause=cause)


class AgentPool:
    """Reusable agents: a host gets a new one only when all of its agents are busy."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._all: list[Agent] = []
        self._idle: dict[str, list[Agent]] = {host: [] for host in lab.hosts}

    def acquire(self, host: str) -> Agent:
        """Return an idle agent of the host, or start one; release it after its result."""
        if idle := self._idle.get(host):
            return idle.pop()
        agent = Agent(self._lab, host)
        self._all.append(agent)
        return agent

    def release(self, agent: Agent) -> None:
        self._idle[agent.host].append(agent)

    def end(self) -> None:
        end_all([agent.child for agent in self._all])
        for agent in self._all:
            agent.connection.close()


def _serve(connection: Connection) -> None:
    while True:
        task, args = connection.recv()
        value, wrong = math.nan, None
        try:
            value = task(*args)
        except OSError as error:  # a network error is a result, not a crash
            wrong = str(error)
        connection.send((value, wrong))
