"""Execute the actions of one stage: receive the inputs, compute, send the results.

Activations live from the forward of a micro-batch to its backward. Their size is measured from the
tensors that autograd saves, once for every kind of micro-batch.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from polyrhythm.errors import ScheduleError
from polyrhythm.run.comm.process_groups import wait_for_event
from polyrhythm.run.emulated_compute import EmulatedCompute
from polyrhythm.run.pipeline.autotune import ClockOffset
from polyrhythm.run.pipeline.batch import Batch, BatchHeader, MicrobatchKind
from polyrhythm.run.pipeline.loss import (
    NOT_COUNTED,
    AuxiliaryLosses,
    Count,
    LossFunction,
    labels_of,
    logits_of,
)
from polyrhythm.run.pipeline.partition import Wiring
from polyrhythm.run.pipeline.transport import Connections, Inbox, MessageLayout, Transfer
from polyrhythm.run.random_streams import RandomStreams
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.types import Action, Bytes, Op, Seconds

MAX_TIMINGS = 4096  # kept until they are read: far more than a step has
_LATEST: Callable[[], deque[Any]] = partial(deque, maxlen=MAX_TIMINGS)
_MAX_UNLOGGED = 4  # steps whose actions a GPU may still run; beyond, the host waits


class Moment:
    """When an action begins or ends: on a GPU when it runs the event, which the host only queues.

    `recorded`: of time.perf_counter().
    """

    __slots__ = ("event", "recorded")

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self.event, self.recorded = event, time.perf_counter()


class Timing(NamedTuple):
    start: Moment
    end: Moment

    @property
    def is_over(self) -> bool:
        return self.end.event is None or self.end.event.query()

    def duration(self) -> Seconds:
        """Return the time between the moments, of an action that is over."""
        start, end = self.start.event, self.end.event
        if start is None or end is None:
            return self.end.recorded - self.start.recorded
        return start.elapsed_time(end) / 1e3


class DeviceClock:
    """The time, on the host's clock, at which a GPU ran an event; the host never waits for it.

    A GPU runs an event after the host has recorded it, and before the host finds it complete. Each
    event so bounds the difference of the two clocks, exactly while one of them waits for the other.
    """

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None
        self._device_time: Seconds = 0.0  # of the last event
        self._offset = -math.inf  # the host's clock minus the GPU's

    def read(self, moment: Moment) -> Seconds:
        """Return the time of a moment; its event is complete."""
        if moment.event is None:
            return moment.recorded
        if self._last is not None:
            self._device_time += self._last.elapsed_time(moment.event) / 1e3
        self._last = moment.event
        least, most = moment.recorded, time.perf_counter()
        self._offset = max(self._offset, least - self._device_time)
        self._offset = min(self._offset, most - self._device_time)
        return self._device_time + self._offset


@dataclass(slots=True)
class LoggedAction:
    """An action for the log: its times, and for whom the host has waited before it."""

    step: int
    name: str
    timing: Timing
    waited: Seconds
    waited_for: str

    def write(self, log: EventLog, start: Seconds, end: Seconds) -> None:
        """`start` includes the wait; both are of time.perf_counter()."""
        waited_for = {"waited_for": self.waited_for} if self.waited_for else {}
        log.write(
            "action",
            start=log.at(start),
            end=log.at(end),
            step=self.step,
            name=self.name,
            values={"wait": self.waited, **waited_for},
        )


@dataclass(slots=True)
class _SavedForBackward:
    """The tensors that the backward of a micro-batch needs."""

    inputs: list[Tensor]
    # Gradient edges, not tensors: those are freed once they are sent. None for an output without a
    # gradient. On the last stage the loss itself.
    outputs: list[GradientEdge | Tensor | None]
    auxiliary: AuxiliaryLosses


@dataclass(slots=True, kw_only=True)
class StageCompute:
    """Runs the module of a stage; `loss_fn` only on the last stage."""

    call: Callable[..., Any]  # the module, or the module with stashed weights
    stage: int
    is_last: bool
    device: torch.device
    loss_fn: LossFunction | None = None
    compute: EmulatedCompute | None = None
    dw_builder: Callable[[], Callable[..., None]] | None = None  # adds the gradients of weights
    is_timed: bool = True  # somebody reads the times of actions: a tuner, or a log
    activation_bytes: dict[int, Bytes] = field(default_factory=dict, init=False)  # by kind
    peak_in_flight: int = field(default=0, init=False)
    _saved: dict[int, _SavedForBackward] = field(default_factory=dict, init=False)
    last_timing: "Timing | None" = field(default=None, init=False)  # None if none is taken
    _stream: torch.cuda.Stream | None = field(default=None, init=False)  # of the action's events
    _timings: deque[tuple[Op, int, "Timing"]] = field(default_factory=_LATEST, init=False)

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
        self,
        microbatch: int,
        inputs: Sequence[Any],
        outputs: tuple[Tensor, ...],
        auxiliary: AuxiliaryLosses,
    ) -> None:
        """Keep the inputs and outputs that the backward needs."""
        needing_grad = (x for x in inputs if isinstance(x, Tensor) and x.requires_grad)
        received = [x for x in needing_grad if x.is_leaf]  # slices of user tensors are no leaves
        edges = [
            (y if self.is_last else get_gradient_edge(y)) if y.requires_grad else None
            for y in outputs
        ]
        self._saved[microbatch] = _SavedForBackward(received, edges, auxiliary)
        self.peak_in_flight = max(self.peak_in_flight, len(self._saved))

    def backward(
        self, microbatch: int, kind: int, gradients: Sequence[Tensor | None], weight: Count
    ) -> list[Tensor]:
        """Compute the gradients of the inputs from the gradients of the outputs.

        `weight`: of the micro-batch, for auxiliary losses.
        """
        saved = self._saved.pop(microbatch)
        saved.auxiliary.weight, saved.auxiliary.is_forward = weight, False
        start = self._start_timing()
        pairs = [
            (edge, g)
            for edge, g in zip(saved.outputs, gradients, strict=True)
            if edge is not None and (g is not None or self.is_last)
        ]
        if pairs:  # otherwise this and all earlier stages are frozen
            # A backward has the dtypes of its forward.
            is_autocast = torch.is_autocast_enabled(self.device.type)
            if is_autocast:  # a context would take several times as long
                torch.set_autocast_enabled(self.device.type, False)
            try:
                outputs: list[Any] = [edge for edge, _ in pairs]
                with saved.auxiliary:
                    torch.autograd.backward(outputs, [g for _, g in pairs])
                    if self.dw_builder is not None:
                        self.dw_builder()()
            finally:
                if is_autocast:
                    torch.set_autocast_enabled(self.device.type, True)
        self._end_timing(Op.B, kind, start)
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in saved.inputs]

    @property
    def num_in_flight(self) -> int:
        """The micro-batches whose activations are in memory; not the one of a running backward."""
        return len(self._saved)

    def release(self) -> None:
        """Free the tensors saved for backwards that will not run."""
        self._saved.clear()

    def durations(
        self, since: Seconds = 0.0, *, timeout: Seconds | None = 0.0
    ) -> list[tuple[Op, int, Seconds]]:
        """Return operation, kind and duration of each action since the last call, in order.

        Those that a GPU has not run yet are left for the next call; with a `timeout`, or None for
        no bound, it waits for them and may raise PeerError. Evaluations are left out, and actions
        that the host has started before `since`, of time.perf_counter().
        """
        if timeout != 0.0 and self._timings:
            last = self._timings[-1][2].end.event
            if last is not None:
                wait_for_event(last, timeout)
        durations = []
        while self._timings and self._timings[0][2].is_over:
            op, kind, timing = self._timings.popleft()
            if timing.start.recorded >= since:
                durations.append((op, kind, timing.duration()))
        return durations

    # Two calls: a context manager would cost more than the timing itself.
    def _start_timing(self) -> "Moment | None":
        if not self.is_timed:
            return None
        # Emulated compute takes the time of the kernels, not of their launch.
        is_on_gpu = self.device.type == "cuda" and self.compute is None
        self._stream = torch.cuda.current_stream(self.device) if is_on_gpu else None
        return Moment(self._recorded_event())

    def _end_timing(self, op: Op, kind: int, start: "Moment | None") -> None:
        if start is None:
            return
        if self.compute is not None:
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            self.compute.slow_down(op, time.perf_counter() - start.recorded)
        end = Moment(self._recorded_event())
        self.last_timing = Timing(start, end)
        if torch.is_grad_enabled():
            self._timings.append((op, kind, self.last_timing))

    def _recorded_event(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    @contextmanager
    def _measure_activations(self, kind: int) -> Iterator[None]:
        nbytes_by_tensor: dict[tuple[int, int], Bytes] = {}
        held = self.call.parameters() if isinstance(self.call, nn.Module) else ()
        parameters = {t.untyped_storage().data_ptr() for p in held for t in _plain_tensors(p)}

        @torch.compiler.disable  # otherwise it is traced as a part of a compiled module
        def record_saved(saved_tensor: Tensor) -> Tensor:
            for tensor in _plain_tensors(saved_tensor):
                # By view, not by storage: a micro-batch is a view of the user's batch.
                if tensor.untyped_storage().data_ptr() not in parameters:
                    nbytes_by_tensor[tensor.data_ptr(), tensor.numel()] = tensor.nbytes
            return saved_tensor.detach()  # the tensor itself would keep its own graph alive

        with torch.autograd.graph.saved_tensors_hooks(record_saved, lambda tensor: tensor):
            yield
        self.activation_bytes[kind] = sum(nbytes_by_tensor.values())


@dataclass(slots=True, kw_only=True)
class Executor:
    """Runs the actions of one stage; `connections` is None in a pipeline of one stage."""

    stage: StageCompute
    wiring: Wiring
    connections: Connections | None
    log: EventLog | None
    streams: RandomStreams | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)  # keywords of the module
    clock_offsets: dict[str, ClockOffset] = field(default_factory=dict)  # by neighbour
    on_backward: Callable[[], None] | None = field(default=None, init=False)
    action: Action | None = field(default=None, init=False)  # the one that runs, or has failed
    loss_scale: Tensor | None = field(default=None, init=False)  # multiplies gradients
    _transfers: deque[tuple[str, Transfer]] = field(default_factory=_LATEST, init=False)
    _num_outputs: dict[MicrobatchKind, int] = field(default_factory=dict, init=False)
    _number: Count = field(default=0.0, init=False)  # of the last message received
    _waited: Seconds = field(default=0.0, init=False)
    _longest_wait: Seconds = field(default=0.0, init=False)
    _waited_for: str = field(default="", init=False)
    _unlogged: deque[LoggedAction] = field(default_factory=deque, init=False)
    _clock: DeviceClock = field(default_factory=DeviceClock, init=False)
    _last_end: Seconds = field(default=0.0, init=False)  # of the last action of a GPU in the log

    def post_receives(self, header: BatchHeader, first: int = 0) -> None:
        """Post receives for a whole batch, whose micro-batches are numbered from `first`."""
        if self.connections is None:
            return
        kinds = list(enumerate(header.kinds, start=first))
        for inbox in self.connections.activations_in.values():
            inbox.post_receives([(Action(Op.F, m), kind) for m, kind in kinds])
        if header.training:
            for inbox in self.connections.gradients_in.values():
                inbox.post_receives([(Action(Op.B, m), kind) for m, kind in kinds])

    def run(self, actions: Sequence[Action], batch: Batch) -> None:
        for action in actions:
            self.execute(action, batch)

    def pop_transfers(self) -> list[tuple[str, Transfer]]:
        """Return sender and times of the messages received since the last call."""
        transfers = list(self._transfers)
        self._transfers.clear()
        return transfers

    def call_on_backward(self) -> None:
        """Call `on_backward` once: a backward, and the wait for one, leave the interpreter lock."""
        on_backward, self.on_backward = self.on_backward, None
        if on_backward is not None:
            on_backward()

    def execute(self, action: Action, batch: Batch) -> None:
        start, self.action = time.perf_counter(), action
        self._waited, self._longest_wait, self._waited_for = 0.0, 0.0, ""
        if action.op is Op.F:
            self._forward(action, batch)
        else:
            self._backward(action, batch)
        self.action = None
        if self.log is None:
            return
        timing, waited_for = self.stage.last_timing, self._waited_for
        assert timing is not None, "with a log, actions are timed"
        logged = LoggedAction(batch.step, str(action), timing, self._waited, waited_for)
        if timing.end.event is None:
            logged.write(self.log, start, time.perf_counter())
        else:
            self._unlogged.append(logged)

    def log_actions(self, *, is_last: bool = False) -> None:
        """Between two steps, log the actions that a GPU has run; `is_last`: wait for all."""
        while self._unlogged:
            action, last = self._unlogged[0], self._unlogged[-1]
            event = action.timing.end.event
            assert self.log is not None, "actions are kept for a log"
            assert event is not None, "others are logged at once"
            if not event.query():
                if not is_last and last.step - action.step < _MAX_UNLOGGED:
                    return
                event.synchronize()
            start, end = map(self._clock.read, action.timing)
            # The host may have waited while the GPU still ran the action before.
            action.waited = max(0.0, min(action.waited, start - self._last_end))
            action.write(self.log, start - action.waited, end)
            self._last_end = end
            self._unlogged.popleft()

    def _forward(self, action: Action, batch: Batch) -> None:
        m, kind, training = (
            action.microbatch,
            batch.kind(action.microbatch),
            batch.header.training,
        )
        auxiliary = AuxiliaryLosses()
        inputs = self._inputs(action, batch, auxiliary)
        keywords = self.defaults | self._to_device(batch.keywords[m - batch.first], batch)
        arguments: Sequence[Any] = inputs
        if (named := self.wiring.named_inputs) is not None:
            arguments, keywords = (), named.bind(inputs, keywords, self.stage.stage)
        if self.streams is not None:
            self.streams.begin_forward(batch.position(m))
        with auxiliary if training else nullcontext():  # evaluation leaves them out
            if self.stage.is_last:
                finish = partial(self._compute_loss, m, batch, auxiliary)
                recorded: AbstractContextManager[None] = nullcontext()
                loss_fn, target = self.stage.loss_fn, batch.targets[m - batch.first]
                if loss_fn is not None and loss_fn.function is None and target is not None:
                    keywords = keywords | labels_of(self._to_device(target, batch))
                    recorded = loss_fn.recorded()
                with recorded:
                    outputs = self.stage.forward(kind, arguments, keywords, finish)
            else:
                returned = self.stage.forward(kind, arguments, keywords)
        if not self.stage.is_last:
            outputs = _tensors_of(returned, stage=self.stage.stage)
            self._send_outputs(action, kind, outputs, auxiliary.value, training=training)
        if training:
            self.stage.save_for_backward(m, inputs, outputs, auxiliary)

    def _backward(self, action: Action, batch: Batch) -> None:
        m, kind = action.microbatch, batch.kind(action.microbatch)
        if self.stage.is_last:
            gradients: Sequence[Tensor | None] = [None]
        else:
            self.call_on_backward()
            gradients = self._gradients(action, batch)
        if batch.counts and batch.on_counted is not None:
            batch.on_counted()  # before the first backward that is counted
            batch.on_counted = None
        if self.streams is not None:
            self.streams.begin_backward(batch.position(m))
        weight = batch.weight(m)
        if self.loss_scale is not None:
            weight = weight * self.loss_scale
        self.call_on_backward()
        input_gradients = iter(self.stage.backward(m, kind, gradients, weight))
        count = batch.counts.get(m, NOT_COUNTED)
        for source in self.wiring.sources:
            layout = self._links.activations_in[source].layout(kind).gradient
            tensors = list(islice(input_gradients, len(layout.specs)))
            self._links.gradients_out[source].send(action, kind, tensors, layout, count)

    @property
    def _links(self) -> Connections:
        assert self.connections is not None, "a stage with sources or targets has connections"
        return self.connections

    def _inputs(self, action: Action, batch: Batch, auxiliary: AuxiliaryLosses) -> list[Any]:
        if not self.wiring.sources:
            return list(self._to_device(batch.arguments[action.microbatch - batch.first], batch))
        inputs = list[Any]()
        for source in self.wiring.sources:
            inputs += self._receive(self._links.activations_in[source], action, batch)
            auxiliary.value = auxiliary.value + self._number
        return inputs

    def _gradients(self, action: Action, batch: Batch) -> list[Tensor | None]:
        """Receive the gradients of this stage's outputs, summed over the stages that use them."""
        total: dict[int, Tensor] = {}
        kind = batch.kind(action.microbatch)
        for target in self.wiring.targets:
            positions = self._positions(target, self._num_outputs[kind])
            layout = self._links.activations_out[target].layout(kind)
            assert layout is not None, "announced by the forward"
            sent = zip(positions, layout.specs, strict=True)
            needing_grad = [position for position, spec in sent if spec.needs_grad]
            received = self._receive(self._links.gradients_in[target], action, batch)
            if isinstance(self._number, Tensor) or self._number != NOT_COUNTED:
                batch.counts[action.microbatch] = self._number
            for position, gradient in zip(needing_grad, received, strict=True):
                total[position] = total[position] + gradient if position in total else gradient
        return [total.get(position) for position in range(self._num_outputs[kind])]

    def _send_outputs(
        self,
        action: Action,
        kind: MicrobatchKind,
        outputs: Sequence[Tensor],
        auxiliary: Count,
        *,
        training: bool,
    ) -> None:
        self._num_outputs[kind] = len(outputs)
        for target in self.wiring.targets:
            sent = [outputs[position] for position in self._positions(target, len(outputs))]
            outbox = self._links.activations_out[target]
            layout = MessageLayout.of(sent)
            previous = outbox.layout(kind) or layout
            if previous != layout and previous.description == layout.description:
                raise ScheduleError(
                    f"layers of stage {self.stage.stage} or an earlier one changed requires_grad",
                    expected="the same trained parameters in every step of a pipeline",
                    fix="create a new Pipeline after changing requires_grad",
                )
            if previous != layout:
                raise ScheduleError(
                    f"stage {self.stage.stage} returned {layout.description}, and earlier, "
                    f"for inputs of the same shape, {previous.description}",
                    expected="outputs whose shape and dtype depend only on those of the inputs",
                    fix="pad to a fixed shape, or choose the shape outside the pipeline",
                )
            # Auxiliary losses take one way to the last stage: each stage sends them once.
            number = auxiliary if target == min(self.wiring.targets) else 0.0
            outbox.send(action, kind, [tensor.detach() for tensor in sent], layout, number)
            if training:
                self._links.gradients_in[target].set_layout(kind, layout.gradient)

    def _positions(self, target: int, num_outputs: int) -> Sequence[int]:
        """Return which of this stage's outputs go to `target`."""
        positions = self.wiring.targets[target]
        return range(num_outputs) if positions is None else positions

    def _receive(self, inbox: Inbox, action: Action, batch: Batch) -> list[Tensor]:
        start = time.perf_counter()
        tensors, transfer = self._links.receive(inbox, action)
        self._number = transfer.number
        waited = time.perf_counter() - start
        if waited > self._longest_wait:
            self._longest_wait, self._waited_for = waited, inbox.route.peer
        self._waited += waited
        self._transfers.append((inbox.route.peer, transfer))
        if self.log is not None and not transfer.is_nccl:
            self.log.write(
                "transfer",
                start=self.log.at(self._transfer_start(inbox.route.peer, transfer)),
                end=self.log.at(transfer.arrived),
                step=batch.step,
                name=str(action),
                values={"peer": inbox.route.peer, "bytes": transfer.nbytes},
            )
        return tensors

    def _transfer_start(self, peer: str, transfer: Transfer) -> Seconds:
        """Return the start of a transfer on the local clock; without an offset, a lower bound."""
        sent = (
            transfer.sent - self.clock_offsets[peer].offset if peer in self.clock_offsets else 0.0
        )
        return min(transfer.arrived, max(sent, transfer.posted))

    def _compute_loss(
        self, microbatch: int, batch: Batch, auxiliary: AuxiliaryLosses, returned: Any
    ) -> tuple[Tensor, ...]:
        """Compute the loss of a micro-batch, weighted as it counts in the gradient."""
        if batch.keeps_outputs:
            batch.outputs.append(pytree.tree_map_only(Tensor, Tensor.detach, returned))
        number = microbatch - batch.first
        if self.stage.loss_fn is None or batch.targets[number] is None:
            return ()
        target = None
        if self.stage.loss_fn.function is not None:  # otherwise the model has computed it
            target = self._to_device(batch.targets[number], batch)
            if self.streams is not None:
                self.streams.begin_loss()
        loss = self.stage.loss_fn(
            returned,
            target,
            batch.loss_kwargs,
            num_samples=batch.header.sizes[number],
            host_target=batch.targets[number],
        )
        if self.stage.loss_fn.observer is not None:
            target = self._to_device(batch.targets[number], batch)
            self.stage.loss_fn.observer(logits_of(returned), target, batch.header.sizes[number])
        if batch.header.training and not loss.value.requires_grad:
            raise ScheduleError(
                "a loss that depends on no trained parameter of any stage",
                expected="a trained parameter on at least one stage",
                fix="unfreeze one, or call eval() to run forward only",
            )
        if loss.count is not None:
            batch.labels[microbatch] = loss.count
        if batch.header.training and batch.is_own_mean:
            loss = loss.over_own_count()
        if loss.count is not None:
            batch.counts[microbatch] = loss.count
        has_auxiliary = isinstance(auxiliary.value, Tensor) or auxiliary.value != 0.0
        batch.losses.append(loss.mean() + auxiliary.value if has_auxiliary else loss.mean())
        objective = loss.objective(batch.weight(microbatch), batch.unit, returned)
        return (objective if self.loss_scale is None else objective * self.loss_scale,)

    def _to_device(self, arguments: Any, batch: Batch) -> Any:
        """Move tensors to this stage's device."""
        if not batch.needs_device_copy:
            return arguments
        device = self.stage.device
        to_gpu = device.type == "cuda"  # a non-blocking copy to the host could be read too early

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=to_gpu)

        if isinstance(arguments, Tensor):  # without a tree, which takes longer than the copy
            return move(arguments)
        return pytree.tree_map_only(Tensor, move, arguments)


def _tensors_of(returned: object, *, stage: int) -> tuple[Tensor, ...]:
    """Return the outputs of a stage as a tuple of tensors; refuse other objects."""
    outputs = returned if isinstance(returned, tuple | list) else (returned,)
    if outputs and all(
        isinstance(x, Tensor) and x.layout == torch.strided and not isinstance(x, DTensor)
        for x in outputs
    ):
        return tuple(outputs)
    if isinstance(returned, Mapping):
        shown = f"{type(returned).__name__} with {', '.join(map(str, returned))}"
    elif isinstance(returned, tuple | list):
        shown = f"{type(returned).__name__} of {', '.join(map(_shown, returned)) or 'nothing'}"
    else:
        shown = _shown(returned)
    raise ScheduleError(
        f"stage {stage} returned a {shown}",
        expected="a tensor, or a tuple of tensors, to send to the next stage; each dense and local",
        fix="return only tensors from the stage's module, and keep the rest in the module; "
        "for a DTensor return x.to_local() or x.full_tensor(), for a sparse tensor x.to_dense()",
    )


def _shown(value: object) -> str:
    if isinstance(value, Tensor) and value.layout != torch.strided:
        return f"{value.layout} tensor"
    return type(value).__name__


def _plain_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors inside one: a shard, the result of a collective still under way."""
    flatten = getattr(tensor, "__tensor_flatten__", None)  # of tensors that wrap others
    if flatten is not None:
        inner = (getattr(tensor, name) for name in flatten()[0])
        return [plain for x in inner if isinstance(x, Tensor) for plain in _plain_tensors(x)]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor] if tensor.layout == torch.strided else []


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, in the same memory; other tensors unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()
