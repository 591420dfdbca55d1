"""The manifest of a checkpoint: what it holds, of which model, and the hash of every file.

It is written last and carries a hash of itself, so that a folder whose manifest can be read is
complete, and a file that was cut off or changed later is known by name. JSON, for people; numbers
that JSON lacks (an infinite best loss of a scheduler, say) are written as Python does.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from polyrhythm import __version__
from polyrhythm.errors import UserError
from polyrhythm.types import Bytes

FORMAT = 1
MANIFEST = "manifest.json"
Problem = str  # what is wrong with a checkpoint, in half a sentence


class CheckpointError(UserError):
    """A checkpoint that cannot be used here, or a state that cannot become one."""


class TensorSpec(msgspec.Struct, frozen=True):
    """What a tensor of the model looks like."""

    shape: tuple[int, ...]
    dtype: str  # as torch names it, such as float32

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class File(msgspec.Struct, frozen=True):
    size_bytes: Bytes
    blake2b: str


class ParamGroup(msgspec.Struct, frozen=True):
    """Parameters that share the options of their optimizer, such as the learning rate."""

    options: dict[str, Any]
    parameters: tuple[str, ...]


class OptimizerTable(msgspec.Struct, frozen=True):
    """What is known of an optimizer besides its tensors, by name of parameter."""

    options: tuple[str, ...]  # that this kind of optimizer has; schedulers add to those of groups
    groups: tuple[ParamGroup, ...]
    values: dict[str, dict[str, Any]]  # its state that is no tensor


class ModelTable(msgspec.Struct, frozen=True):
    """Names, shapes and types of a model, or of a stage's part of one."""

    tensors: dict[str, TensorSpec]  # by first name
    tied: dict[str, str] = {}  # further names of a parameter -> the first one

    @property
    def fingerprint(self) -> str:
        """Equal for equal models, however they are cut."""
        listed = sorted((name, list(of.shape), of.dtype) for name, of in self.tensors.items())
        return _hash_of(json.dumps([listed, sorted(self.tied.items())]))


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    polyrhythm: str = __version__
    torch: str
    step: int
    serial: int  # counts the checkpoints of a folder: a run that goes back saves earlier steps
    saved_at: str
    num_stages: int
    model: ModelTable
    optimizer: OptimizerTable | None
    extra: dict[str, Any]  # of the loop: where the data stands, seeds, schedulers
    run_info: dict[str, Any] = msgspec.field(
        name="facts"
    )  # about the run: its plan, the configuration of its model
    fingerprint: str  # of the model
    files: dict[str, File]


def merge_tables(tables: Iterable[ModelTable]) -> ModelTable:
    """Of all stages as of the whole model."""
    tensors: dict[str, TensorSpec] = {}
    tied: dict[str, str] = {}
    for table in tables:
        tensors |= table.tensors
        tied |= table.tied
    return ModelTable(tensors, tied)


def merge_optimizers(tables: Iterable[OptimizerTable | None]) -> OptimizerTable | None:
    """Of all stages; groups with the same options become one."""
    known = [table for table in tables if table is not None]
    if not known:
        return None
    groups: dict[str, tuple[dict[str, Any], dict[str, None]]] = {}
    for group in (group for table in known for group in table.groups):
        _, names = groups.setdefault(json.dumps(group.options, sort_keys=True), (group.options, {}))
        names.update(dict.fromkeys(group.parameters))
    return OptimizerTable(
        options=known[0].options,
        groups=tuple(ParamGroup(options, tuple(names)) for options, names in groups.values()),
        values={name: of for table in known for name, of in table.values.items()},
    )


def as_json(value: Mapping[str, Any] | None, what: str) -> dict[str, Any]:
    """A copy of it, as a manifest would give it back; refuses what JSON has no words for."""
    try:
        copied: dict[str, Any] = json.loads(json.dumps(dict(value or {})))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{what}: {error}",
            expected="numbers, strings, lists and dictionaries of them, as in JSON",
            fix="convert what is something else, tensors with .tolist()",
        ) from None
    return copied


def to_text(manifest: Manifest) -> str:
    table = msgspec.to_builtins(manifest)
    return _lines({**table, "hash": _hash_of(_canonical(table))}, depth=3) + "\n"


def read_manifest(checkpoint: Path) -> Manifest:
    """Of a folder; raises CheckpointError for what is none, is damaged, or is of a later format."""
    try:
        table = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        raise _unusable(
            checkpoint, f"no {MANIFEST}" if missing else f"{MANIFEST}: {error}"
        ) from None
    if not isinstance(table, dict) or type(table.get("format")) is not int:
        raise _unusable(checkpoint, f"{MANIFEST} is not one of a checkpoint")
    if table["format"] > FORMAT:
        raise NewerFormatError(
            f"{checkpoint}: a checkpoint of format {table['format']}",
            expected=f"format {FORMAT}, or an older one",
            fix=f"use polyrhythm {table.get('polyrhythm', 'as it was saved with')} or later",
        )
    noted = table.pop("hash", None)
    if noted != _hash_of(_canonical(table)):
        raise _unusable(checkpoint, f"{MANIFEST} is not as it was written")
    try:
        return msgspec.convert(table, Manifest)
    except msgspec.ValidationError as error:
        raise _unusable(checkpoint, f"{MANIFEST}: {error}") from None


class NewerFormatError(CheckpointError):
    """To be put right, not to be passed over: the state is there."""


def file_of(path: Path) -> File:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, _hashing).hexdigest()
        return File(file.tell(), digest)


def find_damage(checkpoint: Path, files: Mapping[str, File]) -> Problem | None:
    """The first of these files that is not as it was written."""
    for name, noted in files.items():
        path = checkpoint / name
        try:
            size = path.stat().st_size
            if size != noted.size_bytes:
                return f"{name} has {size:,} bytes, not {noted.size_bytes:,}"
            if file_of(path) != noted:
                return f"{name} has other contents than were written"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None


def check_model(manifest: Manifest, model: ModelTable, *, whole: bool) -> None:
    """Refuse the checkpoint of another model; `whole`: this is all of it, not a stage's part."""
    saved, theirs = manifest.model, manifest.model.tensors
    for name, ours in model.tensors.items():
        if name in saved.tied:
            raise _model_mismatch(f"its {name} is one with {saved.tied[name]}", "two tensors")
        if (found := theirs.get(name)) is None:
            raise _model_mismatch(f"it has no {name}", f"{name}: {ours}, as the model has")
        if found != ours:
            raise _model_mismatch(f"its {name} is {found}", f"{ours}, as in the model")
    for name, first in model.tied.items():
        if saved.tied.get(name, name) != saved.tied.get(first, first):
            raise _model_mismatch(f"its {name} is a tensor of its own", f"one with {first}")
    if not whole:
        return
    for name in (*theirs, *saved.tied):
        if name not in model.tensors and name not in model.tied:
            raise _model_mismatch(f"it has {name}", "no such tensor: the model has none")


def _model_mismatch(wrong: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"a checkpoint of another model: {wrong}",
        expected=expected,
        fix="build the model that was saved, or use another folder for this one",
    )


def _unusable(checkpoint: Path, problem: Problem) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint}: {problem}",
        expected="a checkpoint that is complete",
        fix="use an earlier one, or remove this folder",
    )


def _hashing() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=20)


def _hash_of(text: str) -> str:
    digest = _hashing()
    digest.update(text.encode())
    return digest.hexdigest()


def _lines(value: object, *, depth: int, indent: str = "") -> str:
    """JSON with a line for each entry of the outer dictionaries, such as a tensor."""
    if depth == 0 or not isinstance(value, dict) or not value:
        return json.dumps(value)
    inner = indent + " "
    items = (
        f"{inner}{json.dumps(key)}: {_lines(each, depth=depth - 1, indent=inner)}"
        for key, each in value.items()
    )
    return "{\n" + ",\n".join(items) + f"\n{indent}}}"


def _canonical(table: Mapping[str, Any]) -> str:
    return json.dumps(table, sort_keys=True)
