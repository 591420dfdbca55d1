"""The processes on a host: whoever is in its network namespace, however it got there.

A process group would not do: a shell with job control, `timeout`, or a visitor from another
terminal leads a group of its own, and must end with the lab all the same.
"""

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

_ROUNDS = 20  # of looking for processes that were started while others were being signalled


def namespace_id(descriptor: int) -> int:
    return os.fstat(descriptor).st_ino


def namespace_pids(namespace: int) -> set[int]:
    """Process ids in the network namespace with this id."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _is_inside(int(folder.name), namespace):
            found.add(int(folder.name))
    return found


def signal_namespace(namespace: int, what: signal.Signals, others: Iterable[int] = ()) -> None:
    """Signal everybody in the namespace, also who is started meanwhile, and `others`."""
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
    # The descriptor fixes who is meant: looked at again through it, the number cannot have been
    # given to another process in between.
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
    except OSError:  # it has ended, or belongs to somebody else
        return False
