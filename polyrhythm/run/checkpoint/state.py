"""The state of a stage by the whole model's names, and back into modules and optimizers.

Everything, including optimizer state, is keyed by the parameter's name in the whole model. A
checkpoint therefore does not depend on stages: any split finds its names in it. A parameter with
several names has its first one; if several stages hold it, the first of them saves it. A save
writes from copies in CPU memory.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from polyrhythm.run.checkpoint.manifest import (
    CheckpointError,
    ModelTable,
    OptimizerTable,
    ParamGroup,
    TensorSpec,
    as_json,
)
from polyrhythm.run.pipeline.partition import TiedParameter

Tensors = dict[str, Tensor]
Nested = dict[str, Any]  # of tensors, by name
OptimizerTensors = dict[str, Tensors]  # by parameter, then by state name (such as exp_avg)
_COMPILED = "_orig_mod."  # in the names of modules that torch.compile wraps
_NO_OPTIONS = ("params", "param_names")


@dataclass(frozen=True, slots=True)
class StageModel:
    """The tensors of a stage's module by first name, and their table."""

    tensors: Tensors
    table: ModelTable
    held_elsewhere: frozenset[str]  # names that an earlier stage holds and saves
    first_names: Mapping[str, str]  # of every parameter, by its name in the module

    @classmethod
    def of(
        cls, module: nn.Module, tied: Iterable[TiedParameter] = (), *, stage: int = 0
    ) -> "StageModel":
        """`tied`: the parameters that other stages hold as well."""
        first_names: dict[str, str] = {}
        by_parameter: dict[nn.Parameter, str] = {}
        shared = {each.name: each for each in tied}
        for found, parameter in module.named_parameters(remove_duplicate=False):
            name = _unwrapped(found)
            key = shared[name].key if name in shared else name
            first_names[name] = by_parameter.setdefault(parameter, key)
        tensors: Tensors = {}
        for found, value in module.state_dict().items():
            name = _unwrapped(found)
            tensors.setdefault(first_names.get(name, name), _plain_tensor(name, value))
        return cls(
            tensors=tensors,
            table=ModelTable(
                {name: _shape(value) for name, value in tensors.items()},
                {name: first for name, first in first_names.items() if name != first},
            ),
            held_elsewhere=frozenset(
                each.key for each in shared.values() if each.stages[0] != stage
            ),
            first_names=first_names,
        )

    @property
    def saved(self) -> Tensors:
        return {
            name: value for name, value in self.tensors.items() if name not in self.held_elsewhere
        }


def optimizer_state(
    optimizer: Optimizer, module: nn.Module, model: StageModel, state: Mapping[str, Any]
) -> tuple[OptimizerTensors, OptimizerTable]:
    """Return the tensors and the table to save, from the optimizer's state_dict."""
    names = _names_by_index(optimizer, module, model)
    tensors: OptimizerTensors = {}
    values: dict[str, dict[str, Any]] = {}
    for index, entry in state["state"].items():
        name = names[index]
        if name in model.held_elsewhere:
            continue
        if found := {k: _plain_tensor(name, v) for k, v in entry.items() if isinstance(v, Tensor)}:
            tensors[name] = found
        if rest := {k: v for k, v in entry.items() if not isinstance(v, Tensor)}:
            values[name] = as_json(rest, f"the optimizer's state of {name}")
    groups = tuple(
        ParamGroup(_options(group), tuple(names[index] for index in group["params"]))
        for group in state["param_groups"]
    )
    return tensors, OptimizerTable(tuple(sorted(optimizer.defaults)), groups, values)


def check_optimizer(
    optimizer: Optimizer, module: nn.Module, model: StageModel, saved: OptimizerTable | None
) -> None:
    """Reject the state of another kind of optimizer, or of one for other parameters."""
    if saved is None:
        raise _optimizer_mismatch("a checkpoint without an optimizer", "optimizer state")
    unknown = [name for name in saved.options if name not in optimizer.defaults]
    if unknown:
        raise _optimizer_mismatch(
            f"a checkpoint of an optimizer with the option {unknown[0]}",
            f"one like {type(optimizer).__name__}, with {', '.join(sorted(optimizer.defaults))}",
        )
    options = _options_by_name(saved)
    names = _names_by_index(optimizer, module, model)
    for group in optimizer.state_dict()["param_groups"]:
        for name in (names[index] for index in group["params"]):
            if name not in options:
                raise _optimizer_mismatch(
                    f"the optimizer of the checkpoint did not have {name}", "the same parameters"
                )
            first = names[group["params"][0]]
            if options[name] != options[first]:
                raise _optimizer_mismatch(
                    f"{name} and {first} had different options in the checkpoint",
                    "the same parameter groups",
                )


def load_optimizer(
    optimizer: Optimizer,
    module: nn.Module,
    model: StageModel,
    saved: OptimizerTable,
    tensors: OptimizerTensors,
) -> None:
    """Load the optimizer; `tensors` are the saved ones of this stage's parameters."""
    names, options = _names_by_index(optimizer, module, model), _options_by_name(saved)
    state: dict[int, dict[str, Any]] = {}
    for index, name in enumerate(names):
        found = {**tensors.get(name, {}), **saved.values.get(name, {})}
        if found:
            # Two parameters may have one name here, and must not share their state.
            state[index] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in found.items()}
    groups = []
    for group in optimizer.state_dict()["param_groups"]:
        known = options[names[group["params"][0]]] if group["params"] else {}
        groups.append(group | {key: _like(value, group.get(key)) for key, value in known.items()})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


class Staging:
    """Copies of a stage's tensors in CPU memory, which training does not change during the write.

    The memory is reused from save to save: allocating it takes longer than the copy. For a GPU it
    is pinned, so that copies run at the speed of the bus.
    """

    def __init__(self) -> None:
        self._copies: Nested = {}

    def copy_to_host(self, tensors: Nested) -> Nested:
        """Copy the tensors; the copies are complete on return and valid until the next call."""
        self._copies = _copy_into(tensors, self._copies)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return self._copies

    def clear(self) -> None:
        self._copies = {}


def _names_by_index(optimizer: Optimizer, module: nn.Module, model: StageModel) -> list[str]:
    """Return first names in the order in which the optimizer's state_dict counts parameters."""
    names: Iterable[str] | None = getattr(optimizer, "parameter_names", None)
    if names is None:
        known = {parameter: name for name, parameter in module.named_parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if unknown := [p for p in parameters if p not in known]:
            raise CheckpointError(
                f"the optimizer has a parameter {_shape(unknown[0])} that the module has not",
                expected="an optimizer of the module's parameters",
                fix="save the module whose parameters() the optimizer was made with",
            )
        names = (known[parameter] for parameter in parameters)
    return [model.first_names[_unwrapped(name)] for name in names]


def _options_by_name(saved: OptimizerTable) -> dict[str, dict[str, Any]]:
    return {name: group.options for group in saved.groups for name in group.parameters}


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


def _shape(value: Tensor) -> TensorSpec:
    return TensorSpec(tuple(value.shape), str(value.dtype).removeprefix("torch."))


def _plain_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.is_meta:
        return value.detach()
    kind = "a tensor without memory" if getattr(value, "is_meta", False) else type(value).__name__
    raise CheckpointError(
        f"{name} is {kind}",
        expected="plain tensors, each complete in one process",
        fix="save sharded models with torch.distributed.checkpoint itself; omit extra state",
    )


def _optimizer_mismatch(wrong: str, expected: str) -> CheckpointError:
    return CheckpointError(
        wrong, expected=expected, fix="restore the model alone: restore(path, module)"
    )


def _copy_into(tensors: Nested, into: Nested) -> Nested:
    copies: Nested = {}
    for name, value in tensors.items():
        copy = into.get(name)
        if isinstance(value, dict):
            copies[name] = _copy_into(value, copy if isinstance(copy, dict) else {})
            continue
        if not isinstance(copy, Tensor) or _kind(copy) != _kind(value):
            copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        copies[name] = copy.copy_(value, non_blocking=True)
    return copies


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
