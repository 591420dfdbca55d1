"""Checkpoints of a model that is cut into stages: saved in the background, whole or not at all.

    checkpoints = Checkpoints("runs/mine/checkpoints", group=stages, tied=part.tied)
    if (path := checkpoints.latest()) is not None:
        step = checkpoints.restore(path, pipe.module, optimizer).step
    ...
    checkpoints.save(step, pipe.module, optimizer, extra={"position": position})
    ...
    checkpoints.close()

`save` copies the state and returns; a thread writes it while training goes on. A save that fails,
for a full disk or a peer that is gone, becomes a warning and an event: training goes on, earlier
checkpoints stay, the next save tries again. All stages agree on which it was.
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
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from polyrhythm.errors import LaunchError, PeerError
from polyrhythm.events import EventLog
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
from polyrhythm.run.checkpoint.staging import Nested, Staging
from polyrhythm.run.checkpoint.state import StageModel, optimizer_state
from polyrhythm.run.pipeline.partition import TiedParameter
from polyrhythm.run.pipeline.stage_setup import stage_ranks
from polyrhythm.types import Seconds

SAVE_TIMEOUT: Seconds = 600.0
_NICENESS = 10  # the niceness of the thread that writes: cores are for training first


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """How a save ended, on all stages alike."""

    step: int
    path: Path | None  # None: it failed, or was left out
    why: str = ""

    @property
    def is_saved(self) -> bool:
        return self.path is not None


class Checkpointer:
    """Made and used by all stages of one pipeline together; replicas do not save."""

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
        """`group`: the processes that hold the stages, in their order, or their ranks.

        Without it those of the whole job, or this process alone. All must see the same `folder`.
        `tied` is the `Part`'s: parameters that other stages hold, too. After a save the newest
        `keep` stay. `timeout` bounds what a save waits for another stage, its writing included.
        """
        if keep < 1 or timeout <= 0:
            raise CheckpointError(
                f"keep={keep}, timeout={timeout}",
                expected="one checkpoint or more to keep, and some time to wait",
                fix="use keep=1, and a timeout above what writing takes",
            )
        ranks, self.stage = _stage_of(group)
        self.num_stages, self.folder = len(ranks), Path(folder)
        self._tied, self._log = tuple(tied), log
        self._store = JobStore(ranks, self.stage, timeout=timeout)
        self._staging = Staging()
        self._context = SaveContext(self.folder, self.stage, self._store, keep, rounds=[])
        self._thread: threading.Thread | None = None
        self._outcome: SaveOutcome | None = None
        self._num_rounds = 0  # that all stages count alike
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
        """Copy the state now, and write it in the background; False if it is left out.

        While an earlier save is under way, this one is left out with a warning, for training not
        to wait for a slow disk; a `blocking` one, such as the last of a run, waits for it. `extra`
        and `run_info` are the first stage's: what the loop needs to go on, and what is known of the
        run (its plan, say). The replicas of a DistributedOptimizer call its state_dict() meanwhile;
        or all call its state_later(), whose result is `optimizer_state_fn`, and is asked for when it is written.
        """
        self._check_open()
        if optimizer_state_fn is not None and optimizer is None:
            raise CheckpointError(
                "save() with optimizer_state_fn= and without an optimizer",
                expected="the optimizer whose state comes later, which names its parameters",
                fix="save(step, module, optimizer, optimizer_state_fn=...)",
            )
        began = time.perf_counter()
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
        copied = time.perf_counter() - began
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, began, copied), name="checkpoint", daemon=True
        )
        self._thread.start()
        return True

    def wait(self, timeout: Seconds | None = None) -> SaveOutcome | None:
        """How the last save ended; None if there was none, or it takes longer than this."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return None
        return self._outcome

    def latest(self) -> Path | None:
        """The newest checkpoint that is whole; warns of damaged ones. Called by all stages.

        Every file is read, each by one of the stages.
        """
        self._check_open()
        name = self._next_round()
        told: list[str] | CheckpointError = []
        if self.stage == 0:
            try:
                told = [path.name for path, _ in folders.candidates(self.folder)]
            except CheckpointError as error:
                told = error  # for all stages to raise
        listed = self._store.all_gather(name, told)[0]
        if isinstance(listed, CheckpointError):
            raise listed
        for each in listed:
            path = self.folder / each
            problem = self._find_damage(f"{name}/{each}", path, read_manifest(path))
            if problem is None:
                return path
            if self.stage == 0:
                warnings.warn(f"checkpoint passed over: {path}: {problem}", stacklevel=2)
        return None

    def verify_files(self, path: Path | str) -> Path:
        """That checkpoint, every file of which is read; raises CheckpointError if it is damaged.

        Called by all stages, each of which reads a part.
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
        """Into this cut of the model, whatever the cut that was saved. Called by all stages.

        The manifest has `step`, `extra` and `run_info`. Raises CheckpointError, and leaves module and
        optimizer as they are, if the checkpoint is damaged or of another model. `verify` reads all
        files first: not needed for what `latest` or `verify_files` has just read.
        """
        self._check_open()
        path = self.verify_files(path) if verify else Path(path)
        manifest, name = read_manifest(path), self._next_round()
        model = StageModel.of(module, self._tied, stage=self.stage)
        table = merge_tables(self._store.all_gather(f"{name}/model", model.table))
        load(path, manifest, module, model, optimizer, table=table, whole=True)
        return manifest

    def close(self) -> None:
        """Wait for the save that is under way."""
        self.wait()
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._release()  # a peer may be gone: waiting would hide the error

    def _release(self) -> None:
        self._is_closed = True
        self._store.close()
        self._staging.clear()

    def _check_open(self) -> None:
        if self._is_closed:
            raise CheckpointError(
                "checkpoints that are closed", expected="open ones", fix="make new ones"
            )

    def _next_round(self) -> str:
        self._num_rounds += 1
        return f"round{self._num_rounds}"

    def _check_shared_folder(self) -> None:
        """Clean up after a run that was killed; see that all stages look at the same folder."""
        mark, secret, problem = self.folder / ".in-use", os.urandom(8).hex(), ""
        if self.stage == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                folders.remove_leftovers(self.folder)
                mark.write_text(secret)
            except OSError as error:
                problem = f"stage 0 cannot write there: {error.strerror}"
        secret, problem = self._store.all_gather("meet", (secret, problem))[0]
        seen = mark.exists() and mark.read_text() == secret
        blind = [i for i, sees in enumerate(self._store.all_gather("seen", seen)) if not sees]
        if problem or blind:
            raise LaunchError(
                f"{self.folder.absolute()}: "
                + (problem or f"stage {blind[0]} does not see what stage 0 writes there"),
                expected="a folder that all stages share, such as one on a network file system",
                fix="give the path of one",
            )
        if self.stage == 0:
            mark.unlink()

    def _find_damage(self, name: str, path: Path, manifest: Manifest) -> str | None:
        """Each stage reads its share of the files; the first problem of all."""
        share = dict(sorted(manifest.files.items())[self.stage :: self.num_stages])
        problems = self._store.all_gather(f"{name}/damage", find_damage(path, share))
        return next((problem for problem in problems if problem is not None), None)

    def _skip(self, name: str, step: int) -> None:
        why = f"stage {self.stage} was still writing an earlier one"
        with contextlib.suppress(PeerError):  # no store, no job: training will say so
            self._store.decide(name, why)
            self._store.put(f"{name}/part", None)
        self._log_event(SaveOutcome(step, None, why), time.perf_counter(), {})
        if self.stage == 0:
            warnings.warn(
                f"checkpoint of step {step} left out: {why}; save less often", stacklevel=3
            )

    def _write(self, snapshot: StageSnapshot, began: Seconds, copied: Seconds) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        ended = save_with_all_stages(snapshot, self._context)
        self._outcome = SaveOutcome(snapshot.step, ended.path, ended.why)
        self._log_event(self._outcome, began, {"copied_s": copied})
        if ended.path is None and ended.should_warn:
            warnings.warn(
                f"checkpoint of step {snapshot.step} failed: {ended.why}; training goes on",
                stacklevel=1,
            )

    def _log_event(self, outcome: SaveOutcome, began: Seconds, values: Mapping[str, float]) -> None:
        if self._log is not None:
            self._log.write(
                "checkpoint",
                start=self._log.at(began),
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


def _stage_of(group: dist.ProcessGroup | Sequence[int] | None) -> tuple[list[int], int]:
    if not isinstance(group, Sequence):
        return stage_ranks(group)
    ranks, own = list(group), dist.get_rank() if dist.is_initialized() else 0
    if own not in ranks:
        raise LaunchError(
            f"checkpoints of ranks {ranks} in the process of rank {own}",
            expected="the processes of one pipeline: replicas do not save",
            fix="make them in those, and restore the others with the function restore()",
        )
    return ranks, ranks.index(own)
