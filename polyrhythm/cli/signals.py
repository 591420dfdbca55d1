"""Being terminated is an ending like any other: `with` and `finally` get their turn."""

import signal
import sys

from polyrhythm.processes import TERMINATED


def exit_on_sigterm() -> None:
    """Not for a process of torchrun: while gloo waits no Python handler runs, and it must end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
