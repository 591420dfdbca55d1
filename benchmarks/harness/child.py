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
    """Return what `measure` returns: parts fork workers, and may use autograd before."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        child = Child(lambda: path.write_bytes(msgspec.json.encode(measure())))
        try:
            if child.wait(timeout) != 0:
                raise RuntimeError(f"the part {name} {child.reason}")
            return msgspec.json.decode(path.read_bytes(), type=kind)
        finally:
            child.end()
