"""Profile a model on a device of this machine: time and memory of every layer.

Each layer is timed separately, forward and backward, on the previous layer's output; all are in
training mode. On a GPU it runs twice in a row. The first run tells how long the host takes to
launch its kernels. The second is timed by events, behind a kernel that holds the GPU until all
others are launched: as in training, where the host is ahead. These times do not add up to that of
the model: under load the clocks of a GPU fall, and the host launches a layer alone more slowly. So
the whole model is timed, too, and the layers share its time (`times_in_training`). Memory comes
first, for all sizes: a size at which a layer fails costs no timing.
"""

import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from polyrhythm.describe.factory import call_factory, error_summary
from polyrhythm.describe.measure import device_flops, device_of, device_text, finish
from polyrhythm.describe.model import AtSize, Layer, ModelProfile, blocks_with_parameters
from polyrhythm.describe.sample import Sample
from polyrhythm.describe.units import check_amount
from polyrhythm.errors import DescriptionError, PlanError
from polyrhythm.run.pipeline.partition import LayerSplit, recomputes_itself
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


class _WithLoss(nn.Module):
    """The last layer with the loss, whose time and memory are those of its stage."""

    def __init__(self, layer: nn.Module, loss: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.layer, self.loss = layer, loss

    def forward(self, *arguments: Any) -> Tensor:
        return self.loss(self.layer(*arguments))


def split_layers_by_name(
    split: LayerSplit, model: nn.Module, names: tuple[str, ...], *, recompute: bool = False
) -> dict[str, nn.Module]:
    """Return a model's layers, each as the stage that has it alone; the first takes all inputs.

    `names` are the keyword arguments among these inputs, which come last. Nothing is copied.
    `recompute`: as stages that recompute; a Sequential has none.
    """
    if split.layers is None and isinstance(model, nn.Sequential):
        parts = [layer for layer in model._modules.values() if layer is not None]
        kinds = [type(layer).__name__ for layer in parts]
    else:
        num_layers = split.num_layers(model)
        sizes = (1,) * num_layers
        parts = [
            split.extract_stage(model, stage, sizes, recompute=recompute).module
            for stage in range(num_layers)
        ]
        kinds = [type(model).__name__] * num_layers
    parts[0] = _PositionalInputs(parts[0], names)
    layer_names = [f"{index}.{kind}" for index, kind in enumerate(kinds)]
    return dict(zip(layer_names, parts, strict=True))


def recomputing_layers(
    split: LayerSplit, model: nn.Module, names: tuple[str, ...]
) -> dict[str, nn.Module] | None:
    """Return the layers as stages that recompute; None for a Sequential, where inputs tell all."""
    if split.layers is None and isinstance(model, nn.Sequential):
        return None
    return split_layers_by_name(split, model, names, recompute=not recomputes_itself(model))


_LISTS = (nn.Sequential, nn.ModuleList)
_HELD = 2.0  # how long the GPU is held, of the time to launch a run
_LONGEST_HOLD: Seconds = 0.25  # a first run that compiles takes minutes
_MOST_CYCLES = 3e9  # of a GPU in a second


class _LayerMemory(NamedTuple):
    output: Bytes
    stored: Bytes
    cast: Bytes  # copies of weights in the dtype of autocast
    recompute: Bytes  # stored instead if the layer recomputes
    temporary: Bytes | None = (
        None  # beyond what is stored, while the layer runs; None: not on a GPU
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledModel:
    """The model to profile: its layers by name, and example arguments of the first."""

    layers: dict[str, nn.Module]
    example: tuple[Any, ...]  # arguments of the first layer
    num_samples: int  # in the example: the first dimension of its first tensor
    # The layers as stages that recompute; None if each starts from its input alone.
    recomputing: dict[str, nn.Module] | None = None

    @classmethod
    def of(cls, returned: object, *, source: str) -> Self:
        """Parse what a factory returned; raises DescriptionError."""
        if not isinstance(returned, tuple | list) or len(returned) not in (2, 3, 4):
            raise _unusable_model(source, _kind(returned))
        model, example, *rest = returned
        losses = [each for each in rest if callable(each)]
        split = [each for each in rest if not callable(each)]
        named = dict(example) if isinstance(example, Mapping) else {}
        arguments = example if isinstance(example, tuple) else (example,)
        recomputing: dict[str, nn.Module] | None = None
        if split or named or (isinstance(model, nn.Module) and not isinstance(model, _LISTS)):
            layer_split = split[0] if split else LayerSplit()
            layers, recomputing = _layers_of_split(model, layer_split, named, source)
        else:
            layers = _layers(model, source)
        for made in (layers, recomputing) if losses else ():
            if made is not None:
                *_, last = made
                made[last] = _WithLoss(made[last], losses[0])
        arguments = tuple(named.values()) if named else arguments
        leaves = pytree.tree_leaves(arguments)
        tensors = [each for each in leaves if isinstance(each, Tensor) and each.dim()]
        if not tensors or len(tensors[0]) == 0:
            raise _unusable_model(source, f"{_kind(example)} as the example")
        return cls(
            layers=layers,
            example=arguments,
            num_samples=len(tensors[0]),
            recomputing=recomputing,
        )

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
            for name, layer in itertools.chain(
                self.layers.items(), (self.recomputing or {}).items()
            ):
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

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Set all modules to training mode, as in the planned training, and restore them after."""
        layers = [*self.layers.values(), *(self.recomputing or {}).values()]
        modes = {module: module.training for layer in layers for module in layer.modules()}
        for layer in layers:
            layer.train()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode

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
    autocast: str | None = None,
    measured_at: str = "",
    on_progress: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] = lambda text: None,
) -> ModelProfile:
    """Profile a `module:factory`, or a Hugging Face model; the first of `sizes` is the profile's.

    Without `sizes`, size 1 is optional: it may be too small (for a batch norm), and is skipped
    with a warning. `autocast`: the dtype in which layers compute, while their weights keep theirs.
    Raises DescriptionError, also for any error in the user's code.
    """
    torch_device = device_of(device)
    on_progress("nothing yet: the factory is running")
    made = call_factory(source) if ":" in source else HuggingFaceModel(source).build()
    model = ProfiledModel.of(made, source=source)
    float_type = None if dtype is None else getattr(torch, dtype)
    model = model.to(torch_device, float_type)
    first_size, *others = sizes or reversed(model.default_sizes())
    with _autocast(torch_device, autocast):
        workspace = _workspace_bytes(model, first_size, torch_device)
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
    if autocast is not None:
        float_type = getattr(torch, autocast)
    float_type = float_type or _type_of(model)
    del model  # frees memory for the matrices
    speed = device_flops(torch_device, float_type, repeat=repeat)
    return ModelProfile(
        name=source,
        source=f"polyrhythm profile, {device_text(torch_device)}",
        measured_at=measured_at,
        flops=speed.median,
        flops_dtype=str(float_type).removeprefix("torch."),
        workspace_bytes=workspace,
        microbatch_size=first_size,
        layers=layers,
    )


def _autocast(device: torch.device, dtype: str | None) -> AbstractContextManager[object]:
    """Return the context of all forwards; it keeps copies of weights, as that of a step does."""
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, dtype))


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
        with model.train_mode():
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
                recompute_bytes=at.recompute_bytes,
                sizes=tuple(found[other][index] for other in sorted(found)),
            )
            for index, ((name, layer), at) in enumerate(zip(model.layers.items(), own, strict=True))
        ),
    )


def _counted(model: ProfiledModel, size: int, flops: float) -> list[AtSize]:
    memory = _layer_memory(model, size)
    arguments = model.resized_example(size)
    found = []
    for (name, layer), own in zip(model.layers.items(), memory, strict=True):
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
            activation_bytes=own.output,
            stored_bytes=own.stored,
            recompute_bytes=own.recompute,
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

    @contextmanager
    def skip_if_optional(size: int) -> Iterator[None]:
        try:
            yield
        except DescriptionError as error:
            if size not in optional:
                raise
            warn(f"skipped micro-batches of {size}: {error.wrong}")

    with torch.enable_grad(), model.train_mode():
        memory: dict[int, list[_LayerMemory]] = {}
        for each in (size, *other_sizes):
            on_progress(f"micro-batches of {each}: memory")
            with skip_if_optional(each):
                own = _layer_memory(model, each)
                if device.type == "cuda":
                    own = _with_temporary(model, each, own, device)
                memory[each] = own
        found: dict[int, list[tuple[AtSize, float, float]]] = {}
        for each, own in memory.items():
            with skip_if_optional(each):  # a backward may fail, or all gradients not fit
                found[each] = _at_size(model, each, own, repeat, device, on_progress)
    measured = found.pop(size)
    return tuple(
        Layer(
            name=name,
            forward=at.forward,
            backward=at.backward,
            parameter_bytes=sum(p.nbytes for p in layer.parameters()),
            activation_bytes=at.activation_bytes,
            stored_bytes=at.stored_bytes,
            recompute_bytes=at.recompute_bytes,
            temporary_bytes=at.temporary_bytes,
            cast_bytes=memory[size][index].cast or None,
            forward_spread=forward_spread,
            backward_spread=backward_spread,
            sizes=tuple(found[other][index][0] for other in sorted(found)),
        )
        for index, ((name, layer), (at, forward_spread, backward_spread)) in enumerate(
            zip(model.layers.items(), measured, strict=True)
        )
    )


def _at_size(
    model: ProfiledModel,
    size: int,
    memory: list[_LayerMemory],
    repeat: int,
    device: torch.device,
    on_progress: Callable[[str], None],
) -> list[tuple[AtSize, float, float]]:
    """Return the figures of each layer, and the spreads of its forward and backward times."""
    # Sweeps over all layers: a slow moment affects one sample of each layer, not all of one.
    sweeps: list[list[tuple[Timed, Timed]]] = []
    whole = None
    try:
        for number in range(repeat + 1):  # the first one warms up
            on_progress(f"micro-batches of {size}: run {number} of {repeat}")
            sweeps.append(list(_sweep(model.layers, model.resized_example(size), size, device)))
        if device.type == "cuda":
            on_progress(f"micro-batches of {size}: the whole model")
            # The gradients of weights exist, as from the second micro-batch of a step on.
            whole = time_microbatch(model, size, device)
    finally:
        for layer in model.layers.values():
            layer.zero_grad()
    samples = [
        _Samples.of(runs)
        for per_layer in zip(*sweeps[1:], strict=True)
        for runs in zip(*per_layer, strict=True)
    ]
    times = times_in_training([Timed(each.device.median, each.host) for each in samples], whole)
    found = []
    for number, own in enumerate(memory):
        forward, backward = 2 * number, 2 * number + 1
        at = AtSize(
            microbatch_size=size,
            forward=times[forward],
            backward=times[backward],
            activation_bytes=own.output,
            stored_bytes=own.stored,
            recompute_bytes=own.recompute,
            temporary_bytes=own.temporary,
        )
        found.append((at, samples[forward].device.spread, samples[backward].device.spread))
    return found


class Timed(NamedTuple):
    """A run of a layer: its time on the device, and the host's time to launch it."""

    device: Seconds
    host: Seconds


def times_in_training(times: Sequence[Timed], whole: Seconds | None) -> list[Seconds]:
    """Return the time of each forward and backward as a part of that of the whole model.

    Each is bound by the device or by the host, and takes that share of `whole`. None: on a CPU,
    whose times are already those of training.
    """
    if whole is None:
        return [each.device for each in times]
    bounds = [max(each) for each in times]
    total = sum(bounds)
    if not total:
        return [whole / len(times) for _ in times]
    return [whole * bound / total for bound in bounds]


class _Samples(NamedTuple):
    """All runs of a layer's forward, or of its backward."""

    device: Sample
    host: Seconds  # the median

    @classmethod
    def of(cls, runs: Sequence[Timed]) -> "_Samples":
        device, host = zip(*runs, strict=True)
        return cls(Sample.of(device), Sample.of(host).median)


def _sweep(
    layers: dict[str, nn.Module], arguments: tuple[Any, ...], size: int, device: torch.device
) -> Iterator[tuple[Timed, Timed]]:
    """Yield the forward and backward times of each layer."""
    num_runs = 2 if device.type == "cuda" else 1
    for name, layer in layers.items():
        # A run has its own inputs: a layer may write in place.
        copies = [pytree.tree_map_only(Tensor, _copy, arguments) for _ in range(num_runs - 1)]
        with _describe_layer_errors(name, "forward", size):
            values, forward = _timed_runs(
                [partial(layer, *inputs) for inputs in (*copies, arguments)], device
            )
        outputs = [
            [tensor for tensor in _tensors_of(value, name) if tensor.requires_grad]
            for value in values
        ]
        with _describe_layer_errors(name, "backward", size), _no_autocast(device):
            gradients = [_random_like(output) for output in outputs[-1]]
            arguments = (pytree.tree_map_only(Tensor, _detached_copy, values[-1]),)
            del values
            run = torch.autograd.backward if gradients else _do_nothing
            backward = _timed_runs([partial(run, each, gradients) for each in outputs], device)[1]
        yield forward, backward


def _timed_runs(runs: Sequence[Callable[[], Any]], device: torch.device) -> tuple[list[Any], Timed]:
    """Return the results of all runs, one after another, and the time of the last."""
    finish(device)
    start = time.perf_counter()
    results = [run() for run in runs[:-1]]
    if device.type != "cuda":
        start = time.perf_counter()
        results.append(runs[-1]())
        elapsed = time.perf_counter() - start
        return results, Timed(elapsed, elapsed)
    host = (time.perf_counter() - start) / len(results)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):  # another GPU may be the current device
        torch.cuda._sleep(int(min(_HELD * host, _LONGEST_HOLD) * _MOST_CYCLES))
        before.record()
        start = time.perf_counter()
        results.append(runs[-1]())
        # The first run is slow after the wait above, this one if the queue of kernels is full.
        host = min(host, time.perf_counter() - start)
        after.record()
    finish(device)
    return results, Timed(before.elapsed_time(after) / 1e3, host)


def time_microbatch(
    model: ProfiledModel, size: int, device: torch.device, *, num_runs: int = 8
) -> Seconds:
    """Return the time of a forward and a backward of the whole model, in steady state.

    Nothing waits for the device between the runs: as in training, the host is ahead if it can.
    """
    example, gradients = model.resized_example(size), list[Tensor]()
    try:
        _run_model(model.layers, example, device, gradients)  # warms up
        finish(device)
        start = time.perf_counter()
        for _ in range(num_runs):
            _run_model(model.layers, example, device, gradients)
        finish(device)
    except Exception as error:  # out of memory; or a user's layer, which may raise anything
        raise DescriptionError(
            f"the whole model fails with micro-batches of {size}: {error_summary(error)}",
            expected="layers that train one after another, and with a micro-batch fit into memory",
            fix="pass smaller --sizes, or measure a model of fewer such layers",
        ) from None
    return (time.perf_counter() - start) / num_runs


def _run_model(
    layers: dict[str, nn.Module],
    example: tuple[Any, ...],
    device: torch.device,
    gradients: list[Tensor],
) -> None:
    """Run all layers and one backward, as a stage does.

    `gradients` are those of the last outputs; they are drawn if there are none.
    """
    # A run has its own example: a layer may write in place.
    arguments = pytree.tree_map_only(Tensor, Tensor.clone, example)
    for layer in layers.values():
        arguments = (layer(*arguments),)
    outputs = [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]
    outputs = [tensor for tensor in outputs if tensor.requires_grad]
    if not gradients:
        gradients += map(_random_like, outputs)
    # Edges, not tensors: a stage has sent its outputs by then.
    edges = [get_gradient_edge(output) for output in outputs]
    del arguments, outputs
    if edges:
        with _no_autocast(device):
            torch.autograd.backward(edges, gradients)


def _random_like(output: Tensor) -> Tensor:
    """Return a gradient of random numbers: a GPU multiplies equal ones faster; 1 of a loss."""
    return torch.randn_like(output) if output.dim() else torch.ones_like(output)


def _do_nothing(*_: object) -> None:
    """Run in place of the backward of a layer without gradients."""


def _no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A backward has the dtypes of its forward; what autocast has cached is kept."""
    is_autocast = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_autocast else nullcontext()


def _workspace_bytes(model: ProfiledModel, size: int, device: torch.device) -> Bytes | None:
    """Return what a GPU's libraries allocate in a forward and a backward, and keep."""
    if device.type != "cuda":
        return None
    torch._C._cuda_clearCublasWorkspaces()  # of an earlier profile
    before = torch.cuda.memory_allocated(device)
    with torch.enable_grad(), model.train_mode():
        for _ in _sweep(model.layers, model.resized_example(size), size, device):
            pass
    for layer in model.layers.values():
        layer.zero_grad()
    torch.clear_autocast_cache()
    return max(0, torch.cuda.memory_allocated(device) - before)


def _with_temporary(
    model: ProfiledModel, size: int, memory: list[_LayerMemory], device: torch.device
) -> list[_LayerMemory]:
    """Add what each layer needs while it runs: the peak of a forward and a backward of its own.

    Counted are its input, its output, their gradients and all that is freed again, less what the
    layer stores. Gradients of weights exist before, as from the second micro-batch of a step on.
    """
    found, arguments = list[_LayerMemory](), model.resized_example(size)
    for (name, layer), own in zip(model.layers.items(), memory, strict=True):
        following: tuple[Any, ...] = ()
        for number in range(2):  # the first run leaves gradients and what autocast caches
            finish(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            with _describe_layer_errors(name, "forward", size):
                value = layer(*pytree.tree_map_only(Tensor, _copy, arguments))
            if number == 0:
                following = (pytree.tree_map_only(Tensor, _detached_copy, value),)
            with _describe_layer_errors(name, "backward", size), _no_autocast(device):
                outputs = [tensor for tensor in _tensors_of(value, name) if tensor.requires_grad]
                gradients = [torch.ones_like(output) for output in outputs]
                # Edges, not tensors: the next layer has freed this one's output by then.
                edges = [get_gradient_edge(output) for output in outputs]
                del value, outputs
                if edges:
                    torch.autograd.backward(edges, gradients)
                del edges, gradients
            peak = torch.cuda.max_memory_allocated(device) - before
        found.append(own._replace(temporary=max(0, peak - own.stored)))
        arguments = following
    for layer in model.layers.values():
        layer.zero_grad()
    return found


def _layer_memory(model: ProfiledModel, size: int) -> list[_LayerMemory]:
    """Return the memory of each layer for micro-batches of `size`."""
    example = model.resized_example(size)
    memory = _forward_memory(model.layers, example, size)
    if model.recomputing is not None:
        kept = [
            stored
            for _, stored, _ in _forward_memory(
                model.recomputing, model.resized_example(size), size
            )
        ]
    else:
        has_parameters = [any(True for _ in x.parameters()) for x in model.layers.values()]
        starts = {block.start for block in blocks_with_parameters(has_parameters)}
        first = [x.nbytes for x in pytree.tree_leaves(example) if isinstance(x, Tensor)]
        inputs = [sum(first), *(output for output, _, _ in memory)]
        kept = [inputs[number] if number in starts else 0 for number in range(len(memory))]
    return [_LayerMemory(*own, rest) for own, rest in zip(memory, kept, strict=True)]


def _forward_memory(
    layers: dict[str, nn.Module], arguments: tuple[Any, ...], size: int
) -> list[tuple[Bytes, Bytes, Bytes]]:
    """Return the bytes of each layer's output, of stored tensors and of weights that are cast.

    Stored are the bytes that autograd saves for the backward. Each storage counts once, at the last
    layer that stores it, so that the bytes of consecutive layers add up. Parameters and buffers do
    not count, nor tensors freed before the end of the forward.
    """
    kept: list[list[weakref.ref[_SavedTensor]]] = []
    outputs: list[Bytes] = []
    casts: list[dict[int, Bytes]] = []
    for name, layer in layers.items():
        kept.append([])
        with _describe_layer_errors(name, "forward", size), _record_saved_tensors(kept[-1]):
            value = layer(*arguments)
        with _describe_layer_errors(name, "forward", size):
            casts.append(_cast_storages(layer, arguments))
        outputs.append(sum(tensor.nbytes for tensor in _tensors_of(value, name)))
        arguments = (value,)
    counted: set[int] = set()
    stored: list[Bytes] = []
    for layer, holders, cast in zip(
        reversed(layers.values()), reversed(kept), reversed(casts), strict=True
    ):
        storages = _live_storages(holders, layer)
        stored.insert(0, sum(storages[each] for each in storages.keys() - counted - cast.keys()))
        counted |= storages.keys()
    return list(zip(outputs, stored, (sum(cast.values()) for cast in casts), strict=True))


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


def _cast_storages(layer: nn.Module, arguments: tuple[Any, ...]) -> dict[int, Bytes]:
    """Return the copies of weights that autocast makes once: two forwards store the same ones."""
    if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
        return {}
    found, values = list[dict[int, Bytes]](), []
    for _ in range(2):
        holders: list[weakref.ref[_SavedTensor]] = []
        with _record_saved_tensors(holders):
            values.append(layer(*pytree.tree_map_only(Tensor, _detached_copy, arguments)))
        found.append(_live_storages(holders, layer))
    first, second = found
    return {each: first[each] for each in first.keys() & second.keys()}


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


def _copy(tensor: Tensor) -> Tensor:
    """Copy a tensor; the copy requires gradients if the tensor does."""
    return _detached_copy(tensor) if tensor.requires_grad else tensor.clone()


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
) -> tuple[dict[str, nn.Module], dict[str, nn.Module] | None]:
    """Return the layers of a model, and the same ones as stages that recompute."""
    if not isinstance(model, nn.Module) or not isinstance(split, LayerSplit):
        what = model if not isinstance(model, nn.Module) else split
        raise _unusable_model(source, f"{_kind(what)} with a split")
    if split.num_layers(model) == 1 and not isinstance(model, nn.Sequential):
        raise _unusable_model(source, f"a {type(model).__name__} without a split")
    try:
        return (
            split_layers_by_name(split, model, tuple(named)),
            recomputing_layers(split, model, tuple(named)),
        )
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
        "name); for any other model also its LayerSplit; and, if its memory and time count, a "
        "function that returns the loss of the last layer's output",
        fix="return nn.Sequential(...), torch.randn(8, 512): the first dimension counts samples; "
        'or return model, example, LayerSplit(layers="model.layers", ...)',
    )


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}" if value is not None else "nothing"
