"""The state of each host (dead, cut off, paused) and the signals to its processes.

The processes of a host are those in its network namespace. A process group is not enough: a shell
with job control, `timeout`, or a process attached from another terminal leads its own group, and
must end with the lab, too.
"""

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

_ROUNDS = 20  # of searching for processes that were started while others were being signalled


class HostStates:
    """The state of all hosts, by number; `namespaces` are the ids of their namespaces."""

    def __init__(self, namespaces: Sequence[int]) -> None:
        self._namespaces = namespaces
        self._starting: dict[int, int] = {}  # process id: the host that it is about to move to
        self.dead: set[int] = set()
        self.disconnected: set[int] = set()
        self.pauses: Counter[int] = Counter()

    def add_process(self, pid: int, host: int) -> None:
        """Kill or pause a process that is about to enter the host, if the host is in that state."""
        self._starting = {p: h for p, h in self._starting.items() if _parent(p) is not None}
        self._starting[pid] = host
        if host in self.dead:
            self._signal(host, signal.SIGKILL)
        elif self.pauses[host]:
            self._signal(host, signal.SIGSTOP)

    def kill(self, host: int, *, silent: bool) -> None:
        self.dead.add(host)
        if silent:
            self.disconnected.add(host)  # first: peers must not receive the kernel's FIN or RST
        self._signal(host, signal.SIGKILL)

    def revive(self, host: int) -> None:
        self.dead.discard(host)
        self.disconnected.discard(host)

    def pause(self, host: int, *, paused: bool) -> None:
        self.pauses[host] = max(0, self.pauses[host] + (1 if paused else -1))
        self._signal(host, signal.SIGSTOP if self.pauses[host] else signal.SIGCONT)

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


def namespace_id(descriptor: int) -> int:
    return os.fstat(descriptor).st_ino


def namespace_pids(namespace: int) -> set[int]:
    """Return the ids of the processes in the network namespace with this id."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _is_inside(int(folder.name), namespace):
            found.add(int(folder.name))
    return found


def signal_namespace(namespace: int, what: signal.Signals, others: Iterable[int] = ()) -> None:
    """Signal all processes in the namespace, also those started meanwhile, and `others`."""
    for pid in others:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, what)
    done: set[int] = set()
    for _ in range(_ROUNDS):
        new = namespace_pids(namespace) - done
        if not new:
            return
        for pid in new:
            _signal_if_inside(pid, namespace, what)
        done |= new


def _signal_if_inside(pid: int, namespace: int, what: signal.Signals) -> None:
    # The pidfd pins the process: after the check, the id cannot belong to another process.
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        try:
            if _is_inside(pid, namespace):
                signal.pidfd_send_signal(process, what)
        finally:
            os.close(process)


def _is_inside(pid: int, namespace: int) -> bool:
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino == namespace
    except OSError:  # the process has ended, or belongs to another user
        return False
