"""End on SIGTERM like on an exception, so that `with` and `finally` blocks run."""

import signal
import sys

from polyrhythm.processes import TERMINATED


def exit_on_sigterm() -> None:
    """Exit with status 143 on SIGTERM.

    Not for torchrun's processes: no Python handler runs while gloo waits, and they must end.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
