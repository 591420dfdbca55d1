"""The files of a checkpoint, written and read by torch.distributed.checkpoint.

Its planners and its file format do the work; `job_store.py` replaces its collectives. Each stage
writes its own file. The first stage merges the metadata of all stages into one index, in which a
name that several stages wrote appears once. Reading needs no other process.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from polyrhythm.run.checkpoint.manifest import File, file_of
from polyrhythm.run.checkpoint.state import Nested, OptimizerTensors

MODEL, OPTIMIZER = "model", "optimizer"  # top-level keys, which torch's own tools read, too


@dataclass(frozen=True, slots=True)
class WrittenStage:
    """The files and metadata that a stage has written."""

    plan: SavePlan
    results: list[WriteResult]
    files: dict[str, File]


def write_stage(folder: Path, tensors: Nested, stage: int) -> WrittenStage:
    """Write the tensors of a stage to its own file, synced to disk."""
    writer, planner = _writer(folder), DefaultSavePlanner()
    planner.set_up_planner(tensors, is_coordinator=stage == 0)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plan = writer.prepare_global_plan([SavePlan([])] * stage + [plan])[stage]  # names its file
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    names = dict.fromkeys(result.storage_data.relative_path for result in results)
    return WrittenStage(plan, results, {name: file_of(folder / name) for name in names})


def write_index(folder: Path, parts: Iterable[WrittenStage]) -> dict[str, File]:
    """Merge the parts into an index; return all files of the checkpoint."""
    parts = list(parts)
    before = set(folder.iterdir())
    _, metadata = DefaultSavePlanner().create_global_plan([part.plan for part in parts])
    _writer(folder).finish(metadata, [part.results for part in parts])
    index = {path.name: file_of(path) for path in set(folder.iterdir()) - before}
    return index | {name: file for part in parts for name, file in part.files.items()}


def read_index(checkpoint: Path) -> Metadata:
    return FileSystemReader(checkpoint).read_metadata()


def read_into(checkpoint: Path, tensors: Nested) -> None:
    """Overwrite these tensors, on any device, with the saved tensors of the same names."""
    reader, planner = FileSystemReader(checkpoint), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


def read_optimizer(checkpoint: Path, names: Iterable[str]) -> OptimizerTensors:
    """Read the optimizer's tensors for these parameters into CPU memory."""
    metadata = read_index(checkpoint)
    wanted = set(names)
    found: OptimizerTensors = {}
    for fqn, (part, *path) in (metadata.planner_data or {}).items():
        recorded = metadata.state_dict_metadata[fqn]
        if part == OPTIMIZER and path[0] in wanted and isinstance(recorded, TensorStorageMetadata):
            empty = torch.empty(recorded.size, dtype=recorded.properties.dtype)
            found.setdefault(path[0], {})[path[1]] = empty
    if found:
        read_into(checkpoint, {OPTIMIZER: found})
    return found


def _writer(folder: Path) -> FileSystemWriter:
    # No copies ahead: the tensors are in CPU memory already.
    return FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0, overwrite=False)
