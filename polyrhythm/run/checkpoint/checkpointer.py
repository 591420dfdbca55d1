"""Checkpoints of a model split into stages: saved in the background, complete or not at all.

    checkpoints = Checkpointer("runs/mine/checkpoints", process_group=stages, tied=part.tied)
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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from polyrhythm.errors import LaunchError, PeerError
from polyrhythm.renamed import renamed_arguments
from polyrhythm.run.checkpoint import folder as folders
from polyrhythm.run.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    ModelTable,
    as_json,
    damage_error,
    find_damage,
    merge_tables,
    read_manifest,
)
from polyrhythm.run.checkpoint.save import (
    SaveContext,
    SaveOutcome,
    StageSnapshot,
    save_with_all_stages,
    skip,
)
from polyrhythm.run.checkpoint.state import StagedCopies, StageModel, Staging, load, optimizer_state
from polyrhythm.run.comm.process_groups import DEFAULT_TIMEOUT
from polyrhythm.run.comm.store import JobStore, Members, job_store_backend
from polyrhythm.run.pipeline.partition import TiedParameter
from polyrhythm.run.pipeline.transport import stage_ranks
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.types import Seconds

_NICENESS = 10  # of the writing thread: training has priority
_MARKER = ".in-use-"  # of a file in the folder, by which all stages see that they share it


class Checkpointer:
    """Saves and restores one pipeline; all of its stages make it and call it together."""

    @renamed_arguments(group="process_group=", keep="keep_last=")
    def __init__(
        self,
        folder: Path | str,
        *,
        process_group: dist.ProcessGroup | Sequence[int] | None = None,
        tied: Iterable[TiedParameter] = (),
        keep_last: int = 3,
        timeout: Seconds = DEFAULT_TIMEOUT,
        log: EventLog | None = None,
        name: str = "checkpoints",
    ) -> None:
        """`process_group`: the stages in order, or their ranks; by default the whole job.

        All must see the same `folder`. `tied` is the `ModelPartition`'s: parameters that other
        stages hold, too. After a save the newest `keep_last` with finite weights are kept, and the
        newest of the others. `timeout` bounds the wait of a save for another stage, including the
        other stage's writing. `name` is unique among the Checkpointers that are open at the same
        time.
        """
        if keep_last < 1 or timeout <= 0:
            raise CheckpointError(
                f"keep_last={keep_last}, timeout={timeout}",
                expected="keep_last >= 1, and timeout > 0",
                fix="use keep_last=1, and a timeout longer than writing takes",
            )
        ranks, self.stage = _find_stage(process_group)
        self.num_stages, self.folder = len(ranks), Path(folder)
        self._tied, self._log = tuple(tied), log
        backend = job_store_backend(f"polyrhythm/{name}/{','.join(map(str, ranks))}", timeout)
        # Several may have this name, one after the other; each is an epoch.
        epoch = backend.add(f"opened by {ranks[self.stage]}", 1)
        self._members = Members(tuple(ranks), epoch)
        make_store = partial(
            JobStore,
            rank=ranks[self.stage],
            timeout=timeout,
            name_of=lambda rank: f"stage {ranks.index(rank)}",
        )
        self._store = make_store(backend)
        # Two threads must not share a connection.
        store_for_saves = make_store(backend.clone(), check=self._check_waits)
        self._context = SaveContext(self.folder, store_for_saves, self._members, keep_last, [])
        self._staging = Staging()
        self._copies: StagedCopies | None = None  # for which no later work waits yet
        self._thread: threading.Thread | None = None
        self._outcome: SaveOutcome | None = None
        self._num_rounds = 0  # equal on all stages
        self._is_closed = False
        self._open_folder()

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
        overlap: bool = False,
    ) -> bool:
        """Copy the state now, and write it in the background; False if the save is skipped.

        A GPU makes the copies before its next work, and the host does not wait for it. With
        `overlap` its next work may begin meanwhile: call `wait_for_copies` before trained weights
        or the optimizer's state change. A forward may change buffers, weights that are not trained,
        and embeddings with a `max_norm`, and no other weights.

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
        tensors, table, state_fn = model.saved, None, None
        kept = set(model.constant_in_forward)
        if optimizer is not None and optimizer_state_fn is not None:
            state_fn = partial(optimizer_state, optimizer, module, model, optimizer_state_fn)
        elif optimizer is not None:
            state, table = optimizer_state(optimizer, module, model, optimizer.state_dict)
            tensors |= state
            kept |= state.keys()
        self._copies = self._staging.copy_to_host(tensors, kept if overlap else ())
        snapshot = StageSnapshot(
            name=name,
            step=step,
            copies=self._copies,
            model=model.table,
            trained=model.trained,
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

    def wait_for_copies(self) -> None:
        """Let the GPU wait for copies that `overlap` its work; the host does not wait."""
        if self._copies is not None:
            self._copies.wait_on_device()
            self._copies = None

    def wait(self, timeout: Seconds | None = None) -> SaveOutcome | None:
        """Return the outcome of the last save; None if there was none, or after `timeout`."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return None
        return self._outcome

    def latest(self) -> Path | None:
        """Find the newest complete checkpoint with finite weights; warn of those skipped.

        All stages call it. Every file is read, each by one of the stages.
        """
        self._check_open()
        name = self._next_round()
        listed = self._store.run_on_leader(
            name,
            lambda: [path.name for path, _ in folders.restorable(self.folder)],
            self._members,
        )
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
        tables = self._store.all_gather_object(
            f"{name}/model", model.table, self._members, as_type=ModelTable
        )
        load(path, manifest, module, model, optimizer, table=merge_tables(tables), whole=True)
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
        self._staging.clear()

    def _check_open(self) -> None:
        if self._is_closed:
            raise CheckpointError(
                "this Checkpointer is closed", expected="an open one", fix="make a new one"
            )

    def _check_waits(self) -> None:
        """End the waits of a save in progress once this Checkpointer is closed."""
        if self._is_closed:
            raise PeerError("the other stages", action="a save", waited=0.0, cause="closed here")

    def _next_round(self) -> str:
        self._num_rounds += 1
        return f"round{self._num_rounds}"

    def _open_folder(self) -> None:
        """Remove leftovers of a killed run; check that all stages see the same folder."""

        def mark_folder() -> str:
            name = f"{_MARKER}{os.urandom(8).hex()}"
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                folders.remove_leftovers(self.folder)
                for old in self.folder.glob(f"{_MARKER}*"):
                    old.unlink()
                (self.folder / name).touch()  # empty: survivors of a loss may find a full disk
            except OSError as error:
                raise self._not_shared(f"stage 0 cannot write there: {error.strerror}") from None
            return name

        marker = self.folder / self._store.run_on_leader("open", mark_folder, self._members)
        all_see = self._store.all_gather_object("seen", marker.exists(), self._members)
        if not all(all_see):
            stage = all_see.index(False)
            raise self._not_shared(f"stage {stage} does not see what stage 0 writes there")
        if self.stage == 0:
            marker.unlink()

    def _not_shared(self, problem: str) -> LaunchError:
        return LaunchError(
            f"{self.folder.absolute()}: {problem}",
            expected="a folder that all stages share, such as one on a network file system",
            fix="pass the path of a shared folder",
        )

    def _find_damage(self, name: str, path: Path, manifest: Manifest) -> str | None:
        """Read this stage's share of the files; return the first problem of all stages."""
        share = dict(sorted(manifest.files.items())[self.stage :: self.num_stages])
        problems = self._store.all_gather_object(
            f"{name}/damage", find_damage(path, share), self._members
        )
        return next((problem for problem in problems if problem is not None), None)

    def _skip(self, name: str, step: int) -> None:
        why = f"stage {self.stage} was still writing an earlier one"
        with contextlib.suppress(PeerError):  # without the store, training itself fails
            skip(name, why, replace(self._context, store=self._store))
        self._log_event(SaveOutcome(step, None, why), time.perf_counter(), {})
        if self.stage == 0:
            warnings.warn(
                f"checkpoint of step {step} skipped: {why}; save less often", stacklevel=3
            )

    def _write(self, snapshot: StageSnapshot, start: Seconds, copied: Seconds) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        outcome, should_warn = save_with_all_stages(snapshot, self._context)
        self._outcome = outcome
        self._log_event(outcome, start, {"copied_s": copied})
        if not outcome.is_saved and should_warn:
            warnings.warn(
                f"checkpoint of step {outcome.step} failed: {outcome.why}; training continues",
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


def _find_stage(
    process_group: dist.ProcessGroup | Sequence[int] | None,
) -> tuple[list[int], int]:
    if not isinstance(process_group, Sequence):
        return stage_ranks(process_group)
    ranks, rank = list(process_group), dist.get_rank() if dist.is_initialized() else 0
    if rank not in ranks:
        raise LaunchError(
            f"checkpoints of ranks {ranks} in the process of rank {rank}",
            expected="the processes of one pipeline: replicas do not save",
            fix="make the Checkpointer in those only, and restore the others with restore()",
        )
    return ranks, ranks.index(rank)
