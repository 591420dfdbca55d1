"""One save on one stage; it ends in a complete checkpoint, or in a reason for the failure.

The first stage makes the folder; each stage writes its file and reports; the first merges the
reports into the manifest and renames the folder. Where a stage gives up waiting while the first one
completes the checkpoint, the first decision is final for all. The first stage removes the folder of
a failed save once no stage writes in it any more.
"""

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from polyrhythm.errors import PeerError
from polyrhythm.run.checkpoint.encoding import Tensors, joined, write_tensors
from polyrhythm.run.checkpoint.folder import (
    complete,
    next_serial,
    partial_folder,
    remove_leftovers,
    remove_old,
    step_folder,
    would_replace_finite,
    write_synced,
)
from polyrhythm.run.checkpoint.manifest import (
    MANIFEST,
    File,
    Manifest,
    ModelTable,
    OptimizerTable,
    merge_optimizers,
    merge_tables,
    to_text,
)
from polyrhythm.run.checkpoint.state import StagedCopies
from polyrhythm.run.comm.store import JobStore, Members

SAVED = "saved"  # the decision; any other text is the reason of the failure
STAGE_FILE = "stage-{}.safetensors".format
_PART_SIZE = 1 << 15  # elements: torch's smallest work for several threads
_NUMPY_SUMS = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class StagePart(msgspec.Struct, frozen=True):
    """What a stage has written."""

    file: File
    model: ModelTable
    optimizer: OptimizerTable | None
    is_finite: bool  # all trained parameters


_Report = StagePart | str  # or the reason of a failure


@dataclass(frozen=True, slots=True)
class SaveContext:
    """The settings that all saves of a stage share."""

    folder: Path
    store: JobStore
    members: Members  # the stages in order
    keep_last: int
    rounds: list[str]  # on stage 0: saves whose values are still in the store

    @property
    def stage(self) -> int:
        return self.members.ranks.index(self.store.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSnapshot:
    """The state that a stage saves."""

    name: str  # of the round, the same on all stages
    step: int
    copies: StagedCopies  # of its tensors, by their names in the files
    model: ModelTable
    trained: frozenset[str]  # names of the tensors that training must keep finite
    optimizer: OptimizerTable | None
    extra: dict[str, Any]
    run_info: dict[str, Any]
    optimizer_state_fn: Callable[[], tuple[Tensors, OptimizerTable]] | None  # replaces `optimizer`


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """The outcome of a save, equal on all stages."""

    step: int
    path: Path | None  # None: the save failed or was skipped
    why: str = ""

    @property
    def is_saved(self) -> bool:
        return self.path is not None


def save_with_all_stages(snapshot: StageSnapshot, context: SaveContext) -> tuple[SaveOutcome, bool]:
    """Save; return the outcome, and whether this stage warns of a failure.

    All stages call it, each in its checkpoint thread, and get the same outcome.
    """
    should_warn = context.stage == 0
    try:
        decided = (_lead if context.stage == 0 else _follow)(snapshot, context)
    except Exception as error:  # training continues whatever it is
        decided, should_warn = _give_up(snapshot, context, error), True  # stage 0 may be lost
    if decided != SAVED:
        return SaveOutcome(snapshot.step, None, decided), should_warn
    return SaveOutcome(snapshot.step, step_folder(context.folder, snapshot.step)), should_warn


def skip(name: str, why: str, context: SaveContext) -> None:
    """Take part in a save without writing: it fails on all stages."""
    context.store.set_once(f"{name}/decision", why, context.members)
    if context.stage == 0:
        context.store.publish(f"{name}/begin", (why, ""), context.members)
    value = "part" if context.stage else "end"
    context.store.publish(f"{name}/{value}", why, context.members, as_type=str)


def _follow(snapshot: StageSnapshot, context: SaveContext) -> str:
    """On the other stages: write the file and report it; return the decision of stage 0."""
    store, name, members = context.store, snapshot.name, context.members
    why, folder = store.receive(f"{name}/begin", members.leader, members)
    with store.heartbeats(f"{name}/part", members):
        part = why or _write(snapshot, context, context.folder / folder)
    store.publish(f"{name}/part", part, members, as_type=_Report)
    decided: str = store.receive(f"{name}/end", members.leader, members)
    return decided


def _lead(snapshot: StageSnapshot, context: SaveContext) -> str:
    """On stage 0: write, complete the checkpoint, publish the decision and return it."""
    decided: str = context.store.run_on_leader(
        f"{snapshot.name}/end", lambda: _write_and_complete(snapshot, context), context.members
    )
    return decided


def _write_and_complete(snapshot: StageSnapshot, context: SaveContext) -> str:
    store, members = context.store, context.members
    # Its own: survivors of a loss may save the step again while this thread still gives up.
    partial = partial_folder(context.folder, snapshot.step, os.urandom(4).hex())
    try:
        why = ""
        try:
            remove_leftovers(partial.parent)
            partial.mkdir(parents=True)
        except OSError as error:
            why = f"stage 0: {summarize_error(error)}"
        store.publish(f"{snapshot.name}/begin", (why, partial.name), members)
        reports: list[_Report] = [why or _write(snapshot, context, partial)]
        reports += [
            store.receive(f"{snapshot.name}/part", rank, members, as_type=_Report)
            for rank in members.ranks[1:]
        ]
        decided = next((report for report in reports if isinstance(report, str)), SAVED)
        if decided == SAVED:
            _delete_past_rounds(snapshot, context)
            parts = [report for report in reports if isinstance(report, StagePart)]
            _write_manifest(partial, snapshot, parts, next_serial(context.folder))
            decided = _check_weights(snapshot, parts, context)
        decided = store.set_once(f"{snapshot.name}/decision", decided, members)
        if decided == SAVED:
            complete(partial, step_folder(context.folder, snapshot.step))
    except Exception as error:
        decided = _give_up(snapshot, context, error)
    if decided == SAVED:
        with contextlib.suppress(OSError):  # tried again after the next save
            remove_old(context.folder, context.keep_last)
    else:
        shutil.rmtree(partial, ignore_errors=True)
    return decided


def _write(snapshot: StageSnapshot, context: SaveContext, partial: Path) -> _Report:
    path = partial / STAGE_FILE(context.stage)
    try:
        copies, optimizer = snapshot.copies.wait(), snapshot.optimizer
        tensors = copies
        if snapshot.optimizer_state_fn is not None:
            state, optimizer = snapshot.optimizer_state_fn()
            tensors = tensors | state
        trained = (value for name, value in copies.items() if name in snapshot.trained)
        is_finite = all(map(_is_finite, joined(trained)))
        return StagePart(write_tensors(path, tensors), snapshot.model, optimizer, is_finite)
    except Exception as error:
        return f"stage {context.stage}: {summarize_error(error)}"


def _is_finite(flat: Tensor) -> bool:
    """Check copies in CPU memory; without more threads, and seldom with the interpreter's lock.

    Training needs both: numpy reads all of them in one call that releases the lock, and a finite
    sum is enough. torch would start threads of its own for more than a small part; numpy has no
    bfloat16.
    """
    if flat.dtype == torch.float4_e2m1fn_x2 or not (flat.is_floating_point() or flat.is_complex()):
        return True  # its type has no such value
    if flat.dtype in _NUMPY_SUMS:
        with np.errstate(all="ignore"):
            if np.isfinite(flat.numpy().sum()):
                return True
    is_float8 = flat.dtype.itemsize == 1  # of which torch cannot tell
    parts = flat.split(_PART_SIZE)
    return all(bool((p.float() if is_float8 else p).isfinite().all()) for p in parts)


def _check_weights(
    snapshot: StageSnapshot, parts: Sequence[StagePart], context: SaveContext
) -> str:
    """Return SAVED, or why a checkpoint with non-finite weights is not saved; warn of it."""
    stages = [str(stage) for stage, part in enumerate(parts) if not part.is_finite]
    if not stages:
        return SAVED
    problem = f"the weights of stage {', '.join(stages)} are not finite"
    if would_replace_finite(step_folder(context.folder, snapshot.step)):
        return f"{problem}, and it would replace a checkpoint of the same step"
    warnings.warn(
        f"checkpoint of step {snapshot.step}: {problem}; restore() skips it, and the newest finite "
        "ones are kept",
        stacklevel=1,
    )
    return SAVED


def _delete_past_rounds(snapshot: StageSnapshot, context: SaveContext) -> None:
    """Delete the values of earlier rounds: all stages are in this round and read them no more."""
    while (past := context.rounds[0]) != snapshot.name:
        for value in ("begin", "part", "end"):
            for rank in context.members.ranks:
                context.store.delete(f"{past}/{value}", context.members, rank=rank)
        context.store.delete_once(f"{past}/decision", context.members)
        context.rounds.pop(0)


def _write_manifest(
    partial: Path, snapshot: StageSnapshot, parts: Sequence[StagePart], serial: int
) -> None:
    model = merge_tables([part.model for part in parts])
    manifest = Manifest(
        torch=str(torch.__version__),
        step=snapshot.step,
        serial=serial,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        num_stages=len(parts),
        model=model,
        optimizer=merge_optimizers(part.optimizer for part in parts),
        extra=snapshot.extra,
        run_info=snapshot.run_info,
        fingerprint=model.fingerprint,
        files={STAGE_FILE(stage): part.file for stage, part in enumerate(parts)},
        is_finite=all(part.is_finite for part in parts),
    )
    write_synced(partial / MANIFEST, to_text(manifest))


def _give_up(snapshot: StageSnapshot, context: SaveContext, error: Exception) -> str:
    reason = summarize_error(error)
    try:
        decided: str = context.store.set_once(f"{snapshot.name}/decision", reason, context.members)
    except PeerError:  # the store is lost, and with it the job
        return reason
    # Stage 0 decides before it renames: if the rename fails, it publishes that instead.
    return reason if decided == SAVED and context.stage == 0 else decided


def summarize_error(error: BaseException) -> str:
    """Describe an error in one line; prefer the OSError of its chain (such as a full disk)."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    kind = "" if isinstance(error, PeerError) else f"{type(error).__name__}: "
    return f"{kind}{error}".strip().splitlines()[0]
