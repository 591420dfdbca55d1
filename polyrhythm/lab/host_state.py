"""The state of each host (dead, cut off, paused) and the signals to its processes."""

import os
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from polyrhythm.lab.host_processes import namespace_pids, signal_namespace


class HostStates:
    """The state of all hosts, by number; `namespaces` are the ids of their namespaces."""

    def __init__(self, namespaces: Sequence[int]) -> None:
        self._namespaces = namespaces
        self._starting: dict[int, int] = {}  # process id: the host that it is about to move to
        self._dead: set[int] = set()
        self._cut_off: set[int] = set()
        self._pauses: Counter[int] = Counter()

    def add_process(self, pid: int, host: int) -> None:
        """Kill or pause a process that is about to enter the host, if the host is in that state."""
        self._starting = {p: h for p, h in self._starting.items() if _parent(p) is not None}
        self._starting[pid] = host
        if host in self._dead:
            self._signal(host, signal.SIGKILL)
        elif self._pauses[host]:
            self._signal(host, signal.SIGSTOP)

    def kill(self, host: int, *, silent: bool) -> None:
        self._dead.add(host)
        if silent:
            self._cut_off.add(host)  # first: peers must not receive the kernel's FIN or RST
        self._signal(host, signal.SIGKILL)

    def revive(self, host: int) -> None:
        self._dead.discard(host)
        self._cut_off.discard(host)

    def pause(self, host: int, *, paused: bool) -> None:
        self._pauses[host] = max(0, self._pauses[host] + (1 if paused else -1))
        self._signal(host, signal.SIGSTOP if self._pauses[host] else signal.SIGCONT)

    def is_dead(self, host: int) -> bool:
        return host in self._dead

    def pauses(self, host: int) -> int:
        return self._pauses[host]

    def is_cut_off(self, host: int) -> bool:
        return host in self._cut_off

    def count(self, host: int) -> int:
        return len(namespace_pids(self._namespaces[host]))

    def end(self) -> None:
        """Kill all processes on all hosts."""
        for host in range(len(self._namespaces)):
            self._signal(host, signal.SIGKILL)

    def _signal(self, host: int, what: signal.Signals) -> None:
        # A child of our parent is not reaped yet, so its process id is not reused.
        owner = os.getppid()
        starting = [p for p, h in self._starting.items() if h == host and _parent(p) == owner]
        signal_namespace(self._namespaces[host], what, starting)


def _parent(pid: int) -> int | None:
    """Return the parent's process id; None if the process does not exist."""
    try:
        # The program's name, in brackets, may contain anything: parse what follows it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1])
