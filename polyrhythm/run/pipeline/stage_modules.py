"""The modules that stages run: a chain of layers, or a whole model's forward around some layers.

The second kind is the model itself without the weights of other stages. Layers of earlier stages
return their input; at the first own layer the received hidden state replaces the model's; a call of
the first layer of the next stage ends the forward, with its hidden state as the output. So the
model's own code runs the own layers, and its code before and after all layers takes effect only on
the first and the last stage. The list of layers keeps its length, since models choose a layer's
mask by its position (Gemma, Qwen and many more).

A stage may recompute: each layer runs under torch's activation checkpointing and keeps only its
inputs from forward to backward. Names of parameters, hooks and the user's model stay as they are.
"""

import copy
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyrhythm.describe.model import blocks_with_parameters
from polyrhythm.errors import PlanError


class SequentialStage(nn.Module):
    """Consecutive layers of a Sequential, under their names in the Sequential."""

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        *,
        first: int,
        is_last: bool,
        received: Sequence[int],
        extra: Mapping[int, Sequence[int]],
        sent: Sequence[int],
        recompute: bool = False,
    ) -> None:
        """Outputs are identified by the index of the layer that computes them.

        `first` is the index of the first own layer; `extra` maps a layer to further outputs that it
        takes. Without `received` the inputs are the outputs of the previous layer; without `sent`
        the output is that of the last layer. To `recompute`, a layer without parameters joins the
        layer before it: an activation function alone would keep as much as it stores.
        """
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._first, self._is_last = first, is_last
        self._received, self._extra, self._sent = received, extra, sent
        self._kept = {*sent, *(v for values in extra.values() for v in values)}
        self._recompute = recompute
        self._blocks = self._make_blocks()

    def _make_blocks(self) -> list[range]:
        """Return the layers that run together: each alone, or those that recompute together."""
        layers = [layer for layer in self._modules.values() if layer is not None]
        own = range(self._first, self._first + len(layers))
        starts = set(own)
        if self._recompute:
            blocks = blocks_with_parameters([_has_parameters(layer) for layer in layers])
            starts = {own[block.start] for block in blocks}
            # Outputs between the layers of a block are not known outside it.
            starts |= {index for index in own if index - 1 in self._kept or index in self._extra}
        bounds = [*sorted(starts), own.stop]
        return [range(a, b) for a, b in pairwise(bounds)]

    def forward(self, *inputs: Any) -> Any:
        kept: dict[int, Any] = {}
        if self._received:
            kept = dict(zip(self._received, inputs, strict=True))
            inputs = (kept[self._first - 1],)
        elif self._first > 0 and len(inputs) > 1:
            inputs = (inputs,)  # the previous layer returned a tuple, which is one argument
        layers = [layer for layer in self._modules.values() if layer is not None]
        for block in self._blocks:
            own = layers[block.start - self._first : block.stop - self._first]
            run = partial(self._run, own, block.start == self._first > 0)
            arguments = (*inputs, *(kept[v] for v in self._extra.get(block.start, ())))
            output = recomputed_call(run, arguments) if self._recompute else run(*arguments)
            index = block[-1]
            if index in self._kept:
                kept[index] = output
            inputs = (output,)
        if self._is_last:
            return output
        if not self._sent:
            is_tuple = isinstance(output, tuple | list) and len(output) > 1
            return output if is_tuple else _require_tensor(index, output)
        sent = tuple(_require_tensor(index, kept[index]) for index in self._sent)
        return sent if len(sent) > 1 else sent[0]

    def _run(self, layers: Sequence[nn.Module], is_received: bool, *inputs: Any) -> Any:
        """Run consecutive layers; only the first takes more than the output of the one before."""
        if (self._recompute or is_received) and starts_in_place(layers[0]):
            inputs = tuple(x.clone() for x in inputs)  # kept inputs and leaves must not change
        for layer in layers:
            inputs = (layer(*inputs),)
        return inputs[0]


def _has_parameters(layer: nn.Module) -> bool:
    return any(True for _ in layer.parameters())


def recomputed_call(
    call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Call a layer, keep its inputs only, and run it again in the backward.

    The second run has the weights, the autocast state and the random numbers of the first. All
    inputs are positional arguments of `checkpoint`, which saves these as autograd saves tensors.
    """
    names = tuple(kwargs or {})

    def run(*values: Any) -> Any:
        num_args = len(values) - len(names)
        return call(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))

    return checkpoint(run, *args, *(kwargs or {}).values(), use_reentrant=False)


def _require_tensor(index: int, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    raise PlanError(
        f"layer {index} returned a {type(value).__name__}, which another stage needs",
        expected="one tensor (without skips also several) from a layer whose output is sent",
        fix="split elsewhere with layers_per_stage, or return a tensor",
    )


def starts_in_place(layer: nn.Module) -> bool:
    """Whether a layer overwrites its input, according to its `inplace` attribute."""
    while isinstance(layer, nn.Sequential) and len(layer):
        layer = layer[0]
    return getattr(layer, "inplace", False) is True


class _ForwardExit(BaseException):
    """Raised at the first layer of the next stage; the model's `except Exception` ignores it."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


@dataclass(slots=True)
class StageForward:
    """The state of a forward through a stage's part of the model."""

    own_layers: range  # the layers of this stage
    is_last: bool
    parameters: Mapping[str, inspect.Parameter]  # of the model's forward
    hidden: Tensor | None = None  # received; None on the first stage and between forwards
    has_graph: bool = False  # autograd records this forward
    num_called: int = 0  # layers called so far
    substituted: bool = False  # the first own layer was called with another tensor than `hidden`
    verified: bool = False
    after_layer: Callable[[int], None] = lambda index: None  # called for layers of earlier stages
    returns_all: bool = False  # the model's whole output, as with the loss that it computes

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
        return output if self.returns_all else first_tensor(output)

    def record_call(self, index: int | str) -> None:
        if index != self.num_called:
            raise _call_order_error(
                f"layer {index} was called when layer {self.num_called} was due"
            )
        self.num_called += 1

    def verify(self, received: Tensor, returned: Tensor) -> None:
        """Refuse layers that use outputs of the prologue's placeholders, which are nan."""
        if self.verified or received.is_meta:
            return
        if returned.isnan().any() and not received.isnan().any():
            raise PlanError(
                f"layers {self.own_layers.start} to {self.own_layers.stop - 1} use modules that "
                "only the first stage has",
                expected="a prologue that reaches the layers only through the hidden state",
                fix="list modules that every layer needs under `every`, or split the model by hand",
            )
        self.verified = True


def _call_order_error(what: str) -> PlanError:
    return PlanError(
        what,
        expected="a forward that calls every layer of the list once, in order",
        fix="turn off layerdrop, or split the model by hand",
    )


class _StageRole(nn.Module):
    """The role of a module on a stage: its class becomes a subclass of this and of its own class.

    It keeps its attributes and its answers to the model's checks (`isinstance`, a layer's type).
    Subclasses replace `__call__`, since some layers checkpoint themselves there.
    """

    _stage_forward: StageForward
    _position: int | str  # in the list of layers, or a dotted name


class _AbsentModule(_StageRole):
    """A module whose weights are on other stages."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}, on another stage"


class _PlaceholderModule(_AbsentModule):
    """A module of the first or the last stage: returns nan in the shape of the hidden state.

    An embedding and a projection of embeddings return their own shape: some models stack several
    streams of them into one hidden state.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden = self._stage_forward.hidden
        if hidden is None:
            raise PlanError(
                f"{self._position} is used before the layers, but listed in `epilogue`",
                expected="an epilogue that is used only after the layers",
                fix=f"move {self._position} to `prologue`, or to `every` if also used after them",
            )
        if isinstance(self, nn.Embedding) and args:
            return hidden.new_full((*args[0].shape, self.embedding_dim), math.nan)
        if isinstance(self, nn.Linear) and args and args[0].shape[-1] == self.in_features:
            return hidden.new_full((*args[0].shape[:-1], self.out_features), math.nan)
        return _nan_like(hidden)


class _EarlierLayer(_AbsentModule):
    """A layer of an earlier stage."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        self._stage_forward.record_call(self._position)
        assert isinstance(self._position, int), "an index"
        self._stage_forward.after_layer(self._position)
        # A model that takes the first of several outputs gets a slice, which is never used.
        return self._stage_forward.hidden


class _EntryLayer(_StageRole):
    """The first layer of a stage after the first."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage_forward = self._stage_forward
        if stage_forward.hidden is None:  # the model's checkpoint recomputes it in backward
            if stage_forward.substituted:
                raise _checkpointing_error("is not called with the hidden state itself")
            return super().__call__(*args, **kwargs)
        if stage_forward.has_graph and not torch.is_grad_enabled():
            raise _checkpointing_error("hides its input from autograd by use_reentrant=True")
        stage_forward.record_call(self._position)
        if _hidden_of(self, args, kwargs) is not stage_forward.hidden:
            stage_forward.substituted = True
        if args:
            args = (stage_forward.hidden, *args[1:])
        else:
            kwargs[first_parameter(self)] = stage_forward.hidden
        return super().__call__(*args, **kwargs)


class _RecomputedLayer(nn.Module):
    """A layer that keeps only its inputs from forward to backward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return recomputed_call(super().__call__, args, kwargs)


def _checkpointing_error(problem: str) -> PlanError:
    return PlanError(
        f"the model checkpoints its layers, and the first layer of this stage {problem}",
        expected="checkpoint(layer, hidden, use_reentrant=False) of layers that return a tensor",
        fix="checkpoint in this form, or inside the layers",
    )


class ExitLayer(_AbsentModule):
    """A layer of a later stage."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._position != self._stage_forward.own_layers.stop:
            expected = self._stage_forward.own_layers.stop
            raise _call_order_error(
                f"layer {self._position} was called when layer {expected} was due"
            )
        raise _ForwardExit(_hidden_of(self, args, kwargs))


class _StageModel(_StageRole):
    """The whole model, with its own forward, around the layers of one stage."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage_forward, parameters = self._stage_forward, self._stage_forward.parameters
        if kwargs.get("use_cache"):
            raise PlanError(
                "use_cache=True",
                expected="no cache: the step of a pipeline runs whole sequences",
                fix="omit it",
            )
        if "use_cache" in parameters:
            kwargs["use_cache"] = False
        if stage_forward.own_layers.start == 0:
            return stage_forward.run(super().__call__, args, kwargs)
        (hidden,) = args
        args = ()
        stage_forward.hidden, stage_forward.has_graph = hidden, torch.is_grad_enabled()
        try:
            # Only shape and dtype matter: the hidden state replaces them at the first own layer.
            first = _first_input(parameters)
            if first in kwargs or "inputs_embeds" in kwargs or (kwargs and not first):
                pass
            elif "inputs_embeds" in parameters:
                kwargs["inputs_embeds"] = _nan_like(hidden)
            else:
                args = (hidden.new_zeros(hidden.shape[:-1], dtype=torch.long),)
            returned = stage_forward.run(super().__call__, args, kwargs)
        finally:
            stage_forward.hidden = None
        stage_forward.verify(hidden, first_tensor(returned))
        return returned


def call_after_earlier_layers(module: nn.Module, function: Callable[[int], None]) -> None:
    """Call `function` with the index of each earlier stage's layer when the model passes it."""
    if isinstance(module, _StageModel):
        module._stage_forward.after_layer = function


def return_whole_output(module: nn.Module) -> None:
    """Let the last stage return the model's whole output, such as the loss from its labels."""
    if isinstance(module, _StageModel):
        module._stage_forward.returns_all = True


def keywords_for_all(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the names of the first stage's arguments that each stage of this model must be given.

    Not the first input: later stages have the hidden state instead.
    """
    if not isinstance(module, _StageModel):
        return ()
    parameters = module._stage_forward.parameters
    given = dict(zip(_positional(parameters), args, strict=False)) | dict(kwargs)
    others = (_first_input(parameters), "inputs_embeds", "use_cache")
    return tuple(name for name, value in given.items() if value is not None and name not in others)


def check_keywords(
    module: nn.Module, expected: Sequence[str], kwargs: Mapping[str, Any], stage: int
) -> None:
    """Refuse to run the model's forward without keywords that the first stage was given."""
    missing = [name for name in expected if name not in kwargs]
    if missing and isinstance(module, _StageModel):
        text = ", ".join(missing)
        raise PlanError(
            f"stage {stage} was not given {text}, which the first stage was given",
            expected="the same inputs on every stage, but for the first one: each stage runs the "
            "model's forward",
            fix=f"pass {text} by name in every process, as in step({missing[0]}=...)",
        )


def forward_parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the forward of the whole model."""
    if isinstance(module, _StageModel):
        return module._stage_forward.parameters
    try:
        return inspect.signature(module.forward).parameters
    except ValueError:  # a forward that is not written in Python
        return {}


def without_cache(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Add use_cache=False where a model takes it: layers would fill a cache that outlives them.

    And with a cache, models of transformers do not see from `position_ids` where texts are packed.
    """
    takes_it = "use_cache" in forward_parameters(model)
    return {"use_cache": False, **kwargs} if takes_it else dict(kwargs)


def _positional(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in parameters.items() if parameter.kind in kinds]


def _first_input(parameters: Mapping[str, inspect.Parameter]) -> str:
    return next(iter(_positional(parameters)), "")


def _named_parameters(model: nn.Module, layers: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of forward; if they are *args, **kwargs, of the model that is wrapped.

    That is the next module on the path to the list of layers.
    """
    module, parameters = model, inspect.signature(model.forward).parameters
    for name in layers.split(".")[:-1]:
        kinds = [parameter.kind for parameter in parameters.values()]
        if kinds != [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]:
            break
        module = module.get_submodule(name)
        parameters = inspect.signature(module.forward).parameters
    return parameters


def later_stage_keywords(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keywords that later stages take, given the arguments of the first stage.

    A model that runs its own forward on every stage takes all, since its forward may use each for
    masks and positions; but for the first one if it holds numbers that the prologue turns into the
    hidden state, such as pixels or embeddings. Stages of a Sequential take none.
    """
    if not isinstance(module, _StageModel):
        return {}
    names = _positional(module._stage_forward.parameters)
    if len(args) > max(1, len(names)):
        raise PlanError(
            f"{len(args)} inputs for {type(module).__name__}, whose forward names {len(names)}",
            expected="inputs by name: every stage runs this forward",
            fix="return a dict of inputs from the dataset, and name them in forward",
        )
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    first = next(iter(names), "")
    return {
        name: value
        for name, value in given.items()
        if not (name in (first, "inputs_embeds") and _is_floating(value))
    }


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _nan_like(hidden: Tensor) -> Tensor:
    return torch.full_like(hidden, math.nan, requires_grad=False)


def first_parameter(layer: Any) -> str:
    """Return the name of the argument that is a layer's hidden state."""
    return next(iter(inspect.signature(layer.forward).parameters))


def _hidden_of(layer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    hidden = args[0] if args else kwargs.get(first_parameter(layer))
    if isinstance(hidden, Tensor):
        return hidden
    raise PlanError(
        f"{type(layer).__name__} is called with a {type(hidden).__name__} as its first argument",
        expected="layers whose first argument is the hidden state, one tensor",
        fix="split the model by hand",
    )


def first_tensor(output: Any) -> Tensor:
    """Return the logits, or else the first tensor, of a model's output."""
    if isinstance(output, Mapping):
        output = output["logits"] if "logits" in output else tuple(output.values())
    if isinstance(output, tuple | list):
        output = next((x for x in output if isinstance(x, Tensor)), None)
    if isinstance(output, Tensor):
        return output
    raise PlanError(
        f"the model returned a {type(output).__name__}",
        expected="a tensor, or a tuple or mapping with logits or another tensor",
        fix="wrap the model so that it returns the tensor that the loss needs",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """A stage's part of a model, and the modules it omits, by dotted name."""

    layers: str  # the list of layers
    own_layers: range  # the layers of this stage
    absent: Collection[str]  # modules and parameters that other stages hold
    inner: Collection[str]  # modules that contain a listed one
    recompute: bool = False  # run the layers of this stage again in the backward


def extract_stage(model: nn.Module, spec: StageSpec, *, is_last: bool) -> nn.Module:
    """Return the model without the modules of other stages; it shares its own with `model`."""
    parameters = _named_parameters(model, spec.layers)
    stage_forward = StageForward(spec.own_layers, is_last, parameters)
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
            copied._modules[name] = _extract_layers(child, stage_forward, spec.recompute)
        elif path + name in spec.absent:
            copied._modules[name] = _placeholder(child, path + name, stage_forward)
        elif path + name in spec.inner:
            copied._modules[name] = _strip_module(child, f"{path}{name}.", spec, stage_forward)
    return copied


def _placeholder(module: nn.Module, name: str, stage_forward: StageForward) -> nn.Module:
    """Copy a module without weights; a forward may read the dtype and shape of its parameters."""
    copied = _without_weights(module)
    # Plain attributes: they are neither moved to a device nor in the state_dict.
    for key, parameter in module._parameters.items():
        if parameter is not None:
            value = math.nan if parameter.is_floating_point() else 0
            vars(copied)[key] = parameter.detach().new_full((), value).expand_as(parameter)
    for key, child in _children(module):
        vars(copied)[key] = _placeholder(child, f"{name}.{key}", stage_forward)
    return _assign_role(copied, _PlaceholderModule, stage_forward, name)


def _extract_layers(layers: nn.Module, stage_forward: StageForward, recompute: bool) -> nn.Module:
    copied, own = _shallow_copy(layers), stage_forward.own_layers
    for index, (name, layer) in enumerate(_children(layers)):
        if index not in own:
            role = _EarlierLayer if index < own.start else ExitLayer
            layer = _assign_role(_without_weights(layer), role, stage_forward, index)
        elif recompute:
            layer = _recomputed_view(layer)
        if index == own.start > 0:
            layer = _assign_role(_shallow_copy(layer), _EntryLayer, stage_forward, index)
        copied._modules[name] = layer
    return copied


def _recomputed_view(layer: nn.Module) -> nn.Module:
    """Return a second object with the state of a layer: the user's layer does not recompute."""
    view = object.__new__(_class_with_role(type(layer), _RecomputedLayer))
    object.__setattr__(view, "__dict__", vars(layer))
    return view


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all children; `named_children` omits the second name of a shared module."""
    return ((name, child) for name, child in module._modules.items() if child is not None)


def _shallow_copy(module: nn.Module) -> nn.Module:
    """Copy a module object: children can be removed from the copy and not from the original."""
    copied = copy.copy(module)
    for name, value in list(vars(copied).items()):
        if isinstance(value, dict | set):
            vars(copied)[name] = value.copy()
        elif isinstance(value, MethodType) and value.__self__ is module:
            vars(copied)[name] = MethodType(value.__func__, copied)
    return copied


def _without_weights(module: nn.Module) -> nn.Module:
    """Copy a module with its plain attributes only, such as a layer's number or kind."""
    copied = _shallow_copy(module)
    for members in (copied._modules, copied._parameters, copied._buffers):
        members.update(dict.fromkeys(members))  # None: reading a removed member is no error
    for name, value in list(vars(copied).items()):
        if isinstance(value, Tensor | nn.Module):
            del vars(copied)[name]
    return copied


def _assign_role(
    copied: nn.Module, role: type[_StageRole], stage_forward: StageForward, position: int | str
) -> nn.Module:
    copied._stage_forward, copied._position = stage_forward, position  # type: ignore[assignment]  # Module guesses
    copied.__class__ = _class_with_role(type(copied), role)
    return copied


def _class_with_role(kind: type[nn.Module], role: type[nn.Module]) -> type[nn.Module]:
    # Some models look up their class by name.
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (role, kind), named)
