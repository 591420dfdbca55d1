"""Several runs at the same time, each in a process of its own: those that mostly wait leave room.

A run is prepared, then waits for the others: while one makes its connections, none is timed. What
it prints goes where ours does; its result, or why there is none, comes through a pipe.
"""

import multiprocessing
import multiprocessing.connection
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from polyrhythm.errors import LabError, UserError
from polyrhythm.processes import Child, end_all
from polyrhythm.types import Seconds

T = TypeVar("T")
Run = Callable[[Callable[[], Any]], T]  # given what to call when it is prepared
_FAREWELL: Seconds = 2.0  # from the end of a pipe until the process has ended, and says why


def at_once(runs: Sequence[Run[T]], *, patience: Seconds) -> list[T]:
    """What each gives, in order; LabError if one fails, or not all are over within `patience`."""
    all_prepared = multiprocessing.get_context("fork").Barrier(len(runs))

    def tell(run: Run[T], pipe: Connection) -> None:
        try:
            pipe.send(run(all_prepared.wait))  # until all are, or we end it
        except Exception as error:
            pipe.send(_failure(error))

    pipes, children = list[Connection](), list[Child]()
    try:
        for run in runs:
            ours, theirs = multiprocessing.Pipe()
            pipes.append(ours)
            children.append(Child(partial(tell, run, theirs)))
            theirs.close()
        return _results(pipes, children, patience)
    finally:
        end_all(children)
        for pipe in pipes:
            pipe.close()


def _failure(error: Exception) -> LabError:
    if isinstance(error, UserError):
        return LabError(error.wrong, expected=error.expected, fix=error.fix)
    traceback.print_exc()
    return _broken(f"{type(error).__name__}: {error}")


def _results(
    pipes: Sequence[Connection], children: Sequence[Child], patience: Seconds
) -> list[Any]:
    ends, results = time.monotonic() + patience, dict[int, Any]()
    while silent := [number for number in range(len(pipes)) if number not in results]:
        left = max(0.0, ends - time.monotonic())
        ready = multiprocessing.connection.wait([pipes[number] for number in silent], left)
        if not ready:
            raise LabError(
                f"{len(pipes)} runs at once took more than {patience:g} s",
                expected="all of them over within it, on two idle cores",
                fix="run the benchmark while the machine has nothing else to do",
            )
        for number in silent:
            if pipes[number] in ready:
                results[number] = result = _result(pipes[number], children[number])
                if isinstance(result, LabError):
                    raise result.at(f"run {number + 1} of {len(pipes)}")
    return [results[number] for number in range(len(pipes))]


def _result(pipe: Connection, child: Child) -> Any:
    """Or the failure, also of a run that could not tell it."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        child.wait(_FAREWELL)
        return _broken(child.reason)


def _broken(why: str) -> LabError:
    return LabError(why, expected="it to run until it is over", fix="report it, with what it says")
