"""Child processes that have an owner: forked to run one function, and gone when the owner is.

A child leads a session of its own, so that ending it ends whatever it started. The kernel kills it
when its owner ends, however that happens. Its exit status says why it ended.
"""

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from polyrhythm.errors import PeerError, UserError
from polyrhythm.types import Seconds

# Exit statuses of a child; a negative one is the signal that ended it.
FAILED, BAD_INPUT, PEER_LOST = 1, 2, 3

_fork = multiprocessing.get_context("fork")


class Child:
    """`work` in a forked process; its stdout and stderr go to `output` where one is given."""

    def __init__(
        self,
        work: Callable[[], object],
        *,
        output: Path | None = None,
        dies_with_owner: bool = True,
    ) -> None:
        self.output = output
        owner = os.getpid() if dies_with_owner else None
        self._process = _fork.Process(target=_run, args=(work, owner, output))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "it was started in __init__"
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """Becomes ready when the child ends."""
        return self._process.sentinel

    @property
    def status(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: Seconds) -> int | None:
        """Its exit status, or None if it still runs after `timeout`."""
        self._process.join(timeout)
        return self.status

    def signal(self, what: signal.Signals) -> None:
        """To the child and everything it started; nothing happens if they are gone."""
        try:
            os.killpg(self.pid, what)
        except ProcessLookupError:  # gone, or so young that it leads no session yet
            if self.status is None:
                os.kill(self.pid, what)

    def end(self) -> None:
        """Kill it and what it started, and see it gone."""
        self.signal(signal.SIGKILL)
        self._process.join()

    @property
    def reason(self) -> str:
        """Why it ended, in words."""
        status = self.status
        if status is None or status == 0:
            return "still runs" if status is None else "ended well"
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        text = self.output.read_text(errors="replace").strip() if self.output else ""
        if status == BAD_INPUT and text:
            return f"refused: {text}"
        unindented = [line for line in text.splitlines() if line[:1].strip()]
        return f"failed: {unindented[-1] if unindented else f'exit status {status}'}"


def wait_for_any(children: Sequence[Child], timeout: Seconds) -> None:
    """Return when one of the running `children` ends, none runs, or `timeout` has passed."""
    running = [child.sentinel for child in children if child.status is None]
    if running:
        multiprocessing.connection.wait(running, max(0.0, timeout))


def wait_for_all(children: Sequence[Child], timeout: Seconds) -> bool:
    """Whether all have ended within `timeout`."""
    ends = time.monotonic() + timeout
    return all(child.wait(max(0.0, ends - time.monotonic())) is not None for child in children)


def _die_with(owner: int) -> None:
    """Ask the kernel for SIGKILL when the owner, our parent, ends (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != owner:  # it ended before we asked
        os._exit(FAILED)


def _run(work: Callable[[], object], owner: int | None, output: Path | None) -> None:
    os.setsid()
    if owner is not None:
        _die_with(owner)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if output is not None:
        sys.stdout = sys.stderr = output.open("w", buffering=1)  # the owner may have replaced them
        for descriptor in (1, 2):
            os.dup2(sys.stdout.fileno(), descriptor)
    status = FAILED
    try:
        work()
        status = 0
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else FAILED
    except UserError as error:
        print(error, file=sys.stderr)
        status = BAD_INPUT
    except PeerError:
        traceback.print_exc()
        status = PEER_LOST
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # without the owner's exit handlers
