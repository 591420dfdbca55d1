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
from polyrhythm.run.checkpoint.board import Board
from polyrhythm.run.checkpoint.files import MODEL, OPTIMIZER
from polyrhythm.run.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    OptimizerTable,
    as_json,
    damage,
    merged_tables,
    read_manifest,
)
from polyrhythm.run.checkpoint.restore import damaged, load
from polyrhythm.run.checkpoint.saving import Job, Saving, save_together
from polyrhythm.run.checkpoint.staging import Nested, Staging
from polyrhythm.run.checkpoint.state import StageModel, optimizer_state
from polyrhythm.run.pipeline.split import Tied
from polyrhythm.run.pipeline.standing import place_of
from polyrhythm.types import Seconds

DEADLINE: Seconds = 600.0
_BEHIND = 10  # the niceness of the thread that writes: cores are for training first


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a save ended, on all stages alike."""

    step: int
    path: Path | None  # None: it failed, or was left out
    why: str = ""

    @property
    def is_saved(self) -> bool:
        return self.path is not None


class Checkpoints:
    """Made and used by all stages of one pipeline together; replicas do not save."""

    def __init__(
        self,
        folder: Path | str,
        *,
        group: dist.ProcessGroup | Sequence[int] | None = None,
        tied: Iterable[Tied] = (),
        keep: int = 3,
        deadline: Seconds = DEADLINE,
        log: EventLog | None = None,
    ) -> None:
        """`group`: the processes that hold the stages, in their order, or their ranks.

        Without it those of the whole job, or this process alone. All must see the same `folder`.
        `tied` is the `Part`'s: parameters that other stages hold, too. After a save the newest
        `keep` stay. `deadline` bounds what a save waits for another stage, its writing included.
        """
        if keep < 1 or deadline <= 0:
            raise CheckpointError(
                f"keep={keep}, deadline={deadline}",
                expected="one checkpoint or more to keep, and some time to wait",
                fix="use keep=1, and a deadline above what writing takes",
            )
        ranks, self.stage = _place(group)
        self.num_stages, self.folder = len(ranks), Path(folder)
        self._tied, self._log = tuple(tied), log
        self._board = Board(ranks, self.stage, deadline=deadline)
        self._staging = Staging()
        self._job = Job(self.folder, self.stage, self._board, keep, rounds=[])
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._num_rounds = 0  # that all stages count alike
        self._is_closed = False
        self._meet()

    def save(
        self,
        step: int,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        later: Callable[[], Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
        facts: Mapping[str, Any] | None = None,
        patient: bool = False,
    ) -> bool:
        """Copy the state now, and write it in the background; False if it is left out.

        While an earlier save is under way, this one is left out with a warning, for training not
        to wait for a slow disk; a `patient` one, such as the last of a run, waits for it. `extra`
        and `facts` are the first stage's: what the loop needs to go on, and what is known of the
        run (its plan, say). The replicas of a DistributedOptimizer call its state_dict() meanwhile;
        or all call its state_later(), whose result is `later`, and is asked for when it is written.
        """
        self._check_open()
        if later is not None and optimizer is None:
            raise CheckpointError(
                "save() with later= and without an optimizer",
                expected="the optimizer whose state comes later, which names its parameters",
                fix="save(step, module, optimizer, later=...)",
            )
        began = time.perf_counter()
        name = self._round()
        if self.stage == 0:
            self._job.rounds.append(name)
        if patient and self._thread is not None:
            self._thread.join()
        if self._thread is not None and self._thread.is_alive():
            self._leave_out(name, step)
            return False
        model = StageModel.of(module, self._tied, stage=self.stage)
        tensors: dict[str, Any] = {MODEL: model.saved} if model.saved else {}
        table: OptimizerTable | None = None
        asked_later: Callable[[], tuple[Nested, OptimizerTable]] | None = None
        if optimizer is not None and later is not None:
            asked_later = partial(_state_later, optimizer, module, model, later)
        elif optimizer is not None:
            state, table = optimizer_state(optimizer, module, model, optimizer.state_dict())
            tensors |= {OPTIMIZER: state} if state else {}
        saving = Saving(
            name=name,
            step=step,
            tensors=self._staging.copied(tensors),
            model=model.table,
            optimizer=table,
            extra=as_json(extra, "extra"),
            facts=as_json(facts, "facts"),
            later=asked_later,
        )
        copied = time.perf_counter() - began
        self._thread = threading.Thread(
            target=self._write, args=(saving, began, copied), name="checkpoint", daemon=True
        )
        self._thread.start()
        return True

    def wait(self, timeout: Seconds | None = None) -> Outcome | None:
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
        name = self._round()
        told: list[str] | CheckpointError = []
        if self.stage == 0:
            try:
                told = [path.name for path, _ in folders.candidates(self.folder)]
            except CheckpointError as error:
                told = error  # for all stages to raise
        listed = self._board.exchange(name, told)[0]
        if isinstance(listed, CheckpointError):
            raise listed
        for each in listed:
            path = self.folder / each
            problem = self._damage(f"{name}/{each}", path, read_manifest(path))
            if problem is None:
                return path
            if self.stage == 0:
                warnings.warn(f"checkpoint passed over: {path}: {problem}", stacklevel=2)
        return None

    def checked(self, path: Path | str) -> Path:
        """That checkpoint, every file of which is read; raises CheckpointError if it is damaged.

        Called by all stages, each of which reads a part.
        """
        self._check_open()
        path = Path(path)
        problem = self._damage(self._round(), path, read_manifest(path))
        if problem is not None:
            raise damaged(path, problem)
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

        The manifest has `step`, `extra` and `facts`. Raises CheckpointError, and leaves module and
        optimizer as they are, if the checkpoint is damaged or of another model. `verify` reads all
        files first: not needed for what `latest` or `checked` has just read.
        """
        self._check_open()
        path = self.checked(path) if verify else Path(path)
        manifest, name = read_manifest(path), self._round()
        model = StageModel.of(module, self._tied, stage=self.stage)
        table = merged_tables(self._board.exchange(f"{name}/model", model.table))
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
        self._board.close()
        self._staging.clear()

    def _check_open(self) -> None:
        if self._is_closed:
            raise CheckpointError(
                "checkpoints that are closed", expected="open ones", fix="make new ones"
            )

    def _round(self) -> str:
        self._num_rounds += 1
        return f"round{self._num_rounds}"

    def _meet(self) -> None:
        """Clean up after a run that was killed; see that all stages look at the same folder."""
        mark, secret, problem = self.folder / ".in-use", os.urandom(8).hex(), ""
        if self.stage == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                folders.remove_leftovers(self.folder)
                mark.write_text(secret)
            except OSError as error:
                problem = f"stage 0 cannot write there: {error.strerror}"
        secret, problem = self._board.exchange("meet", (secret, problem))[0]
        seen = mark.exists() and mark.read_text() == secret
        blind = [i for i, sees in enumerate(self._board.exchange("seen", seen)) if not sees]
        if problem or blind:
            raise LaunchError(
                f"{self.folder.absolute()}: "
                + (problem or f"stage {blind[0]} does not see what stage 0 writes there"),
                expected="a folder that all stages share, such as one on a network file system",
                fix="give the path of one",
            )
        if self.stage == 0:
            mark.unlink()

    def _damage(self, name: str, path: Path, manifest: Manifest) -> str | None:
        """Each stage reads its share of the files; the first problem of all."""
        share = dict(sorted(manifest.files.items())[self.stage :: self.num_stages])
        problems = self._board.exchange(f"{name}/damage", damage(path, share))
        return next((problem for problem in problems if problem is not None), None)

    def _leave_out(self, name: str, step: int) -> None:
        why = f"stage {self.stage} was still writing an earlier one"
        with contextlib.suppress(PeerError):  # no store, no job: training will say so
            self._board.decide(name, why)
            self._board.put(f"{name}/part", None)
        self._note(Outcome(step, None, why), time.perf_counter(), {})
        if self.stage == 0:
            warnings.warn(
                f"checkpoint of step {step} left out: {why}; save less often", stacklevel=3
            )

    def _write(self, saving: Saving, began: Seconds, copied: Seconds) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BEHIND)
        ended = save_together(saving, self._job)
        self._outcome = Outcome(saving.step, ended.path, ended.why)
        self._note(self._outcome, began, {"copied_s": copied})
        if ended.path is None and ended.is_to_be_told:
            warnings.warn(
                f"checkpoint of step {saving.step} failed: {ended.why}; training goes on",
                stacklevel=1,
            )

    def _note(self, outcome: Outcome, began: Seconds, values: Mapping[str, float]) -> None:
        if self._log is not None:
            self._log.write(
                "checkpoint",
                start=self._log.at(began),
                step=outcome.step,
                name="saved" if outcome.is_saved else "failed",
                why=outcome.why or None,
                values=values,
            )


def _state_later(
    optimizer: Optimizer,
    module: nn.Module,
    model: StageModel,
    later: Callable[[], Mapping[str, Any]],
) -> tuple[Nested, OptimizerTable]:
    return optimizer_state(optimizer, module, model, later())


def _place(group: dist.ProcessGroup | Sequence[int] | None) -> tuple[list[int], int]:
    if not isinstance(group, Sequence):
        return place_of(group)
    ranks, own = list(group), dist.get_rank() if dist.is_initialized() else 0
    if own not in ranks:
        raise LaunchError(
            f"checkpoints of ranks {ranks} in the process of rank {own}",
            expected="the processes of one pipeline: replicas do not save",
            fix="make them in those, and restore the others with the function restore()",
        )
    return ranks, ranks.index(own)
