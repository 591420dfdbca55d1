"""Convert a checkpoint of format 1, the only place in Polyrhythm that unpickles.

Format 1 was written through torch.distributed.checkpoint, whose index is a pickle, as were the
states of learning rate schedulers and datasets. A pickle is code: convert only what you trust.
"""

import base64
import pickle
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from polyrhythm import __version__
from polyrhythm.run.checkpoint.encoding import Tensors, encode_state, split_tensors, write_tensors
from polyrhythm.run.checkpoint.folder import (
    CHECKPOINTS,
    complete,
    find_checkpoint,
    list_steps,
    new_folder,
    partial_folder,
    step_folder,
    write_synced,
)
from polyrhythm.run.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    CheckpointError,
    Manifest,
    OptimizerTable,
    damage_error,
    find_damage,
    read_manifest_as,
    to_text,
)
from polyrhythm.run.checkpoint.save import STAGE_FILE

_FORMAT = 1
_OPTIMIZER = "optimizer"  # tensors are named as now: model.NAME, optimizer.NAME.KEY


class _Optimizer(OptimizerTable, frozen=True):
    state: dict[str, Any] = msgspec.field(name="values")  # other than tensors


class _Manifest(Manifest, frozen=True, kw_only=True):
    optimizer: _Optimizer | None
    run_info: dict[str, Any] = msgspec.field(name="facts")


def _newest(folder: Path) -> Path | None:
    """Return the complete checkpoint that was saved last; if all are damaged, the last of them."""
    complete, damaged, newest = list[tuple[int, Path]](), list[str](), None
    for newest in list_steps(folder).values():
        try:
            manifest = read_manifest_as(_Manifest, newest, _FORMAT)
            problem = find_damage(newest, manifest.files)
        except CheckpointError as error:
            problem = error.wrong
        if problem is None:
            complete.append((manifest.serial, newest))
        else:
            damaged.append(f"{newest} is skipped: {problem}")
    if not complete:
        return newest
    for text in damaged:
        warnings.warn(text, stacklevel=4)
    return max(complete)[1]


def convert(run: Path, out: Path, step: int | None = None) -> Path:
    """Convert the checkpoint of a step, by default the newest complete, into the run folder `out`.

    `run` is a run folder, its checkpoints folder, or a checkpoint. Runs the code that the
    checkpoint contains. Raises CheckpointError if it is damaged, or of another format.
    """
    checkpoint = find_checkpoint(run, step, newest=_newest)
    manifest = read_manifest_as(_Manifest, checkpoint, _FORMAT)
    if (problem := find_damage(checkpoint, manifest.files)) is not None:
        raise damage_error(checkpoint, problem)
    target = step_folder(out / CHECKPOINTS, manifest.step)
    if target.exists():
        raise CheckpointError(
            f"{target} exists", expected="a new checkpoint", fix="use another --out, or remove it"
        )
    partial = partial_folder(target.parent, manifest.step)
    with new_folder(partial):
        write_synced(partial / MANIFEST, to_text(_convert(checkpoint, manifest, partial)))
        complete(partial, target)
    return target


def _convert(checkpoint: Path, manifest: _Manifest, partial: Path) -> Manifest:
    """Write the tensors of each old file into a new one, and return the new manifest."""
    index = FileSystemReader(checkpoint).read_metadata()
    held = defaultdict(list)
    for key, stored in index.storage_data.items():
        held[stored.relative_path].append(key.fqn)
    files = {
        STAGE_FILE(stage): write_tensors(
            partial / STAGE_FILE(stage), _read(checkpoint, index, names)
        )
        for stage, (_, names) in enumerate(sorted(held.items()))
    }
    changed = {
        "format": FORMAT,
        "polyrhythm": __version__,
        "optimizer": _optimizer_table(manifest.optimizer, index),
        "extra": _convert_extra(manifest.extra),
        "files": files,
    }
    return Manifest(**(msgspec.structs.asdict(manifest) | changed))


def _read(checkpoint: Path, index: Metadata, names: list[str]) -> Tensors:
    tensors: Tensors = {}
    for name in names:
        stored: Any = index.state_dict_metadata[name]
        tensors[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
    reader, planner = FileSystemReader(checkpoint), DefaultLoadPlanner()
    planner.set_up_planner(tensors, index, is_coordinator=True)
    reader.set_up_storage_reader(index, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return tensors


def _optimizer_table(saved: _Optimizer | None, index: Metadata) -> OptimizerTable | None:
    if saved is None:
        return None
    entries: dict[str, dict[str, Any]] = defaultdict(dict)
    for part, *path in (index.planner_data or {}).values():
        if part == _OPTIMIZER:
            parameter, key = path
            entries[parameter][key] = torch.empty(0)  # only its name is used
    for parameter, values in saved.state.items():
        entries[parameter] |= values
    state = {parameter: split_tensors(entry, parameter)[0] for parameter, entry in entries.items()}
    return OptimizerTable(saved.options, saved.groups, state)


def _convert_extra(extra: dict[str, Any]) -> dict[str, Any]:
    """Encode the states that a Trainer pickled: of its scheduler and of an iterable dataset."""
    if not {"supply", "rates"} <= extra.keys():
        return extra
    converted = extra | {"rates": _encode_again(extra["rates"], "the learning rate scheduler")}
    if "stream" in extra:
        position, pickled = extra["stream"]
        converted["stream"] = [position, _encode_again(pickled, "the dataset")]
    return converted


def _encode_again(pickled: str, what: str) -> str:
    try:
        state = pickle.loads(base64.b64decode(pickled))
    except Exception as error:  # it may run any code
        raise CheckpointError(
            f"the state of {what} cannot be unpickled: {type(error).__name__}: {error}",
            expected="the modules that it was pickled with",
            fix="convert it where the training script can be imported, with PYTHONPATH",
        ) from error
    return base64.b64encode(encode_state(state, f"the state of {what}")).decode()
