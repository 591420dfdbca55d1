"""Find bundled descriptions: a bare word names one inside the package, anything else is a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path

from polyrhythm.describe.read import unknown


def bundled(folder: str) -> tuple[str, ...]:
    """Return the names of the descriptions bundled in this folder of the package."""
    return tuple(sorted(_files(folder)))


def is_name(source: str | Path) -> bool:
    """Return whether `source` is a name: files end in .toml or .json, or contain a folder."""
    return isinstance(source, str) and "/" not in source and not Path(source).suffix


@contextmanager
def locate(what: str, source: str | Path, folder: str) -> Iterator[Path]:
    """Yield the path of the description named `source`, valid inside the `with` block."""
    if not is_name(source):
        yield Path(source)
        return
    inside = _files(folder)
    if source not in inside:
        raise unknown(what, str(source), sorted(inside))
    with as_file(inside[str(source)]) as path:
        yield path


def _files(folder: str) -> dict[str, Traversable]:
    every = (files("polyrhythm.describe") / folder).iterdir()
    return {Path(file.name).stem: file for file in every if file.name.endswith((".toml", ".json"))}
