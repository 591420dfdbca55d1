"""Checkpoints of a model split into stages: saved in the background, complete or not at all.

    checkpoints = Checkpointer("runs/mine/checkpoints", group=stages, tied=part.tied)
    if (path := checkpoints.latest()) is not None:
        step = checkpoints.restore(path, pipe.module, optimizer).step
    ...
    checkpoints.save(step, pipe.module, optimizer, extra={"position": position})
    ...
    checkpoints.close()

`save` copies the state and returns; a thread writes it while training continues. A failed save
(a full disk, a lost peer) becomes a warning and an event: training continues, earlier checkpoints
stay, the next save tries again. All stages agree on whether a save failed.
"""

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from polyrhythm.errors import LaunchError, PeerError
from polyrhythm.run.checkpoint import folder as folders
from polyrhythm.run.checkpoint.files import MODEL, OPTIMIZER
from polyrhythm.run.checkpoint.job_store import JobStore
from polyrhythm.run.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    OptimizerTable,
    as_json,
    find_damage,
    merge_tables,
    read_manifest,
)
from polyrhythm.run.checkpoint.restore import damage_error, load
from polyrhythm.run.checkpoint.save import SaveContext, StageSnapshot, save_with_all_stages
from polyrhythm.run.checkpoint.state import Nested, StageModel, Staging, optimizer_state
from polyrhythm.run.pipeline.partition import TiedParameter
from polyrhythm.run.pipeline.transport import stage_ranks
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.types import Seconds

SAVE_TIMEOUT: Seconds = 600.0
_NICENESS = 10  # of the writing thread: training has priority


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """The outcome of a save, equal on all stages."""

    step: int
    path: Path | None  # None: the save failed or was skipped
    why: str = ""

    @property
    def is_saved(self) -> bool:
        return self.path is not None


class Checkpointer:
    """Saves and restores one pipeline; all of its stages make it and call it together."""

    def __init__(
        self,
        folder: Path | str,
        *,
        group: dist.ProcessGroup | Sequence[int] | None = None,
        tied: Iterable[TiedParameter] = (),
        keep: int = 3,
        timeout: Seconds = SAVE_TIMEOUT,
        log: EventLog | None = None,
    ) -> None:
        """`group`: the processes of the stages in order, or their ranks; by default the whole job.

        All must see the same `folder`. `tied` is the `ModelPartition`'s: parameters that other
        stages hold, too. After a save the newest `keep` are kept. `timeout` bounds the wait of a
        save for another stage, including the other stage's writing.
        """
        if keep < 1 or timeout <= 0:
            raise CheckpointError(
                f"keep={keep}, timeout={timeout}",
                expected="keep >= 1, and timeout > 0",
                fix="use keep=1, and a timeout longer than writing takes",
            )
        ranks, self.stage = _find_stage(group)
        self.num_stages, self.folder = len(ranks), Path(folder)
        self._tied, self._log = tuple(tied), log
        self._store = JobStore(ranks, self.stage, timeout=timeout)
        self._staging = Staging()
        self._context = SaveContext(self.folder, self.stage, self._store, keep, rounds=[])
        self._thread: threading.Thread | None = None
        self._outcome: SaveOutcome | None = None
        self._num_rounds = 0  # equal on all stages
        self._is_closed = False
        self._check_shared_folder()

    def save(
        self,
        step: int,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        optimizer_state_fn: Callable[[], Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
        run_info: Mapping[str, Any] | None = None,
        blocking: bool = False,
    ) -> bool:
        """Copy the state now, and write it in the background; False if the save is skipped.

        During an earlier save, this one is skipped with a warning, so that training does not wait
        for a slow disk; with `blocking`, such as for the last save of a run, it waits. `extra` and
        `run_info` are the first stage's: what the loop needs to continue, and a description of the
        run (such as its plan). Replicas of a DistributedOptimizer call its `state_dict` meanwhile;
        or all call `async_state_dict`, whose `result` is `optimizer_state_fn`, called at the write.
        """
        self._check_open()
        if optimizer_state_fn is not None and optimizer is None:
            raise CheckpointError(
                "save() with optimizer_state_fn= and without an optimizer",
                expected="the optimizer too, which names its parameters",
                fix="save(step, module, optimizer, optimizer_state_fn=...)",
            )
        start = time.perf_counter()
        name = self._next_round()
        if self.stage == 0:
            self._context.rounds.append(name)
        if blocking and self._thread is not None:
            self._thread.join()
        if self._thread is not None and self._thread.is_alive():
            self._skip(name, step)
            return False
        model = StageModel.of(module, self._tied, stage=self.stage)
        tensors: dict[str, Any] = {MODEL: model.saved} if model.saved else {}
        table: OptimizerTable | None = None
        state_fn: Callable[[], tuple[Nested, OptimizerTable]] | None = None
        if optimizer is not None and optimizer_state_fn is not None:
            state_fn = partial(_optimizer_state_from, optimizer, module, model, optimizer_state_fn)
        elif optimizer is not None:
            state, table = optimizer_state(optimizer, module, model, optimizer.state_dict())
            tensors |= {OPTIMIZER: state} if state else {}
        snapshot = StageSnapshot(
            name=name,
            step=step,
            tensors=self._staging.copy_to_host(tensors),
            model=model.table,
            optimizer=table,
            extra=as_json(extra, "extra"),
            run_info=as_json(run_info, "run_info"),
            optimizer_state_fn=state_fn,
        )
        copied = time.perf_counter() - start
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, start, copied), name="checkpoint", daemon=True
        )
        self._thread.start()
        return True

    def wait(self, timeout: Seconds | None = None) -> SaveOutcome | None:
        """Return the outcome of the last save; None if there was none, or after `timeout`."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return None
        return self._outcome

    def latest(self) -> Path | None:
        """Find the newest complete checkpoint; warn of damaged ones. All stages call it.

        Every file is read, each by one of the stages.
        """
        self._check_open()
        name = self._next_round()
        proposed: list[str] | CheckpointError = []
        if self.stage == 0:
            try:
                proposed = [path.name for path, _ in folders.candidates(self.folder)]
            except CheckpointError as error:
                proposed = error  # all stages raise it
        listed = self._store.all_gather(name, proposed)[0]
        if isinstance(listed, CheckpointError):
            raise listed
        for each in listed:
            path = self.folder / each
            problem = self._find_damage(f"{name}/{each}", path, read_manifest(path))
            if problem is None:
                return path
            if self.stage == 0:
                warnings.warn(f"checkpoint skipped: {path}: {problem}", stacklevel=2)
        return None

    def verify_files(self, path: Path | str) -> Path:
        """Read every file of a checkpoint; raises CheckpointError if one is damaged.

        All stages call it, and each reads its share of the files.
        """
        self._check_open()
        path = Path(path)
        problem = self._find_damage(self._next_round(), path, read_manifest(path))
        if problem is not None:
            raise damage_error(path, problem)
        return path

    def restore(
        self,
        path: Path | str,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        verify: bool = True,
    ) -> Manifest:
        """Restore into this split of the model, whatever the saved split. All stages call it.

        Returns the manifest, with `step`, `extra` and `run_info`. Raises CheckpointError, and does
        not change module and optimizer, if the checkpoint is damaged or of another model.
        `verify` reads all files first: not needed after `latest` or `verify_files`.
        """
        self._check_open()
        path = self.verify_files(path) if verify else Path(path)
        manifest, name = read_manifest(path), self._next_round()
        model = StageModel.of(module, self._tied, stage=self.stage)
        table = merge_tables(self._store.all_gather(f"{name}/model", model.table))
        load(path, manifest, module, model, optimizer, table=table, whole=True)
        return manifest

    def close(self) -> None:
        """Wait for the save in progress, and close."""
        self.wait()
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._release()  # a peer may be lost: waiting would hide the error

    def _release(self) -> None:
        self._is_closed = True
        self._store.close()
        self._staging.clear()

    def _check_open(self) -> None:
        if self._is_closed:
            raise CheckpointError(
                "this Checkpointer is closed", expected="an open one", fix="make a new one"
            )

    def _next_round(self) -> str:
        self._num_rounds += 1
        return f"round{self._num_rounds}"

    def _check_shared_folder(self) -> None:
        """Remove leftovers of a killed run; check that all stages see the same folder."""
        marker, token, problem = self.folder / ".in-use", os.urandom(8).hex(), ""
        if self.stage == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                folders.remove_leftovers(self.folder)
                marker.write_text(token)
            except OSError as error:
                problem = f"stage 0 cannot write there: {error.strerror}"
        token, problem = self._store.all_gather("open", (token, problem))[0]
        seen = marker.exists() and marker.read_text() == token
        not_seeing = [i for i, sees in enumerate(self._store.all_gather("seen", seen)) if not sees]
        if problem or not_seeing:
            raise LaunchError(
                f"{self.folder.absolute()}: "
                + (problem or f"stage {not_seeing[0]} does not see what stage 0 writes there"),
                expected="a folder that all stages share, such as one on a network file system",
                fix="pass the path of a shared folder",
            )
        if self.stage == 0:
            marker.unlink()

    def _find_damage(self, name: str, path: Path, manifest: Manifest) -> str | None:
        """Read this stage's share of the files; return the first problem of all stages."""
        share = dict(sorted(manifest.files.items())[self.stage :: self.num_stages])
        problems = self._store.all_gather(f"{name}/damage", find_damage(path, share))
        return next((problem for problem in problems if problem is not None), None)

    def _skip(self, name: str, step: int) -> None:
        why = f"stage {self.stage} was still writing an earlier one"
        with contextlib.suppress(PeerError):  # without the store, training itself fails
            self._store.decide(name, why)
            self._store.put(f"{name}/part", None)
        self._log_event(SaveOutcome(step, None, why), time.perf_counter(), {})
        if self.stage == 0:
            warnings.warn(
                f"checkpoint of step {step} skipped: {why}; save less often", stacklevel=3
            )

    def _write(self, snapshot: StageSnapshot, start: Seconds, copied: Seconds) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        decision = save_with_all_stages(snapshot, self._context)
        self._outcome = SaveOutcome(snapshot.step, decision.path, decision.why)
        self._log_event(self._outcome, start, {"copied_s": copied})
        if decision.path is None and decision.should_warn:
            warnings.warn(
                f"checkpoint of step {snapshot.step} failed: {decision.why}; training continues",
                stacklevel=1,
            )

    def _log_event(self, outcome: SaveOutcome, start: Seconds, values: Mapping[str, float]) -> None:
        if self._log is not None:
            self._log.write(
                "checkpoint",
                start=self._log.at(start),
                step=outcome.step,
                name="saved" if outcome.is_saved else "failed",
                why=outcome.why or None,
                values=values,
            )


def _optimizer_state_from(
    optimizer: Optimizer,
    module: nn.Module,
    model: StageModel,
    optimizer_state_fn: Callable[[], Mapping[str, Any]],
) -> tuple[Nested, OptimizerTable]:
    return optimizer_state(optimizer, module, model, optimizer_state_fn())


def _find_stage(group: dist.ProcessGroup | Sequence[int] | None) -> tuple[list[int], int]:
    if not isinstance(group, Sequence):
        return stage_ranks(group)
    ranks, rank = list(group), dist.get_rank() if dist.is_initialized() else 0
    if rank not in ranks:
        raise LaunchError(
            f"checkpoints of ranks {ranks} in the process of rank {rank}",
            expected="the processes of one pipeline: replicas do not save",
            fix="make the Checkpointer in those only, and restore the others with restore()",
        )
    return ranks, ranks.index(rank)
