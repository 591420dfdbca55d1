"""An agent: a process on a host that does what it is asked, one thing after another, and answers.

One process for many requests: forking anew for every pair of hosts would take longer than most
measurements, and leave a file open for each.
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

Task = Callable[..., float]  # a function of a module, or a partial one: it is sent by its name


class Agent:
    """`ask`, then `answer`: meanwhile others work too."""

    def __init__(self, lab: Lab, host: str) -> None:
        self.host = host
        self._action, self._asked = "nothing", 0.0
        self.connection, other_end = multiprocessing.Pipe()
        self.child = lab.spawn(host, _serve, other_end)
        other_end.close()  # the agent's is the only one, so that its death is seen at once

    def ask(self, action: str, task: Task, *args: object) -> None:
        """`action` says in an error what was going on."""
        self._action, self._asked = action, time.monotonic()
        self.connection.send((task, args))

    def answer(self, deadline: Seconds) -> float:
        """Of the last task asked for; `deadline` is a time of time.monotonic(). Raises PeerError."""
        try:
            if not self.connection.poll(max(0.0, deadline - time.monotonic())):
                raise self._lost("no answer")
            value, wrong = self.connection.recv()
        except (EOFError, ConnectionError):
            self.child.wait(1.0)
            raise self._lost(f"its process {self.child.reason}") from None
        if wrong is not None:
            raise self._lost(wrong)
        return float(value)

    def _lost(self, cause: str) -> PeerError:
        waited = time.monotonic() - self._asked
        return PeerError(f"host {self.host}", action=self._action, waited=waited, cause=cause)


class AgentPool:
    """As many agents on each host as are busy at once."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._all: list[Agent] = []
        self._idle: dict[str, list[Agent]] = {host: [] for host in lab.hosts}

    def acquire(self, host: str) -> Agent:
        """One that nobody else uses; give it back after its answer."""
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
        except OSError as error:  # of the network: what it was asked to find out about
            wrong = str(error)
        connection.send((value, wrong))
