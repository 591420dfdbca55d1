"""A process on a host and all that it started: signalled together, never taken for another."""

import contextlib
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Session:
    """`pid` leads a session; a descriptor taken while it lives tells it from a later namesake."""

    host: int
    pid: int
    _handle: int | None = field(init=False)

    def __post_init__(self) -> None:
        try:
            self._handle = os.pidfd_open(self.pid)
        except ProcessLookupError:  # over before we heard of it
            self._handle = None

    def is_alive(self) -> bool:
        """Alive, or at least not yet reaped by its parent."""
        if self._handle is None:
            return False
        try:
            signal.pidfd_send_signal(self._handle, 0)
        except ProcessLookupError:
            os.close(self._handle)
            self._handle = None
            return False
        return True

    def signal(self, what: signal.Signals) -> None:
        # While anything of the session is left its number is not given away; once another process
        # has the number, nothing of the session is left.
        if self.is_alive() or not Path(f"/proc/{self.pid}").exists():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, what)
