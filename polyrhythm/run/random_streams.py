"""Random streams: each draw follows from a seed and a sample's position, never from the process.

    streams = RandomStreams(seed, model.transformer.h)
    for position, items in ...:  # micro-batches, each known by the position of its first sample
        with seeded_draws(seed, position):
            inputs, target = collate([dataset[i] for i in items])
        with streams.isolated():
            streams.begin_forward(position)
            output = model(**inputs)
            streams.begin_loss()
            loss_fn(output, target).backward()

A collator and a dataset draw from the global generators of torch, numpy and random, which are
seeded for each micro-batch: all stages of a pipeline that read it draw the same numbers. A model
draws from torch's generators of the CPU and of its device. They are seeded at the start of a
forward, after every layer of the list that stages divide, and before the loss: dropout masks are
those of one process, however a model is split and its micro-batches are shared out. Activation
checkpointing saves and restores the generators, as always in torch. Nothing has to be saved.
"""

import ctypes
import hashlib
import inspect
import logging
import random
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from polyrhythm.run.comm.forward_hooks import CompiledCall, UncompiledHook

_logger = logging.getLogger(__name__)

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio, odd: the seeds of layers are far apart
_BEFORE_LAYERS, _LOSS = -1, -2  # streams, besides those of layers
_WATCH_EVERY = 16  # blocks of a kind, after the first 16: reading states costs
_WORD = 2**64 - 1
_MT19937_BYTES = 625 * 4  # of its state: 624 words and an index


def stream_seed(seed: int, name: str, position: int) -> int:
    """Return a seed of 64 bits."""
    text = f"{seed} {name} {position}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class StreamedLayer(NamedTuple):
    """A layer of the list that stages divide."""

    stream: int  # its index in the list, of its first use
    layer: nn.Module | None  # None if another stage has it


class RandomStreams:
    """Seeds what a model draws; only within `isolated`, so that other calls are unchanged."""

    def __init__(
        self,
        seed: int,
        layers: Iterable[nn.Module | StreamedLayer] = (),
        device: torch.device | str = "cpu",
        *,
        has_hooks: bool = True,
    ) -> None:
        """`has_hooks=False`: seed nothing between layers until the model is seen to draw."""
        self._seed, first = seed, dict[nn.Module, int]()
        self._layers = [
            x if isinstance(x, StreamedLayer) else StreamedLayer(first.setdefault(x, index), x)
            for index, x in enumerate(layers)
        ]
        device = torch.device(device)
        self._cuda_index: int | None = None
        if device.type == "cuda":
            self._cuda_index = torch.cuda.current_device() if device.index is None else device.index
        self._base: int | None = None  # of the current micro-batch
        own = [(index, layer) for index, (_, layer) in enumerate(self._layers) if layer is not None]
        self._first = own[0][0] if own else 0
        self._own = {layer: index for index, layer in own}
        self._hooks = list[RemovableHandle | CompiledCall]()
        self._states: list[bytes] | None = None  # before a forward without hooks
        self._is_watching = False  # the next such forward
        self._num_blocks = Counter[bool]()  # with gradients, and without: evaluations
        if has_hooks:
            self._add_hooks()

    def close(self) -> None:
        """Remove the hooks of all layers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._own = [], {}

    def _add_hooks(self) -> None:
        for layer, index in self._own.items():
            after, calls = partial(self.after_layer, index), list[CompiledCall]()
            if layer._compiled_call_impl is not None:  # its hooks are compiled with it
                calls.append(CompiledCall(layer, after=after))
            hook = layer.register_forward_hook(UncompiledHook(after, calls))
            self._hooks += [*calls, hook]

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Restore the generators after this block: its draws do not change those outside."""
        cpu = torch.default_generator.get_state()
        cuda = None if self._cuda_index is None else self._cuda_generator().get_state()
        is_training = torch.is_grad_enabled()
        self._num_blocks[is_training] += 1
        number = self._num_blocks[is_training]
        is_watched = number <= _WATCH_EVERY or number % _WATCH_EVERY == 0
        self._is_watching = is_watched and bool(self._own) and not self._hooks
        try:
            yield
        finally:
            self._end_forward()
            self._base = None
            torch.default_generator.set_state(cpu)
            if cuda is not None:
                self._cuda_generator().set_state(cuda)

    def begin_forward(self, position: int) -> None:
        """Seed the forward of the micro-batch whose first sample has this position."""
        self.begin_backward(position)
        self._seed_after(self._first - 1)
        if self._is_watching:
            self._states, self._is_watching = self._current_states(), False

    def begin_backward(self, position: int) -> None:
        """Select the micro-batch: activation checkpointing runs its layers in backward."""
        self._end_forward()
        self._base = stream_seed(self._seed, "layers", position)

    def begin_loss(self) -> None:
        self._end_forward()
        self._seed_stream(_LOSS)

    def _end_forward(self) -> None:
        """Add hooks if a forward without them has drawn."""
        states, self._states = self._states, None
        if states is not None and states != self._current_states():
            self._add_hooks()
            _logger.warning(
                "the model has drawn random numbers, though no module has a rate of dropout above "
                "0: those until now depend on the number of stages, later ones do not. "
                "To seed all, give a module of each stage an attribute such as `noise = 1.0`"
            )

    def after_layer(self, index: int) -> None:
        """Seed what follows the layer with this index in the list, up to the end of the next."""
        if self._base is not None and self._hooks:
            self._seed_after(index)

    def _seed_after(self, index: int) -> None:
        self._seed_stream(self._layers[index].stream if index >= 0 else _BEFORE_LAYERS)

    def _seed_stream(self, stream: int) -> None:
        assert self._base is not None, "in a forward or backward"
        seed = (self._base + stream * _GOLDEN) & _WORD
        torch.default_generator.manual_seed(seed)
        if self._cuda_index is not None:  # on the host: nothing waits for the device
            self._cuda_generator().manual_seed(seed)

    def _current_states(self) -> list[bytes]:
        generators = [torch.default_generator]
        if self._cuda_index is not None:
            generators.append(self._cuda_generator())
        return [generator.get_state().numpy().tobytes() for generator in generators]

    def _cuda_generator(self) -> torch.Generator:
        assert self._cuda_index is not None, "on a GPU"
        return torch.cuda.default_generators[self._cuda_index]


def may_draw(model: nn.Module) -> bool:
    """Return whether training a model may draw random numbers; in doubt, True."""
    modules = list(model.modules())
    configs = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    return any(map(_has_rate, [*configs.values(), *modules])) or any(map(_calls_draw, modules))


def _has_rate(owner: Any) -> bool:
    """Return whether an attribute such as `attention_dropout` is above 0, or a Dropout's `p`."""
    is_random = _RANDOM_NAMES.search(type(owner).__name__.lower())
    return any(
        isinstance(value, int | float) and value > 0
        for name, value in getattr(owner, "__dict__", {}).items()
        if (_RANDOM_NAMES.search(name) and not name.startswith("summary_"))
        or (is_random and name in ("p", "prob"))
    )


def _calls_draw(module: nn.Module) -> bool:
    """Return whether forward names a random function that is no attribute of the module."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or type(module).__module__.startswith("torch.nn."):
        return isinstance(module, nn.RReLU)
    names = (name.rstrip("_") for name in code.co_names if not hasattr(module, name))
    return any(map(_RANDOM_FUNCTIONS.fullmatch, names))


@contextmanager
def seeded_draws(seed: int, position: int) -> Iterator["DrawWatch"]:
    """Seed the global generators for a micro-batch, and restore them afterwards.

    No other thread may draw meanwhile.
    """
    cpu, of_numpy, of_python = torch.default_generator.get_state(), None, random.getstate()
    value, watch = stream_seed(seed, "data", position), DrawWatch()
    torch.default_generator.manual_seed(value)
    random.seed(value)
    if _numpy_state():
        of_numpy = np.random.get_state()
        np.random.seed(value % 2**32)
    seeded = _global_states()
    try:
        yield watch
        watch.has_drawn = _global_states() != seeded
    finally:
        torch.default_generator.set_state(cpu)
        random.setstate(of_python)
        if of_numpy is not None:
            np.random.set_state(of_numpy)


class DrawWatch:
    """Whether a block has drawn from a global generator."""

    has_drawn = False


@contextmanager
def watched_draws() -> Iterator[DrawWatch]:
    """Watch for draws of this thread while another one may draw, too; it may find too many."""
    watch, mode, before = DrawWatch(), _TorchDraws(), _numpy_and_python_states()
    with mode:
        yield watch
    watch.has_drawn = mode.has_drawn or _numpy_and_python_states() != before


class _TorchDraws(TorchFunctionMode):
    """Notices random functions of torch in this thread: other threads use the same generator."""

    has_drawn = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        is_random = _is_random_name(getattr(function, "__name__", ""))
        if is_random and kwargs.get("generator") is None:
            self.has_drawn = True
        return function(*args, **kwargs)


# Attributes and classes: rates of dropout, layerdrop, stochastic depth, a router's noise.
_RANDOM_NAMES = re.compile(r"drop|stochastic|noise|jitter")

# Their names in torch, without underscores at the end.
_RANDOM_FUNCTIONS = re.compile(
    r"rand\w*|\w*dropout\w*|bernoulli|binomial|cauchy|exponential|geometric|gumbel_softmax|log_normal"
    r"|multinomial|normal|poisson|rrelu|uniform|manual_seed"
)


@cache
def _is_random_name(name: str) -> bool:
    """Return whether a function of torch has the name of a random one."""
    return _RANDOM_FUNCTIONS.fullmatch(name.rstrip("_")) is not None


def _global_states() -> tuple[Any, ...]:
    """Return what changes if the global generator of torch (CPU), numpy or random is used."""
    torch_state = torch.default_generator.get_state()
    return torch_state.numpy().tobytes(), *_numpy_and_python_states()


def _numpy_and_python_states() -> tuple[Any, ...]:
    return _numpy_state(), *_python_state()


def _numpy_state() -> bytes:
    """Return the memory of numpy's generator: `get_state` takes 100 times as long."""
    generator = np.random.mtrand.get_bit_generator()  # also in numpy.random, without a type
    if not isinstance(generator, np.random.MT19937):
        return b""  # the user's own, which cannot be seeded like the default one
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def _python_state() -> tuple[Any, ...]:
    """Return the memory of random's generator, if known: `getstate` takes 20 times as long."""
    address = _python_state_address()
    if address is None:
        return random.getstate()
    # `gauss` draws two numbers at a time and keeps the second one in this attribute.
    return ctypes.string_at(address, _MT19937_BYTES), _python_generator().gauss_next


def _python_generator() -> Any:
    return random.random.__self__  # type: ignore[attr-defined]


@cache
def _python_state_address() -> int | None:
    """Return where CPython has the state of random's generator; None if it is not there."""
    generator = _python_generator()
    if type(generator).__basicsize__ < object.__basicsize__ + _MT19937_BYTES:
        return None
    address = id(generator) + object.__basicsize__
    _, (*words, index), _ = generator.getstate()
    expected = struct.pack(f"=i{len(words)}I", index, *words)
    return address if ctypes.string_at(address, _MT19937_BYTES) == expected else None
