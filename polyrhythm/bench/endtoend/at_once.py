"""Several runs at the same time, each in a process of its own: those that mostly wait leave room.

A run is prepared, then waits for the others: while one makes its connections, none is timed.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from polyrhythm.bench.words import word_of_each
from polyrhythm.processes import Child, end_all
from polyrhythm.types import Seconds

T = TypeVar("T")
Run = Callable[[Callable[[], Any]], T]  # given what to call when it is prepared


def at_once(runs: Sequence[Run[T]], *, patience: Seconds) -> list[T]:
    """What each gives, in order; LabError if one fails, or not all are over within `patience`."""
    all_prepared = multiprocessing.get_context("fork").Barrier(len(runs))

    def tell(run: Run[T], pipe: Connection) -> None:
        pipe.send(run(lambda: all_prepared.wait(patience)))

    pipes, children = list[Connection](), list[Child]()
    try:
        for run in runs:
            ours, theirs = multiprocessing.Pipe()
            pipes.append(ours)
            children.append(Child(partial(tell, run, theirs)))
            theirs.close()
        return word_of_each(pipes, children, "one of several runs", patience)
    finally:
        end_all(children)
        for pipe in pipes:
            pipe.close()
