"""Find the split of a model: its list of layers, and which modules run before and after it.

The list is the one that a pipeline plan of transformers names, or else the one that divides the
model best. What belongs to which stage follows from one forward on an example, in which every
layer's output is cut off autograd's graph: the parameters that the graph of a layer's inputs
reaches are those that the code between the layers needs there. Parameters needed before the first
layer only are the prologue, after the last one only the epilogue, and others are on every stage.

The forward is a real one: a few tokens cost far less than a step, and models with experts or
masks that depend on data run, too. Only attributes of transformers' models are read.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from polyrhythm.errors import PlanError
from polyrhythm.run.pipeline.stage_modules import first_parameter, first_tensor, without_cache

Example = tuple[Sequence[Any], Mapping[str, Any]]  # args and kwargs of the model's forward

_FIX = "name the parts, split=LayerSplit(layers=..., prologue=[...], epilogue=[...]), or use one "
_FIX += "stage and several pipelines"
_LENGTH = 8  # of an example text


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitNames:
    """The parts of a model by dotted name, as in LayerSplit."""

    layers: str
    prologue: tuple[str, ...]
    every: tuple[str, ...]
    epilogue: tuple[str, ...]
    together: tuple[tuple[int, int], ...]  # a layer, and the last that takes more from it


def find_split(model: nn.Module, example: Example | None = None) -> SplitNames:
    """Find the parts of a model that is no Sequential; raise a PlanError that says why not.

    Runs two forwards in eval mode, on a few tokens or one image if no example is given, and leaves
    the model as it was: its mode, gradients, buffers and the random states.
    """
    try:
        args, kwargs = _example_of(model) if example is None else example
        return _find(model, args, without_cache(model, kwargs))
    except PlanError:
        raise
    except Exception as error:  # the user's modules may raise anything
        raise PlanError(
            f"the split of {type(model).__name__} is not known: its forward on an example raised "
            f"{type(error).__name__}: {error}",
            expected="a forward that runs on one micro-batch",
            fix=_FIX,
        ) from error


def _find(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SplitNames:
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise PlanError(
            f"{type(model).__name__} is an encoder-decoder, whose decoder layers all take the "
            "output of the encoder",
            expected="a model whose layers pass on one hidden state",
            fix="use one stage and several pipelines, as with --local 2",
        )
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise PlanError(
            f"the split of {type(model).__name__} is not known: its parameters are sharded",
            expected="a whole model, whose stages are sharded after the split",
            fix=_FIX,
        )
    with unchanged(model), torch.enable_grad():
        model.eval()
        trace = _trace_calls(model, args, kwargs)
        layers = _planned_layers(model) or _best_list(model, trace)
        _check_order(layers, model.get_submodule(layers), trace)
        flow = _Flow(model, layers)
        with flow.recorded():
            output = model(*args, **kwargs)
        flow.end(output)
    return _assign(model, layers, trace, flow)


def _planned_layers(model: nn.Module) -> str | None:
    """Return the list of layers that a pipeline plan of transformers names; None without one."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        config = getattr(module, "config", None)
        plans = getattr(config, "base_model_pp_plan", None), getattr(module, "_pp_plan", None)
        for key in (key for plan in plans if isinstance(plan, Mapping) for key in plan):
            path = f"{name}.{key}" if name else key
            if path in modules and is_layer_list(modules[path]):
                return path
    return None


def is_layer_list(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleDict):  # some models key layers by number, to keep their names
        return len(module) > 0 and all(key.isdecimal() for key in module)
    return isinstance(module, nn.ModuleList | nn.Sequential)


def enclosing(name: str) -> list[str]:
    """Return the enclosing modules, innermost first: "a.b" and "a" for "a.b.c"."""
    outer = []
    while "." in name:
        name = name.rpartition(".")[0]
        outer.append(name)
    return outer


def _example_of(model: nn.Module) -> Example:
    """Make a small input for a model with a config of transformers."""
    config: Any = getattr(model, "config", None)
    first = getattr(model, "main_input_name", None)
    parameter = next(model.parameters(), torch.empty(0))
    if config is not None and first == "pixel_values":
        channels, size = (getattr(config, name, None) for name in ("num_channels", "image_size"))
        height, width = size if isinstance(size, Sequence) else (size or 64,) * 2
        pixels = torch.linspace(-1, 1, 2 * (channels or 3) * height * width)
        pixels = pixels.sin().reshape(2, channels or 3, height, width)
        return (), {first: pixels.to(parameter.device, parameter.dtype)}
    if config is not None and first == "input_ids":
        text = getattr(config, "get_text_config", lambda: config)()
        words = getattr(text, "vocab_size", None) or 2
        # Not the first words: padding is often among them.
        ids = words - 1 - torch.arange(2 * _LENGTH).reshape(2, _LENGTH) % max(1, words // 2)
        inputs = {"input_ids": ids.to(parameter.device)}
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = inputs["input_ids"]
        return (), inputs
    raise PlanError(
        f"the split of {type(model).__name__} is not known: no example of its inputs is at hand",
        expected="an example, or a model of transformers that takes input_ids or pixel_values",
        fix=_FIX,
    )


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the modes, parameters, buffers and attributes of a model, and the random states.

    Compiled layers run uncompiled: they would be compiled for these inputs, with their hooks.
    """
    modules = list(model.modules())
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    kept = []
    for module in modules:
        members = {name: dict(vars(module)[name]) for name in ("_parameters", "_buffers")}
        kept.append(vars(module) | members)
    with torch.random.fork_rng(_cuda_devices(model)), torch.compiler.set_stance("force_eager"):
        try:
            yield
        finally:
            for module, attributes in zip(modules, kept, strict=True):
                vars(module).clear()
                vars(module).update(attributes)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def _cuda_devices(model: nn.Module) -> list[torch.device]:
    return list({p.device for p in model.parameters() if p.device.type == "cuda"})


@dataclass(slots=True)
class _Trace:
    """The order in which modules are called."""

    calls: Counter[nn.Module] = field(default_factory=Counter)
    starts: dict[nn.Module, int] = field(default_factory=dict)  # of the first call
    ends: dict[nn.Module, int] = field(default_factory=dict)  # of the last call


def _trace_calls(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Trace:
    trace, clock = _Trace(), iter(range(1 << 62))

    def start(module: nn.Module, inputs: Any) -> None:
        trace.calls[module] += 1
        trace.starts.setdefault(module, next(clock))

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        trace.ends[module] = next(clock)

    hooks = [module.register_forward_pre_hook(start) for module in model.modules()]
    hooks += [module.register_forward_hook(end) for module in model.modules()]
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return trace


def _layers_of(layers: nn.Module) -> list[nn.Module]:
    return [layer for layer in layers._modules.values() if layer is not None]


def _order_problem(layers: nn.Module, trace: _Trace) -> str | None:
    """Return what is wrong with the calls of a list of layers: each must be called once."""
    last = -1
    for index, layer in enumerate(_layers_of(layers)):
        if trace.calls[layer] != 1:
            return f"layer {index} is called {trace.calls[layer]} times"
        if layer not in trace.ends or trace.starts[layer] < last:
            return f"layer {index} is called before layer {index - 1} has returned"
        last = trace.ends[layer]
    return None


def _check_order(name: str, layers: nn.Module, trace: _Trace) -> None:
    if (problem := _order_problem(layers, trace)) is not None:
        raise PlanError(
            f"{name} cannot be split: {problem}",
            expected="a forward that calls every layer of the list once, in order",
            fix=_FIX,
        )


def _lists(model: nn.Module) -> dict[str, nn.Module]:
    named = model.named_modules(remove_duplicate=False)
    return {n: m for n, m in named if n and is_layer_list(m) and len(_layers_of(m)) > 1}


def _best_list(model: nn.Module, trace: _Trace) -> str:
    """Return the list of layers along which the largest undivided part of the model is smallest."""
    lists = _lists(model)
    total = _size(model)
    scores = {
        name: (max(total - _size(layers), *map(_size, _layers_of(layers))), -len(layers._modules))
        for name, layers in lists.items()
        if _order_problem(layers, trace) is None
    }
    if scores:
        return min(scores, key=scores.__getitem__)
    shown = [f"{name}: {_order_problem(layers, trace)}" for name, layers in lists.items()]
    raise PlanError(
        f"{type(model).__name__} has no list of layers that are called once each, in order"
        + "".join(f"; {text}" for text in shown[:4]),
        expected="a model whose layers are in one ModuleList or Sequential",
        fix=_FIX,
    )


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class _Watched(Tensor):
    """A tensor that reports its use; to be passed on is no use."""

    @staticmethod
    def watch(value: Tensor, report: Callable[[], None]) -> "_Watched":
        watched = value.as_subclass(_Watched)
        vars(watched).update(plain=value, report=report)
        return watched

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def plain(watched: _Watched) -> Any:
            vars(watched)["report"]()
            return vars(watched)["plain"]

        args, kwargs = tree_map_only(_Watched, plain, (args, dict(kwargs or {})))
        return func(*args, **kwargs or {})


class _Flow:
    """Which parameters the inputs of each layer depend on, but through earlier layers' inputs.

    Each parameter has a leaf of its own under each of its names, also if it is tied or frozen.
    """

    def __init__(self, model: nn.Module, layers: str) -> None:
        self._layers = _layers_of(model.get_submodule(layers))
        self._names: dict[int, list[str]] = {}  # of a leaf, by its id
        self._leaves: list[Tensor] = []  # kept, so that ids stay theirs
        self._hidden: dict[int, int] = {}  # the layer of a leaf that replaces its hidden state
        self.needed: list[set[str]] = []  # parameters by layer; the last: after all layers
        # A layer, and a later one that takes more from it than the hidden state.
        self.together: set[tuple[int, int]] = set()
        self._watched: dict[int, _Watched] = {}  # by the id of an output of a layer
        self._layer_names = layers
        seen: dict[nn.Module, dict[str, Tensor]] = {}
        for path, module in list(model.named_modules(remove_duplicate=False)):
            fresh = seen.setdefault(module, {})
            for name, parameter in list(module._parameters.items()):
                if parameter is None or not parameter.is_floating_point():
                    continue
                if name not in fresh:
                    fresh[name] = module._parameters[name] = nn.Parameter(parameter.detach())
                for leaf in (fresh[name], parameter):
                    self._names.setdefault(id(leaf), []).append(f"{path}.{name}" if path else name)
                    self._leaves.append(leaf)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        hooks = [
            layer.register_forward_pre_hook(self._enter, with_kwargs=True) for layer in self._layers
        ]
        hooks += [layer.register_forward_hook(self._leave) for layer in self._layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.needed.append(set())
        name = first_parameter(layer)
        hidden = args[0] if args else kwargs.get(name)
        others = args[1:], {key: value for key, value in kwargs.items() if key != name}
        self.needed[-1] |= self._reached([hidden]) | self._reached(tree_leaves(others), alone=False)
        if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
            return None
        leaf = hidden.detach().requires_grad_()
        self._hidden[id(leaf)] = len(self.needed) - 1
        self._leaves.append(leaf)
        more, named = tree_map_only(Tensor, lambda x: self._watched.get(id(x), x), others)
        return ((leaf, *more), named) if args else ((), {**named, name: leaf})

    def _leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Watch the outputs that have no gradient: the graph does not tell who uses them."""
        source = len(self.needed) - 1
        for value in [x for x in tree_leaves(output) if isinstance(x, Tensor)][1:]:
            if isinstance(value, _Watched) or value.requires_grad:
                continue
            self._leaves.append(value)
            self._watched[id(value)] = _Watched.watch(value, partial(self._use, source))

    def _use(self, source: int) -> None:
        if source < len(self.needed) - 1:
            self.together.add((source, len(self.needed) - 1))

    def end(self, output: Any) -> None:
        self.needed.append(set())
        self.needed[-1] |= self._reached([first_tensor(output)])

    def _reached(self, values: Sequence[Any], *, alone: bool = True) -> set[str]:
        """Return the names that values depend on; `alone`: values that are the hidden state.

        The hidden state of a layer is computed on the stage of the layer before it.
        """
        tensors = [x for x in values if isinstance(x, Tensor) and not isinstance(x, _Watched)]
        tensors = [tensor for tensor in tensors if tensor.requires_grad]
        leaves = [tensor for tensor in tensors if tensor.grad_fn is None]
        nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        visited = set(nodes)
        while nodes:
            node: Any = nodes.pop()
            if hasattr(node, "variable"):
                leaves.append(node.variable)
            for following, _ in node.next_functions:
                if following is not None and following not in visited:
                    visited.add(following)
                    nodes.append(following)
        names = {name for leaf in leaves for name in self._names.get(id(leaf), ())}
        sources = {self._hidden[id(leaf)] for leaf in leaves if id(leaf) in self._hidden}
        prefix = self._layer_names + "."
        own = [int(n.removeprefix(prefix).split(".")[0]) for n in names if n.startswith(prefix)]
        before = len(self.needed) - 2  # the layer
        if alone:
            self.together |= {(source, before) for source in {*sources, *own} if source < before}
        return {name for name in names if not name.startswith(prefix)}


def _assign(model: nn.Module, layers: str, trace: _Trace, flow: _Flow) -> SplitNames:
    """Assign every module outside the layers to the stages that need it."""
    found: dict[str, list[str]] = {"prologue": [], "every": [], "epilogue": []}
    for name, is_before in _units(model, layers, trace).items():
        uses = [
            index
            for index, names in enumerate(flow.needed)
            if any(other == name or other.startswith(name + ".") for other in names)
        ]
        if uses in ([0], [len(flow.needed) - 1]):
            option = "prologue" if uses == [0] else "epilogue"
        elif uses:
            option = "every"
        else:
            by_position = "prologue" if is_before else "epilogue"
            option = _by_calls(model, name, layers, trace) or by_position
        found[option].append(name)
    for name in found["every"]:
        _check_no_layers(model, layers, name, trace)
    parts = {option: tuple(names) for option, names in found.items()}
    return SplitNames(layers=layers, **parts, together=tuple(sorted(flow.together)))


def _units(model: nn.Module, layers: str, trace: _Trace) -> dict[str, bool]:
    """Return the parts outside the layers that have parameters, and whether defined before them."""
    units: dict[str, bool] = {}
    is_before = True

    def visit(path: str, module: nn.Module) -> None:
        nonlocal is_before
        for name, parameter in module._parameters.items():
            if parameter is not None:
                units[path + name] = is_before
        for name, child in module._modules.items():
            if child is None or not any(True for _ in child.parameters()):
                continue
            if path + name == layers:
                is_before = False
            elif layers.startswith(f"{path}{name}."):
                visit(f"{path}{name}.", child)
            elif trace.calls[child] or not any(trace.calls[inner] for inner in child.modules()):
                units[path + name] = is_before
            else:  # a container
                visit(f"{path}{name}.", child)

    visit("", model)
    return units


def _by_calls(model: nn.Module, name: str, layers: str, trace: _Trace) -> str | None:
    """Return the option for a part that no gradient reaches; None if it is not called."""
    module = dict(model.named_modules(remove_duplicate=False)).get(name)
    if module is None or not trace.calls[module]:
        return None
    last = _layers_of(model.get_submodule(layers))[-1]
    return "epilogue" if trace.starts[module] > trace.ends[last] else "every"


def _check_no_layers(model: nn.Module, layers: str, name: str, trace: _Trace) -> None:
    """Refuse to run other layers on every stage, such as the encoder of an encoder-decoder."""
    inner = [n for n in _lists(model) if n == name or n.startswith(name + ".")]
    inner = [n for n in inner if any(trace.calls[m] for m in _layers_of(model.get_submodule(n)))]
    if inner:
        raise PlanError(
            f"{type(model).__name__} cannot be split along {layers}: its layers take the output of "
            f"{name}, whose layers {inner[0]} would have to run on every stage",
            expected="one list of layers, in which each takes the hidden state of the one before",
            fix="use one stage and several pipelines",
        )
