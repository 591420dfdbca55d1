"""The folder of a run's checkpoints: `step-00000100`, written as `.step-00000100.partial` first.

A checkpoint appears atomically, by a rename: a reader finds it complete or not at all. A step that
is saved again first hides its earlier checkpoint as `.step-00000100.replaced`, which remains the
checkpoint of that step until the new one has its name. Partial folders and those of interrupted
removals (`.step-00000100.removed`) are hidden by their names, and the next run removes them. The
order holds for a loss of power, too: files are synced before the rename, and the rename before
anything older is removed.
"""

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from polyrhythm.run.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Evaluation,
    FormatError,
    Manifest,
    find_damage,
    read_manifest,
)

CHECKPOINTS = "checkpoints"  # subfolder of the run folder
BEST = "best"  # in place of a step or a path: the checkpoint of the best evaluation
_STEP = re.compile(r"step-(\d{8,})")
_REPLACED = re.compile(r"\.(step-\d{8,})\.replaced")
_LEFTOVER = re.compile(r"\.step-\d{8,}(\.[0-9a-f]+)?\.(partial|removed)")


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}"


def partial_folder(folder: Path, step: int, token: str = "") -> Path:
    """Return where a checkpoint is written; two saves of one step may each have a token."""
    return folder / f".step-{step:08}{token and f'.{token}'}.partial"


def list_steps(folder: Path) -> dict[int, Path]:
    """Return the folders of checkpoints by step; one that was being replaced may be hidden."""
    names = {target.name: hidden for target, hidden in _hidden_checkpoints(folder)}
    names |= {entry.name: entry for entry in folder.glob("step-*") if _STEP.fullmatch(entry.name)}
    named = sorted(names.items())
    return {int(name.removeprefix("step-")): entry for name, entry in named if entry.is_dir()}


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


def best(
    found: Iterable[tuple[Path, Manifest]], metric: str | None = None
) -> tuple[Path, float] | None:
    """Return the checkpoint of the best evaluation, and its value; None if none was evaluated.

    Of equal values the earliest counts. Without `metric`, that of the newest evaluation counts.
    """
    evaluated = list[tuple[int, Evaluation, Path]]()
    for path, manifest in found:
        evaluation = Evaluation.of(manifest)
        if evaluation is None or manifest.is_finite is False:
            continue
        if metric in (None, evaluation.metric):
            evaluated.append((manifest.serial, evaluation, path))
    if not evaluated:
        return None
    _, newest, _ = max(evaluated, key=lambda each: each[0])
    sign = -1.0 if newest.mode == "max" else 1.0
    same = [each for each in evaluated if each[1].metric == newest.metric]
    _, evaluation, path = min(same, key=lambda each: (sign * each[1].value, each[0]))
    return path, evaluation.value


def find_best(folder: Path) -> Path:
    """Return the checkpoint of the best evaluation; raises CheckpointError."""
    found = best(candidates(folder))
    if found is None:
        raise CheckpointError(
            f"{folder} has no checkpoint with an evaluation",
            expected="one that was saved as the best",
            fix='train with CheckpointConfig(keep_best="eval_loss") and fit(eval_dataset=...)',
        )
    return found[0]


def find_checkpoint(
    run: Path,
    step: int | str | None = None,
    *,
    newest: Callable[[Path], Path | None] = latest,
) -> Path:
    """Find the checkpoint of a step, or the "best", by default the newest complete one of a run.

    `run` is a run folder, its checkpoints folder, or a checkpoint; raises CheckpointError.
    """
    if (run / MANIFEST).is_file() and step is None:
        return run
    folder = run / CHECKPOINTS if (run / CHECKPOINTS).is_dir() else run
    if step == BEST:
        return find_best(folder)
    steps = list_steps(folder)
    found = newest(folder) if step is None else steps.get(int(step))
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
    replaced = target.with_name(f".{target.name}.replaced")
    if target.exists():
        target.rename(replaced)
    try:
        partial.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise
    sync_folder(target.parent)
    if replaced.exists():
        with suppress(OSError):  # the checkpoint is saved; the next save tries again
            _remove(replaced, target)


def remove_old(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` with finite weights, and the newest of the others.

    The one with the best evaluation stays; so do unreadable ones, for the user to inspect.
    """
    found = candidates(folder, should_warn=False)
    finite = [each for each in found if each[1].is_finite is not False]
    not_finite = [each for each in found if each[1].is_finite is False]
    kept = best(finite)
    for path, manifest in reversed(finite[keep:] + not_finite[1:]):
        if kept is not None and path == kept[0]:
            continue
        _remove(path, step_folder(folder, manifest.step))


def remove_leftovers(folder: Path) -> None:
    """Remove the folders of interrupted saves and removals; finish or undo a replacement."""
    for target, hidden in _hidden_checkpoints(folder):
        if target.exists():
            _remove(hidden, target)
        else:
            hidden.rename(target)
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


def _hidden_checkpoints(folder: Path) -> list[tuple[Path, Path]]:
    """Return the final and the hidden path of each checkpoint that was being replaced."""
    found = ((entry, _REPLACED.fullmatch(entry.name)) for entry in sorted(folder.glob(".step-*")))
    return [(folder / match[1], entry) for entry, match in found if match]


def _remove(path: Path, checkpoint: Path) -> None:
    """Remove a folder; what an interruption leaves has a name that is never read."""
    removed = checkpoint.with_name(f".{checkpoint.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)
