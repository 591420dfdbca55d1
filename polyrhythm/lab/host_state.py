"""Who is on the hosts, and what has befallen each host: dead, cut off, paused, or none of these."""

import os
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from polyrhythm.lab.host_processes import namespace_pids, signal_namespace


class HostStates:
    """Hosts are numbers; `namespaces` are the ids of their network namespaces."""

    def __init__(self, namespaces: Sequence[int]) -> None:
        self._namespaces = namespaces
        self._starting: dict[int, int] = {}  # process id: the host that it is about to move to
        self._dead: set[int] = set()
        self._cut_off: set[int] = set()
        self._pauses: Counter[int] = Counter()

    def add_process(self, pid: int, host: int) -> None:
        """A process that is about to move to a host shares its fate."""
        self._starting = {p: h for p, h in self._starting.items() if _parent(p) is not None}
        self._starting[pid] = host
        if host in self._dead:
            self._signal(host, signal.SIGKILL)
        elif self._pauses[host]:
            self._signal(host, signal.SIGSTOP)

    def kill(self, host: int, *, silent: bool) -> None:
        self._dead.add(host)
        if silent:
            self._cut_off.add(host)  # first: nobody is to hear the kernel say goodbye
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
        """Kill everybody on every host."""
        for host in range(len(self._namespaces)):
            self._signal(host, signal.SIGKILL)

    def _signal(self, host: int, what: signal.Signals) -> None:
        # A number is surely still that of whom we mean while it is our own parent's child, which
        # has yet to be reaped.
        owner = os.getppid()
        starting = [p for p, h in self._starting.items() if h == host and _parent(p) == owner]
        signal_namespace(self._namespaces[host], what, starting)


def _parent(pid: int) -> int | None:
    """None if there is no such process."""
    try:
        # The name of the program, in brackets, may hold anything; what follows it does not.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1])
