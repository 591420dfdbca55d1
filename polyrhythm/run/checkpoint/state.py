"""The state of a stage by the whole model's names, and back into modules and optimizers.

Everything, including optimizer state, is keyed by the parameter's name in the whole model. A
checkpoint therefore does not depend on stages: any split finds its names in it. A parameter with
several names has its first one; if several stages hold it, the first of them saves it. A save
writes from copies in CPU memory.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polyrhythm.run.checkpoint.encoding import (
    TensorReader,
    Tensors,
    in_file_order,
    join_tensors,
    split_tensors,
    tensor_problem,
)
from polyrhythm.run.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    ModelTable,
    OptimizerTable,
    ParamGroup,
    TensorSpec,
    as_json,
    check_model,
    damage_error,
    find_damage,
    read_manifest,
)
from polyrhythm.run.pipeline.partition import TiedParameter
from polyrhythm.types import Bytes

MODEL_KEY = "model.{}".format  # names a tensor in the files
OPTIMIZER_KEY = "optimizer.{}.{}".format  # of a parameter, and a key of its state
_COMPILED = "_orig_mod."  # in the names of modules that torch.compile wraps
_BLOCK_SIZE: Bytes = 1 << 26  # a power of 2, to which torch rounds pinned memory
_NO_OPTIONS = ("params", "param_names")
# How an optimizer computes, not what: those of the restoring script count, not the saved ones.
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")


@dataclass(frozen=True, slots=True)
class StageModel:
    """The tensors of a stage's module by first name, and their table."""

    tensors: Tensors
    table: ModelTable
    held_elsewhere: frozenset[str]  # names that an earlier stage holds and saves
    first_names: Mapping[str, str]  # of every parameter, by its name in the module
    trained: frozenset[str]  # parameters that require a gradient, by their names in the files
    # Those of them that only the optimizer changes. A forward changes embeddings with a `max_norm`.
    constant_in_forward: frozenset[str]

    @classmethod
    def of(
        cls, module: nn.Module, tied: Iterable[TiedParameter] = (), *, stage: int = 0
    ) -> "StageModel":
        """`tied`: the parameters that other stages hold as well."""
        first_names: dict[str, str] = {}
        by_parameter: dict[nn.Parameter, str] = {}
        trained, constant_in_forward = set[str](), set[str]()
        renormalised = {
            each.weight
            for each in module.modules()
            if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None
        }
        shared = {each.name: each for each in tied}
        for found, parameter in module.named_parameters(remove_duplicate=False):
            name = _unwrapped(found)
            key = shared[name].key if name in shared else name
            first_names[name] = by_parameter.setdefault(parameter, key)
            if parameter.requires_grad:
                trained.add(MODEL_KEY(first_names[name]))
                if parameter not in renormalised:
                    constant_in_forward.add(MODEL_KEY(first_names[name]))
        tensors: Tensors = {}
        for found, value in module.state_dict().items():
            name = _unwrapped(found)
            tensors.setdefault(first_names.get(name, name), _plain_tensor(name, value))
        return cls(
            tensors=tensors,
            table=ModelTable(
                {name: _spec(value) for name, value in tensors.items()},
                {name: first for name, first in first_names.items() if name != first},
            ),
            held_elsewhere=frozenset(
                each.key for each in shared.values() if each.stages[0] != stage
            ),
            first_names=first_names,
            trained=frozenset(trained),
            constant_in_forward=frozenset(constant_in_forward),
        )

    @property
    def saved(self) -> Tensors:
        """The tensors that this stage saves, by their names in the files."""
        return {
            MODEL_KEY(name): value
            for name, value in self.tensors.items()
            if name not in self.held_elsewhere
        }


def optimizer_state(
    optimizer: Optimizer,
    module: nn.Module,
    model: StageModel,
    state_dict_fn: Callable[[], Mapping[str, Any]],
) -> tuple[Tensors, OptimizerTable]:
    """Return the tensors, by their names in the files, and the table, from a state_dict."""
    state, names = state_dict_fn(), _names_by_index(optimizer, module, model)
    tensors: Tensors = {}
    plain: dict[str, Any] = {}
    for index, entry in state["state"].items():
        name = names[index]
        if name not in model.held_elsewhere:
            plain[name], found = split_tensors(entry, f"the optimizer's state of {name}")
            tensors |= {OPTIMIZER_KEY(name, key): value for key, value in found.items()}
    groups = tuple(
        ParamGroup(_options(group), tuple(names[index] for index in group["params"]))
        for group in state["param_groups"]
    )
    return tensors, OptimizerTable(tuple(sorted(optimizer.defaults)), groups, plain)


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
    reader = TensorReader(path, manifest.files)
    tensors: Tensors = {}
    for name, spec in model.table.tensors.items():
        tensors[name] = reader.read(MODEL_KEY(name))
        if _spec(tensors[name]) != spec:
            problem = f"{MODEL_KEY(name)} is {_spec(tensors[name])}, and {spec} in {MANIFEST}"
            raise damage_error(path, problem)
    state = None
    if optimizer is not None:
        state = _state_dict(optimizer, module, model, manifest.optimizer, reader)
    for name, value in model.tensors.items():  # all files were readable
        value.copy_(tensors[name])
    if optimizer is not None and state is not None:
        optimizer.load_state_dict(state)


def _state_dict(
    optimizer: Optimizer,
    module: nn.Module,
    model: StageModel,
    saved: OptimizerTable | None,
    reader: TensorReader,
) -> dict[str, Any]:
    """Return the saved state of this stage's parameters as a state_dict of its optimizer.

    Rejects the state of another kind of optimizer, or of one for other parameters.
    """
    if saved is None:
        raise _optimizer_mismatch("a checkpoint without an optimizer", "optimizer state")
    unknown = [name for name in saved.options if name not in optimizer.defaults]
    if unknown:
        raise _optimizer_mismatch(
            f"a checkpoint of an optimizer with the option {unknown[0]}",
            f"one like {type(optimizer).__name__}, with {', '.join(sorted(optimizer.defaults))}",
        )
    options = {name: group.options for group in saved.groups for name in group.parameters}
    names, groups = _names_by_index(optimizer, module, model), []
    own_groups = getattr(optimizer, "whole_param_groups", None)  # a state_dict may be gathered
    for group in own_groups or optimizer.state_dict()["param_groups"]:
        members = [names[index] for index in group["params"]]
        for name in members:
            if name not in options:
                raise _optimizer_mismatch(
                    f"the optimizer of the checkpoint did not have {name}", "the same parameters"
                )
            if options[name] != options[members[0]]:
                raise _optimizer_mismatch(
                    f"{name} and {members[0]} had different options in the checkpoint",
                    "the same parameter groups",
                )
        known = options[members[0]] if members else {}
        restored = {
            key: _like(value, group.get(key))
            for key, value in known.items()
            if key not in _IMPLEMENTATION
        }
        groups.append(group | restored)
    state: dict[int, Any] = {}
    for index, name in enumerate(names):
        if name in saved.state:
            # Copied: two parameters may have one name here, and must not share their state.
            state[index] = join_tensors(saved.state[name], partial(_read_copy, reader, name))
    return {"state": state, "param_groups": groups}


def _read_copy(reader: TensorReader, name: str, key: str) -> Tensor:
    return reader.read(OPTIMIZER_KEY(name, key)).clone()


class Staging:
    """Memory for the copies, which training does not change during the write.

    It is reused from save to save: allocating it takes longer than the copy. Tensors follow each
    other in it as in the file, so that a few calls write them: each call leaves the interpreter
    lock and takes it again, for which a training thread may have to wait. For a GPU it is pinned,
    so that copies run at the speed of the bus, on a stream of their own.
    """

    def __init__(self) -> None:
        self._copies: Tensors = {}
        self._layout: list[tuple[str, torch.Size, torch.dtype, bool]] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy_to_host(self, tensors: Tensors, kept: Collection[str] = ()) -> "StagedCopies":
        """Start to copy the tensors; the copies are valid until the next call.

        Work that the current streams get later waits for the copies, except for those of `kept`:
        the caller changes these only after `StagedCopies.wait_on_device`.
        """
        ordered = dict(in_file_order(tensors))
        layout = [(name, t.shape, t.dtype, t.is_cuda) for name, t in ordered.items()]
        if layout != self._layout:
            self.clear()  # before more memory is allocated
            self._copies, self._layout = _allocate(ordered), layout
        copied = self._start_copies({k: v for k, v in ordered.items() if k not in kept})
        copied.wait_on_device()
        last = self._start_copies({k: v for k, v in ordered.items() if k in kept})
        return StagedCopies(self._copies, {**copied.events, **last.events})

    def _start_copies(self, tensors: Tensors) -> "StagedCopies":
        events = dict[torch.device, torch.cuda.Event]()
        for device in {value.device for value in tensors.values()}:
            some = {name: value for name, value in tensors.items() if value.device == device}
            if device.type != "cuda":
                torch._foreach_copy_([self._copies[name] for name in some], list(some.values()))
                continue
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for name, value in some.items():
                    self._copies[name].copy_(value, non_blocking=True)
                    value.record_stream(stream)
                events[device] = stream.record_event(torch.cuda.Event(blocking=True))
        return StagedCopies(self._copies, events)

    def clear(self) -> None:
        self._copies, self._layout = {}, []


@dataclass(frozen=True, slots=True)
class StagedCopies:
    """Copies that GPUs may still make."""

    tensors: Tensors
    events: Mapping[torch.device, torch.cuda.Event]

    def wait_on_device(self) -> None:
        """Let later work of the current streams wait for the copies; the host does not wait."""
        for device, event in self.events.items():
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> Tensors:
        """Wait for the copies and return them."""
        for event in self.events.values():
            event.synchronize()
        return self.tensors


def _allocate(tensors: Tensors) -> Tensors:
    """Return empty tensors like these, which follow each other in memory."""
    copies: Tensors = {}
    # All or none: the steps of an optimizer of weights on a GPU may be in main memory.
    is_pinned = any(value.is_cuda for value in tensors.values())
    for block in _blocks(tensors):
        sizes = [value.nbytes for value in block.values()]
        memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=is_pinned)
        for (name, value), part in zip(block.items(), memory.split(sizes), strict=True):
            copies[name] = part.view(value.dtype).view(value.shape)
    return copies


def _blocks(tensors: Tensors) -> Iterator[Tensors]:
    """Group tensors into blocks: larger ones only for one tensor."""
    block, size = Tensors(), 0
    for name, value in tensors.items():
        if block and size + value.nbytes > _BLOCK_SIZE:
            yield block
            block, size = {}, 0
        block[name] = value
        size += value.nbytes
    if block:
        yield block


def _names_by_index(optimizer: Optimizer, module: nn.Module, model: StageModel) -> list[str]:
    """Return first names in the order in which the optimizer's state_dict counts parameters."""
    names: Iterable[str] | None = getattr(optimizer, "parameter_names", None)
    if names is None:
        known = {parameter: name for name, parameter in module.named_parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if unknown := [p for p in parameters if p not in known]:
            raise CheckpointError(
                f"the optimizer has a parameter {_spec(unknown[0])} that the module has not",
                expected="an optimizer of the module's parameters",
                fix="save the module whose parameters() the optimizer was made with",
            )
        names = (known[parameter] for parameter in parameters)
    return [model.first_names[_unwrapped(name)] for name in names]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    plain = {
        key: value.item() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key not in _NO_OPTIONS
    }
    return as_json(plain, "the optimizer's options")


def _like(value: Any, present: Any) -> Any:
    """Convert a JSON list or number back to the tuple or tensor that `present` is."""
    if isinstance(present, Tensor):
        return torch.full_like(present, value)
    return tuple(value) if isinstance(present, tuple) else value


def _unwrapped(name: str) -> str:
    return name.replace(_COMPILED, "")


def _spec(value: Tensor) -> TensorSpec:
    return TensorSpec(tuple(value.shape), str(value.dtype).removeprefix("torch."))


def _plain_tensor(name: str, value: Any) -> Tensor:
    if (problem := tensor_problem(value)) is None:
        return value.detach()
    raise CheckpointError(
        f"{name} is {problem}",
        expected="plain tensors, each complete in one process",
        fix="gather sharded tensors, and convert other types, or omit them from the state",
    )


def _optimizer_mismatch(wrong: str, expected: str) -> CheckpointError:
    return CheckpointError(
        wrong, expected=expected, fix="restore the model alone: restore(path, module)"
    )
