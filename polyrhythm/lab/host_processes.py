"""Find and signal the processes of a host: all processes in its network namespace.

A process group is not enough: a shell with job control, `timeout`, or a process attached from
another terminal leads its own group, and must end with the lab, too.
"""

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

_ROUNDS = 20  # of searching for processes that were started while others were being signalled


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
