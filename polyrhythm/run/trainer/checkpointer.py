"""Checkpoints of a training job: the first pipeline saves, every pipeline restores."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from polyrhythm.events import EventLog
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.plan_file import plan_table
from polyrhythm.run.checkpoint.checkpointer import SAVE_TIMEOUT, Checkpointer
from polyrhythm.run.checkpoint.folder import CHECKPOINTS, list_steps
from polyrhythm.run.checkpoint.manifest import CheckpointError, Manifest
from polyrhythm.run.checkpoint.restore import restore
from polyrhythm.run.pipeline.partition import ModelPartition
from polyrhythm.run.trainer.store import LEADER, broadcast_object, receive_object
from polyrhythm.run.trainer.sync_strategy import NoSync
from polyrhythm.types import Worker


@dataclass(slots=True)
class TrainerCheckpointer:
    """Replicas of the first pipeline only help, where they hold a part of the state."""

    part: ModelPartition
    worker: Worker
    run_info: dict[str, Any]  # of the run, that a checkpoint tells
    checkpoints: Checkpointer | None  # of the first pipeline
    num_replicas: int  # processes of other pipelines
    name: str  # of the Trainer, in the job's store
    _num_restores: int = field(default=0, init=False)

    @classmethod
    def of(
        cls,
        run: Path,
        part: ModelPartition,
        worker: Worker,
        group: dist.ProcessGroup | None,
        plan: Plan,
        name: str,
        *,
        keep: int,
        log: EventLog | None,
    ) -> "TrainerCheckpointer":
        checkpoints = None
        if worker.pipeline == 0:
            checkpoints = Checkpointer(
                run / CHECKPOINTS, group=group, tied=part.tied, keep=keep, log=log
            )
        others = plan.num_workers - plan.num_stages
        return cls(part, worker, {"plan": plan_table(plan)}, checkpoints, others, name)

    def save(
        self, step: int, strategy: NoSync, extra: Mapping[str, Any], *, blocking: bool = False
    ) -> None:
        """In the background; a patient one waits for an earlier one to end."""
        strategy.synchronize()
        future = strategy.async_state_dict()
        if self.checkpoints is not None:
            self.checkpoints.save(
                step,
                self.part.module,
                strategy.optimizer,
                optimizer_state_fn=None if future is None else future.result,
                extra=extra,
                run_info=self.run_info,
                blocking=blocking,
            )

    def restore(self, path: Path | None, optimizer: Optimizer) -> Manifest | None:
        """The given checkpoint, or else the newest that is whole; None if there never was one.

        Raises CheckpointError, in all processes, if the given one is damaged, or all there are.
        """
        found, module = self._found(path), self.part.module
        if found is None:
            return None
        if self.checkpoints is not None:
            return self.checkpoints.restore(found, module, optimizer, verify=False)
        return restore(found, module, optimizer, tied=self.part.tied, whole=False, verify=False)

    def wait(self) -> None:
        """Until what is saved is on disk."""
        if self.checkpoints is not None:
            outcome = self.checkpoints.wait()
            if outcome is not None and not outcome.is_saved and self.worker == LEADER:
                warnings.warn(f"the last checkpoint was not saved: {outcome.why}", stacklevel=3)

    def close(self) -> None:
        self.wait()
        if self.checkpoints is not None:
            self.checkpoints.close()

    def _found(self, path: Path | None) -> Path | None:
        """The first pipeline looks for it and reads it all; the others hear what it has found."""
        self._num_restores += 1
        name = f"{self.name}/restored {self._num_restores}"
        if self.checkpoints is None:
            found: Path | None = receive_object(
                name, "hearing which checkpoint to restore", timeout=SAVE_TIMEOUT
            )
            return found
        try:
            found = (
                _latest_or_raise(self.checkpoints)
                if path is None
                else self.checkpoints.verify_files(path)
            )
        except CheckpointError as error:
            self._broadcast_found(name, error)
            raise
        self._broadcast_found(name, found)
        return found

    def _broadcast_found(self, name: str, value: Path | CheckpointError | None) -> None:
        if self.worker == LEADER:
            broadcast_object(name, value, num_receivers=self.num_replicas)


def _latest_or_raise(checkpoints: Checkpointer) -> Path | None:
    """Refuses to begin anew where something was kept: that would be removed in time."""
    found, there = checkpoints.latest(), list_steps(checkpoints.folder)
    if found is None and there:
        raise CheckpointError(
            f"{checkpoints.folder}: none of its {len(there)} checkpoints is whole",
            expected="one that training can go on from",
            fix="fetch a copy of one; or remove them, or give another run folder, to begin anew",
        )
    return found
