"""Export a checkpoint as safetensors files: the whole model, usable without Polyrhythm.

The layout is that of Hugging Face's `save_pretrained`: one `model.safetensors`, or, above a size,
several and an index; and `config.json` for a Hugging Face model. A parameter with several names is
written once, under its first. One process exports.
"""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from polyrhythm.run.checkpoint.encoding import TensorReader, write_tensors
from polyrhythm.run.checkpoint.folder import new_folder, sync_folder, write_synced
from polyrhythm.run.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    TensorSpec,
    damage_error,
    find_damage,
    read_manifest,
)
from polyrhythm.run.checkpoint.state import MODEL_KEY
from polyrhythm.types import Bytes

LARGEST_FILE: Bytes = 5 * 10**9  # Hugging Face's default
_CONFIGS = ("config", "generation_config")  # attributes of the model, and names of files


def hugging_face_configs(model: Any) -> dict[str, Any]:
    """Return the `run_info` of a Hugging Face model for `save`; {} for other models."""
    run_info: dict[str, Any] = {}
    for name in _CONFIGS:
        if (to_json := getattr(getattr(model, name, None), "to_json_string", None)) is not None:
            run_info[f"hf_{name}"] = json.loads(to_json())
    if "hf_config" in run_info:
        run_info["hf_config"]["architectures"] = [type(model).__name__]
    return run_info


def export(checkpoint: Path | str, out: Path | str, *, largest_file: Bytes = LARGEST_FILE) -> Path:
    """Write the model of a checkpoint into the new folder `out`; raises CheckpointError."""
    checkpoint, out = Path(checkpoint), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(
            f"{out} exists",
            expected="a new folder, or an empty one",
            fix=f"--out {out.with_name(out.name + '-2')}, or remove it",
        )
    manifest = read_manifest(checkpoint)
    if (problem := find_damage(checkpoint, manifest.files)) is not None:
        raise damage_error(checkpoint, problem)
    partial = out.with_name(f".{out.name}.partial")
    with new_folder(partial):
        _write(checkpoint, manifest, partial, largest_file)
        sync_folder(partial)
        if out.exists():
            out.rmdir()  # it is empty
        partial.rename(out)
    return out


def files_for(
    tensors: Mapping[str, TensorSpec], largest: Bytes
) -> tuple[dict[str, list[str]], dict[str, Bytes]]:
    """Return the tensor names of each file, in order, and the bytes of each tensor."""
    sizes = {
        name: prod(spec.shape) * getattr(torch, spec.dtype).itemsize
        for name, spec in tensors.items()
    }
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if files[-1] and filled + size > largest:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    name, last = "model-{:05}-of-{:05}.safetensors", len(files)
    name = name if last > 1 else "model.safetensors"
    return {name.format(i, last): held for i, held in enumerate(files, 1)}, sizes


def _write(checkpoint: Path, manifest: Manifest, folder: Path, largest: Bytes) -> None:
    files, sizes = files_for(manifest.model.tensors, largest)
    reader = TensorReader(checkpoint, manifest.files)
    for file, names in files.items():
        write_tensors(folder / file, {name: reader.read(MODEL_KEY(name)) for name in names})
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        write_synced(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    for name in _CONFIGS:
        if (config := manifest.run_info.get(f"hf_{name}")) is not None:
            write_synced(folder / f"{name}.json", json.dumps(config, indent=2) + "\n")
