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
from polyrhythm.run.checkpoint.staging import Nested

SAVED = "saved"  # the decision; any other is the reason why not
_REPORT_KEYS = ("begin", "part", "end")  # of a round


@dataclass(frozen=True, slots=True)
class SaveContext:
    """Where, and with whom."""

    folder: Path
    stage: int
    store: JobStore
    keep: int
    rounds: list[str]  # the first stage's: saves, in order, whose notes are still there


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSnapshot:
    """What a stage has to save."""

    name: str  # of the round, the same on all stages
    step: int
    tensors: Nested
    model: ModelTable
    optimizer: OptimizerTable | None
    extra: dict[str, Any]
    run_info: dict[str, Any]
    optimizer_state_fn: (
        Callable[[], tuple[Nested, OptimizerTable]] | None
    )  # of the optimizer, if not above

    def with_optimizer_state(self) -> "StageSnapshot":
        """With what comes later."""
        if self.optimizer_state_fn is None:
            return self
        state, table = self.optimizer_state_fn()
        tensors = self.tensors | ({OPTIMIZER: state} if state else {})
        return replace(self, tensors=tensors, optimizer=table, optimizer_state_fn=None)


@dataclass(frozen=True, slots=True)
class _StageReport:
    """What the first stage needs from the others."""

    part: WrittenStage
    model: ModelTable
    optimizer: OptimizerTable | None


@dataclass(frozen=True, slots=True)
class SaveDecision:
    path: Path | None  # None: there is no checkpoint of this step
    why: str
    should_warn: bool  # by this stage


def save_with_all_stages(snapshot: StageSnapshot, context: SaveContext) -> SaveDecision:
    """Called by all stages, each in a thread of its own; they return alike."""
    try:
        whole = snapshot.with_optimizer_state()
        report: _StageReport | None = _StageReport(
            _write(whole, context), whole.model, whole.optimizer
        )
        failure = ""
    except Exception as error:  # whatever it is, training goes on
        report, failure = None, f"stage {context.stage}: {summarize_error(error)}"
    is_first = context.stage == 0
    try:
        if failure:
            context.store.decide(snapshot.name, failure)
        context.store.put(f"{snapshot.name}/part", report)
        decided = _commit(snapshot, context) if is_first else _wait_for_decision(snapshot, context)
    except Exception as error:
        is_first = True  # nobody else may be there to tell
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
            context.store.put(begin, None)  # whatever became of it, the others must not wait
    context.store.get(begin, 0)
    return write_stage(partial, snapshot.tensors, context.stage)


def _wait_for_decision(snapshot: StageSnapshot, context: SaveContext) -> str:
    # Twice: the first stage, too, may be waiting for another one until its deadline.
    decision: str = context.store.get(f"{snapshot.name}/end", 0, timeout=2 * context.store.timeout)
    return decision


def _commit(snapshot: StageSnapshot, context: SaveContext) -> str:
    """By the first stage: join what all have written; what became of it, as all are told."""
    partial = partial_folder(context.folder, snapshot.step)
    try:
        reports = context.store.get_all(f"{snapshot.name}/part")
        if None in reports:
            decided = context.store.decide(snapshot.name, "a stage failed")  # it has said why
        else:
            _delete_past_rounds(snapshot, context)
            _write_manifest(partial, snapshot, reports, next_serial(context.folder))
            decided = context.store.decide(snapshot.name, SAVED)
        if decided == SAVED:
            complete(partial, step_folder(context.folder, snapshot.step))
    except Exception as error:
        decided = _decide_failed(snapshot, context, error)
    if decided == SAVED:
        with contextlib.suppress(OSError):  # what cannot be removed is tried after the next one
            remove_old(context.folder, context.keep)
    else:
        shutil.rmtree(partial, ignore_errors=True)
    context.store.put(f"{snapshot.name}/end", decided)
    return decided


def _delete_past_rounds(snapshot: StageSnapshot, context: SaveContext) -> None:
    """Once all write in this round, nobody reads what was said in earlier ones."""
    while (past := context.rounds[0]) != snapshot.name:
        for name in (past, *(f"{past}/{report}" for report in _REPORT_KEYS)):
            context.store.delete(name)
        context.rounds.pop(0)


def _write_manifest(
    partial: Path, snapshot: StageSnapshot, reports: list[_StageReport], serial: int
) -> None:
    """The index of all parts, and last the manifest."""
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
    except PeerError:  # the store is gone, and with it the job
        return reason
    # The first stage decides before it renames: if that went wrong, it says so to the others.
    return reason if decided == SAVED and context.stage == 0 else decided


def summarize_error(error: BaseException) -> str:
    """In a line; of a chain of errors the system's own, which says what to do (a full disk)."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    kind = "" if isinstance(error, PeerError) else f"{type(error).__name__}: "
    return f"{kind}{error}".strip().splitlines()[0]
