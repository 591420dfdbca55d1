"""One save, as every stage goes through it; it ends in a checkpoint that is whole, or in a reason.

The first stage makes the folder; each writes its part and says so; the first joins the parts, adds
the manifest and renames the folder. What goes wrong anywhere is decided to be a failure by whoever
sees it first, and the first stage removes the folder once nobody writes in it any more.
"""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from polyrhythm.errors import PeerError
from polyrhythm.run.checkpoint.board import Board
from polyrhythm.run.checkpoint.files import OPTIMIZER, WrittenPart, write_index, write_part
from polyrhythm.run.checkpoint.folder import (
    complete,
    next_serial,
    partial_folder,
    remove_leftovers,
    remove_old,
    step_folder,
    write_synced,
)
from polyrhythm.run.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    ModelTable,
    OptimizerTable,
    merged_optimizers,
    merged_tables,
    to_text,
)
from polyrhythm.run.checkpoint.staging import Nested

SAVED = "saved"  # the decision; any other is the reason why not
_NOTES = ("begin", "part", "end")  # of a round


@dataclass(frozen=True, slots=True)
class Job:
    """Where, and with whom."""

    folder: Path
    stage: int
    board: Board
    keep: int
    rounds: list[str]  # the first stage's: saves, in order, whose notes are still there


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What a stage has to save."""

    name: str  # of the round, the same on all stages
    step: int
    tensors: Nested
    model: ModelTable
    optimizer: OptimizerTable | None
    extra: dict[str, Any]
    facts: dict[str, Any]
    later: Callable[[], tuple[Nested, OptimizerTable]] | None  # of the optimizer, if not above

    def completed(self) -> "Saving":
        """With what comes later."""
        if self.later is None:
            return self
        state, table = self.later()
        tensors = self.tensors | ({OPTIMIZER: state} if state else {})
        return replace(self, tensors=tensors, optimizer=table, later=None)


@dataclass(frozen=True, slots=True)
class _Note:
    """What the first stage needs from the others."""

    part: WrittenPart
    model: ModelTable
    optimizer: OptimizerTable | None


@dataclass(frozen=True, slots=True)
class Ended:
    path: Path | None  # None: there is no checkpoint of this step
    why: str
    is_to_be_told: bool  # by this stage


def save_together(saving: Saving, job: Job) -> Ended:
    """Called by all stages, each in a thread of its own; they return alike."""
    try:
        whole = saving.completed()
        note: _Note | None = _Note(_write(whole, job), whole.model, whole.optimizer)
        failure = ""
    except Exception as error:  # whatever it is, training goes on
        note, failure = None, f"stage {job.stage}: {reason_of(error)}"
    is_first = job.stage == 0
    try:
        if failure:
            job.board.decide(saving.name, failure)
        job.board.put(f"{saving.name}/part", note)
        decided = _finish(saving, job) if is_first else _told(saving, job)
    except Exception as error:
        is_first = True  # nobody else may be there to tell
        decided = _give_up(saving, job, error)
    if decided == SAVED:
        return Ended(step_folder(job.folder, saving.step), "", is_first)
    return Ended(None, decided, is_first)


def _write(saving: Saving, job: Job) -> WrittenPart:
    begin = f"{saving.name}/begin"
    partial = partial_folder(job.folder, saving.step)
    if job.stage == 0:
        try:
            remove_leftovers(job.folder)
            partial.mkdir(parents=True)
        finally:
            job.board.put(begin, None)  # whatever became of it, the others must not wait
    job.board.read(begin, 0)
    return write_part(partial, saving.tensors, job.stage)


def _told(saving: Saving, job: Job) -> str:
    # Twice: the first stage, too, may be waiting for another one until its deadline.
    told: str = job.board.read(f"{saving.name}/end", 0, deadline=2 * job.board.deadline)
    return told


def _finish(saving: Saving, job: Job) -> str:
    """By the first stage: join what all have written; what became of it, as all are told."""
    partial = partial_folder(job.folder, saving.step)
    try:
        notes = job.board.read_all(f"{saving.name}/part")
        if None in notes:
            decided = job.board.decide(saving.name, "a stage failed")  # it has said why
        else:
            _forget_before(saving, job)
            _describe(partial, saving, notes, next_serial(job.folder))
            decided = job.board.decide(saving.name, SAVED)
        if decided == SAVED:
            complete(partial, step_folder(job.folder, saving.step))
    except Exception as error:
        decided = _give_up(saving, job, error)
    if decided == SAVED:
        with contextlib.suppress(OSError):  # what cannot be removed is tried after the next one
            remove_old(job.folder, job.keep)
    else:
        shutil.rmtree(partial, ignore_errors=True)
    job.board.put(f"{saving.name}/end", decided)
    return decided


def _forget_before(saving: Saving, job: Job) -> None:
    """Once all write in this round, nobody reads what was said in earlier ones."""
    while (past := job.rounds[0]) != saving.name:
        for name in (past, *(f"{past}/{note}" for note in _NOTES)):
            job.board.forget(name)
        job.rounds.pop(0)


def _describe(partial: Path, saving: Saving, notes: list[_Note], serial: int) -> None:
    """The index of all parts, and last the manifest."""
    model = merged_tables(note.model for note in notes)
    manifest = Manifest(
        torch=str(torch.__version__),
        step=saving.step,
        serial=serial,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        num_stages=len(notes),
        model=model,
        optimizer=merged_optimizers(note.optimizer for note in notes),
        extra=saving.extra,
        facts=saving.facts,
        fingerprint=model.fingerprint,
        files=write_index(partial, [note.part for note in notes]),
    )
    write_synced(partial / MANIFEST, to_text(manifest))


def _give_up(saving: Saving, job: Job, error: Exception) -> str:
    reason = reason_of(error)
    try:
        decided = job.board.decide(saving.name, reason)
    except PeerError:  # the store is gone, and with it the job
        return reason
    # The first stage decides before it renames: if that went wrong, it says so to the others.
    return reason if decided == SAVED and job.stage == 0 else decided


def reason_of(error: BaseException) -> str:
    """In a line; of a chain of errors the system's own, which says what to do (a full disk)."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    kind = "" if isinstance(error, PeerError) else f"{type(error).__name__}: "
    return f"{kind}{error}".strip().splitlines()[0]
