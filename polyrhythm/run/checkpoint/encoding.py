"""Tensors and nested state in the safetensors format, which is read without running code.

A stage writes its tensors with `write_tensors`, and `TensorReader` reads them by name.
`encode_state` turns the state_dict of an optimizer, a scheduler or a dataset into bytes. Nested
state is split into tensors and JSON; what JSON lacks, such as a tuple or an integer key, becomes an
object with the key `$`, so that every value comes back with its type. Other types are refused.

The files are written here and not by safetensors' `save_file`: the hash needs no second reading,
and a full disk stays an OSError with its reason.
"""

import base64
import itertools
import json
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from polyrhythm.run.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    File,
    damage_error,
    new_hash,
)

Tensors = dict[str, Tensor]
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_METADATA = {"format": "pt"}  # required by transformers
_ALIGNMENT = 8  # of the largest of these types; mapped files need it
_TAG = "$"
_SCALARS = (type(None), bool, int, float, str)
_STRUCTURE, _PREFIX = "structure", "state."  # names in encoded state


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> File:
    """Write a new file, synced to disk; raises CheckpointError for a tensor that it cannot hold."""
    digest, chunks = new_hash(), _chunks(tensors)
    header = next(chunks)  # before there is a file
    with path.open("xb") as file:
        for chunk in itertools.chain([header], chunks):
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        return File(file.tell(), digest.hexdigest(), tuple(tensors))


class TensorReader:
    """Reads the tensors of a checkpoint by name; opens a file when it is needed."""

    def __init__(self, checkpoint: Path, files: Mapping[str, File]) -> None:
        self._checkpoint = checkpoint
        self._file_of = {name: file for file, each in files.items() for name in each.tensors}
        self._opened: dict[str, Any] = {}

    def read(self, name: str) -> Tensor:
        """Return a tensor mapped from its file: copy it before it is changed.

        Raises CheckpointError if the file is damaged or lacks the tensor.
        """
        file = self._file_of.get(name)
        if file is None:
            raise damage_error(self._checkpoint, f"{MANIFEST} names no file for {name}")
        try:
            if file not in self._opened:
                self._opened[file] = safe_open(self._checkpoint / file, framework="pt")
            value: Tensor = self._opened[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise damage_error(self._checkpoint, f"{file}: {error}") from None
        return value


def encode_state(state: Any, what: str = "the state") -> bytes:
    """Encode nested lists, tuples, dicts, numbers, strings, tensors and arrays.

    Raises CheckpointError with the type and the key path of a value that cannot be encoded; `what`
    names the state there. Tensors come back in CPU memory.
    """
    plain, tensors = split_tensors(state, what)
    structure = torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)
    named = {_PREFIX + name: value for name, value in tensors.items()}
    return b"".join(_chunks({_STRUCTURE: structure, **named}))


def decode_state(data: bytes, what: str = "the state") -> Any:
    """Decode what `encode_state` returned; raises CheckpointError if it is something else."""
    try:
        tensors = safetensors.torch.load(data)
        plain = json.loads(tensors[_STRUCTURE].numpy().tobytes())
        return join_tensors(plain, lambda name: tensors[_PREFIX + name])
    except (SafetensorError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{what}: {type(error).__name__}: {error}",
            expected="state that encode_state has encoded",
            fix="restore an earlier checkpoint; or, one of an earlier version, convert it by "
            "polyrhythm export --from-legacy",
        ) from None


def split_tensors(state: Any, what: str) -> tuple[Any, Tensors]:
    """Return a state for JSON, in which tensors are named, and these tensors."""
    splitter = _Splitter(what)
    try:
        return splitter.split(state), splitter.tensors
    except RecursionError:
        raise CheckpointError(
            f"{what} contains itself", expected="a finite state", fix="omit that value"
        ) from None


def join_tensors(plain: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    """Return the state that `split_tensors` split."""
    if isinstance(plain, list):
        return [join_tensors(item, tensor_of) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if _TAG not in plain:
        return {key: join_tensors(item, tensor_of) for key, item in plain.items()}
    kind = plain[_TAG]
    if kind == "tensor":
        return tensor_of(plain["name"])
    if kind in ("array", "scalar"):
        array = tensor_of(plain["name"]).numpy()
        return array if kind == "array" else array[()]
    if kind == "bytes":
        return base64.b64decode(plain["base64"])
    return _CONTAINERS[kind](join_tensors(plain["items"], tensor_of))


_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "dict": dict,
    "OrderedDict": OrderedDict,  # torch's own state_dicts
    "Counter": lambda items: Counter(dict(items)),  # the milestones of MultiStepLR
}


@dataclass(slots=True)
class _Splitter:
    what: str
    tensors: Tensors = field(default_factory=dict)

    def split(self, value: Any, path: tuple[Any, ...] = ()) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind in (list, tuple, set):
            items = list(value)
            if not all(type(item) in _SCALARS for item in items):  # a generator's state has 624
                items = [self.split(item, (*path, number)) for number, item in enumerate(items)]
            return items if kind is list else {_TAG: kind.__name__, "items": items}
        if kind is dict and all(type(key) is str and key != _TAG for key in value):
            return {key: self.split(item, (*path, key)) for key, item in value.items()}
        if kind in (dict, OrderedDict, Counter):
            pairs = [
                [self.split(part, (*path, key)) for part in (key, item)]
                for key, item in value.items()
            ]
            return {_TAG: kind.__name__, "items": pairs}
        if kind is bytes:
            return {_TAG: "bytes", "base64": base64.b64encode(value).decode()}
        if isinstance(value, Tensor):
            return {_TAG: "tensor", "name": self._add(value, path)}
        if isinstance(value, np.ndarray | np.generic):
            tag = "array" if isinstance(value, np.ndarray) else "scalar"
            return {_TAG: tag, "name": self._add(self._from_numpy(value, path), path)}
        raise self._refusal(path, f"a {kind.__name__}")

    def _add(self, value: Tensor, path: tuple[Any, ...]) -> str:
        if (problem := tensor_problem(value)) is not None:
            raise self._refusal(path, problem)
        name = ".".join(map(str, path))
        while name in self.tensors:  # two paths may give one name, as ("a", "b") and ("a.b",)
            name += "'"
        self.tensors[name] = value.detach()
        return name

    def _from_numpy(self, value: Any, path: tuple[Any, ...]) -> Tensor:
        try:
            return torch.from_numpy(np.array(value))  # a copy
        except (TypeError, ValueError):
            raise self._refusal(path, f"a numpy array of {value.dtype}") from None

    def _refusal(self, path: tuple[Any, ...], problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self.what}{''.join(f'[{key!r}]' for key in path)} is {problem}",
            expected="None, numbers, strings, bytes, tensors, numpy arrays; and lists, tuples, "
            "sets and dicts of them",
            fix="convert it in state_dict(), for example with float(), list() or vars()",
        )


def tensor_problem(value: Any) -> str | None:
    """Return why a value cannot be written as a tensor; None if it can."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    if isinstance(value, DTensor):
        return "a DTensor, which is sharded over processes"
    if value.is_meta:
        return "a tensor without memory"
    if value.layout is not torch.strided or value.dtype not in _DTYPES:
        return f"a tensor of {value.dtype}, {value.layout}"
    return None


def in_file_order(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Return the tensors by name, the largest types first, so that each is aligned."""
    return sorted(tensors.items(), key=lambda each: -each[1].element_size())


def joined(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield flat tensors in CPU memory: those of one type that follow each other there are one."""
    run = list[Tensor]()
    next_address = 0
    for tensor in tensors:
        value = tensor.detach() if tensor.requires_grad else tensor
        if value.is_complex() or value.is_neg() or not (value.is_cpu and value.is_contiguous()):
            value = value.cpu().resolve_conj().resolve_neg().contiguous()
        follows = bool(run) and value.data_ptr() == next_address and value.dtype == run[0].dtype
        if follows and value.untyped_storage()._cdata == run[0].untyped_storage()._cdata:
            run.append(value)
        elif value.numel():
            if run:
                yield _flat(run)
            run = [value]
        next_address = value.data_ptr() + value.nbytes if value.numel() else next_address
    if run:
        yield _flat(run)


def _flat(run: list[Tensor]) -> Tensor:
    """Return tensors that follow each other in memory as one."""
    first, size = run[0], sum(tensor.numel() for tensor in run)
    return first.reshape(-1) if len(run) == 1 else first.as_strided((size,), (1,))


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the parts of a safetensors file: a header, and the bytes of each tensor."""
    header: dict[str, Any] = {"__metadata__": _METADATA}
    ordered = in_file_order(tensors)
    end = 0
    for name, value in ordered:
        if (problem := tensor_problem(value)) is not None:
            raise CheckpointError(
                f"{name} is {problem}",
                expected=f"a plain tensor of {', '.join(str(t)[6:] for t in _DTYPES)}",
                fix="convert it, for example with torch.view_as_real(), or exclude it",
            )
        start, end = end, end + value.nbytes
        shape = list(value.shape)
        header[name] = {"dtype": _DTYPES[value.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for memory in joined(value for _, value in ordered):
        yield memory.view(torch.uint8).numpy().data
