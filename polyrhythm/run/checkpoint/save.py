"""One save on one stage; it ends in a complete checkpoint, or in a reason for the failure.

The first stage makes the folder; each stage writes its part and reports; the first merges the
parts, adds the manifest and renames the folder. The first stage to see an error decides that the
save has failed; stage 0 removes the folder once no stage writes in it any more.
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
from polyrhythm.run.checkpoint.files import OPTIMIZER, WrittenStage, write_index, write_stage
from polyrhythm.run.checkpoint.folder import (
    complete,
    next_serial,
    partial_folder,
    remove_leftovers,
    remove_old,
    step_folder,
    write_synced,
)
from polyrhythm.run.checkpoint.job_store import JobStore
from polyrhythm.run.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    ModelTable,
    OptimizerTable,
    merge_optimizers,
    merge_tables,
    to_text,
)
from polyrhythm.run.checkpoint.state import Nested

SAVED = "saved"  # the decision; any other text is the reason of the failure
_REPORT_KEYS = ("begin", "part", "end")  # of a round


@dataclass(frozen=True, slots=True)
class SaveContext:
    """The settings that all saves of a stage share."""

    folder: Path
    stage: int
    store: JobStore
    keep: int
    rounds: list[str]  # on stage 0: saves whose values are still in the store, in order


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSnapshot:
    """The state that a stage saves."""

    name: str  # of the round, the same on all stages
    step: int
    tensors: Nested
    model: ModelTable
    optimizer: OptimizerTable | None
    extra: dict[str, Any]
    run_info: dict[str, Any]
    optimizer_state_fn: Callable[[], tuple[Nested, OptimizerTable]] | None  # replaces `optimizer`

    def with_optimizer_state(self) -> "StageSnapshot":
        """Return the snapshot with the result of `optimizer_state_fn`."""
        if self.optimizer_state_fn is None:
            return self
        state, table = self.optimizer_state_fn()
        tensors = self.tensors | ({OPTIMIZER: state} if state else {})
        return replace(self, tensors=tensors, optimizer=table, optimizer_state_fn=None)


@dataclass(frozen=True, slots=True)
class _StageReport:
    """What stage 0 needs from each stage."""

    part: WrittenStage
    model: ModelTable
    optimizer: OptimizerTable | None


@dataclass(frozen=True, slots=True)
class SaveDecision:
    path: Path | None  # None: there is no checkpoint of this step
    why: str
    should_warn: bool  # this stage warns


def save_with_all_stages(snapshot: StageSnapshot, context: SaveContext) -> SaveDecision:
    """Save; all stages call it, each in its checkpoint thread, and get the same decision."""
    try:
        full = snapshot.with_optimizer_state()
        report: _StageReport | None = _StageReport(
            _write(full, context), full.model, full.optimizer
        )
        failure = ""
    except Exception as error:  # training continues whatever it is
        report, failure = None, f"stage {context.stage}: {summarize_error(error)}"
    is_first = context.stage == 0
    try:
        if failure:
            context.store.decide(snapshot.name, failure)
        context.store.put(f"{snapshot.name}/part", report)
        decided = _commit(snapshot, context) if is_first else _wait_for_decision(snapshot, context)
    except Exception as error:
        is_first = True  # warn here: stage 0 may be lost
        decided = _decide_failed(snapshot, context, error)
    if decided == SAVED:
        return SaveDecision(step_folder(context.folder, snapshot.step), "", is_first)
    return SaveDecision(None, decided, is_first)


def _write(snapshot: StageSnapshot, context: SaveContext) -> WrittenStage:
    begin = f"{snapshot.name}/begin"
    partial = partial_folder(context.folder, snapshot.step)
    if context.stage == 0:
        try:
            remove_leftovers(context.folder)
            partial.mkdir(parents=True)
        finally:
            context.store.put(begin, None)  # also after an error: the others must not wait
    context.store.get(begin, 0)
    return write_stage(partial, snapshot.tensors, context.stage)


def _wait_for_decision(snapshot: StageSnapshot, context: SaveContext) -> str:
    # Twice the timeout: stage 0 may itself wait a timeout for another stage.
    decision: str = context.store.get(f"{snapshot.name}/end", 0, timeout=2 * context.store.timeout)
    return decision


def _commit(snapshot: StageSnapshot, context: SaveContext) -> str:
    """On stage 0: merge what all stages have written, publish the decision and return it."""
    partial = partial_folder(context.folder, snapshot.step)
    try:
        reports = context.store.get_all(f"{snapshot.name}/part")
        if None in reports:
            decided = context.store.decide(snapshot.name, "a stage failed")  # its reason wins
        else:
            _delete_past_rounds(snapshot, context)
            _write_manifest(partial, snapshot, reports, next_serial(context.folder))
            decided = context.store.decide(snapshot.name, SAVED)
        if decided == SAVED:
            complete(partial, step_folder(context.folder, snapshot.step))
    except Exception as error:
        decided = _decide_failed(snapshot, context, error)
    if decided == SAVED:
        with contextlib.suppress(OSError):  # tried again after the next save
            remove_old(context.folder, context.keep)
    else:
        shutil.rmtree(partial, ignore_errors=True)
    context.store.put(f"{snapshot.name}/end", decided)
    return decided


def _delete_past_rounds(snapshot: StageSnapshot, context: SaveContext) -> None:
    """Delete the values of earlier rounds: all stages are in this round and read them no more."""
    while (past := context.rounds[0]) != snapshot.name:
        for name in (past, *(f"{past}/{report}" for report in _REPORT_KEYS)):
            context.store.delete(name)
        context.rounds.pop(0)


def _write_manifest(
    partial: Path, snapshot: StageSnapshot, reports: list[_StageReport], serial: int
) -> None:
    """Write the index of all parts, and last the manifest."""
    model = merge_tables(report.model for report in reports)
    manifest = Manifest(
        torch=str(torch.__version__),
        step=snapshot.step,
        serial=serial,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        num_stages=len(reports),
        model=model,
        optimizer=merge_optimizers(report.optimizer for report in reports),
        extra=snapshot.extra,
        run_info=snapshot.run_info,
        fingerprint=model.fingerprint,
        files=write_index(partial, [report.part for report in reports]),
    )
    write_synced(partial / MANIFEST, to_text(manifest))


def _decide_failed(snapshot: StageSnapshot, context: SaveContext, error: Exception) -> str:
    reason = summarize_error(error)
    try:
        decided = context.store.decide(snapshot.name, reason)
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
