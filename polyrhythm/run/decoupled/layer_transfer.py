"""Move layers between processes whose stages have changed: weights, optimizer state and buffers.

All members of a group make the call. Some have a stage of the old division, with the whole state of
its optimizer; some get a stage of the new one, in other modules. A tensor is known by its name in
the whole model, and each receiver gets it from the first member that has it. Nothing that a member
has changes: until all have what they need, any of them may go on with its old stage.

Options of parameter groups, such as learning rates, are those of the group that a parameter was in.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor, nn
from torch.optim import Optimizer

from polyrhythm.errors import PeerError, TrainingError
from polyrhythm.run.comm.process_groups import abort, set_timeout
from polyrhythm.run.decoupled.reshard import StateMessages, like_own
from polyrhythm.run.decoupled.state_dict import from_summary, summary_of
from polyrhythm.types import Seconds

_NOT_OPTIONS = ("params", "param_names")  # of a parameter group


class _Tensor(msgspec.Struct, frozen=True):
    """The form of a tensor in the state of an optimizer."""

    dtype: str
    shape: tuple[int, ...]


class _Table(msgspec.Struct, frozen=True):
    """What a member has and wants, by name in the whole model."""

    parameters: dict[str, tuple[int, ...]] = {}  # shapes
    buffers: dict[str, tuple[int, ...]] = {}
    # Of parameters that the optimizer has: tensors, and summaries of anything else.
    tensors: dict[str, dict[str, _Tensor]] = {}
    values: dict[str, dict[str, Any]] = {}
    group_of: dict[str, int] = {}
    options: list[dict[str, Any]] = []  # summaries, by parameter group
    wanted_parameters: dict[str, tuple[int, ...]] = {}
    wanted_buffers: dict[str, tuple[int, ...]] = {}


class HeldLayers:
    """A stage with the whole state of its optimizer, which no replica shares."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        self._buffers = _buffers_of(module)

    def table(self) -> _Table:
        groups = self._optimizer.param_groups
        number_of = {p: number for number, group in enumerate(groups) for p in group["params"]}
        owned = {name: p for name, p in self._parameters.items() if p in number_of}
        state = {name: self._optimizer.state.get(p, {}) for name, p in owned.items()}
        return _Table(
            parameters=_shapes_of(self._parameters),
            buffers=_shapes_of(self._buffers),
            tensors={
                name: {key: _form_of(value) for key, value in entry.items() if _is_sent(value)}
                for name, entry in state.items()
            },
            values={
                name: {k: summary_of(value) for k, value in entry.items() if not _is_sent(value)}
                for name, entry in state.items()
            },
            group_of={name: number_of[p] for name, p in owned.items()},
            options=[
                {key: summary_of(value) for key, value in group.items() if key not in _NOT_OPTIONS}
                for group in groups
            ],
        )

    def tensor(self, name: str) -> Tensor:
        found = self._parameters.get(name)
        return self._buffers[name] if found is None else found.detach()

    def state(self, name: str, key: str) -> Tensor:
        value: Tensor = self._optimizer.state[self._parameters[name]][key]
        return value.detach()


def move_layers(
    held: HeldLayers | None,
    module: nn.Module | None,
    optimizer: Optimizer | None,
    group: dist.ProcessGroup,
    *,
    timeout: Seconds,
) -> None:
    """Fill a new stage and its new optimizer with what the members hold.

    `held`: None for a member that only receives; `module` and `optimizer`: None for one that only
    gives. `group`: a gloo group that the members use for nothing else. Buffers that nobody has
    stay as they are. Raises TrainingError, on all members, if nobody has a parameter.
    """
    set_timeout(group, timeout)
    try:
        messages = StateMessages(group, timeout)
        own = _Table() if held is None else held.table()
        target = _Target(module, optimizer)
        tables = messages.exchange(target.add_wanted(own), _Table)
        sources = [_sources_of(table, tables) for table in tables]
        target.allocate(tables, sources[group.rank()])
        for receiver, of_names in enumerate(sources):
            for name, source in of_names.items():
                _post(messages, (source, receiver), name, held, target, tables[source])
        messages.wait()
    except PeerError:
        abort(group)  # the others need not wait for the timeout
        raise
    target.install()


def _post(
    messages: StateMessages,
    ends: tuple[int, int],
    name: str,
    held: HeldLayers | None,
    target: "_Target",
    table: _Table,
) -> None:
    """Send a parameter with its state, or a buffer, from a source with this table."""

    def held_here() -> HeldLayers:
        assert held is not None, "its table has the name"
        return held

    shape = table.parameters.get(name) or table.buffers.get(name, ())
    if 0 in shape:
        return
    messages.post(*ends, give=lambda: held_here().tensor(name), into=lambda: target.tensor(name))
    for key, form in table.tensors.get(name, {}).items():
        if 0 not in form.shape:
            messages.post(
                *ends,
                give=lambda key=key: held_here().state(name, key),  # type: ignore[misc]
                into=lambda key=key: target.state(name, key),  # type: ignore[misc]
            )


def _sources_of(wanting: _Table, tables: Sequence[_Table]) -> dict[str, int]:
    """Return by name the first member that has it; raise TrainingError without a parameter.

    A name may be that of a parameter of one stage, and of a buffer that stands for it on others.
    """
    found: dict[str, int] = {}
    for name, shape in wanting.wanted_parameters.items():
        holders = [i for i, table in enumerate(tables) if table.parameters.get(name) == shape]
        if not holders:
            raise TrainingError(
                f"nobody has the parameter {name} of shape {list(shape)}",
                expected="each layer on a process that is left",
                fix="restore() the newest checkpoint, and report this as a defect",
            )
        found[name] = holders[0]
    for name, shape in wanting.wanted_buffers.items():
        holders = [i for i, table in enumerate(tables) if table.buffers.get(name) == shape]
        if holders:
            found[name] = holders[0]
    return found


class _Target:
    """What this member gets."""

    def __init__(self, module: nn.Module | None, optimizer: Optimizer | None) -> None:
        self._optimizer = optimizer
        self._parameters = {} if module is None else dict(module.named_parameters())
        self._buffers = {} if module is None else _buffers_of(module)
        self._state: dict[str, dict[str, Any]] = {}
        self._options: dict[str, dict[str, Any]] = {}  # of the group of a parameter

    def add_wanted(self, table: _Table) -> _Table:
        return structs.replace(
            table,
            wanted_parameters=_shapes_of(self._parameters),
            wanted_buffers=_shapes_of(self._buffers),
        )

    def allocate(self, tables: Sequence[_Table], sources: Mapping[str, int]) -> None:
        """Make the tensors of the state."""
        for name in self._parameters:
            table = tables[sources[name]]
            forms, values = table.tensors.get(name, {}), table.values.get(name, {})
            self._state[name] = {
                **{key: torch.empty(f.shape, dtype=_dtype(f)) for key, f in forms.items()},
                **{key: from_summary(value) for key, value in values.items()},
            }
            if name in table.group_of:
                options = table.options[table.group_of[name]]
                self._options[name] = {key: from_summary(v) for key, v in options.items()}

    def tensor(self, name: str) -> Tensor:
        found = self._parameters.get(name)
        return self._buffers[name] if found is None else found.detach()

    def state(self, name: str, key: str) -> Tensor:
        value: Tensor = self._state[name][key]
        return value

    def install(self) -> None:
        """Give the optimizer its state, and its groups the options of their first parameters."""
        if self._optimizer is None:
            return
        name_of = {parameter: name for name, parameter in self._parameters.items()}
        own_groups, described = self._optimizer.param_groups, self._optimizer.state_dict()
        for group, own in zip(described["param_groups"], own_groups, strict=True):
            first = next(iter(own["params"]), None)
            options = {} if first is None else self._options.get(name_of[first], {})
            group |= {key: like_own(value, own.get(key)) for key, value in options.items()}
        parameters = [parameter for group in own_groups for parameter in group["params"]]
        state = {i: self._state[name_of[p]] for i, p in enumerate(parameters)}
        described["state"] = {i: entry for i, entry in state.items() if entry}
        self._optimizer.load_state_dict(described)


def _buffers_of(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_buffers(remove_duplicate=False))


def _shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _is_sent(value: Any) -> bool:
    """Whether a value in an optimizer's state is sent as a tensor: not a count of steps."""
    return isinstance(value, Tensor) and value.dim() > 0


def _form_of(value: Tensor) -> _Tensor:
    return _Tensor(str(value.dtype).removeprefix("torch."), tuple(value.shape))


def _dtype(form: _Tensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, form.dtype)
    return dtype
