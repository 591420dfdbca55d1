"""Run a part of a benchmark in a process of its own."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from polyrhythm.processes import Child
from polyrhythm.types import Seconds

_T = TypeVar("_T")


def in_child(name: str, measure: Callable[[], _T], kind: type[_T], timeout: Seconds) -> _T:
    """Return what `measure` returns: parts fork workers, and may use autograd before.

    Raises RuntimeError with the traceback of an error, or after `timeout`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        child = Child(lambda: path.write_bytes(msgspec.json.encode(measure())), keeps_failure=True)
        try:
            if child.wait(timeout) is None:
                raise RuntimeError(f"the part {name} still runs after {timeout:g} s")
            if child.status != 0:
                trace = child.failure.traceback
                raise RuntimeError(f"the part {name} {child.reason}" + f"\n{trace}" * bool(trace))
            return msgspec.json.decode(path.read_bytes(), type=kind)
        finally:
            child.end()
