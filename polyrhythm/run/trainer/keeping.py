"""Checkpoints of a training job: the first pipeline saves, every pipeline restores."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.optim import Optimizer

from polyrhythm.events import EventLog
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.plan_file import plan_table
from polyrhythm.run.checkpoint.checkpoints import Checkpoints
from polyrhythm.run.checkpoint.folder import CHECKPOINTS
from polyrhythm.run.checkpoint.manifest import Manifest
from polyrhythm.run.checkpoint.restore import restore
from polyrhythm.run.peers import waiting_for
from polyrhythm.run.pipeline.split import Part
from polyrhythm.run.trainer.together import Alone, Decoupled
from polyrhythm.types import Worker


@dataclass(slots=True)
class Keeping:
    """Replicas of the first pipeline only help, where they hold a part of the state."""

    part: Part
    worker: Worker
    facts: dict[str, Any]  # of the run, that a checkpoint tells
    checkpoints: Checkpoints | None  # of the first pipeline
    _num_restores: int = field(default=0, init=False)

    @classmethod
    def of(
        cls,
        run: Path,
        part: Part,
        worker: Worker,
        group: dist.ProcessGroup | None,
        plan: Plan,
        *,
        keep: int,
        log: EventLog | None,
    ) -> "Keeping":
        checkpoints = None
        if worker.pipeline == 0:
            checkpoints = Checkpoints(
                run / CHECKPOINTS, group=group, tied=part.tied, keep=keep, log=log
            )
        return cls(part, worker, {"plan": plan_table(plan)}, checkpoints)

    def save(
        self, step: int, together: Alone, extra: Mapping[str, Any], *, patient: bool = False
    ) -> None:
        """In the background; a patient one waits for an earlier one to end."""
        together.settle()
        if self.checkpoints is not None:
            self.checkpoints.save(
                step,
                self.part.module,
                together.optimizer,
                extra=extra,
                facts=self.facts,
                patient=patient,
            )
        elif isinstance(together, Decoupled):
            together.optimizer.state_dict()  # each replica has a part of it

    def restore(self, path: Path | None, optimizer: Optimizer) -> Manifest | None:
        """The given checkpoint, or else the newest that is whole; None if there is none."""
        self._num_restores += 1
        if self.checkpoints is None:
            found = self._told() if path is None else path
            if found is None:
                return None
            tied = self.part.tied
            return restore(found, self.part.module, optimizer, tied=tied, whole=False, verify=False)
        found = self.checkpoints.latest() if path is None else path
        if path is None and self.worker == Worker(0, 0) and dist.is_initialized():
            _get_default_store().set(self._key, "" if found is None else str(found))
        if found is None:
            return None
        return self.checkpoints.restore(found, self.part.module, optimizer)

    def wait(self) -> None:
        """Until what is saved is on disk."""
        if self.checkpoints is not None:
            outcome = self.checkpoints.wait()
            if outcome is not None and not outcome.is_saved and self.worker == Worker(0, 0):
                warnings.warn(f"the last checkpoint was not saved: {outcome.why}", stacklevel=3)

    def close(self) -> None:
        self.wait()
        if self.checkpoints is not None:
            self.checkpoints.close()

    @property
    def _key(self) -> str:
        return f"polyrhythm/restored/{self._num_restores}"

    def _told(self) -> Path | None:
        """What the first pipeline has found."""
        with waiting_for(Worker(0, 0), "hearing which checkpoint to restore"):
            told = _get_default_store().get(self._key).decode()
        return Path(told) if told else None
