"""Inner loops as machine code: `@compiled` is Numba, with what it made kept on disk.

The first call of all compiles, which takes seconds; later processes load what it wrote. Files that
use this are imported inside of functions: Numba takes a third of a second to import, and
`polyrhythm --help` must not wait for it. Compiled code is plain loops over arrays that it is given:
every function of NumPy takes Numba up to a second more, and making the first array takes four. Its
random numbers are those of Numba, see `seed`.
"""

import hashlib
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.extending import register_jitable
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_HERE = Path(__file__).parent
_NUM_KEPT = 4  # folders of other states of the sources: of a branch, or of a running process
_config: Any = numba.config  # its attributes come from the environment, so mypy knows none


def compiled(function: _Function) -> _Function:
    """The same function, faster. As in C, no index is checked, and other threads run beside it."""
    part = function.__module__.split(".")[1]
    given, _config.CACHE_DIR = _config.CACHE_DIR, str(_folder(part))
    try:
        return cast(_Function, numba.njit(cache=True, nogil=True)(function))
    finally:
        _config.CACHE_DIR = given


def inlined(function: _Function) -> _Function:
    """The same for what compiled code calls, and which becomes part of that.

    From Python it is what it was, slow: a way in for Python takes as long to compile again.
    """
    return register_jitable(function)


@cache
def _folder(part: str) -> Path:
    """One for each part of the package that has compiled code, and each state of its sources.

    Numba compiles a function anew if its file has changed, but not if that of a function it calls
    has: by itself it would go on running code that is no longer there. No part calls another's.
    """
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for source in sorted((_HERE / part).rglob("*.py")):
        text = source.read_bytes()
        if b"polyrhythm.compiled import" in text:
            digest.update(text)
    parent = _HERE / "__pycache__"
    if _config.CACHE_DIR:  # from NUMBA_CACHE_DIR
        parent = Path(_config.CACHE_DIR)
    elif not os.access(_HERE, os.W_OK):
        parent = Path.home() / ".cache" / "polyrhythm"
    folder = parent / f"compiled-{part}-{digest.hexdigest()[:12]}"
    if not folder.exists():
        remove_oldest(parent, part)
    return folder


def remove_oldest(parent: Path, part: str) -> None:
    """Keep what the newest few states of the sources were compiled to."""
    folders = sorted(parent.glob(f"compiled-{part}-*"), key=lambda folder: folder.stat().st_mtime)
    for folder in folders[:-_NUM_KEPT]:
        shutil.rmtree(folder, ignore_errors=True)  # another process may be at it, too


@compiled
def seed(value: int) -> None:
    """Fix what compiled code draws from here on: Numba's generator is not NumPy's."""
    np.random.seed(value)


@inlined
def random_below(count: int) -> int:
    """A random number from 0 on; NumPy's own takes seconds more to compile."""
    return int(np.random.random() * count)
