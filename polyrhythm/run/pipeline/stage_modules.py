"""The modules that stages run: a chain of layers, or a whole model's forward around a few layers.

The second is the model itself without the weights of other stages. Layers of earlier stages are
stepped over; where the first own layer is called, the received hidden state takes the place of
what the model has there; where the first layer of the next stage would be called, its hidden state
is the output and the forward ends. So the model's own code decides everything about the own layers,
and what it does before and after them happens on the first and on the last stage only. The list
keeps its length, since models choose a layer's mask by its position (Gemma, Qwen and many more).
"""

import copy
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.errors import PlanError


class SequentialStage(nn.Module):
    """Consecutive layers of a Sequential, under the names that they have there."""

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        *,
        first: int,
        is_last: bool,
        received: Sequence[int],
        extra: Mapping[int, Sequence[int]],
        sent: Sequence[int],
    ) -> None:
        """Values are known by the index of the layer that makes them.

        `first` is the index of our first layer, `extra` gives further values that a layer takes.
        Without `received` the inputs are what the layer before returned, without `sent` the output
        is what the last layer returns.
        """
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._first, self._is_last = first, is_last
        self._received, self._extra, self._sent = received, extra, sent
        self._kept = {*sent, *(v for values in extra.values() for v in values)}

    def forward(self, *inputs: Any) -> Any:
        kept: dict[int, Any] = {}
        if self._received:
            kept = dict(zip(self._received, inputs, strict=True))
            inputs = (kept[self._first - 1],)
        elif self._first > 0 and len(inputs) > 1:
            inputs = (inputs,)  # the layer before returned a tuple, which is one argument
        for index, layer in enumerate(self._modules.values(), start=self._first):
            assert layer is not None, "a Sequential has no empty places"
            if index == self._first > 0 and starts_in_place(layer):
                inputs = tuple(x.clone() for x in inputs)  # autograd lets nobody change a leaf
            output = layer(*inputs, *(kept[v] for v in self._extra.get(index, ())))
            if index in self._kept:
                kept[index] = output
            inputs = (output,)
        if self._is_last:
            return output
        if not self._sent:
            several = isinstance(output, tuple | list) and len(output) > 1
            return output if several else _require_tensor(index, output)
        sent = tuple(_require_tensor(index, kept[index]) for index in self._sent)
        return sent if len(sent) > 1 else sent[0]


def _require_tensor(index: int, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    raise PlanError(
        f"layer {index} returned a {type(value).__name__}, which another stage needs",
        expected="a tensor from a layer whose output crosses stages; or, without skips, several",
        fix="split elsewhere with layers_per_stage, or return a tensor",
    )


def starts_in_place(layer: nn.Module) -> bool:
    """Whether it overwrites its input, as far as a module says so."""
    while isinstance(layer, nn.Sequential) and len(layer):
        layer = layer[0]
    return getattr(layer, "inplace", False) is True


class _ForwardExit(BaseException):
    """The first layer of the next stage was called; no `except Exception` on the way stops it."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


@dataclass(slots=True)
class StageForward:
    """The way of one micro-batch after the other through a stage's share of the model."""

    own_layers: range  # the layers of this stage
    is_last: bool
    hidden: Tensor | None = None  # received; None on the first stage, and between forwards
    has_graph: bool = False  # autograd records this forward
    num_called: int = 0
    substituted: bool = False
    verified: bool = False

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_called = 0
        try:
            output = call(*args, **kwargs)
        except _ForwardExit as exit_:
            return exit_.hidden
        if not self.is_last or (
            self.own_layers.start > 0 and self.num_called <= self.own_layers.start
        ):
            missing = self.own_layers.start if self.is_last else self.own_layers.stop
            raise _call_order_error(f"the forward ended without a call of layer {missing}")
        return _first_tensor(output)

    @contextmanager
    def with_hidden(self, hidden: Tensor) -> Iterator[None]:
        self.hidden, self.has_graph = hidden, torch.is_grad_enabled()
        try:
            yield
        finally:
            self.hidden = None

    def record_call(self, index: int | str) -> None:
        if index != self.num_called:
            raise _call_order_error(
                f"layer {index} was called when layer {self.num_called} was due"
            )
        self.num_called += 1

    def verify(self, received: Tensor, returned: Tensor) -> None:
        """Whatever the prologue's stand-ins return is not a number, and so is all made from it."""
        if self.verified or received.is_meta:
            return
        if returned.isnan().any() and not received.isnan().any():
            raise PlanError(
                f"layers {self.own_layers.start} to {self.own_layers.stop - 1} use what only the first stage has",
                expected="a prologue that reaches the layers through the hidden state alone",
                fix="list under `every` what each layer needs; the model may be beyond splitting",
            )
        self.verified = True


def _call_order_error(what: str) -> PlanError:
    return PlanError(
        what,
        expected="a forward that calls every layer of the list once, in order",
        fix="turn off layerdrop, or split the model by hand",
    )


class _StageRole(nn.Module):
    """What a module of the model becomes on a stage, by a subclass of this and of its own class.

    Its attributes stay, and what the model asks about it (`isinstance`, a layer's type) is answered
    as before. It is `__call__` that is replaced: layers may be checkpointed in theirs.
    """

    _stage_forward: StageForward
    _position: int | str  # in the list of layers, or a dotted name


class _AbsentModule(_StageRole):
    """In place of a module whose weights other stages hold."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}, on another stage"


class _PlaceholderModule(_AbsentModule):
    """For a module of the first or the last stage: shaped like its result, and worth nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._stage_forward.hidden is None:
            raise PlanError(
                f"{self._position} is used before the layers, and listed as epilogue",
                expected="an epilogue that is used after the layers only",
                fix=f"move {self._position} to `prologue`, or to `every` if both sides use it",
            )
        return _nan_like(self._stage_forward.hidden)


class _EarlierLayer(_AbsentModule):
    """For a layer of an earlier stage."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        self._stage_forward.record_call(self._position)
        # Where the model takes the first of several outputs, this becomes a slice: no matter.
        return self._stage_forward.hidden


class _EntryLayer(_StageRole):
    """The first layer of a stage after the first."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage_forward = self._stage_forward
        if stage_forward.hidden is None:  # the backward of somebody's checkpoint calls it again
            if stage_forward.substituted:
                raise _checkpointing_error("what the model gave it was not what it took")
            return super().__call__(*args, **kwargs)
        if stage_forward.has_graph and not torch.is_grad_enabled():
            raise _checkpointing_error("use_reentrant=True hides from autograd what it takes")
        stage_forward.record_call(self._position)
        if _hidden_of(self, args, kwargs) is not stage_forward.hidden:
            stage_forward.substituted = True
        if args:
            args = (stage_forward.hidden, *args[1:])
        else:
            kwargs[_first_parameter(self)] = stage_forward.hidden
        return super().__call__(*args, **kwargs)


def _checkpointing_error(problem: str) -> PlanError:
    return PlanError(
        f"the model checkpoints its layers, and of the first of this stage {problem}",
        expected="checkpoint(layer, hidden, use_reentrant=False) of layers that return a tensor",
        fix="checkpoint like that, or inside of the layers",
    )


class ExitLayer(_AbsentModule):
    """For a layer of a later stage."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._position != self._stage_forward.own_layers.stop:
            due = self._stage_forward.own_layers.stop
            raise _call_order_error(f"layer {self._position} was called when layer {due} was due")
        raise _ForwardExit(_hidden_of(self, args, kwargs))


class _StageModel(_StageRole):
    """The whole model, with its own forward, around the layers of one stage."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage_forward, parameters = self._stage_forward, inspect.signature(self.forward).parameters
        if kwargs.get("use_cache"):
            raise PlanError(
                "use_cache=True",
                expected="no cache: a pipeline's step sees whole sequences",
                fix="leave it out",
            )
        if "use_cache" in parameters:
            kwargs["use_cache"] = False
        if stage_forward.own_layers.start == 0:
            return stage_forward.run(super().__call__, args, kwargs)
        (hidden,) = args
        args = ()
        with stage_forward.with_hidden(hidden):
            # Only their shape and type matter: the hidden state goes in at the first own layer.
            if next(iter(parameters), "") in kwargs or "inputs_embeds" in kwargs:
                pass
            elif "inputs_embeds" in parameters:
                kwargs["inputs_embeds"] = _nan_like(hidden)
            else:
                args = (hidden.new_zeros(hidden.shape[:-1], dtype=torch.long),)
            returned = stage_forward.run(super().__call__, args, kwargs)
        stage_forward.verify(hidden, returned)
        return returned


def _nan_like(hidden: Tensor) -> Tensor:
    return torch.full_like(hidden, math.nan, requires_grad=False)


def _first_parameter(layer: Any) -> str:
    return next(iter(inspect.signature(layer.forward).parameters))


def _hidden_of(layer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    hidden = args[0] if args else kwargs.get(_first_parameter(layer))
    if isinstance(hidden, Tensor):
        return hidden
    raise PlanError(
        f"{type(layer).__name__} is called with a {type(hidden).__name__} as its first argument",
        expected="layers that take the hidden state, one tensor, first",
        fix="split the model by hand",
    )


def _first_tensor(output: Any) -> Tensor:
    """The logits, where the model names them."""
    if isinstance(output, Mapping):
        output = output["logits"] if "logits" in output else tuple(output.values())
    if isinstance(output, tuple | list):
        output = next((x for x in output if isinstance(x, Tensor)), None)
    if isinstance(output, Tensor):
        return output
    raise PlanError(
        f"the model returned a {type(output).__name__}",
        expected="a tensor, or logits or a tensor among what it returns",
        fix="wrap the model so that it returns what the loss needs",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """A stage's share of a model, and what it leaves out, by dotted name."""

    layers: str  # the list of layers
    own_layers: range  # those of this stage
    absent: Collection[str]  # modules and parameters that other stages hold
    inner: Collection[str]  # modules that contain a listed one


def extract_stage(model: nn.Module, spec: StageSpec, *, is_last: bool) -> nn.Module:
    """The model without what other stages hold; what stays is shared with the original."""
    stage_forward = StageForward(spec.own_layers, is_last)
    return _assign_role(
        _strip_module(model, "", spec, stage_forward), _StageModel, stage_forward, "the model"
    )


def _strip_module(
    module: nn.Module, path: str, spec: StageSpec, stage_forward: StageForward
) -> nn.Module:
    copied = _shallow_copy(module)
    for name, parameter in module._parameters.items():
        if path + name in spec.absent and parameter is not None:
            del copied._parameters[name]
            copied._buffers[name] = parameter.detach().new_full((), math.nan).expand_as(parameter)
            copied._non_persistent_buffers_set.add(name)
    for name, child in _children(module):
        if path + name == spec.layers:
            copied._modules[name] = _extract_layers(child, stage_forward)
        elif path + name in spec.absent:
            copied._modules[name] = _assign_role(
                _without_weights(child), _PlaceholderModule, stage_forward, path + name
            )
        elif path + name in spec.inner:
            copied._modules[name] = _strip_module(child, f"{path}{name}.", spec, stage_forward)
    return copied


def _extract_layers(layers: nn.Module, stage_forward: StageForward) -> nn.Module:
    copied = _shallow_copy(layers)
    for index, (name, layer) in enumerate(_children(layers)):
        if index < stage_forward.own_layers.start:
            copied._modules[name] = _assign_role(
                _without_weights(layer), _EarlierLayer, stage_forward, index
            )
        elif index >= stage_forward.own_layers.stop:
            copied._modules[name] = _assign_role(
                _without_weights(layer), ExitLayer, stage_forward, index
            )
        elif index == stage_forward.own_layers.start > 0:
            copied._modules[name] = _assign_role(
                _shallow_copy(layer), _EntryLayer, stage_forward, index
            )
    return copied


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All of them; `named_children` leaves out the second name of a shared one."""
    return ((name, child) for name, child in module._modules.items() if child is not None)


def _shallow_copy(module: nn.Module) -> nn.Module:
    """The same module in another object: it can lose parts without the original losing them."""
    copied = copy.copy(module)
    for name, value in list(vars(copied).items()):
        if isinstance(value, dict | set):
            vars(copied)[name] = value.copy()
        elif isinstance(value, MethodType) and value.__self__ is module:
            vars(copied)[name] = MethodType(value.__func__, copied)
    return copied


def _without_weights(module: nn.Module) -> nn.Module:
    """A shell that keeps plain attributes only, such as a layer's number or kind."""
    copied = _shallow_copy(module)
    for members in (copied._modules, copied._parameters, copied._buffers):
        members.update(
            dict.fromkeys(members)
        )  # None: nothing is there, and asking for it is no error
    for name, value in list(vars(copied).items()):
        if isinstance(value, Tensor | nn.Module):
            del vars(copied)[name]
    return copied


def _assign_role(
    copied: nn.Module, role: type[_StageRole], stage_forward: StageForward, position: int | str
) -> nn.Module:
    copied._stage_forward, copied._position = stage_forward, position  # type: ignore[assignment]  # Module guesses
    kind = type(copied)
    # Models look themselves up by the name of their class.
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    copied.__class__ = type(kind.__name__, (role, kind), named)
    return copied
