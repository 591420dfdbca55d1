"""Child processes with an owner: each is forked to run one function and ends with its owner.

A child leads its own session, so that ending it ends all processes that it started. The kernel
kills it when its owner ends, even by a kill. Its exit status tells why it ended.
"""

import contextlib
import ctypes
import gc
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, TextIO

from polyrhythm.errors import PeerError, SingleWorkerError, UserError
from polyrhythm.types import Seconds

# Exit statuses of a child; a negative one is the signal that ended it. Programs have their own
# statuses, so these are unlikely numbers.
FAILED, BAD_INPUT, PEER_LOST, FENCED, FAILED_ALONE = 1, 222, 223, 224, 225
TERMINATED = 128 + signal.SIGTERM  # as in a shell: a clean exit after SIGTERM
INTERRUPTED = 128 + signal.SIGINT  # and after Ctrl-C

_fork = multiprocessing.get_context("fork")
_OUR_MODULE = re.compile(r"^polyrhythm\.\w+\.")  # of an error's class


class FencedError(PeerError):
    """This process is no longer a member of its job, which goes on without it."""


class Failure(NamedTuple):
    """The error that ended a child, and where the user's code raised it, if it did."""

    summary: str = ""
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        if isinstance(error, PeerError):  # the peer has the cause
            return cls(str(error))
        if not isinstance(error, UserError):
            summary = traceback.format_exception_only(error)[-1].strip()
            return cls(summary, _user_traceback(error))
        cause = error.__cause__
        is_users = cause is not None and not isinstance(cause, UserError | PeerError)
        return cls(str(error), _user_traceback(cause) if is_users and cause else "")


def _user_traceback(error: BaseException) -> str:
    """Format an error without the frames before the user's code."""
    found = traceback.TracebackException.from_exception(error)
    ours = (str(Path(__file__).parent), "<frozen ")
    first = next((i for i, f in enumerate(found.stack) if not f.filename.startswith(ours)), 0)
    found.stack = traceback.StackSummary.from_list(found.stack[first:])
    return "".join(found.format())


def is_loss(status: int) -> bool:
    """Whether others may go on without a process of this exit status.

    Another process has ended it, or it has an error that the others do not have.
    """
    return status < 0 or status in (FENCED, FAILED_ALONE, TERMINATED, INTERRUPTED)


def reserve_port() -> socket.socket:
    """Reserve a port of this machine for a server of a child, until the socket is closed.

    A port that was only free a moment ago may be given to any connection before the server has it.
    The kernel gives no connection a port that is bound; but a server that reuses addresses, as
    those of torch do, may bind it, too, since nobody listens there.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


class Child:
    """A forked process that runs `work`; its stdout and stderr go to `output`, if given.

    With `keeps_failure` its error is for the owner, who reads `failure`, and for `output`.
    """

    def __init__(
        self,
        work: Callable[[], object],
        *,
        output: Path | None = None,
        dies_with_owner: bool = True,
        keeps_failure: bool = False,
    ) -> None:
        self.output = output
        self._failure_file: IO[str] | None = None
        if keeps_failure:
            self._failure_file = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed when read
        self._failure = Failure()
        owner = os.getpid() if dies_with_owner else None
        # Opened by the owner, so that the file exists at once and the owner gets an error.
        file = None if output is None else output.open("w", buffering=1)
        self._process = _fork.Process(target=_run, args=(work, owner, file, self._failure_file))
        with _no_collection():
            self._process.start()
        assert self._process.pid is not None, "it was started"
        self.pid = self._process.pid
        self._status: int | None = None
        if file is not None:
            file.close()

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the child ends."""
        return self._process.sentinel

    @property
    def status(self) -> int | None:
        """The exit status; None while the child runs."""
        if self._status is None and (status := self._process.exitcode) is not None:
            self._status = status
            self._process.close()  # and with it a descriptor
            self._read_failure()
        return self._status

    @property
    def failure(self) -> Failure:
        """The error that ended the child; empty if it ended otherwise, or still runs."""
        return self._failure if self.status is not None else Failure()

    def _read_failure(self) -> None:
        """Take the error from the file and close it, when the child has ended."""
        if self._failure_file is not None:
            with self._failure_file as file:
                file.seek(0)
                text = file.read()
            self._failure_file = None
            with contextlib.suppress(ValueError):  # killed, or out of disk, while it was written
                self._failure = Failure(*json.loads(text)) if text else Failure()

    def wait(self, timeout: Seconds) -> int | None:
        """Return the exit status, or None if the child still runs after `timeout`."""
        if self.status is None:
            self._process.join(timeout)
        return self.status

    def signal(self, what: signal.Signals) -> None:
        """Signal the child and all processes that it started, if they still exist."""
        if self.status is not None and Path(f"/proc/{self.pid}").exists():
            return  # the process id belongs to another process now: none of ours is left
        try:
            os.killpg(self.pid, what)
        except ProcessLookupError:  # ended, or so new that it leads no session yet
            if self.status is None:
                os.kill(self.pid, what)

    def end(self) -> None:
        """Kill the child and all processes that it started, and wait for its end."""
        end_all([self])

    @property
    def reason(self) -> str:
        """Why the child ended, as text."""
        status = self.status
        if status is None or status == 0:
            return "still runs" if status is None else "ended well"
        if status < 0:
            return f"was ended by {signal_name(-status)}"
        text = self.failure.summary
        if not text and self.output is not None and self.output.exists():
            text = self.output.read_text(errors="replace").strip()
        if status == BAD_INPUT and text:
            return f"refused: {text}"
        if status == FAILED_ALONE and text:
            return f"failed: {text}"
        unindented = [line for line in text.splitlines() if line[:1].strip()]
        if not unindented or status not in (FAILED, PEER_LOST, FENCED):
            return f"failed: exit status {status}"
        return f"failed: {_OUR_MODULE.sub('', unindented[-1])}"


def end_all(children: Sequence[Child]) -> None:
    """Kill all children and the processes that they started, and wait for their ends."""
    for child in children:  # stopped first: a survivor would report the others as lost
        child.signal(signal.SIGSTOP)
    for child in children:
        child.signal(signal.SIGKILL)
    for child in children:
        while child.wait(1.0) is None:  # SIGKILL cannot be refused, only delayed
            pass


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have none
        return f"signal {number}"


def exit_on_sigterm() -> None:
    """From now on, exit with status 143 on SIGTERM, so that `with` and `finally` blocks run.

    Not for torchrun's processes: no Python handler runs while gloo waits, and they must end.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))


def wait_for_any(children: Sequence[Child], timeout: Seconds) -> None:
    """Return when one of the running `children` ends, none runs, or `timeout` has passed."""
    # Children whose end was not seen yet, without a new check: a child that ends between the
    # caller's check and this one would be skipped here, and the caller would wait for the others.
    running = [child.sentinel for child in children if child._status is None]
    if running:
        multiprocessing.connection.wait(running, max(0.0, timeout))


def wait_for_all(children: Sequence[Child], timeout: Seconds) -> bool:
    """Return whether all children end within `timeout`."""
    ends = time.monotonic() + timeout
    return all(child.wait(max(0.0, ends - time.monotonic())) is not None for child in children)


def _die_with(owner: int) -> None:
    """Ask the kernel for SIGKILL when the owner, our parent, ends (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != owner:  # the owner ended before the request
        os._exit(FAILED)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def _run(
    work: Callable[[], object],
    owner: int | None,
    file: TextIO | None,
    failure_file: IO[str] | None,
) -> None:
    # No collection in this process touches, and so copies, the owner's objects, or ends one that
    # waits for a thread of the owner, such as a store: this process has no such thread.
    gc.freeze()
    gc.enable()
    os.setsid()
    if owner is not None:
        _die_with(owner)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if file is not None:
        sys.stdout = sys.stderr = file  # the owner may have replaced them
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    status = FAILED
    with contextlib.suppress(OSError):  # a full disk is no failure of the work
        status, error = _status_of(work)
        if error is not None and failure_file is not None:
            json.dump(Failure.of(error), failure_file)
            failure_file.flush()
        if error is not None and (failure_file is None or file is not None):
            _print_error(error)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)  # without the owner's exit handlers


def _status_of(work: Callable[[], object]) -> tuple[int, BaseException | None]:
    try:
        work()
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0, None
        print(leaving.code, file=sys.stderr)
        return FAILED, None
    except SingleWorkerError as error:
        return FAILED_ALONE, error
    except UserError as error:
        return BAD_INPUT, error
    except FencedError as error:
        return FENCED, error
    except PeerError as error:
        return PEER_LOST, error
    except BaseException as error:
        return FAILED, error
    return 0, None


def _print_error(error: BaseException) -> None:
    if isinstance(error, UserError):
        failure = Failure.of(error)
        print(failure.traceback + failure.summary, file=sys.stderr)
    else:
        traceback.print_exception(error)
