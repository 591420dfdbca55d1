"""Compile inner loops to machine code: `@compiled` is Numba with a cache on disk.

The first call ever compiles, which takes seconds; later processes load the cache. Files that use
this are imported inside functions: Numba takes a third of a second to import, and
`polyrhythm --help` must not wait for it. Compiled code is plain loops over arrays passed to it:
every function of NumPy takes Numba up to a second more, and allocating the first array takes four.
Its random numbers come from Numba's generator, see `seed`.
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
_NUM_KEPT = 4  # cache folders of other source versions: of a branch, or of a running process
_config: Any = numba.config  # its attributes come from the environment, so mypy knows none


def compiled(function: _Function) -> _Function:
    """Compile a function. As in C, indices are not checked; the GIL is released."""
    part = ".".join(function.__module__.split(".")[:2])  # such as polyrhythm.plan
    given, _config.CACHE_DIR = _config.CACHE_DIR, str(_folder(part))
    try:
        return cast(_Function, numba.njit(cache=True, nogil=True)(function))
    finally:
        _config.CACHE_DIR = given


def inlined(function: _Function) -> _Function:
    """Mark a function that compiled code calls, to be inlined there.

    Called from Python it runs uncompiled: a compiled entry point would double the compile time.
    """
    return register_jitable(function)


@cache
def _folder(part: str) -> Path:
    """Return the cache folder of a part and of the present version of its sources.

    Numba recompiles a function if its file has changed, but not if the file of a function that it
    calls has: it would run stale code. No part calls compiled code of another part.
    """
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for source in sorted(_HERE.parent.joinpath(*part.split(".")).rglob("*.py")):
        text = source.read_bytes()
        if b"polyrhythm.jit import" in text:
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
    """Remove all but the newest few cache folders."""
    for folder in sorted(parent.glob(f"compiled-{part}-*"), key=_age)[:-_NUM_KEPT]:
        shutil.rmtree(folder, ignore_errors=True)


def _age(folder: Path) -> float:
    """Return when the folder was changed; 0 if another process has just removed it."""
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


@compiled
def seed(value: int) -> None:
    """Seed the generator of compiled code: Numba's generator is not NumPy's."""
    np.random.seed(value)


@inlined
def random_below(count: int) -> int:
    """Return a random integer from 0 to `count` - 1; NumPy's own takes seconds more to compile."""
    return int(np.random.random() * count)
