"""The folder of a run's checkpoints: `step-00000100`, written as `.step-00000100.partial` first.

A checkpoint appears atomically, by a rename: a reader finds it complete or not at all. A partial
folder that a killed run left is hidden by its name, and the next run removes it.
"""

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from polyrhythm.run.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    FormatError,
    Manifest,
    find_damage,
    read_manifest,
)

CHECKPOINTS = "checkpoints"  # subfolder of the run folder
_STEP = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(partial|replaced)")


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}"


def partial_folder(folder: Path, step: int) -> Path:
    return folder / f".step-{step:08}.partial"


def list_steps(folder: Path) -> dict[int, Path]:
    """Return the folders with the name of a checkpoint, by step."""
    named = (entry for entry in sorted(folder.glob("step-*")) if _STEP.fullmatch(entry.name))
    return {int(entry.name.removeprefix("step-")): entry for entry in named if entry.is_dir()}


def latest(folder: Path | str) -> Path | None:
    """Find the newest complete checkpoint with finite weights; warn of those skipped.

    Every file is read.
    """
    for path, manifest in restorable(Path(folder)):
        problem = find_damage(path, manifest.files)
        if problem is None:
            return path
        warnings.warn(f"checkpoint skipped: {path}: {problem}", stacklevel=2)
    return None


def find_checkpoint(
    run: Path, step: int | None = None, *, newest: Callable[[Path], Path | None] = latest
) -> Path:
    """Find the checkpoint of a step, by default the newest complete one of a run.

    `run` is a run folder, its checkpoints folder, or a checkpoint; raises CheckpointError.
    """
    if (run / MANIFEST).is_file() and step is None:
        return run
    folder = run / CHECKPOINTS if (run / CHECKPOINTS).is_dir() else run
    steps = list_steps(folder)
    found = newest(folder) if step is None else steps.get(step)
    if found is not None:
        return found
    wanted = "complete checkpoint" if step is None else f"checkpoint of step {step}"
    raise CheckpointError(
        f"{run} has no {wanted}",
        expected=f"a {wanted} in its folder {CHECKPOINTS}/",
        fix=f"--step with one of {', '.join(map(str, steps))}" if steps else "pass another run",
    )


def candidates(folder: Path, *, should_warn: bool = True) -> list[tuple[Path, Manifest]]:
    """Return the checkpoints with a readable manifest, newest first; warn of the others."""
    found: list[tuple[Path, Manifest]] = []
    for path in list_steps(folder).values():
        try:
            found.append((path, read_manifest(path)))
        except CheckpointError as error:
            if should_warn and isinstance(error, FormatError):
                raise  # training from an earlier one would in time delete this one
            if should_warn:
                warnings.warn(f"checkpoint skipped: {error.wrong}", stacklevel=3)
    return sorted(found, key=lambda each: (each[1].serial, each[1].step), reverse=True)


def restorable(folder: Path) -> list[tuple[Path, Manifest]]:
    """Return the candidates without those whose weights are not finite; warn of these."""
    found = candidates(folder)
    for path, manifest in found:
        if manifest.is_finite is False:
            warnings.warn(f"checkpoint skipped: {path}: its weights are not finite", stacklevel=3)
    return [each for each in found if each[1].is_finite is not False]


def would_replace_finite(target: Path) -> bool:
    """Whether a checkpoint of the same step has finite weights, as far as known."""
    try:
        return target.exists() and read_manifest(target).is_finite is not False
    except CheckpointError:
        return False


def next_serial(folder: Path) -> int:
    newest = candidates(folder, should_warn=False)[:1]
    return 1 + max((manifest.serial for _, manifest in newest), default=0)


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Make an empty folder for a `with` block, whose failure removes it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def complete(partial: Path, target: Path) -> None:
    """Rename the partial folder to `target`, replacing a checkpoint of the same step."""
    sync_folder(partial)
    replaced = _replaced(target)
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_old(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` with finite weights, and the newest of the others.

    Unreadable ones stay, for the user to inspect.
    """
    found = candidates(folder, should_warn=False)
    finite = [path for path, manifest in found if manifest.is_finite is not False]
    not_finite = [path for path, manifest in found if manifest.is_finite is False]
    for path in reversed(finite[keep:] + not_finite[1:]):
        hidden = _replaced(path)  # an interrupted removal then leaves a known leftover
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove the folders of interrupted saves and removals."""
    for entry in folder.glob(".step-*"):
        if _LEFTOVER.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)


def write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync renames and new files in the folder to disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")
