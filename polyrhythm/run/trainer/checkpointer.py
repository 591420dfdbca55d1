"""Checkpoints of a training job: the first pipeline saves, every pipeline restores."""

import logging
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from polyrhythm.plan.plan import Plan
from polyrhythm.plan.plan_file import plan_table
from polyrhythm.run.checkpoint.checkpointer import Checkpointer
from polyrhythm.run.checkpoint.folder import (
    BEST,
    CHECKPOINTS,
    best,
    candidates,
    find_best,
    list_steps,
)
from polyrhythm.run.checkpoint.manifest import CheckpointError, Manifest, read_manifest
from polyrhythm.run.checkpoint.save import SaveOutcome
from polyrhythm.run.checkpoint.state import restore
from polyrhythm.run.comm.process_groups import DEFAULT_TIMEOUT
from polyrhythm.run.comm.store import JobStore, Members
from polyrhythm.run.pipeline.partition import ModelPartition
from polyrhythm.run.trainer.config import TrainerConfig
from polyrhythm.run.trainer.metrics import Improvement
from polyrhythm.run.trainer.rank_assignment import LEADER
from polyrhythm.run.trainer.sync_strategy import NoSync
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.types import Worker

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TrainerCheckpointer:
    """Saves and restores one worker's stage; other pipelines only send their optimizer shards."""

    part: ModelPartition
    worker: Worker
    run_info: dict[str, Any]  # plan and model configuration, stored in each checkpoint
    make: Callable[[], Checkpointer] | None  # on the first pipeline
    store: JobStore
    restorers: Members  # the leader, and the processes of the other pipelines
    folder: Path
    is_continued: bool = field(default=False, init=False)  # its checkpoints are of this run
    checkpoints: Checkpointer | None = field(default=None, init=False)  # once it is needed
    _num_restores: int = field(default=0, init=False)
    _is_pending: bool = field(default=False, init=False)  # a save whose outcome is not known
    _saved: deque[SaveOutcome] = field(default_factory=deque, init=False)

    @classmethod
    def of(
        cls,
        config: TrainerConfig,
        part: ModelPartition,
        worker: Worker,
        group: dist.ProcessGroup | None,
        plan: Plan,
        store: JobStore,
        log: EventLog | None,
    ) -> "TrainerCheckpointer":
        make = None
        assert config.run_dir is not None, "checkpoints are saved there"
        folder, keep_last = config.run_dir / CHECKPOINTS, config.checkpoint.keep_last
        if worker.pipeline == 0:
            make = partial(
                Checkpointer,
                folder,
                process_group=group,
                tied=part.tied,
                keep_last=keep_last,
                log=log,
                timeout=max(config.timeout, DEFAULT_TIMEOUT),  # a disk may be slower than a peer
            )
        others = range(plan.num_stages, plan.num_workers)
        restorers = Members((plan.rank(LEADER), *others))
        made = cls(part, worker, {"plan": plan_table(plan)}, make, store, restorers, folder)
        if config.checkpoint.every is not None or config.checkpoint.keep_best is not None:
            made.open()  # a folder that stages do not share is refused at the start
        return made

    def open(self) -> Checkpointer | None:
        """Open the folder, on the first pipeline; without checkpoints it need not be shared."""
        if self.checkpoints is None and self.make is not None:
            self.checkpoints = self.make()
        return self.checkpoints

    def save(
        self,
        step: int,
        strategy: NoSync,
        extra: Mapping[str, Any],
        *,
        blocking: bool = False,
        overlap: bool = False,
    ) -> None:
        """Save in the background; with `blocking`, first wait for the save in progress.

        With `overlap` the next forward and backward may begin before a GPU has made the copies;
        `before_update` comes then.
        """
        strategy.synchronize()
        future = strategy.async_state_dict()
        if (checkpoints := self.open()) is not None:
            if blocking:
                checkpoints.wait()
            self._look_for_outcome()
            self._is_pending |= checkpoints.save(
                step,
                self.part.module,
                strategy.optimizer,
                optimizer_state_fn=None if future is None else future.result,
                extra=extra,
                run_info=self.run_info,
                blocking=blocking,
                overlap=overlap,
            )

    def before_update(self) -> None:
        """Before weights change: let the GPU wait for its copies of them."""
        if self.checkpoints is not None:
            self.checkpoints.wait_for_copies()

    def pop_saved(self) -> SaveOutcome | None:
        """On the first pipeline: return a checkpoint that has become complete, each once."""
        self._look_for_outcome()
        return self._saved.popleft() if self._saved else None

    def _look_for_outcome(self) -> None:
        if self._is_pending and self.checkpoints is not None:
            outcome = self.checkpoints.wait(0.0)
            self._is_pending = outcome is None
            if outcome is not None and outcome.is_saved:
                self._saved.append(outcome)

    def is_best(self, improvement: Improvement, value: float) -> bool:
        """On the leader: whether a value is the best of its metric among checkpoints on disk."""
        self.wait_for_disk()
        found = best(candidates(self.folder, should_warn=False), improvement.metric)
        return improvement.is_better(value, None if found is None else found[1])

    def restore(
        self, path: Path | None, optimizer: Optimizer, check: Callable[[Manifest], object]
    ) -> Manifest | None:
        """Restore `path`, or the best, by default the newest complete one; None if there is none.

        Raises CheckpointError in all processes if the checkpoint at `path` is damaged; without
        `path`, if checkpoints exist and all are damaged. `check` may refuse it, before anything
        has changed.
        """
        checkpoints = self.open()
        found, module = self._find_checkpoint(path), self.part.module
        manifest = None
        if found is not None:
            check(read_manifest(found))
            if checkpoints is not None:
                manifest = checkpoints.restore(found, module, optimizer, verify=False)
            else:
                tied = self.part.tied
                manifest = restore(found, module, optimizer, tied=tied, whole=False, verify=False)
        if path is None or found is None or found.parent.resolve() == self.folder.resolve():
            self.is_continued = True  # only now: after a refusal its checkpoints are not this run's
        return manifest

    def begin_run(self, what: str, *, overwrite: bool) -> None:
        """On the leader, before training: refuse a folder of checkpoints that is not restored.

        With `overwrite` move them to another folder: mixed with those of this run, a later
        restore might continue the earlier one.
        """
        steps = list_steps(self.folder)
        if self.is_continued or not steps:
            return
        moved = next(
            p for i in count(1) if not (p := self.folder.with_name(f"{CHECKPOINTS}.{i}")).exists()
        )
        if not overwrite:
            num = "1 checkpoint" if len(steps) == 1 else f"{len(steps)} checkpoints"
            raise CheckpointError(
                f"{what} in {self.folder.parent}, which holds {num}, the last of step {max(steps)}",
                expected="restore() before it, or a run folder without checkpoints: those that "
                "this run may save would be mixed with these, and in time replace them",
                fix="call restore() to continue that run, fit(..., overwrite=True) to start again "
                f"(moves them to {moved.name}), or pass another run_dir",
            )
        _logger.warning("%s: earlier checkpoints are now in %s", self.folder.parent, moved.name)
        self.folder.rename(moved)

    def wait_for_disk(self) -> None:
        """Wait until no save is in progress."""
        if self.checkpoints is not None:
            self.checkpoints.wait()

    def wait(self) -> bool:
        """Wait until the save in progress is on disk; return whether it is, as far as known."""
        outcome = None if self.checkpoints is None else self.checkpoints.wait()
        if outcome is None or outcome.is_saved:
            return True
        if self.worker == LEADER:
            warnings.warn(f"the last checkpoint was not saved: {outcome.why}", stacklevel=3)
        return False

    def close(self) -> None:
        self.wait()
        if self.checkpoints is not None:
            self.checkpoints.close()

    def abandon(self) -> None:
        """Close after a failure; a save in progress ends by itself, without the other stages."""
        if self.checkpoints is not None:
            self.checkpoints.__exit__(RuntimeError, RuntimeError(), None)

    def _find_checkpoint(self, path: Path | None) -> Path | None:
        """The first pipeline finds and verifies the checkpoint; the others receive its path."""
        self._num_restores += 1
        name = f"the checkpoint of restore {self._num_restores}"

        def find() -> str | None:
            assert self.checkpoints is not None, "this is the first pipeline"
            if path is None:
                found = _latest_or_raise(self.checkpoints)
            elif path == Path(BEST):
                self.wait_for_disk()  # the best may be about to appear
                found = self.checkpoints.verify_files(find_best(self.folder))
            else:
                found = self.checkpoints.verify_files(path)
            return None if found is None else str(found)

        is_other_stage = self.checkpoints is not None and self.worker != LEADER
        found = find() if is_other_stage else self.store.run_on_leader(name, find, self.restorers)
        return None if found is None else Path(found)


def _latest_or_raise(checkpoints: Checkpointer) -> Path | None:
    """Refuse to start from scratch if checkpoints exist: rotation would delete them."""
    found, steps = checkpoints.latest(), list_steps(checkpoints.folder)
    if found is None and steps:
        raise CheckpointError(
            f"{checkpoints.folder}: none of its {len(steps)} checkpoints is complete and finite",
            expected="a complete checkpoint with finite weights to restore",
            fix="restore a copy; or, to start from step 0, remove them or use another run folder",
        )
    return found
