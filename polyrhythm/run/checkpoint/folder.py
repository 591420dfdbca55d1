"""The folder of a run's checkpoints: `step-00000100`, written as `.step-00000100.partial` before.

A checkpoint is there from one moment to the next, by a rename: who looks finds it whole or not at
all. What a killed run left half-written is hidden by its name, and removed when the next begins.
"""

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from polyrhythm.run.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    NewerFormatError,
    Problem,
    find_damage,
    read_manifest,
)

CHECKPOINTS = "checkpoints"  # the folder of them, in that of a run
_STEP = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(partial|replaced)")
DamageCheck = Callable[[Path, Manifest], Problem | None]


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}"


def partial_folder(folder: Path, step: int) -> Path:
    return folder / f".step-{step:08}.partial"


def list_steps(folder: Path) -> dict[int, Path]:
    """What is there under the name of a checkpoint, by step."""
    found = (entry for entry in _entries(folder) if _STEP.fullmatch(entry.name))
    return {int(entry.name.removeprefix("step-")): entry for entry in sorted(found)}


def find_checkpoint(run: Path, step: int | None = None) -> Path:
    """A checkpoint of a run, the latest that is whole unless a step is named.

    `run` is the folder of a run, that of its checkpoints, or a checkpoint; raises CheckpointError.
    """
    if (run / MANIFEST).is_file() and step is None:
        return run
    folder = run / CHECKPOINTS if (run / CHECKPOINTS).is_dir() else run
    there = list_steps(folder)
    found = latest(folder) if step is None else there.get(step)
    if found is not None:
        return found
    wanted = "a checkpoint that is whole" if step is None else f"a checkpoint of step {step}"
    raise CheckpointError(
        f"{run} has no {wanted.removeprefix('a ')}",
        expected=f"{wanted}, as a run keeps them in its folder {CHECKPOINTS}/",
        fix=f"--step with one of {', '.join(map(str, there))}" if there else "give another run",
    )


def latest(folder: Path | str) -> Path | None:
    """The newest checkpoint that is whole, which every file is read for; warns of damaged ones."""
    return newest_complete(candidates(Path(folder)), lambda path, of: find_damage(path, of.files))


def candidates(folder: Path) -> list[tuple[Path, Manifest]]:
    """Those whose manifest can be read, the newest first; warns of the others."""
    found: list[tuple[Path, Manifest]] = []
    for path in list_steps(folder).values():
        try:
            found.append((path, read_manifest(path)))
        except NewerFormatError:
            raise  # an earlier one would be trained on, and this one removed in time
        except CheckpointError as error:
            warnings.warn(f"checkpoint passed over: {error.wrong}", stacklevel=3)
    return sorted(found, key=lambda each: (each[1].serial, each[1].step), reverse=True)


def newest_complete(found: Sequence[tuple[Path, Manifest]], problem_of: DamageCheck) -> Path | None:
    for path, manifest in found:
        problem = problem_of(path, manifest)
        if problem is None:
            return path
        warnings.warn(f"checkpoint passed over: {path}: {problem}", stacklevel=3)
    return None


def next_serial(folder: Path) -> int:
    return 1 + max((manifest.serial for _, manifest in _readable(folder)), default=0)


def complete(partial: Path, target: Path) -> None:
    """Make it the checkpoint `target`, in place of one of the same step."""
    sync_folder(partial)
    replaced = _replaced(target)
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_old(folder: Path, keep: int) -> None:
    """All but the newest `keep`; what cannot be read is somebody else's to look at."""
    ordered = sorted(_readable(folder), key=lambda each: (each[1].serial, each[1].step))
    for path, _ in ordered[:-keep]:
        hidden = _replaced(path)  # a removal that is cut off is then a leftover like others
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Of saves that did not come to their end."""
    for entry in _entries(folder):
        if _LEFTOVER.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)


def write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """What a rename or a new file changed in it reaches the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _entries(folder: Path) -> Iterator[Path]:
    return (entry for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else iter(())


def _readable(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    for path in list_steps(folder).values():
        try:
            yield path, read_manifest(path)
        except CheckpointError:
            continue
