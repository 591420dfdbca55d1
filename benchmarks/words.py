"""What the processes of a benchmark in a lab and the one that drives it say, each within a time."""

import multiprocessing.connection
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from polyrhythm.errors import LabError, PeerError
from polyrhythm.processes import Child
from polyrhythm.types import Seconds

_LOOK: Seconds = 1.0  # at the clock, at least that often
_FAREWELL: Seconds = 2.0  # from the end of a pipe until the process has ended, and says why


def word_of_each(
    pipes: Sequence[Connection], children: Sequence[Child], action: str, patience: Seconds
) -> list[Any]:
    """In the order of ranks, which is that of pipes and children."""
    ends, words = time.monotonic() + patience, dict[int, Any]()
    while silent := [rank for rank in range(len(pipes)) if rank not in words]:
        if time.monotonic() >= ends:
            raise LabError(
                f"{action} took more than {patience:g} s; no word from ranks {silent}",
                expected="a word of all within it, on two idle cores",
                fix="run the benchmark while the machine has nothing else to do",
            )
        left = max(0.0, ends - time.monotonic())
        words.update(next_words(pipes, children, silent, action, min(_LOOK, left)))
    return [words[rank] for rank in range(len(pipes))]


def next_words(
    pipes: Sequence[Connection],
    children: Sequence[Child],
    silent: Iterable[int],
    action: str,
    timeout: Seconds,
) -> dict[int, Any]:
    """Of those among the silent ranks that speak up first, by rank; of nobody after `timeout`."""
    words = {}
    for pipe in multiprocessing.connection.wait([pipes[rank] for rank in silent], timeout):
        assert isinstance(pipe, Connection), "they were given"
        rank = pipes.index(pipe)
        try:
            words[rank] = pipe.recv()
        except (EOFError, ConnectionResetError):
            children[rank].wait(_FAREWELL)
            raise LabError(
                f"rank {rank}, {action}: {children[rank].reason}",
                expected="it to run until the benchmark ends",
                fix="report it, with what it says",
            ) from None
    return words


def word_of_boss(boss: Connection, action: str, patience: Seconds) -> Any:
    """In a process of the benchmark: what the one that drives it says next."""
    began = time.monotonic()
    try:
        if boss.poll(patience):
            return boss.recv()
        cause = f"no word within {patience:g} s"
    except (EOFError, ConnectionResetError):
        cause = "it has ended"
    waited = time.monotonic() - began
    raise PeerError("the benchmark", action=action, waited=waited, cause=cause)
