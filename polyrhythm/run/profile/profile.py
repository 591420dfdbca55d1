"""Profile a model on a device of this machine: time and memory of every layer.

Each layer is timed separately, forward and backward, on the previous layer's output; all are in
training mode. Memory comes first, for all sizes: a size at which a layer fails costs no timing.
"""

import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from polyrhythm.describe.factory import call_factory, error_summary
from polyrhythm.describe.measure import device_flops, device_of, device_text, finish
from polyrhythm.describe.model import AtSize, Layer, ModelProfile
from polyrhythm.describe.sample import Sample
from polyrhythm.describe.units import check_amount
from polyrhythm.errors import DescriptionError, PlanError
from polyrhythm.run.pipeline.partition import LayerSplit
from polyrhythm.run.profile.hugging_face import HuggingFaceModel
from polyrhythm.types import Bytes, Seconds


class _PositionalInputs(nn.Module):
    """Passes its last positional arguments to a module as keyword arguments `names`."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module, self._names = module, names

    def forward(self, *values: Any) -> Any:
        num_positional = len(values) - len(self._names)
        named = dict(zip(self._names, values[num_positional:], strict=True))
        return self.module(*values[:num_positional], **named)


def split_layers_by_name(
    split: LayerSplit, model: nn.Module, names: tuple[str, ...]
) -> dict[str, nn.Module]:
    """Return a model's layers, each as the stage that has it alone; the first takes all inputs.

    `names` are the keyword arguments among these inputs, which come last. Nothing is copied.
    """
    if split.layers is None and isinstance(model, nn.Sequential):
        parts = [layer for layer in model._modules.values() if layer is not None]
        kinds = [type(layer).__name__ for layer in parts]
    else:
        num_layers = split.num_layers(model)
        sizes = (1,) * num_layers
        parts = [split.extract_stage(model, stage, sizes).module for stage in range(num_layers)]
        kinds = [type(model).__name__] * num_layers
    parts[0] = _PositionalInputs(parts[0], names)
    layer_names = [f"{index}.{kind}" for index, kind in enumerate(kinds)]
    return dict(zip(layer_names, parts, strict=True))


_LISTS = (nn.Sequential, nn.ModuleList)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledModel:
    """The model to profile: its layers by name, and example arguments of the first."""

    layers: dict[str, nn.Module]
    example: tuple[Any, ...]  # arguments of the first layer
    num_samples: int  # in the example: the first dimension of its first tensor

    @classmethod
    def of(cls, returned: object, *, source: str) -> Self:
        """Parse what a factory returned; raises DescriptionError."""
        if not isinstance(returned, tuple | list) or len(returned) not in (2, 3):
            raise _unusable_model(source, _kind(returned))
        model, example, *split = returned
        named = dict(example) if isinstance(example, Mapping) else {}
        arguments = example if isinstance(example, tuple) else (example,)
        if split or named or (isinstance(model, nn.Module) and not isinstance(model, _LISTS)):
            layers = _layers_of_split(model, split[0] if split else LayerSplit(), named, source)
        else:
            layers = _layers(model, source)
        arguments = tuple(named.values()) if named else arguments
        leaves = pytree.tree_leaves(arguments)
        tensors = [each for each in leaves if isinstance(each, Tensor) and each.dim()]
        if not tensors or len(tensors[0]) == 0:
            raise _unusable_model(source, f"{_kind(example)} as the example")
        return cls(layers=layers, example=arguments, num_samples=len(tensors[0]))

    def default_sizes(self) -> list[int]:
        """Return the sizes of one sample, a quarter, half and all of the example."""
        shares = (self.num_samples, self.num_samples // 2, self.num_samples // 4, 1)
        return sorted({max(1, share) for share in shares})

    def to(self, device: torch.device, dtype: torch.dtype | None) -> Self:
        """Move the model to a device; `dtype` is the type of its floating-point tensors.

        Raises DescriptionError if it cannot be moved: it is on "meta", or too large.
        """
        self._check_trainable()

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None)

        what = "the example"
        try:
            example = pytree.tree_map_only(Tensor, move, self.example)
            for name, layer in self.layers.items():
                what = f"layer {name!r}"
                layer.to(device, dtype)
        except Exception as error:  # out of memory; or a layer that has a to() of its own
            raise DescriptionError(
                f"{what} cannot be moved to {device}: {error_summary(error)}",
                expected="a model that fits into the memory of one device, with one micro-batch",
                fix="measure a model of fewer such layers, or use --device cpu or --dtype bfloat16",
            ) from None
        return replace(self, example=example)

    def resized_example(self, size: int) -> tuple[Any, ...]:
        """Return a copy of the example, cut or repeated to `size` samples."""

        def resize(tensor: Tensor) -> Tensor:
            detached = tensor.detach()
            if not detached.dim() or len(detached) != self.num_samples:
                return detached.clone()
            return detached[torch.arange(size, device=detached.device) % self.num_samples]

        try:
            arguments: tuple[Any, ...] = pytree.tree_map_only(Tensor, resize, self.example)
        except (RuntimeError, MemoryError) as error:
            raise DescriptionError(
                f"an example of {size} samples cannot be made: {error_summary(error)}",
                expected="micro-batches that fit into memory",
                fix="pass smaller --sizes",
            ) from None
        return arguments

    def _check_trainable(self) -> None:
        """Reject a model without data (on "meta"), or in inference mode."""
        parameters = [each for layer in self.layers.values() for each in layer.parameters()]
        buffers = [each for layer in self.layers.values() for each in layer.buffers()]
        everything = [*pytree.tree_leaves(self.example), *parameters, *buffers]
        if any(isinstance(each, Tensor) and each.is_meta for each in everything):
            raise DescriptionError(
                "the model or its example is on the device 'meta', which holds no data",
                expected="a model that can be run",
                fix="build it without torch.device('meta'), or call model.to_empty(device='cpu')",
            )
        if any(each.is_inference() for each in parameters):
            raise DescriptionError(
                "the model was built in torch.inference_mode(), without gradients",
                expected="a model that can be trained",
                fix="build it outside of torch.inference_mode()",
            )


def measure_profile(
    source: str,
    *,
    sizes: Sequence[int] = (),
    repeat: int = 5,
    device: str = "auto",
    dtype: str | None = None,
    measured_at: str = "",
    on_progress: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] = lambda text: None,
) -> ModelProfile:
    """Profile a `module:factory`, or a Hugging Face model; the first of `sizes` is the profile's.

    Without `sizes`, size 1 is optional: it may be too small (for a batch norm), and is skipped
    with a warning. Raises DescriptionError, also for any error in the user's code.
    """
    torch_device = device_of(device)
    on_progress("nothing yet: the factory is running")
    made = call_factory(source) if ":" in source else HuggingFaceModel(source).build()
    model = ProfiledModel.of(made, source=source)
    float_type = None if dtype is None else getattr(torch, dtype)
    model = model.to(torch_device, float_type)
    first_size, *others = sizes or reversed(model.default_sizes())
    layers = measure_layers(
        model,
        size=first_size,
        other_sizes=others,
        optional=() if sizes or first_size == 1 else (1,),
        repeat=repeat,
        device=torch_device,
        on_progress=on_progress,
        warn=warn,
    )
    on_progress("device speed")
    float_type = float_type or _type_of(model)
    del model  # frees memory for the matrices
    speed = device_flops(torch_device, float_type, repeat=repeat)
    return ModelProfile(
        name=source,
        source=f"polyrhythm profile, {device_text(torch_device)}",
        measured_at=measured_at,
        flops=speed.median,
        flops_dtype=str(float_type).removeprefix("torch."),
        microbatch_size=first_size,
        layers=layers,
    )


def count_profile(
    source: str,
    *,
    flops: float,
    sizes: Sequence[int] = (),
    dtype: str = "float32",
) -> ModelProfile:
    """Count the layers of a Hugging Face model for a device of `flops` operations per second.

    The model has no memory: shapes alone are computed. Times are those of products of matrices.
    """
    check_amount("flops", flops, zero=False)
    with FakeTensorMode(), torch.device("meta"), torch.enable_grad():
        made = HuggingFaceModel(source).build(getattr(torch, dtype))
        model = ProfiledModel.of(made, source=source)
        first_size, *others = sizes or (1,)
        with _train_mode(model.layers):
            found = {size: _counted(model, size, flops) for size in (first_size, *others)}
    own = found.pop(first_size)
    return ModelProfile(
        name=source,
        source="counted by shapes, not measured",
        flops=flops,
        flops_dtype=dtype,
        microbatch_size=first_size,
        layers=tuple(
            Layer(
                name=name,
                forward=at.forward,
                backward=at.backward,
                parameter_bytes=sum(p.nbytes for p in layer.parameters()),
                activation_bytes=at.activation_bytes,
                stored_bytes=at.stored_bytes,
                sizes=tuple(found[other][index] for other in sorted(found)),
            )
            for index, ((name, layer), at) in enumerate(zip(model.layers.items(), own, strict=True))
        ),
    )


def _counted(model: ProfiledModel, size: int, flops: float) -> list[AtSize]:
    memory = _forward_memory(model.layers, model.resized_example(size), size)
    arguments = model.resized_example(size)
    found = []
    for (name, layer), (output_bytes, stored_bytes) in zip(
        model.layers.items(), memory, strict=True
    ):
        with _describe_layer_errors(name, "forward", size), FlopCounterMode(display=False) as count:
            value = layer(*arguments)
            forward = count.get_total_flops()
            outputs = [tensor for tensor in _tensors_of(value, name) if tensor.requires_grad]
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        arguments = (pytree.tree_map_only(Tensor, _detached_copy, value),)
        at = AtSize(
            microbatch_size=size,
            forward=forward / flops,
            backward=(count.get_total_flops() - forward) / flops,
            activation_bytes=output_bytes,
            stored_bytes=stored_bytes,
        )
        found.append(at)
    return found


def _type_of(model: ProfiledModel) -> torch.dtype:
    """Return the type of most floating-point parameters; float32 without any."""
    count: dict[torch.dtype, int] = {}
    for layer in model.layers.values():
        for parameter in layer.parameters():
            if parameter.is_floating_point():
                count[parameter.dtype] = count.get(parameter.dtype, 0) + parameter.numel()
    return max(count, key=lambda each: count[each], default=torch.float32)


def measure_layers(
    model: ProfiledModel,
    *,
    size: int,
    other_sizes: Sequence[int],
    repeat: int,
    device: torch.device,
    optional: Sequence[int] = (),
    on_progress: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] = lambda text: None,
) -> tuple[Layer, ...]:
    """Measure every layer with micro-batches of `size`, and in its `sizes` with other sizes.

    An `optional` size at which a layer fails is skipped with a warning.
    """
    with torch.enable_grad(), _train_mode(model.layers):
        memory: dict[int, list[tuple[Bytes, Bytes]]] = {}
        for each in (size, *other_sizes):
            on_progress(f"micro-batches of {each}: memory")
            try:
                memory[each] = _forward_memory(model.layers, model.resized_example(each), each)
            except DescriptionError as error:
                if each not in optional:
                    raise
                warn(f"skipped micro-batches of {each}: {error.wrong}")
        found = {
            each: _at_size(model, each, memory[each], repeat, device, on_progress)
            for each in memory
        }
    measured = found.pop(size)
    return tuple(
        Layer(
            name=name,
            forward=at.forward,
            backward=at.backward,
            parameter_bytes=sum(p.nbytes for p in layer.parameters()),
            activation_bytes=at.activation_bytes,
            stored_bytes=at.stored_bytes,
            forward_spread=forward_spread,
            backward_spread=backward_spread,
            sizes=tuple(found[other][index][0] for other in sorted(found)),
        )
        for index, ((name, layer), (at, forward_spread, backward_spread)) in enumerate(
            zip(model.layers.items(), measured, strict=True)
        )
    )


@contextmanager
def _train_mode(layers: dict[str, nn.Module]) -> Iterator[None]:
    """Set all modules to training mode, as in the planned training, and restore them after."""
    modes = {module: module.training for layer in layers.values() for module in layer.modules()}
    for layer in layers.values():
        layer.train()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _at_size(
    model: ProfiledModel,
    size: int,
    memory: list[tuple[Bytes, Bytes]],
    repeat: int,
    device: torch.device,
    on_progress: Callable[[str], None],
) -> list[tuple[AtSize, float, float]]:
    """Return the figures of each layer, and the spreads of its forward and backward times."""
    # Sweeps over all layers: a slow moment affects one sample of each layer, not all of one.
    sweeps: list[list[tuple[Seconds, Seconds]]] = []
    for number in range(repeat + 1):  # the first one warms up
        on_progress(f"micro-batches of {size}: run {number} of {repeat}")
        sweeps.append(list(_sweep(model.layers, model.resized_example(size), size, device)))
    for layer in model.layers.values():
        layer.zero_grad()
    found = []
    per_layer = zip(*sweeps[1:], strict=True)
    for (output_bytes, stored_bytes), times in zip(memory, per_layer, strict=True):
        forward, backward = map(Sample.of, zip(*times, strict=True))
        at = AtSize(
            microbatch_size=size,
            forward=forward.median,
            backward=backward.median,
            activation_bytes=output_bytes,
            stored_bytes=stored_bytes,
        )
        found.append((at, forward.spread, backward.spread))
    return found


def _sweep(
    layers: dict[str, nn.Module], arguments: tuple[Any, ...], size: int, device: torch.device
) -> Iterator[tuple[Seconds, Seconds]]:
    """Yield the forward and backward times of each layer."""
    for name, layer in layers.items():
        with _describe_layer_errors(name, "forward", size):
            finish(device)
            start = time.perf_counter()
            value = layer(*arguments)
            finish(device)
            forward = time.perf_counter() - start
        outputs = [tensor for tensor in _tensors_of(value, name) if tensor.requires_grad]
        with _describe_layer_errors(name, "backward", size):
            gradients = [torch.ones_like(output) for output in outputs]
            arguments = (pytree.tree_map_only(Tensor, _detached_copy, value),)
            finish(device)
            start = time.perf_counter()
            if outputs:  # otherwise the layer has no gradients
                torch.autograd.backward(outputs, gradients)
            finish(device)
            backward = time.perf_counter() - start
        yield forward, backward


def _forward_memory(
    layers: dict[str, nn.Module], arguments: tuple[Any, ...], size: int
) -> list[tuple[Bytes, Bytes]]:
    """Return the bytes of each layer's output and stored tensors in a forward of the model.

    Stored are the bytes that autograd saves for the backward. Each storage counts once, at the last
    layer that stores it, so that the bytes of consecutive layers add up. Parameters and buffers do
    not count, nor tensors freed before the end of the forward.
    """
    kept: list[list[weakref.ref[_SavedTensor]]] = []
    outputs: list[Bytes] = []
    for name, layer in layers.items():
        kept.append([])
        with _describe_layer_errors(name, "forward", size), _record_saved_tensors(kept[-1]):
            value = layer(*arguments)
        outputs.append(sum(tensor.nbytes for tensor in _tensors_of(value, name)))
        arguments = (value,)
    counted: set[int] = set()
    stored: list[Bytes] = []
    for layer, holders in zip(reversed(layers.values()), reversed(kept), strict=True):
        storages = _live_storages(holders, layer)
        stored.insert(0, sum(storages[each] for each in storages.keys() - counted))
        counted |= storages.keys()
    return list(zip(outputs, stored, strict=True))


class _SavedTensor:
    """Autograd holds this in place of a saved tensor; it is freed with the graph."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # `tensor` would keep its own graph alive for ever


def _live_storages(holders: list[weakref.ref[_SavedTensor]], layer: nn.Module) -> dict[int, Bytes]:
    """Return the bytes of live storages by identity, except for the layer's parameters.

    Not by the address of their data: tensors without data have none.
    """
    held = [holder.tensor.untyped_storage() for each in holders if (holder := each()) is not None]
    # Collected after the forward: a lazy layer has no parameters before.
    own = {
        tensor.untyped_storage()._cdata
        for tensor in itertools.chain(layer.parameters(), layer.buffers())
    }
    return {each._cdata: each.nbytes() for each in held if each._cdata not in own}


def _record_saved_tensors(
    kept: list[weakref.ref[_SavedTensor]],
) -> torch.autograd.graph.saved_tensors_hooks:
    def pack(tensor: Tensor) -> _SavedTensor:
        holder = _SavedTensor(tensor)
        kept.append(weakref.ref(holder))
        return holder

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor)


def _tensors_of(value: Any, name: str) -> list[Tensor]:
    """Return the tensors in a layer's output; raises DescriptionError if pytree cannot find all.

    The output is a tensor, or tensors in tuples, dicts and other containers of pytree, which
    also supports named tuples, and registered dataclasses.
    """
    leaves = pytree.tree_leaves(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    opaque = next((leaf for leaf in leaves if _hides_tensors(leaf)), None)
    if tensors and opaque is None:
        return tensors
    what = type(value if opaque is None else opaque).__name__
    raise DescriptionError(
        f"layer {name!r} returns a {what}, in which no tensor can be found",
        expected="a tensor, or a tuple, a list, a dict or a named tuple of tensors",
        fix="return a tuple of its tensors"
        + (f", or call torch.export.register_dataclass({what})" if opaque is not None else ""),
    )


def _detached_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor, detached and requiring gradients; a copy since a layer may write in place."""
    detached = tensor.detach()
    return detached.requires_grad_().clone() if detached.is_floating_point() else detached.clone()


def _hides_tensors(leaf: Any) -> bool:
    if not is_dataclass(leaf) or isinstance(leaf, type):
        return False
    inner = [getattr(leaf, field.name, None) for field in fields(leaf)]
    return any(isinstance(each, Tensor) for each in pytree.tree_leaves(inner))


@contextmanager
def _describe_layer_errors(name: str, action: str, size: int) -> Iterator[None]:
    """Turn any error of a layer into a DescriptionError; gradients are enabled."""
    try:
        with torch.enable_grad():
            yield
    except Exception as error:  # a user's layer may raise anything
        raise DescriptionError(
            f"layer {name!r} fails in its {action} with micro-batches of {size}: "
            f"{error_summary(error)}",
            expected="layers that accept the previous layer's output, with any number of samples",
            fix="fix the layer, or measure only sizes that it supports: --sizes",
        ) from None


def _layers_of_split(
    model: object, split: object, named: Mapping[str, Any], source: str
) -> dict[str, nn.Module]:
    if not isinstance(model, nn.Module) or not isinstance(split, LayerSplit):
        what = model if not isinstance(model, nn.Module) else split
        raise _unusable_model(source, f"{_kind(what)} with a split")
    if split.num_layers(model) == 1 and not isinstance(model, nn.Sequential):
        raise _unusable_model(source, f"a {type(model).__name__} without a split")
    try:
        return split_layers_by_name(split, model, tuple(named))
    except PlanError as error:
        raise DescriptionError(error.wrong, expected=error.expected, fix=error.fix) from None


def _layers(model: object, source: str) -> dict[str, nn.Module]:
    if isinstance(model, nn.Sequential):
        named = dict(model._modules)  # named_children() leaves out a layer's second appearance
    elif isinstance(model, list | tuple | nn.ModuleList):
        named = {str(index): layer for index, layer in enumerate(model)}
    else:
        raise _unusable_model(source, f"{_kind(model)} as the model")
    if not named:
        raise _unusable_model(source, "a model without layers")
    layers: dict[str, nn.Module] = {}
    for name, layer in named.items():
        if not isinstance(layer, nn.Module):
            raise _unusable_model(source, f"{_kind(layer)} as layer {name}")
        layers[f"{name}.{type(layer).__name__}" if name.isdigit() else name] = layer
    return layers


def _unusable_model(source: str, what: str) -> DescriptionError:
    return DescriptionError(
        f"{source}() returned {what}",
        expected="two things: an nn.Sequential or a list of nn.Modules, "
        "and a tensor for the first of them (a tuple if it takes several arguments, a dict if by "
        "name); for any other model also its LayerSplit",
        fix="return nn.Sequential(...), torch.randn(8, 512): the first dimension counts samples; "
        'or return model, example, LayerSplit(layers="model.layers", ...)',
    )


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}" if value is not None else "nothing"
