"""Restore a checkpoint into the module and the optimizer of a stage, or of a whole model."""

from collections.abc import Iterable
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from polyrhythm.run.checkpoint.files import MODEL, read_into, read_optimizer
from polyrhythm.run.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    ModelTable,
    check_model,
    find_damage,
    read_manifest,
)
from polyrhythm.run.checkpoint.state import StageModel, check_optimizer, load_optimizer
from polyrhythm.run.pipeline.partition import TiedParameter


def restore(
    path: Path | str,
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    tied: Iterable[TiedParameter] = (),
    whole: bool = True,
    verify: bool = True,
) -> Manifest:
    """Restore in one process and return the manifest; if it raises, nothing has changed.

    `whole=False`: the module is one stage of the saved model, and `tied` is that of its
    `ModelPartition`. `verify` reads all files first.
    """
    path = Path(path)
    manifest = read_manifest(path)
    if verify and (problem := find_damage(path, manifest.files)) is not None:
        raise damage_error(path, problem)
    model = StageModel.of(module, tied)
    load(path, manifest, module, model, optimizer, table=model.table, whole=whole)
    return manifest


def load(
    path: Path,
    manifest: Manifest,
    module: nn.Module,
    model: StageModel,
    optimizer: Optimizer | None,
    *,
    table: ModelTable,
    whole: bool,
) -> None:
    """Check and read; `table` describes the modules of all processes that restore together."""
    check_model(manifest, table, whole=whole)
    if optimizer is not None:
        check_optimizer(optimizer, module, model, manifest.optimizer)
    read_into(path, {MODEL: model.tensors})
    if optimizer is not None and manifest.optimizer is not None:
        tensors = read_optimizer(path, model.tensors)
        load_optimizer(optimizer, module, model, manifest.optimizer, tensors)


def damage_error(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {problem}",
        expected="files as they were written",
        fix="restore an earlier one: latest() finds the newest complete one",
    )
