"""Errors that state what was wrong, what was expected and how to fix it."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Self


class UserError(ValueError):
    """An error that the caller can fix."""

    def __init__(self, wrong: str, *, expected: str, fix: str) -> None:
        super().__init__(f"{wrong}\n  expected: {expected}\n  fix: {fix}")
        self.wrong, self.expected, self.fix = wrong, expected, fix

    def __reduce__(self) -> tuple[object, ...]:  # keyword arguments do not survive pickle otherwise
        return partial(type(self), self.wrong, expected=self.expected, fix=self.fix), ()

    def at(self, where: str) -> Self:
        """Return the same error prefixed with its location, such as a file and a key."""
        return type(self)(f"{where}: {self.wrong}", expected=self.expected, fix=self.fix)


class DescriptionError(UserError):
    """A cluster, model or scenario description that makes no sense."""


class PlanError(UserError):
    """A plan that its machines or its model cannot carry out."""


class ScheduleError(UserError):
    """A schedule that is incomplete, out of order, or would deadlock."""


class PolicyError(UserError):
    """A policy or sync mode that does not exist, cannot work here, or is used out of order."""


class EventError(UserError):
    """An event log that cannot be read."""


class LaunchError(UserError):
    """A job that cannot start with these settings on this machine."""


class TrainingError(UserError):
    """A training that cannot go on: memory ran out, or a loss or gradients are not finite."""


class SingleWorkerError(TrainingError):
    """A failure of one worker alone: it has no memory left, or its weights are not finite.

    A job that goes on after losses goes on without it.
    """


class LabError(UserError):
    """A lab that cannot be set up on this machine, or a host that it does not have."""


class PeerError(RuntimeError):
    """A peer that died or timed out."""

    def __init__(self, peer: str, *, action: str, waited: float, cause: str) -> None:
        super().__init__(f"lost {peer} during {action} after {waited:.1f} s: {cause}")
        self.peer, self.action, self.waited, self.cause = peer, action, waited, cause

    def __reduce__(self) -> tuple[object, ...]:
        rebuild = partial(PeerError, action=self.action, waited=self.waited, cause=self.cause)
        return rebuild, (self.peer,)


@contextmanager
def peer_errors(peer: object, action: str) -> Iterator[None]:
    """Turn a lost connection or a timeout of torch.distributed into a PeerError."""
    start = time.monotonic()
    try:
        yield
    except PeerError:
        raise
    except RuntimeError as error:  # gloo raises plain RuntimeErrors; torch's DistError is one
        if is_out_of_memory(error):  # of this process
            raise
        waited = time.monotonic() - start
        raise PeerError(str(peer), action=action, waited=waited, cause=short_cause(error)) from None


# Of torch's allocator of host memory (how it continues depends on the platform), of CUDA without
# torch's own allocator, of its libraries, and of NCCL.
_FAILED_ALLOCATIONS = (
    "DefaultCPUAllocator: ",
    "CUDA error: out of memory",
    "_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch or Python says that an allocation has failed."""
    is_known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    is_other = isinstance(error, RuntimeError) and any(
        text in str(error) for text in _FAILED_ALLOCATIONS
    )
    return is_known or is_other


def short_cause(error: RuntimeError) -> str:
    """Shorten an error of torch.distributed to one line."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    line = line.split(" This is typically")[0]  # gloo continues with a guess
    return re.sub(r"^\[\S+:\d+\] ", "", line)  # without the line of gloo's source


class WorkerError(RuntimeError):
    """A worker of a local job that ended before its work was done."""

    def __init__(
        self,
        rank: int,
        name: str,
        reason: str,
        *,
        status: int,
        output: str | None,
        traceback: str = "",
    ) -> None:
        details = "" if output is None else f"\n  its output: {output}"
        super().__init__(f"{name} {reason}{details}")
        self.rank, self.reason, self.status, self.output = rank, reason, status, output
        self.traceback = traceback  # of the user's code, if that raised
