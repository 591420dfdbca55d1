"""The compute of one stage: forward and backward of micro-batches, and their activations.

Activations live from the forward of a micro-batch to its backward. Their size is measured from the
tensors that autograd saves, once for every kind of micro-batch.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from polyrhythm.errors import ScheduleError
from polyrhythm.run.emulated_compute import EmulatedCompute
from polyrhythm.run.pipeline.wrappers import local
from polyrhythm.types import Bytes, Op, Seconds

MAX_TIMINGS = 4096  # kept until they are read: far more than a step has
_Timing = tuple[torch.cuda.Event, torch.cuda.Event] | Seconds


def module_device(module: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    parameter = next(module.parameters(), None)
    if parameter is not None and parameter.is_meta:
        raise ScheduleError(
            "a module on the meta device, without memory",
            expected="weights on a device, or device= of where they will be",
            fix="pass device='cpu' or device='cuda:0', and call module.to_empty(device=...)",
        )
    return torch.device("cpu") if parameter is None else parameter.device


@dataclass(slots=True)
class _SavedForBackward:
    """The tensors that the backward of a micro-batch needs."""

    inputs: list[Tensor]
    # Gradient edges, not tensors: those are freed once they are sent. None for an output without a
    # gradient. On the last stage the loss itself.
    outputs: list[GradientEdge | Tensor | None]


@dataclass(slots=True, kw_only=True)
class StageCompute:
    """Runs the module of a stage; `loss_fn` only on the last stage."""

    call: Callable[..., Any]  # the module, or the module with stashed weights
    stage: int
    is_last: bool
    device: torch.device
    loss_fn: Callable[..., Tensor] | None = None
    compute: EmulatedCompute | None = None
    is_synchronized: bool = False  # wait for the GPU after each action: for a log or emulation
    activation_bytes: dict[int, Bytes] = field(default_factory=dict, init=False)  # by kind
    peak_in_flight: int = field(default=0, init=False)
    _saved: dict[int, _SavedForBackward] = field(default_factory=dict, init=False)
    _timings: deque[tuple[Op, int, _Timing]] = field(init=False)

    def __post_init__(self) -> None:
        self._timings = deque(maxlen=MAX_TIMINGS)

    def forward(
        self,
        kind: int,
        inputs: Sequence[Any],
        kwargs: dict[str, Any],
        finish: Callable[[Any], Any] = lambda returned: returned,
    ) -> Any:
        """Run the module and apply `finish` (on the last stage: the loss) to its outputs."""
        start = self._start_timing()
        is_measured = kind in self.activation_bytes or not torch.is_grad_enabled()
        with nullcontext() if is_measured else self._measure_activations(kind):
            outputs = finish(self.call(*inputs, **kwargs))
        self._end_timing(Op.F, kind, start)
        return outputs

    def save_for_backward(
        self, microbatch: int, inputs: Sequence[Any], outputs: tuple[Tensor, ...]
    ) -> None:
        """Keep the inputs and outputs that the backward needs."""
        needing_grad = (x for x in inputs if isinstance(x, Tensor) and x.requires_grad)
        received = [x for x in needing_grad if x.is_leaf]  # slices of user tensors are no leaves
        edges = [
            (y if self.is_last else get_gradient_edge(y)) if y.requires_grad else None
            for y in outputs
        ]
        self._saved[microbatch] = _SavedForBackward(received, edges)
        self.peak_in_flight = max(self.peak_in_flight, len(self._saved))

    def loss(self, returned: Any, target: Any, loss_kwargs: dict[str, Any]) -> Tensor:
        assert self.loss_fn is not None, "checked before the step"
        loss = self.loss_fn(returned, target, **loss_kwargs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ScheduleError(
                f"the loss function returned {shown}",
                expected="a scalar tensor: the mean over the micro-batch",
                fix="use a loss with reduction='mean'",
            )
        return loss

    def backward(
        self, microbatch: int, kind: int, gradients: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Compute the gradients of the inputs from the gradients of the outputs."""
        saved = self._saved.pop(microbatch)
        start = self._start_timing()
        pairs = [
            (edge, g)
            for edge, g in zip(saved.outputs, gradients, strict=True)
            if edge is not None and (g is not None or self.is_last)
        ]
        if pairs:  # otherwise this and all earlier stages are frozen
            with self._outside_autocast():
                outputs: list[Any] = [edge for edge, _ in pairs]
                torch.autograd.backward(outputs, [g for _, g in pairs])
        self._end_timing(Op.B, kind, start)
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in saved.inputs]

    def release(self) -> None:
        """Free the tensors saved for backwards that will not run."""
        self._saved.clear()

    def durations(self) -> list[tuple[Op, int, Seconds]]:
        """Return operation, kind and duration of each action since the last call."""
        timings = list(self._timings)
        self._timings.clear()
        durations = []
        for op, kind, timing in timings:
            if not isinstance(timing, float):
                start, end = timing
                end.synchronize()
                timing = start.elapsed_time(end) / 1e3
            durations.append((op, kind, timing))
        return durations

    def _outside_autocast(self) -> AbstractContextManager[object]:
        """Disable autocast: a backward has the dtypes of its forward."""
        if torch.is_autocast_enabled(self.device.type):
            return torch.autocast(self.device.type, enabled=False)
        return nullcontext()

    # Two calls: a context manager would cost more than the timing itself.
    def _start_timing(self) -> torch.cuda.Event | Seconds:
        if self.device.type == "cuda" and not self.is_synchronized:
            return self._recorded_event()
        return time.perf_counter()

    def _end_timing(self, op: Op, kind: int, start: torch.cuda.Event | Seconds) -> None:
        if not isinstance(start, float):
            self._timings.append((op, kind, (start, self._recorded_event())))
            return
        if self.device.type == "cuda":  # time the end of the kernels, not their launch
            torch.cuda.current_stream(self.device).synchronize()
        if self.compute is not None:
            self.compute.slow_down(op, time.perf_counter() - start)
        self._timings.append((op, kind, time.perf_counter() - start))

    def _recorded_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def _measure_activations(self, kind: int) -> Iterator[None]:
        nbytes_by_tensor: dict[tuple[int, int], Bytes] = {}
        parameters = self._parameter_storages()

        @torch.compiler.disable  # otherwise it is traced as a part of a compiled module
        def record_saved(saved_tensor: Tensor) -> Tensor:
            tensor = local(saved_tensor)
            # By view, not by storage: a micro-batch is a view of the user's batch.
            if tensor.untyped_storage().data_ptr() not in parameters:
                nbytes_by_tensor[tensor.data_ptr(), tensor.numel()] = tensor.nbytes
            return saved_tensor.detach()  # the tensor itself would keep its own graph alive

        with torch.autograd.graph.saved_tensors_hooks(record_saved, lambda tensor: tensor):
            yield
        self.activation_bytes[kind] = sum(nbytes_by_tensor.values())

    def _parameter_storages(self) -> set[int]:
        if not isinstance(self.call, nn.Module):
            return set()
        return {local(p).untyped_storage().data_ptr() for p in self.call.parameters()}
