"""The manifest of a checkpoint: its contents, its model, and the hash of every file.

It is written last and contains its own hash, so that a folder with a readable manifest is
complete, and a file truncated or changed later is found by name. The format is readable JSON;
numbers that JSON lacks (such as an infinite best loss of a scheduler) are written as in Python.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec

from polyrhythm import __version__
from polyrhythm.errors import UserError
from polyrhythm.types import Bytes

FORMAT = 2  # 1 was that of torch.distributed.checkpoint, with a pickled index
MANIFEST = "manifest.json"
Problem = str  # what is wrong with a checkpoint, as part of a sentence
_Kind = TypeVar("_Kind")


class CheckpointError(UserError):
    """A checkpoint that cannot be used here, or a state that cannot become one."""


class TensorSpec(msgspec.Struct, frozen=True):
    """Shape and type of a tensor of the model."""

    shape: tuple[int, ...]
    dtype: str  # torch's name, such as float32

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class File(msgspec.Struct, frozen=True):
    size_bytes: Bytes
    blake2b: str
    tensors: tuple[str, ...] = ()  # in the file, by name


class ParamGroup(msgspec.Struct, frozen=True):
    """Parameters that share the options of their optimizer, such as the learning rate."""

    options: dict[str, Any]
    parameters: tuple[str, ...]


class OptimizerTable(msgspec.Struct, frozen=True):
    """The state of an optimizer by parameter name; its tensors are in the files."""

    options: tuple[str, ...]  # of the optimizer class; schedulers add more to the groups
    groups: tuple[ParamGroup, ...]
    state: dict[str, Any]  # as from `split_tensors`: JSON, in which tensors are named


class ModelTable(msgspec.Struct, frozen=True):
    """Names, shapes and types of a model, or of one stage."""

    tensors: dict[str, TensorSpec]  # by first name
    tied: dict[str, str] = {}  # further names of a parameter -> the first one

    @property
    def fingerprint(self) -> str:
        """A hash, equal for equal models however they are split."""
        listed = sorted((name, list(spec.shape), spec.dtype) for name, spec in self.tensors.items())
        return new_hash(json.dumps([listed, sorted(self.tied.items())]).encode()).hexdigest()


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    polyrhythm: str = __version__
    torch: str
    step: int
    serial: int  # order of saving: after restoring an earlier one, steps are saved again
    saved_at: str
    num_stages: int
    model: ModelTable
    optimizer: OptimizerTable | None
    extra: dict[str, Any]  # of the training loop: sampler state, seeds, schedulers
    run_info: dict[str, Any]  # the run's plan and the configuration of its model
    fingerprint: str  # of the model
    files: dict[str, File]
    is_finite: bool | None = None  # all trained parameters; None: saved by an earlier version


class Evaluation(msgspec.Struct, frozen=True):
    """The metric by which the best checkpoint is chosen, in `extra` of a manifest."""

    metric: str
    mode: str  # whether the best is the "min" or the "max"
    value: float

    KEY: ClassVar[str] = "evaluation"

    @classmethod
    def of(cls, manifest: Manifest) -> "Evaluation | None":
        """Return that of a checkpoint; None if it was not evaluated, or not by a Trainer."""
        try:
            return msgspec.convert(manifest.extra.get(cls.KEY), cls)
        except msgspec.ValidationError:
            return None


def merge_tables(tables: Sequence[ModelTable]) -> ModelTable:
    """Merge the tables of all stages into that of the whole model."""
    return ModelTable(
        {name: spec for table in tables for name, spec in table.tensors.items()},
        {name: first for table in tables for name, first in table.tied.items()},
    )


def merge_optimizers(tables: Iterable[OptimizerTable | None]) -> OptimizerTable | None:
    """Merge the tables of all stages; groups with the same options become one."""
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
        state={name: state for table in known for name, state in table.state.items()},
    )


def as_json(value: Mapping[str, Any] | None, what: str) -> dict[str, Any]:
    """Return a copy as read back from a manifest; rejects values that JSON cannot represent."""
    try:
        copied: dict[str, Any] = json.loads(json.dumps(dict(value or {})))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{what}: {error}",
            expected="numbers, strings, lists and dictionaries of them, as in JSON",
            fix="convert other values, such as tensors with .tolist()",
        ) from None
    return copied


def to_text(manifest: Manifest) -> str:
    table = msgspec.to_builtins(manifest)
    return _lines({**table, "hash": _hash_of(table)}, depth=3) + "\n"


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest of a folder; raises CheckpointError if it is missing or damaged."""
    return read_manifest_as(Manifest, checkpoint, FORMAT)


def read_manifest_as(kind: type[_Kind], checkpoint: Path, expected_format: int) -> _Kind:
    """Read a manifest of one format; raises FormatError for another one."""
    try:
        table = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        raise _unusable(
            checkpoint, f"no {MANIFEST}" if missing else f"{MANIFEST}: {error}"
        ) from None
    if not isinstance(table, dict) or type(table.get("format")) is not int:
        raise _unusable(checkpoint, f"{MANIFEST} is not a checkpoint's manifest")
    found = table["format"]
    if found != expected_format:
        if found > FORMAT:
            fix = f"use polyrhythm {table.get('polyrhythm', 'of that version')} or later"
        elif found == FORMAT:
            fix = "use it as it is"
        else:
            fix = f"polyrhythm export {checkpoint} --from-legacy --out NEW_RUN, which runs the "
            fix += "code that an old checkpoint may contain: convert only those that you trust"
        raise FormatError(
            f"{checkpoint}: a checkpoint of format {found}",
            expected=f"format {expected_format}",
            fix=fix,
        )
    recorded = table.pop("hash", None)
    if recorded != _hash_of(table):
        raise _unusable(checkpoint, f"{MANIFEST} was changed after it was written")
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise _unusable(checkpoint, f"{MANIFEST}: {error}") from None


class FormatError(CheckpointError):
    """A checkpoint of another format: the user must act, it is not skipped as damaged."""


def find_damage(checkpoint: Path, files: Mapping[str, File]) -> Problem | None:
    """Return the problem of the first damaged file; None if all are as written."""
    for name, recorded in files.items():
        path = checkpoint / name
        try:
            size = path.stat().st_size
            if size != recorded.size_bytes:
                return f"{name} has {size:,} bytes, not {recorded.size_bytes:,}"
            with path.open("rb") as file:
                if hashlib.file_digest(file, new_hash).hexdigest() != recorded.blake2b:
                    return f"{name} has other contents than written"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None


def damage_error(checkpoint: Path, problem: Problem) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint}: {problem}",
        expected="files as they were written",
        fix="restore an earlier one: latest() finds the newest complete one",
    )


def check_model(manifest: Manifest, model: ModelTable, *, whole: bool) -> None:
    """Reject the checkpoint of another model; `whole`: `model` is all of it, not one stage."""
    saved, saved_tensors = manifest.model, manifest.model.tensors
    for name, spec in model.tensors.items():
        if name in saved.tied:
            raise _model_mismatch(f"its {name} is tied to {saved.tied[name]}", "separate tensors")
        if (found := saved_tensors.get(name)) is None:
            raise _model_mismatch(f"it has no {name}", f"{name}: {spec}, as the model has")
        if found != spec:
            raise _model_mismatch(f"its {name} is {found}", f"{spec}, as in the model")
    for name, first in model.tied.items():
        if saved.tied.get(name, name) != saved.tied.get(first, first):
            raise _model_mismatch(f"its {name} is a separate tensor", f"one tied to {first}")
    if not whole:
        return
    for name in (*saved_tensors, *saved.tied):
        if name not in model.tensors and name not in model.tied:
            raise _model_mismatch(f"it has {name}", f"no {name}: the model has none")


def _model_mismatch(wrong: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"a checkpoint of another model: {wrong}",
        expected=expected,
        fix="build the model that was saved, or use another folder for this one",
    )


def _unusable(checkpoint: Path, problem: Problem) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint}: {problem}",
        expected="a complete checkpoint",
        fix="use an earlier one, or remove this folder",
    )


def new_hash(data: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=20)


def _lines(value: object, *, depth: int, indent: str = "") -> str:
    """Format JSON with one line per entry of the outer dictionaries, such as a tensor."""
    if depth == 0 or not isinstance(value, dict) or not value:
        return json.dumps(value)
    inner = indent + " "
    items = (
        f"{inner}{json.dumps(key)}: {_lines(each, depth=depth - 1, indent=inner)}"
        for key, each in value.items()
    )
    return "{\n" + ",\n".join(items) + f"\n{indent}}}"


def _hash_of(table: Mapping[str, Any]) -> str:
    return new_hash(json.dumps(table, sort_keys=True).encode()).hexdigest()
