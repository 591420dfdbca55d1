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


class Chain(nn.Module):
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
            return output if several else _crossing(index, output)
        sent = tuple(_crossing(index, kept[index]) for index in self._sent)
        return sent if len(sent) > 1 else sent[0]


def _crossing(index: int, value: Any) -> Tensor:
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


class _Left(BaseException):
    """The first layer of the next stage was called; no `except Exception` on the way stops it."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


@dataclass(slots=True)
class Passage:
    """The way of one micro-batch after the other through a stage's share of the model."""

    own: range  # the layers of this stage
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
        except _Left as left:
            return left.hidden
        if not self.is_last or (self.own.start > 0 and self.num_called <= self.own.start):
            missing = self.own.start if self.is_last else self.own.stop
            raise _not_in_order(f"the forward ended without a call of layer {missing}")
        return _first_tensor(output)

    @contextmanager
    def carrying(self, hidden: Tensor) -> Iterator[None]:
        self.hidden, self.has_graph = hidden, torch.is_grad_enabled()
        try:
            yield
        finally:
            self.hidden = None

    def called(self, index: int | str) -> None:
        if index != self.num_called:
            raise _not_in_order(f"layer {index} was called when layer {self.num_called} was due")
        self.num_called += 1

    def verify(self, received: Tensor, returned: Tensor) -> None:
        """Whatever the prologue's stand-ins return is not a number, and so is all made from it."""
        if self.verified or received.is_meta:
            return
        if returned.isnan().any() and not received.isnan().any():
            raise PlanError(
                f"layers {self.own.start} to {self.own.stop - 1} use what only the first stage has",
                expected="a prologue that reaches the layers through the hidden state alone",
                fix="list under `every` what each layer needs; the model may be beyond splitting",
            )
        self.verified = True


def _not_in_order(what: str) -> PlanError:
    return PlanError(
        what,
        expected="a forward that calls every layer of the list once, in order",
        fix="turn off layerdrop, or split the model by hand",
    )


class _Recast(nn.Module):
    """What a module of the model becomes on a stage, by a subclass of this and of its own class.

    Its attributes stay, and what the model asks about it (`isinstance`, a layer's type) is answered
    as before. It is `__call__` that is replaced: layers may be checkpointed in theirs.
    """

    _passage: Passage
    _place: int | str  # in the list of layers, or a dotted name


class _Absent(_Recast):
    """In place of a module whose weights other stages hold."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}, on another stage"


class _StandIn(_Absent):
    """For a module of the first or the last stage: shaped like its result, and worth nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._passage.hidden is None:
            raise PlanError(
                f"{self._place} is used before the layers, and listed as epilogue",
                expected="an epilogue that is used after the layers only",
                fix=f"move {self._place} to `prologue`, or to `every` if both sides use it",
            )
        return _worthless(self._passage.hidden)


class _Earlier(_Absent):
    """For a layer of an earlier stage."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        self._passage.called(self._place)
        # Where the model takes the first of several outputs, this becomes a slice: no matter.
        return self._passage.hidden


class _Entry(_Recast):
    """The first layer of a stage after the first."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        passage = self._passage
        if passage.hidden is None:  # the backward of somebody's checkpoint calls it again
            if passage.substituted:
                raise _recomputed("what the model gave it was not what it took")
            return super().__call__(*args, **kwargs)
        if passage.has_graph and not torch.is_grad_enabled():
            raise _recomputed("use_reentrant=True hides from autograd what it takes")
        passage.called(self._place)
        if _hidden_of(self, args, kwargs) is not passage.hidden:
            passage.substituted = True
        if args:
            args = (passage.hidden, *args[1:])
        else:
            kwargs[_first_parameter(self)] = passage.hidden
        return super().__call__(*args, **kwargs)


def _recomputed(problem: str) -> PlanError:
    return PlanError(
        f"the model checkpoints its layers, and of the first of this stage {problem}",
        expected="checkpoint(layer, hidden, use_reentrant=False) of layers that return a tensor",
        fix="checkpoint like that, or inside of the layers",
    )


class Exit(_Absent):
    """For a layer of a later stage."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._place != self._passage.own.stop:
            due = self._passage.own.stop
            raise _not_in_order(f"layer {self._place} was called when layer {due} was due")
        raise _Left(_hidden_of(self, args, kwargs))


class _Model(_Recast):
    """The whole model, with its own forward, around the layers of one stage."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        passage, parameters = self._passage, inspect.signature(self.forward).parameters
        if kwargs.get("use_cache"):
            raise PlanError(
                "use_cache=True",
                expected="no cache: a pipeline's step sees whole sequences",
                fix="leave it out",
            )
        if "use_cache" in parameters:
            kwargs["use_cache"] = False
        if passage.own.start == 0:
            return passage.run(super().__call__, args, kwargs)
        (hidden,) = args
        args = ()
        with passage.carrying(hidden):
            # Only their shape and type matter: the hidden state goes in at the first own layer.
            if next(iter(parameters), "") in kwargs or "inputs_embeds" in kwargs:
                pass
            elif "inputs_embeds" in parameters:
                kwargs["inputs_embeds"] = _worthless(hidden)
            else:
                args = (hidden.new_zeros(hidden.shape[:-1], dtype=torch.long),)
            returned = passage.run(super().__call__, args, kwargs)
        passage.verify(hidden, returned)
        return returned


def _worthless(hidden: Tensor) -> Tensor:
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
class Share:
    """A stage's share of a model, and what it leaves out, by dotted name."""

    layers: str  # the list of layers
    own: range  # those of this stage
    absent: Collection[str]  # modules and parameters that other stages hold
    inner: Collection[str]  # modules that contain a listed one


def cut_model(model: nn.Module, share: Share, *, is_last: bool) -> nn.Module:
    """The model without what other stages hold; what stays is shared with the original."""
    passage = Passage(share.own, is_last)
    return _recast(_without(model, "", share, passage), _Model, passage, "the model")


def _without(module: nn.Module, path: str, share: Share, passage: Passage) -> nn.Module:
    shell = _shell(module)
    for name, parameter in module._parameters.items():
        if path + name in share.absent and parameter is not None:
            del shell._parameters[name]
            shell._buffers[name] = parameter.detach().new_full((), math.nan).expand_as(parameter)
            shell._non_persistent_buffers_set.add(name)
    for name, child in _children(module):
        if path + name == share.layers:
            shell._modules[name] = _cut_list(child, passage)
        elif path + name in share.absent:
            shell._modules[name] = _recast(_hollow(child), _StandIn, passage, path + name)
        elif path + name in share.inner:
            shell._modules[name] = _without(child, f"{path}{name}.", share, passage)
    return shell


def _cut_list(layers: nn.Module, passage: Passage) -> nn.Module:
    shell = _shell(layers)
    for index, (name, layer) in enumerate(_children(layers)):
        if index < passage.own.start:
            shell._modules[name] = _recast(_hollow(layer), _Earlier, passage, index)
        elif index >= passage.own.stop:
            shell._modules[name] = _recast(_hollow(layer), Exit, passage, index)
        elif index == passage.own.start > 0:
            shell._modules[name] = _recast(_shell(layer), _Entry, passage, index)
    return shell


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All of them; `named_children` leaves out the second name of a shared one."""
    return ((name, child) for name, child in module._modules.items() if child is not None)


def _shell(module: nn.Module) -> nn.Module:
    """The same module in another object: it can lose parts without the original losing them."""
    shell = copy.copy(module)
    for name, value in list(vars(shell).items()):
        if isinstance(value, dict | set):
            vars(shell)[name] = value.copy()
        elif isinstance(value, MethodType) and value.__self__ is module:
            vars(shell)[name] = MethodType(value.__func__, shell)
    return shell


def _hollow(module: nn.Module) -> nn.Module:
    """A shell that keeps plain attributes only, such as a layer's number or kind."""
    shell = _shell(module)
    for held in (shell._modules, shell._parameters, shell._buffers):
        held.update(dict.fromkeys(held))  # None: nothing is there, and asking for it is no error
    for name, value in list(vars(shell).items()):
        if isinstance(value, Tensor | nn.Module):
            del vars(shell)[name]
    return shell


def _recast(shell: nn.Module, role: type[_Recast], passage: Passage, place: int | str) -> nn.Module:
    shell._passage, shell._place = passage, place  # type: ignore[assignment]  # Module guesses
    kind = type(shell)
    # Models look themselves up by the name of their class.
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    shell.__class__ = type(kind.__name__, (role, kind), named)
    return shell
