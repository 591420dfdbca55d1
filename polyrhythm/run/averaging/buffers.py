"""Flatten what is averaged into one buffer: weights or gradients, statistics, optimizer state.

One message instead of one per tensor. The buffer is in CPU memory, from which gloo sends. Each read
of weights makes a new one, so that training can continue while the buffer is in flight. Gradients
have one that is kept: backward fills it while its first buckets are averaged.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, chain, islice, pairwise, zip_longest
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from polyrhythm.errors import PolicyError, SingleWorkerError
from polyrhythm.run.averaging.split_all_reduce import BucketMemory, FillingBuffer
from polyrhythm.run.comm.forward_hooks import gradient_hooks
from polyrhythm.run.comm.reduce_scatter import HALF_PRECISION, pinned_size
from polyrhythm.run.coordinator.sessions import TensorShapes
from polyrhythm.run.pipeline.loss import divide_by
from polyrhythm.sync.fusion.layers import bucket_bounds
from polyrhythm.types import Bytes, Worker

_FIRST_BUCKET: Bytes = 2**20  # of gradients: small, so that the first messages leave early
_BUCKET: Bytes = 25 * 2**20  # as in DDP
_DIVISOR_UNIT = 256.0  # both parts of an integer up to 65535 are exact in bfloat16
OptimizerStateMode = Literal["local", "average"]


class FlatBuffer:
    """Tensors that are copied into one flat buffer and back, in place.

    Each of `states` has tensors of one shape that a training step decays or replaces, such as the
    moments of one parameter; they follow the `tensors` that a step adds to.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]] = (),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` raises an error if what has been read must not be used."""
        self._check = check
        self._num_added, self._num_states = len(tensors), [len(state) for state in states]
        self._tensors = [_local(tensor) for tensor in chain(tensors, *states)]
        self.dtype = _common_dtype([tensor.dtype for tensor in self._tensors])
        self.size = sum(tensor.numel() for tensor in self._tensors)
        self._gpus = {tensor.device for tensor in self._tensors if tensor.is_cuda}

    def read(self) -> Tensor:
        """Return the tensors, in new memory; that of a GPU's tensors is pinned."""
        flat = torch.empty(self.size, dtype=self.dtype, device="cpu", pin_memory=bool(self._gpus))
        for tensor, view in self.views(flat):
            view.copy_(tensor.detach(), non_blocking=True)
        self._finish_copies()
        self._check()
        return flat

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        for tensor, view in self.views(flat):
            tensor.copy_(view, non_blocking=True)
        self._finish_copies()

    def _finish_copies(self) -> None:
        """Wait for all copies at once; for each alone, a GPU would idle between them."""
        for device in self._gpus:
            torch.cuda.current_stream(device).synchronize()

    @torch.no_grad()
    def apply(self, published: Tensor, mean: Tensor) -> None:
        """Apply the mean of what `published` was part of to tensors that have changed since.

        Weights: add the difference, since writing the mean would undo an optimizer step. Of state,
        which decays, the current value holds only a share of the published one: only this share is
        replaced by the mean's. An average of non-negative state is so never negative.
        """
        views = zip(self.views(published), self.views(mean), strict=True)
        triples = [(tensor, before, after) for (tensor, before), (_, after) in views]
        for tensor, before, after in triples[: self._num_added]:
            mean_there, own_there = (
                x.to(tensor.device, non_blocking=True) for x in (after, before)
            )
            tensor.copy_(tensor + (mean_there - own_there))  # half precision: rounded once
        rest = iter(triples[self._num_added :])
        for num in self._num_states:
            state = list(islice(rest, num))
            for (tensor, _, _), merged in zip(state, merge_state(state), strict=True):
                tensor.copy_(merged)
        self._finish_copies()

    def merge(self, flat: Tensor, published: Tensor, mean: Tensor) -> Tensor:
        """Return `flat`, which was read later than `published`, with the mean applied to it."""
        merged = flat.clone()
        views = iter([view for _, view in self.views(merged)])
        tensors = list(islice(views, self._num_added))
        states = [list(islice(views, num)) for num in self._num_states]
        FlatBuffer(tensors, states).apply(published, mean)
        return merged

    def views(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor with its view into `flat`."""
        views = flat.split([tensor.numel() for tensor in self._tensors])
        for tensor, view in zip(self._tensors, views, strict=True):
            yield tensor, view.view(tensor.shape)


@dataclass(slots=True)
class ReplicaState:
    """The trainable weights, running statistics and, with state="average", optimizer state."""

    module: nn.Module
    optimizer: Optimizer
    state: OptimizerStateMode = "local"
    decoupled: bool = False  # averages arrive during the forward
    # Raises PeerError if a step that a GPU has run lacked tensors of another stage.
    check_received: Callable[[], None] = lambda: None
    order: list[int] = field(default_factory=list, init=False)  # of tensors in the buffer
    _trainable: list[nn.Parameter] = field(init=False)
    _last_flat: FlatBuffer = field(init=False)

    def __post_init__(self) -> None:
        if self.state not in ("local", "average"):
            raise PolicyError(
                f"state={self.state!r}",
                expected='"local" or "average"',
                fix='use state="average" to average momentum and other state, else "local"',
            )
        self._trainable = trainable_parameters(self.module)

    @property
    def num_weights(self) -> int:
        """Number of trained elements; they are first in the buffer, unless `order` is set."""
        return sum(_local(p).numel() for p in self._trainable)

    def flat(self) -> FlatBuffer:
        """Return the buffer; call it after the optimizer's first step, which creates its state."""
        if any(
            p is not q for p, q in zip_longest(trainable_parameters(self.module), self._trainable)
        ):
            raise PolicyError(
                "the trainable parameters have changed since the GroupSync was created",
                expected="the same trainable parameters throughout",
                fix="create a new GroupSync when parameters are frozen or unfrozen",
            )
        tensors, states = self.averaged_tensors(), list[list[Tensor]]()
        if self.order:  # averages arrive in the forward: none is applied later
            tensors = [tensors[number] for number in self.order]
        else:
            num = len(self._trainable)
            tensors, states = tensors[:num], [[statistics] for statistics in tensors[num:]]
        if self.state == "average":
            states += optimizer_state(self.optimizer, self._trainable)
        self._last_flat = FlatBuffer(tensors, states, self.check_received)
        return self._last_flat

    def merge(self, flat: Tensor, published: Tensor, mean: Tensor) -> Tensor:
        """Return `flat` with an average of an earlier buffer applied; safe in another thread."""
        return self._last_flat.merge(flat, published, mean)

    def averaged_tensors(self) -> list[Tensor]:
        """Return the weights, then the running statistics."""
        return [*self._trainable, *running_statistics(self.module)]

    def all_tensors(self) -> list[FlatBuffer]:
        """Return one FlatBuffer per dtype, parameters first; includes what is never averaged.

        Buffers differ more often: each replica has counts and statistics of its own samples.
        """
        buffers = []
        for kind in (self.module.parameters(), self.module.buffers()):
            tensors = [tensor for tensor in kind if tensor.numel()]
            types = dict.fromkeys(tensor.dtype for tensor in tensors)
            buffers += [FlatBuffer([t for t in tensors if t.dtype == dtype]) for dtype in types]
        return buffers

    def shape(self) -> TensorShapes:
        """Describe all tensors; the description must be equal in all workers of a stage."""
        named: list[tuple[str, Tensor]] = [
            (name if p.requires_grad else f"{name} (frozen)", p)
            for name, p in self.module.named_parameters()
        ]
        named += self.module.named_buffers()
        shape = [
            (f"{name}: {str(t.dtype).removeprefix('torch.')}", tuple(_local(t).shape))
            for name, t in named
        ]
        if self.state == "average":
            shape.append((f"state of {type(self.optimizer).__name__}", ()))
        if self.decoupled:
            shape.append(("an all-gather during the forward (decoupled=True)", ()))
        return tuple(shape)


class MeanNumbers(NamedTuple):
    """What is averaged with the gradients and is known after backward."""

    has_gradient: list[bool]  # by parameter, whether any worker has a gradient
    extra: list[float]
    divisor: float
    is_finite: bool


class GradientBuckets:
    """The gradients of a module in one flat buffer, which backward fills bucket by bucket.

    They are in the reverse order of the parameters, about that in which backward computes them.
    Those of `late` parameters, of parameters without a gradient in the first average, and running
    statistics follow: they are known after backward. The last bucket has for each parameter a 1 if
    it has a gradient, `num_extra` numbers, the divisor as two numbers (in half precision one would
    overflow, or be rounded) and the mark of a FillingBuffer. A gradient that no worker has stays
    None.

    `on_gradient` is called with the index of each parameter that is not late when its gradient is
    complete. The buffers are kept between steps, and replaced if the parameters have changed.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        late: Callable[[], Container[nn.Parameter]] = tuple,
        num_extra: int = 0,
        on_gradient: Callable[[int], None] | None = None,
    ) -> None:
        self._module, self._late, self._num_extra = module, late, num_extra
        self._on_gradient, self._hooks = on_gradient, list[RemovableHandle]()
        self._kinds: list[object] = []
        self._unused: set[nn.Parameter] | None = None  # in the first average, equal on all workers
        self._parameters: list[nn.Parameter] = []
        self._filled: dict[int, tuple[Tensor, int]] = {}  # gradients, and their versions
        self._memory: BucketMemory | None = None
        self._copies: PinnedCopies | None = None

    def prepare(self) -> None:
        """Before a step, make the buffers and hooks of the current parameters if they are new."""
        parameters = trainable_parameters(self._module)
        statistics = running_statistics(self._module)
        kinds = [(id(t), t.device, t.dtype, t.shape) for t in (*parameters, *statistics)]
        if kinds != self._kinds:
            self._kinds = list(kinds)
            self._build(parameters, statistics)

    def begin(self) -> FillingBuffer:
        """Return the buffer to fill, with no gradient in it."""
        assert self._memory is not None, "prepare() has made it"
        self.clear()
        self._num_missing = list(self._num_tensors)  # by bucket
        sum_shard = None if self._copies is None else self._copies.sum
        self._filling = FillingBuffer(self._memory, self._receive, sum_shard)
        return self._filling

    def clear(self) -> None:
        """Forget which gradients are in the buffer, and release them."""
        self._filled.clear()
        if self._copies is not None:
            self._copies.streams.clear()

    @property
    def pinned_bytes(self) -> Bytes:
        """Size of the pinned memory, which is kept between steps, as torch rounds it up."""
        if self._copies is None:
            return 0
        return self._copies.memory.pinned_bytes + pinned_size(self._copies.totals.nbytes)

    def is_filled(self, index: int) -> bool:
        return index in self._filled

    @torch.no_grad()
    def fill(self, index: int) -> None:
        """Copy the gradient of a parameter into the buffer; send buckets that are then full.

        A sparse one is left for `fill_rest`, which follows `check_dense`.
        """
        gradient = self._parameters[index].grad
        if gradient is not None and gradient.layout == torch.strided:
            self._filled[index] = gradient, gradient._version
            self._copy(index, gradient)

    @property
    def has_changed(self) -> bool:
        """Whether a gradient was changed or removed after it was copied."""
        return any(
            self._parameters[index].grad is not gradient or gradient._version != version
            for index, (gradient, version) in self._filled.items()
        )

    def check_dense(self) -> None:
        gradients = (p.grad for p in self._parameters)
        if any(gradient is not None and gradient.layout != torch.strided for gradient in gradients):
            raise PolicyError(
                "a sparse gradient",
                expected="dense gradients, which can be averaged as one buffer",
                fix="use nn.Embedding(..., sparse=False), or a policy that averages models",
            )

    @torch.no_grad()
    def fill_rest(self) -> None:
        """Fill in what backward has not: 0 for a parameter without a gradient, statistics."""
        for index, parameter in enumerate(self._parameters):
            if index not in self._filled:
                self._copy(index, parameter.grad)
        for index, tensor in enumerate(self._statistics, start=len(self._parameters)):
            self._copy(index, tensor)
        self._filled.clear()
        if self._copies is not None:
            self._copies.wait()

    def fill_numbers(self, divisor: float, extra: Sequence[float] = ()) -> None:
        """Complete the buffer with the last bucket."""
        memory = self._filling.memory
        flags = [float(p.grad is not None) for p in self._parameters]
        numbers = [*flags, *extra, *divmod(divisor, _DIVISOR_UNIT), 0.0]
        memory.flat[memory.buckets[-1]] = torch.tensor(
            numbers, dtype=memory.flat.dtype, device="cpu"
        )
        self._filling.mark_filled(len(memory.buckets) - 1)

    def mean_numbers(self) -> MeanNumbers:
        memory, num = self._filling.memory, len(self._parameters)
        *rest, high, low, mark = memory.mean[memory.buckets[-1]].real.tolist()
        has_gradient, divisor = [flag > 0 for flag in rest[:num]], _DIVISOR_UNIT * high + low
        if self._unused is None:
            pairs = zip(self._parameters, has_gradient, strict=True)
            self._unused = {parameter for parameter, has in pairs if not has}
            if self._unused:  # the buckets before them would wait for the end of backward
                self._kinds = []
        return MeanNumbers(has_gradient, rest[num:], divisor, mark == 0)

    @torch.no_grad()
    def write(self, numbers: MeanNumbers, *, divides: bool) -> None:
        """Write the mean into gradients and statistics; divide gradients by the divisor."""
        if self._copies is None:
            mean = self._filling.memory.mean
            views = self._views(mean)
        else:
            mean, views = self._copies.receive_all(), self._own_views
        if divides:
            divide_by(numbers.divisor, [mean[: self._num_gradients]])
        into, values = [*self._statistics], views[len(self._parameters) :]
        for parameter, view, has in zip(
            self._parameters, views, numbers.has_gradient, strict=False
        ):
            if has:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                into.append(_local(parameter.grad))
                values.append(view)
        if into:
            torch._foreach_copy_(into, values)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _build(self, parameters: list[nn.Parameter], statistics: list[Tensor]) -> None:
        self.close()
        tied, unused = self._late(), self._unused or ()
        late = [p for p in parameters if isinstance(p, DTensor) or p in tied or p in unused]
        is_late = set(late)
        early = [p for p in reversed(parameters) if p not in is_late]
        self._parameters = early + late
        self._statistics = [_local(tensor) for tensor in statistics]
        tensors = [*map(_local, self._parameters), *self._statistics]
        self._shapes = [tensor.shape for tensor in tensors]
        sizes = [tensor.numel() for tensor in tensors]
        self._num_gradients = sum(sizes[: len(parameters)])
        dtypes = [getattr(p, "grad_dtype", None) or p.dtype for p in parameters]
        dtype = _common_dtype([*dtypes, *(tensor.dtype for tensor in statistics)])
        devices = {tensor.device for tensor in tensors}
        first, most = (max(nbytes // dtype.itemsize, 1) for nbytes in (_FIRST_BUCKET, _BUCKET))
        bounds = bucket_bounds(sizes[: len(early)], first, most)
        rest = bucket_bounds(sizes[len(early) :], most, most)
        bounds += [bounds[-1] + bound for bound in rest[1:]]
        size, num_numbers = bounds[-1], len(parameters) + self._num_extra + 3
        buckets = [slice(*pair) for pair in pairwise([*bounds, size + num_numbers])]
        is_on_gpu = {device.type for device in devices} == {"cuda"} and len(devices) == 1
        self._memory = self._make_memory(buckets, dtype, is_pinned=is_on_gpu)
        self._copies = PinnedCopies(self._memory, size, *devices) if is_on_gpu else None
        own = self._memory.flat if self._copies is None else self._copies.flat
        self._own_views = self._views(own)
        stops = [*accumulate(sizes, initial=0)]
        self._buckets_of = [
            [n for n, b in enumerate(buckets) if max(b.start, start) < min(b.stop, stop)]
            for start, stop in pairwise(stops)
        ]
        counts = Counter(bucket for numbers in self._buckets_of for bucket in numbers)
        self._num_tensors = [counts[bucket] for bucket in range(len(buckets))]
        if self._on_gradient is not None and (is_on_gpu or {d.type for d in devices} == {"cpu"}):
            self._hooks = gradient_hooks({p: self._hook(i) for i, p in enumerate(early)})

    def _make_memory(
        self, buckets: list[slice], dtype: torch.dtype, *, is_pinned: bool
    ) -> BucketMemory:
        """Make the host's buffers; keep them if only the order of parameters has changed."""
        size, memory = buckets[-1].stop, self._memory
        if memory is not None:
            kept = len(memory.flat), memory.flat.dtype, memory.flat.is_pinned()
            if kept == (size, dtype, is_pinned):
                memory.buckets = buckets
                return memory
        flat = torch.empty(size, dtype=dtype, device="cpu", pin_memory=is_pinned)
        return BucketMemory(flat, buckets)

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        on_gradient = self._on_gradient
        assert on_gradient is not None, "hooks call it"
        return lambda _: on_gradient(index)

    def _views(self, flat: Tensor) -> list[Tensor]:
        sizes = [shape.numel() for shape in self._shapes]
        parts = flat[: sum(sizes)].split(sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _copy(self, index: int, tensor: Tensor | None) -> None:
        if self._copies is not None:
            self._copies.use_current_stream()
        if tensor is None:
            self._own_views[index].zero_()
        else:
            self._own_views[index].copy_(_local(tensor))
        for bucket in self._buckets_of[index]:
            self._num_missing[bucket] -= 1
            if self._num_missing[bucket] == 0:
                started = () if self._copies is None else self._copies.send(bucket)
                self._filling.mark_filled(bucket, *started)

    def _receive(self, bucket: int) -> None:
        """In the averager's thread: take a bucket of the mean."""
        if self._copies is not None:
            self._copies.receive(bucket)


class PinnedCopies:
    """Copies of buckets between a flat buffer on a GPU and pinned memory, and sums on the GPU.

    A bucket is copied to the host behind the kernels that compute it, and its mean returns while
    the next bucket is on its way. The GPU sums this worker's shards: a core of the host takes
    several times as long as the copies there and back. Training waits for neither, only the
    averager's threads do. What is sent and what is received have separate streams.
    """

    def __init__(self, memory: BucketMemory, size: int, device: torch.device) -> None:
        self.memory = memory
        self.flat = torch.empty(size, dtype=memory.flat.dtype, device=device)
        self.totals = torch.empty(
            len(memory.buckets), dtype=torch.float32, device="cpu", pin_memory=True
        )
        self._to_host, self._to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._device, self.streams = device, set[torch.cuda.Stream]()  # that compute gradients
        self._copied: torch.cuda.Event | None = None
        self._replaced: set[int] = set()  # buckets of `flat` that hold a mean
        for stream in (self._to_host, self._to_device):
            self.flat.record_stream(stream)  # after an error it may be freed without a wait

    def use_current_stream(self) -> None:
        """Let the current stream write into the buffer, which a failed average may still fill."""
        stream = torch.cuda.current_stream(self._device)
        if stream not in self.streams:
            stream.wait_stream(self._to_device)
            self.streams.add(stream)

    def send(self, bucket: int) -> tuple[torch.cuda.Event, Tensor]:
        """Start to copy a bucket and its sum to the host; return the end of the copy, and the sum.

        The sum is not finite if a number is not.
        """
        part, copied = self.memory.buckets[bucket], torch.cuda.Event(blocking=True)
        for stream in self.streams:
            self._to_host.wait_stream(stream)
        with torch.cuda.stream(self._to_host):
            self.memory.flat[part].copy_(self.flat[part], non_blocking=True)
            numbers = self.flat[part]
            real = torch.view_as_real(numbers) if numbers.is_complex() else numbers
            self.totals[bucket].copy_(real.sum(dtype=torch.float32), non_blocking=True)
            copied.record()
        self._copied = copied
        self._replaced.discard(bucket)
        return copied, self.totals[bucket]

    def wait(self) -> None:
        """Wait until this worker's gradients are on the host: training needs their mean next."""
        if self._copied is not None:
            self._copied.synchronize()

    def sum(
        self, bucket: int, shard: slice, addends: Mapping[int, Tensor], weights: Sequence[float]
    ) -> None:
        """Write the mean of this worker's shard into `memory.mean`; wait until it is there.

        The bucket has been sent, so the GPU has its own addend, which `addends` lack. To the bits
        of `weighted_sum`: products and sums are separate kernels, so that each is rounded.
        """
        into = self.memory.mean[shard]
        if into.numel() == 0:
            return
        # An average that failed later may have replaced the bucket on the GPU.
        own = (self.memory.flat if bucket in self._replaced else self.flat)[shard]
        dtype = torch.float32 if into.dtype in HALF_PRECISION else into.dtype
        has_equal_weights, done = len(set(weights)) == 1, torch.cuda.Event(blocking=True)
        with torch.cuda.device(self._device), torch.cuda.stream(self._to_device):
            total: Tensor | None = None
            for member, weight in enumerate(weights):
                row = addends.get(member, own).to(self._device, non_blocking=True).to(dtype)
                row = row if has_equal_weights else row * weight
                total = row if total is None else total + row
            assert total is not None, "this worker is a member"
            mean = total * weights[0] if has_equal_weights else total
            into.copy_(mean.to(into.dtype), non_blocking=True)
            done.record()
        done.synchronize()  # without the interpreter's lock; gloo sends from `into` next

    def receive(self, bucket: int) -> None:
        """Start to copy the mean of a bucket to the GPU."""
        part = self.memory.buckets[bucket]
        if part.start < len(self.flat):
            self._replaced.add(bucket)
            # The averager's thread has another current device, and a stream's end would use it.
            with torch.cuda.device(self._device), torch.cuda.stream(self._to_device):
                self.flat[part].copy_(self.memory.mean[part], non_blocking=True)

    def receive_all(self) -> Tensor:
        """Return the buffer with the whole mean, for the current stream."""
        torch.cuda.current_stream(self._device).wait_stream(self._to_device)
        return self.flat


def is_finite(flat: Tensor) -> bool:
    """Whether a buffer has neither nan nor inf; a look at the sum is enough if it is finite."""
    return bool(flat.sum().isfinite()) or bool(flat.isfinite().all())


def check_finite(flat: Tensor, worker: Worker) -> None:
    """Refuse to average weights that are not finite: the average would spread them."""
    if not is_finite(flat):
        raise SingleWorkerError(
            f"the weights of {worker} are not finite, and are not averaged",
            expected="finite weights, statistics and averaged optimizer state",
            fix="use a lower learning rate or clip gradients, and restore this worker from a "
            "checkpoint; the others keep finite weights",
        )


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def running_statistics(module: nn.Module) -> list[Tensor]:
    """Return running means and variances of normalisation layers; counts are not averaged."""
    layers = (m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase))
    buffers = (buffer for layer in layers for buffer in layer.buffers(recurse=False))
    return [buffer for buffer in buffers if buffer.is_floating_point()]


def optimizer_state(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> list[list[Tensor]]:
    """Return the optimizer's tensors of each parameter's shape, such as momentum, by parameter.

    All workers need the same lists: a missing tensor is a zero that is thrown away.
    """
    states = [(p, optimizer.state.get(p, {})) for p in parameters]
    dtypes = {
        key: value.dtype
        for p, state in states
        for key, value in state.items()
        if _is_like(value, p)
    }
    for key, dtype in dtypes.items():
        if not (dtype.is_floating_point or dtype.is_complex):
            raise PolicyError(
                f"the state {key!r} of {type(optimizer).__name__} holds {dtype}",
                expected="floating-point state: codes, masks and counts have no mean",
                fix='use GroupSync(..., state="local")',
            )
    keys = sorted(dtypes)
    return [
        [state[key] if _is_like(state.get(key), p) else torch.zeros_like(p) for key in keys]
        for p, state in states
    ]


def merge_state(state: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    """Replace what the current state still holds of the published one by as much of the mean.

    `state` has the current, the published and the mean tensor of each kind, such as Adam's two
    moments. Names and decays of an optimizer are unknown, so the share is measured. Of an element
    that is never negative it is at most current / published, exact if it has only decayed; signed
    tensors such as momentum take at most the same share of each element, so that a step from Adam's
    first moment stays in proportion to its second, and at most their projection on the published
    tensor: a difference that they have forgotten would otherwise add up from average to average.
    """
    wide = [tuple(_to_real(tensor, triple[0]) for tensor in triple) for triple in state]
    share = torch.ones((), device=state[0][0].device)
    is_signed = [any(bool((tensor < 0).any()) for tensor in triple) for triple in wide]
    for (current, published, _), signed in zip(wide, is_signed, strict=True):
        if not signed:
            share = torch.minimum(share, (current / published).nan_to_num_(1.0))  # 0 / 0: all
    merged = []
    for (current, published, mean), signed in zip(wide, is_signed, strict=True):
        kept = share
        if signed and (largest := published.abs().max()) > 0:
            unit = published / largest  # its square neither overflows nor underflows
            projection = (current / largest * unit).sum() / unit.square().sum()
            kept = share.clamp_max(projection.nan_to_num(0.0).clamp(0.0, 1.0))
        rest = torch.addcmul(current, kept, published, value=-1)
        merged.append((rest if signed else rest.clamp_min_(0.0)).addcmul_(kept, mean))
    merged = _keep_variances(wide, merged, is_signed)
    return [
        torch.view_as_complex(tensor) if current.is_complex() else tensor
        for tensor, (current, _, _) in zip(merged, state, strict=True)
    ]


def _keep_variances(
    state: Sequence[tuple[Tensor, ...]], merged: Sequence[Tensor], is_signed: Sequence[bool]
) -> list[Tensor]:
    """Keep current elements where a second moment would become less than a squared first one.

    An optimizer may take the root of their difference, as RMSprop(centered=True). Shares that are
    measured may be too large; where a difference was negative before, no optimizer needs it.
    """
    moments = list(zip(state, merged, is_signed, strict=True))
    is_lost = torch.zeros((), dtype=torch.bool, device=merged[0].device)
    for firsts, first, _ in (moment for moment in moments if moment[2]):
        for seconds, second, _ in (moment for moment in moments if not moment[2]):
            broken = first.square() > second
            for before, square in zip(firsts, seconds, strict=True):
                broken &= before.square() <= square
            is_lost = is_lost | broken
    return [torch.where(is_lost, current, new) for (current, *_), new, _ in moments]


def _to_real(tensor: Tensor, current: Tensor) -> Tensor:
    """Return real numbers of single precision or more, where `current` is; a complex one is two."""
    wide = torch.promote_types(current.dtype, torch.float32)
    real = tensor.detach().to(current.device, wide)
    return torch.view_as_real(real) if real.is_complex() else real


def _is_like(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0


def _local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor: replicas of a stage are sharded in the same way."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _common_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Return the dtype to which all `dtypes` promote."""
    return reduce(torch.promote_types, dtypes)
