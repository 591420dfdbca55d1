"""Messages between stages: sent without blocking, received ahead of their use, and timed.

There is one message per micro-batch, peer and direction, whatever number of tensors it carries: the
network has one transfer, which can be timed. Sender and receiver share a `MessageLayout`; it is
announced once for every kind of micro-batch, before the first message of that kind. A message
carries the time of its sending: links are measured on the messages of the training, which never
stops for a measurement. It also carries one number: with activations the auxiliary losses so far,
with gradients the number of labels of the micro-batch.

Gloo moves data only once the receive is posted, so receives are posted ahead: up to `window`
messages may be in flight or waiting to be used. Gloo's work objects do not report completion before
a call of `wait`, so one thread per direction waits. Messages of one direction between two stages
arrive in the order in which they were sent. There are three process groups, so that none delays
another: activations, gradients, and control, which also serves the exchanges between steps. Before
a step every stage receives the header of the batch from the previous stage.

Gloo aborts on CUDA tensors: these are staged through pinned host memory, on a separate stream. Two
stages with an NCCL link pass tensors over NCCL instead, and only the header of a message over gloo.
The receive is posted to the GPU when the header has arrived: then the sender has posted its send.
So no kernel waits for a stage that is far behind, all stages post in the same order, and the lost
connection of gloo tells that a peer is lost, which ends the kernels that wait for it.
"""

import contextlib
import os
import queue
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from math import prod
from typing import Generic, Self, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.errors import (
    LaunchError,
    PeerError,
    PlanError,
    ScheduleError,
    is_out_of_memory,
    peer_errors,
    short_cause,
)
from polyrhythm.run.comm.epoch import current_epoch
from polyrhythm.run.comm.process_groups import (
    abort,
    all_gather,
    confirm_nccl,
    connect_pairs,
    new_gloo_group,
    new_nccl_group,
    receive,
    run_bounded,
    set_timeout,
    step_timeout,
)
from polyrhythm.run.pipeline.batch import END_OF_DATA, BatchHeader, MicrobatchKind
from polyrhythm.run.pipeline.loss import Count
from polyrhythm.run.pipeline.partition import Wiring
from polyrhythm.types import Action, Bytes, Op, Seconds, Worker

TIMESTAMP_BYTES: Bytes = 64  # the time of sending and a number, padded so that tensors are aligned
ANNOUNCEMENT_BYTES: Bytes = 4096  # a layout on the wire: enough for about fifty tensors
_ALIGNMENT: Bytes = 64

# Threads wait for messages that may be posted long before they are due; `Inbox.get` and
# `Outbox.drain` have the real timeout. A peer that dies closes its connections, noticed at once.
_WAIT_TIMEOUT = timedelta(days=1)
_JOIN_TIMEOUT: Seconds = 5.0  # for a thread without work
_ABORT_TIMEOUT: Seconds = 0.5  # for one that the end of its connections wakes, or nothing does
_MAX_TIMED = 64  # the latest messages over NCCL whose times are kept
_NUM_TAGS = 2**20  # more than are ever in flight at once
_M = TypeVar("_M")  # what a box's thread waits for


class _Spec(msgspec.Struct, frozen=True, array_like=True):
    shape: tuple[int, ...]
    dtype: str  # as torch names it, without "torch."
    needs_grad: bool


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """The tensors of one message: shapes, dtypes, and which of them need a gradient."""

    specs: tuple[_Spec, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Self:
        return cls(
            tuple(
                _Spec(tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad)
                for t in tensors
            )
        )

    @property
    def gradient(self) -> "MessageLayout":
        """The layout of the gradients of this message."""
        needing = (spec for spec in self.specs if spec.needs_grad)
        return MessageLayout(tuple(_Spec(spec.shape, spec.dtype, False) for spec in needing))

    @property
    def nbytes(self) -> Bytes:
        return TIMESTAMP_BYTES + sum(_padded_size(spec) for spec in self.specs)

    @property
    def description(self) -> str:
        """The layout as text, for error messages."""
        return ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in self.specs) or "nothing"

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return tensors that share the memory of a buffer of `nbytes`, but are no views of it.

        Views share a version counter: autograd would refuse one after a change of another.
        """
        tensors, offset = [], TIMESTAMP_BYTES
        for spec in self.specs:
            tensor = torch.empty(0, dtype=getattr(torch, spec.dtype), device=buffer.device)
            start = (buffer.storage_offset() + offset) // tensor.element_size()
            shape = torch.Size(spec.shape)
            stride = torch.empty(shape, device="meta").stride()
            tensors.append(tensor.set_(buffer.untyped_storage(), start, shape, stride))
            offset += _padded_size(spec)
        return tensors

    def pack(self, tensors: Sequence[Tensor], buffer: Tensor) -> None:
        """Copy the tensors into the buffer; from a GPU without waiting for the copies."""
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            view.copy_(tensor, non_blocking=True)

    def announcement(self) -> Tensor:
        payload = msgspec.msgpack.encode(self.specs)
        if len(payload) > ANNOUNCEMENT_BYTES - 4:
            raise PlanError(
                f"a stage passes {len(self.specs)} tensors to another",
                expected=f"at most {ANNOUNCEMENT_BYTES} bytes of layout: about fifty tensors",
                fix="stack or concatenate tensors before the stage returns them",
            )
        return pad_bytes(payload, ANNOUNCEMENT_BYTES)

    @classmethod
    def from_announcement(cls, message: Tensor) -> Self:
        return cls(msgspec.msgpack.decode(unpad_bytes(message), type=tuple[_Spec, ...]))


def pad_bytes(payload: bytes, nbytes: Bytes) -> Tensor:
    """Pad bytes to a message of fixed size, which a receiver can post without a layout."""
    assert len(payload) <= nbytes - 4, "the sender checks the size"
    message = bytearray(nbytes)
    message[: 4 + len(payload)] = struct.pack("<I", len(payload)) + payload
    return torch.frombuffer(message, dtype=torch.uint8)


def unpad_bytes(message: Tensor) -> bytes:
    raw = message.numpy().tobytes()
    (length,) = struct.unpack_from("<I", raw)
    return raw[4 : 4 + length]


def write_timestamp(buffer: Tensor, time: Seconds) -> None:
    """Write the time of sending into the header, just before the send."""
    buffer[:8].view(torch.float64).fill_(time)


def read_timestamp(buffer: Tensor) -> Seconds:
    return buffer[:8].view(torch.float64).item()


def write_number(buffer: Tensor, number: float | Tensor) -> None:
    """Write the number of a message; from a GPU without waiting for the copy."""
    place = buffer[8:16].view(torch.float64)
    if isinstance(number, Tensor):
        place.copy_(number, non_blocking=True)
    else:
        place.fill_(number)


def read_number(buffer: Tensor) -> float:
    return buffer[8:16].view(torch.float64).item()


_ON_DEVICE = 16  # the byte of a header that tells that the number follows as a tensor, over NCCL


def _as_bytes(tensor: Tensor) -> Tensor:
    """View a dense tensor as bytes: NCCL does not know every dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def _padded_size(spec: _Spec) -> Bytes:
    size = prod(spec.shape) * getattr(torch, spec.dtype).itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A peer stage and the process group of one direction."""

    group: dist.ProcessGroup
    rank: int  # in that group
    peer: str
    device: torch.device
    timeout: Seconds
    nccl: dist.ProcessGroup | None = None  # passes the tensors, with the same ranks

    def abort(self) -> None:
        """End kernels that wait for the peer, which is lost."""
        if self.nccl is not None:
            abort(self.nccl)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The times of one received message; `sent` is on the sender's clock.

    Over NCCL they are those of its header: `Outbox.quickest_send` has the time of the tensors.
    """

    action: Action
    kind: MicrobatchKind
    nbytes: Bytes
    sent: Seconds
    posted: Seconds
    arrived: Seconds
    is_nccl: bool
    number: Count = 0.0  # that the sender has given to the message


@dataclass(slots=True)
class _Posted:
    work: dist.Work
    buffer: Tensor
    at: Seconds
    action: Action
    kind: MicrobatchKind
    layout: MessageLayout | None  # None: the announcement of a layout


class _Box(Generic[_M]):
    """One direction of messages with a peer, and the thread that waits for each."""

    def __init__(self, route: Route, name: str) -> None:
        self.route = route
        self._local_error: Exception | None = None  # of this process, such as out of memory
        self._changed = threading.Condition()
        self._queue: queue.SimpleQueue[_M | None] = queue.SimpleQueue()
        self._stream = torch.cuda.Stream(route.device) if route.device.type == "cuda" else None
        current_epoch().on_end(self.fail)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if self.route.device.type == "cuda":  # otherwise this thread would use the first GPU, too
            torch.cuda.set_device(self.route.device)
        self._wait_for_messages()

    def _wait_for_messages(self) -> None:
        raise NotImplementedError

    def fail(self, error: PeerError) -> None:
        """End all waits for messages, when the thread may still wait for one in transfer."""
        raise NotImplementedError

    def finish_on_device(self) -> None:
        """Wait until the GPU has passed all messages; raises PeerError."""
        if self._stream is not None:
            action = f"passing the last messages with {self.route.peer}"
            run_bounded(self._stream.synchronize, timeout=self.route.timeout, action=action)

    def close(self, timeout: Seconds = _JOIN_TIMEOUT) -> None:
        """End the thread and free unused messages; none may be pending, except after a failure.

        `timeout`: of the wait for the thread, which may not end before its message does.
        """
        self._queue.put(None)
        self._thread.join(timeout)
        self._local_error = None  # its traceback references messages
        self._queue = queue.SimpleQueue()  # after a failure it may still hold messages
        self._queue.put(None)


class Inbox(_Box[_Posted]):
    """Receives the messages of one stage after `post_receives`; `get` waits for the next."""

    def __init__(self, route: Route, *, announced: bool, window: int = 1) -> None:
        """`announced`: the sender announces the layout of every kind; otherwise call `set_layout`.

        `window`: the number of messages that may be in flight or waiting to be used.
        """
        self.window, self._announced = window, announced
        self._layouts: dict[MicrobatchKind, MessageLayout] = {}
        self._expected: deque[tuple[Action, MicrobatchKind]] = deque()
        self._arrived: deque[tuple[Transfer, list[Tensor], torch.cuda.Event | None]] = deque()
        self._num_open = 0  # posted, or arrived and not used yet
        self._num_posted = 0  # since the start; gives the tag
        self._is_awaiting_layout = False
        self._failure: str | None = None  # of the peer or the network
        super().__init__(route, f"receive from {route.peer}")

    def post_receives(self, messages: Sequence[tuple[Action, MicrobatchKind]]) -> None:
        """Append messages to expect; post as many receives at once as fit the window."""
        with self._changed:
            self._expected.extend(messages)
            self._post()

    def set_layout(self, kind: MicrobatchKind, layout: MessageLayout) -> None:
        """Set the layout of a kind that is not announced: of gradients, after the forward."""
        with self._changed:
            if kind not in self._layouts:
                self._layouts[kind] = layout
                self._post()

    def layout(self, kind: MicrobatchKind) -> MessageLayout:
        """Return the layout of a kind that has arrived before."""
        return self._layouts[kind]

    def get(
        self, action: Action, what: str = "", timeout: Seconds | None = None
    ) -> tuple[list[Tensor], Transfer]:
        """Return the tensors that `action` needs; raises PeerError after the timeout.

        `what` replaces the action in the error message, `timeout` the timeout of the route.
        """
        start, timeout = time.perf_counter(), timeout or self.route.timeout
        with self._changed:
            while not self._arrived:
                waited = time.perf_counter() - start
                is_timed_out = waited >= timeout
                if self._local_error is not None:
                    raise self._local_error
                if is_timed_out or self._failure is not None:
                    raise PeerError(
                        self.route.peer,
                        action=what or f"receiving {action}",
                        waited=waited,
                        cause=self._failure or f"no message for {timeout:g} s",
                    )
                self._changed.wait(timeout - waited)
            transfer, tensors, copy_event = self._arrived.popleft()
            assert transfer.action == action, f"{transfer.action} arrived instead of {action}"
            self._num_open -= 1
            self._post()
        if copy_event is not None:
            stream = torch.cuda.current_stream(self.route.device)
            stream.wait_event(copy_event)
            for tensor in (*tensors, transfer.number):
                if isinstance(tensor, Tensor):
                    tensor.record_stream(stream)
        return tensors, transfer

    def close(self, timeout: Seconds = _JOIN_TIMEOUT) -> None:
        super().close(timeout)
        with self._changed:
            self._expected.clear()
            self._arrived.clear()

    def fail(self, error: PeerError) -> None:
        with self._changed:
            self._failure = self._failure or error.cause
            self._changed.notify_all()

    def _post(self) -> None:
        """Post receives up to the window; called by either thread, which holds the lock."""
        while self._expected and self._num_open < self.window and not self._is_awaiting_layout:
            action, kind = self._expected[0]
            layout = self._layouts.get(kind)
            if layout is None and not self._announced:
                return  # `set_layout` comes later
            tag = 2 * (self._num_posted % _NUM_TAGS)
            if layout is None:
                self._is_awaiting_layout = True
                nbytes, tag = ANNOUNCEMENT_BYTES, tag + 1
            else:
                self._expected.popleft()
                self._num_posted += 1
                self._num_open += 1
                nbytes = layout.nbytes if self.route.nccl is None else TIMESTAMP_BYTES
            buffer = _buffer(nbytes, self.route)
            try:
                work = self.route.group.recv([buffer], self.route.rank, tag)
            except RuntimeError as error:
                self._fail(error)
                return
            self._queue.put(_Posted(work, buffer, time.perf_counter(), action, kind, layout))

    def _wait_for_messages(self) -> None:
        while (posted := self._queue.get()) is not None:
            try:
                posted.work.wait(_WAIT_TIMEOUT)
            except RuntimeError as error:
                with self._changed:
                    self._fail(error)
                return
            try:
                self._receive(posted, time.perf_counter())
            except Exception as error:
                with self._changed:
                    self._local_error = error
                    self._changed.notify_all()
                return
            del posted  # frees its memory before the wait for another message

    def _receive(self, posted: _Posted, arrived: Seconds) -> None:
        if posted.layout is None:
            with self._changed:
                self._layouts[posted.kind] = MessageLayout.from_announcement(posted.buffer)
                self._is_awaiting_layout = False
                self._post()
            return
        transfer = Transfer(
            action=posted.action,
            kind=posted.kind,
            nbytes=posted.layout.nbytes,
            sent=read_timestamp(posted.buffer),
            posted=posted.at,
            arrived=arrived,
            is_nccl=self.route.nccl is not None,
            number=read_number(posted.buffer),
        )
        copy_event: torch.cuda.Event | None = None
        if self._stream is None:
            tensors = posted.layout.views(posted.buffer)
        else:
            with torch.cuda.stream(self._stream):
                if self.route.nccl is None:
                    buffer = posted.buffer.to(self.route.device, non_blocking=True)
                    tensors = posted.layout.views(buffer)
                else:
                    tensors, transfer = self._receive_nccl(posted, posted.layout, transfer)
                copy_event = self._stream.record_event()
        for tensor, spec in zip(tensors, posted.layout.specs, strict=True):
            tensor.requires_grad_(spec.needs_grad)
        with self._changed:
            self._arrived.append((transfer, tensors, copy_event))
            self._changed.notify_all()

    def _receive_nccl(
        self, posted: _Posted, layout: MessageLayout, transfer: Transfer
    ) -> tuple[list[Tensor], Transfer]:
        """Let the current stream receive the tensors of a message whose header has arrived."""
        assert self.route.nccl is not None, "tensors arrive over NCCL"
        device = self.route.device
        tensors = [
            torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            for spec in layout.specs
        ]
        received = list(tensors)
        if posted.buffer[_ON_DEVICE]:
            number = torch.empty((), dtype=torch.float64, device=device)
            received.append(number)
            transfer = replace(transfer, number=number)
        for tensor in received:
            if tensor.numel():
                self.route.nccl.recv([_as_bytes(tensor)], self.route.rank, 0).wait()
        return tensors, transfer

    def _fail(self, error: RuntimeError) -> None:
        # As text: a stored exception would keep the group's sockets open.
        self._failure = short_cause(error)
        self._changed.notify_all()
        self.route.abort()


class Outbox(_Box[tuple[str, Tensor, Callable[[], object]]]):
    """Sends to one stage, in order; frees a message's memory when it has been sent."""

    def __init__(self, route: Route, *, announces: bool) -> None:
        self._announces = announces
        self._announced: dict[MicrobatchKind, MessageLayout] = {}
        self._num_sent = 0
        self._in_flight: deque[str] = deque()  # names of messages that are not sent yet
        self._last_sent_at: Seconds = 0.0
        self._failure: tuple[str, str] | None = None  # message and cause
        self._nccl_sends = deque[tuple[MicrobatchKind, torch.cuda.Event, torch.cuda.Event]](
            maxlen=_MAX_TIMED
        )
        self._quickest: dict[MicrobatchKind, Seconds] = {}  # of the latest that were over
        super().__init__(route, f"send to {route.peer}")

    def layout(self, kind: MicrobatchKind) -> MessageLayout | None:
        """Return the announced layout of a kind."""
        return self._announced.get(kind)

    def send(
        self,
        action: Action,
        kind: MicrobatchKind,
        tensors: Sequence[Tensor],
        layout: MessageLayout,
        number: float | Tensor = 0.0,
    ) -> None:
        self._raise_failure(0.0)
        tag = 2 * (self._num_sent % _NUM_TAGS)
        self._num_sent += 1
        if self._announces and kind not in self._announced:
            self._announced[kind] = layout
            payload = layout.announcement()
            self._track_send(f"layout of {action}", payload, self._start_send(payload, tag + 1))
        if self.route.nccl is not None:
            self._send_nccl(action, kind, tensors, number, tag)
            return
        buffer = _buffer(layout.nbytes, self.route)
        if self._stream is None:
            layout.pack(tensors, buffer)
            write_number(buffer, number)
            write_timestamp(buffer, time.perf_counter())
            self._track_send(str(action), buffer, self._start_send(buffer, tag))
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.route.device))
        with torch.cuda.stream(self._stream):
            layout.pack(tensors, buffer)
            write_number(buffer, number)
            packed = self._stream.record_event()
        for tensor in (*tensors, number):
            if isinstance(tensor, Tensor):
                tensor.record_stream(self._stream)
        self._track_send(str(action), buffer, partial(self._start_send_after, packed, buffer, tag))

    def _send_nccl(
        self,
        action: Action,
        kind: MicrobatchKind,
        tensors: Sequence[Tensor],
        number: float | Tensor,
        tag: int,
    ) -> None:
        assert self.route.nccl is not None, "tensors leave over NCCL"
        assert self._stream is not None, "they are on a GPU"
        header = _buffer(TIMESTAMP_BYTES, self.route)
        header[_ON_DEVICE] = isinstance(number, Tensor)
        self._stream.wait_stream(torch.cuda.current_stream(self.route.device))
        with torch.cuda.stream(self._stream):
            sent = list(tensors)
            if isinstance(number, Tensor):
                sent.append(number.to(torch.float64))
                number = 0.0
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(self._stream)
            for tensor in sent:
                if tensor.numel():
                    self.route.nccl.send([_as_bytes(tensor)], self.route.rank, 0).wait()
            end.record(self._stream)
        self._nccl_sends.append((kind, start, end))
        for tensor in sent:
            tensor.record_stream(self._stream)
        write_number(header, number)
        write_timestamp(header, time.perf_counter())
        self._track_send(str(action), header, self._start_send(header, tag))

    def quickest_send(self, kind: MicrobatchKind) -> Seconds | None:
        """Return the shortest of the latest transfers over NCCL, which waited for no receiver.

        If the GPU has not ended any of these yet, it is that of the call before.
        """
        done = ((start, end) for sent, start, end in self._nccl_sends if sent == kind)
        times = [start.elapsed_time(end) / 1e3 for start, end in done if end.query()]
        if times:
            self._quickest[kind] = min(times)
        return self._quickest.get(kind)

    def drain(self, timeout: Seconds | None = None) -> None:
        """Wait until all messages are sent; raises PeerError if none is sent for the timeout.

        `timeout` replaces that of the route.
        """
        start, timeout = time.perf_counter(), timeout or self.route.timeout
        with self._changed:
            while self._in_flight and self._failure is None and self._local_error is None:
                waited = time.perf_counter() - max(start, self._last_sent_at)
                if waited >= timeout:
                    cause = f"it received nothing for {timeout:g} s"
                    self._failure = (self._in_flight[0], cause)
                    break
                self._changed.wait(timeout - waited)
            self._raise_failure(time.perf_counter() - start)

    def fail(self, error: PeerError) -> None:
        with self._changed:
            self._failure = self._failure or ("a message", error.cause)
            self._changed.notify_all()

    def _start_send(self, buffer: Tensor, tag: int) -> Callable[[], object]:
        """Start a send; return a function that waits for its end."""
        try:
            work = self.route.group.send([buffer], self.route.rank, tag)
        except RuntimeError as error:
            return partial(_raise_error, short_cause(error))
        return partial(work.wait, _WAIT_TIMEOUT)

    def _start_send_after(self, packed: torch.cuda.Event, buffer: Tensor, tag: int) -> None:
        packed.synchronize()
        write_timestamp(buffer, time.perf_counter())
        self._start_send(buffer, tag)()

    def _track_send(self, what: str, buffer: Tensor, wait: Callable[[], object]) -> None:
        with self._changed:
            self._in_flight.append(what)
        self._queue.put((what, buffer, wait))  # the buffer must live until it is sent

    def _wait_for_messages(self) -> None:
        while (sending := self._queue.get()) is not None:
            what, _, wait = sending
            failure: str | None = None
            local_error: Exception | None = None
            try:
                wait()
            except Exception as error:
                if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                    failure = short_cause(error)
                else:
                    local_error = error
            del sending, _, wait
            with self._changed:
                self._in_flight.popleft()
                self._last_sent_at = time.perf_counter()
                if failure is not None:
                    self._failure = (what, failure)
                    self.route.abort()
                self._local_error = local_error
                self._changed.notify_all()
            if failure is not None or local_error is not None:
                return

    def _raise_failure(self, waited: Seconds) -> None:
        if self._local_error is not None:
            raise self._local_error
        if self._failure is not None:
            what, cause = self._failure
            raise PeerError(self.route.peer, action=f"sending {what}", waited=waited, cause=cause)


def _raise_error(cause: str) -> None:
    raise RuntimeError(cause)


def _buffer(nbytes: Bytes, route: Route) -> Tensor:
    """Return memory for a message over gloo; pinned, if tensors are copied from or to a GPU."""
    if route.device.type != "cuda" or route.nccl is not None:
        return torch.zeros(nbytes, dtype=torch.uint8)
    with torch.cuda.device(route.device):  # pinned memory belongs to the context of a GPU
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


_HEADER_BYTES: Bytes = 4096  # 200 micro-batches, each of another kind
_HEADER_LAYOUT = MessageLayout.of([torch.empty(_HEADER_BYTES, dtype=torch.uint8)])
_HEADER_KIND: MicrobatchKind = 0
_HEADER_ACTION = Action(Op.F, 0)
_DATA_TAG = 2**23  # above the tags of headers, clocks and tied gradients
_HEADER_THREAD_TIMEOUT: Seconds = 86_400.0  # `_HeaderThread.next` has the pipeline's timeout


class Connections:
    """Inboxes and outboxes by stage; created by all stages of a pipeline together."""

    def __init__(
        self,
        ranks: Sequence[int],
        stage: int,
        wiring: Wiring,
        *,
        device: torch.device,
        pipeline: int,
        timeout: Seconds,
        window: int | None = None,
        site: str | None = None,
    ) -> None:
        """Connect `ranks`, the stages' ranks in the job; `window` overrides `set_windows`.

        Stages of the same `site` pass tensors over NCCL; None for gloo.
        """
        self.stage, self.num_stages = stage, len(ranks)
        self.pipeline, self.timeout, self.step_timeout = pipeline, timeout, timeout
        self._window, self._device = window, device
        self._groups = activations, gradients, self.control = [
            new_gloo_group(ranks, what, timeout=timeout)
            for what in ("activations", "gradients", "control")
        ]
        nccl = self._connect_nccl(ranks, wiring, site, device)

        def route(group: dist.ProcessGroup, other: int, on: torch.device = device) -> Route:
            is_nccl = other in self._same_site and on == device
            return Route(
                group=group,
                rank=other,
                peer=self.name(other),
                device=on,
                timeout=timeout,
                nccl=nccl.get(group) if is_nccl else None,
            )

        sources, targets = wiring.sources, wiring.targets
        self.activations_in = {s: Inbox(route(activations, s), announced=True) for s in sources}
        self.gradients_in = {t: Inbox(route(gradients, t), announced=False) for t in targets}
        self.activations_out = {t: Outbox(route(activations, t), announces=True) for t in targets}
        self.gradients_out = {s: Outbox(route(gradients, s), announces=False) for s in sources}
        inboxes = [*self.activations_in.values(), *self.gradients_in.values()]
        self._outboxes = [*self.activations_out.values(), *self.gradients_out.values()]
        host = torch.device("cpu")
        self._header_inbox: Inbox | None = None
        self._header_outbox: Outbox | None = None
        if stage > 0:
            self._header_inbox = Inbox(route(self.control, stage - 1, host), announced=False)
            self._header_inbox.set_layout(_HEADER_KIND, _HEADER_LAYOUT)
            inboxes.append(self._header_inbox)
        if stage < self.num_stages - 1:
            self._header_outbox = Outbox(route(self.control, stage + 1, host), announces=False)
            self._outboxes.append(self._header_outbox)
        self._header_thread: _HeaderThread | None = None
        self._prefetches_headers = False
        self._num_data = [0] * self.num_stages  # messages with data, by the stage that gets them
        self._sent_data = deque[tuple[int, Tensor, dist.Work]]()
        self._boxes: list[Inbox | Outbox] = [*self._outboxes, *inboxes]
        # A thread that waits in gloo while the interpreter ends would abort the process, even if
        # this object was collected before.
        self._nccl_groups = list(nccl.values())
        groups = (*self._groups, *self._nccl_groups)
        self._finalizer = weakref.finalize(self, _abort, groups, self._boxes)

    def _connect_nccl(
        self, ranks: Sequence[int], wiring: Wiring, site: str | None, device: torch.device
    ) -> dict[dist.ProcessGroup, dist.ProcessGroup]:
        """Return the NCCL group beside each gloo group of tensors; all stages call it."""
        payload = b"" if site is None else f"site {site}".encode()
        sites = self.all_gather_bytes(payload, _HEADER_BYTES, "comparing sites")
        self._same_site = {
            other
            for other in (*wiring.sources, *wiring.targets)
            if payload and sites[other] == payload
        }
        self._uses_nccl = sum(map(bool, sites)) >= 2  # on any stage
        if not self._uses_nccl:
            return {}
        found, pairs = dict[dist.ProcessGroup, dist.ProcessGroup](), self._same_site
        for group, what in zip(self._groups, ("activations", "gradients"), strict=False):
            purpose = f"{what} over NCCL"
            made = new_nccl_group(ranks, purpose, timeout=self.timeout, is_used=bool(pairs))
            if made is not None:
                connect_pairs(made, pairs, device, timeout=self.timeout)
                found[group] = made
        return found

    def name(self, stage: int) -> str:
        return str(Worker(stage, self.pipeline))

    def set_step_timeout(self, num_done: int) -> None:
        """Bound the waits of a batch, after `num_done` like it, and for the header of the next."""
        timeout = step_timeout(self.timeout, num_done)
        if timeout != self.step_timeout:
            self.step_timeout = timeout
            # NCCL's watchdog aborts a group whose message takes longer than the group's timeout.
            for group in (self.control, *self._nccl_groups):
                set_timeout(group, timeout)

    def receive(self, inbox: Inbox, action: Action) -> tuple[list[Tensor], Transfer]:
        """Return the tensors that `action` needs; raises PeerError."""
        return inbox.get(action, timeout=self.step_timeout)

    def relay_header(self, header: BatchHeader | None) -> BatchHeader:
        """Send the header to the next stage; all but the first receive it from the previous one.

        It is relayed at once, before any compute, so that all stages post their receives early.
        """
        if self._header_thread is not None:
            return self._header_thread.next()
        if self._header_inbox is not None:
            header = self._received(self.step_timeout)
        assert header is not None, "the first stage makes the header"
        self._send_header(header)
        return header

    def prefetch_headers(self, on_header: Callable[[BatchHeader], None]) -> None:
        """Receive headers from now on when batches start on the first stage, ahead of their use.

        `on_header` posts receives for a batch; `relay_header` then returns the headers in order.
        """
        self._prefetches_headers = True
        if self._header_inbox is not None:
            self._header_thread = _HeaderThread(self, on_header)

    def _received(self, timeout: Seconds) -> BatchHeader:
        assert self._header_inbox is not None, "not the first stage"
        self._header_inbox.post_receives([(_HEADER_ACTION, _HEADER_KIND)])
        (payload,), _ = self._header_inbox.get(_HEADER_ACTION, "waiting for the next step", timeout)
        return msgspec.msgpack.decode(unpad_bytes(payload), type=BatchHeader)

    def _send_header(self, header: BatchHeader) -> None:
        if self._header_outbox is None:
            return
        payload = msgspec.msgpack.encode(header)
        if len(payload) > _HEADER_BYTES - 4:
            raise ScheduleError(
                f"a batch header of {len(payload)} bytes",
                expected=f"at most {_HEADER_BYTES - 4} bytes",
                fix="pass less metadata to step() or eval(), or pad micro-batches to fewer lengths",
            )
        message = pad_bytes(payload, _HEADER_BYTES)
        self._header_outbox.send(_HEADER_ACTION, _HEADER_KIND, [message], _HEADER_LAYOUT)

    def send_data(self, payloads: Sequence[bytes]) -> None:
        """Send data of the next batch from the first stage to each later one, unless it is empty.

        A later stage receives it when it begins the batch, so waiting for older data costs nothing.
        """
        self._wait_for_data(most=4 * self.num_stages)
        for stage, payload in enumerate(payloads, start=1):
            if payload:
                message = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
                with peer_errors(self.name(stage), "sending a batch"):
                    work = self.control.send([message], stage, self._next_data_tag(stage))
                self._sent_data.append((stage, message, work))

    def receive_data(self, nbytes: Bytes) -> bytes:
        """Receive data of this batch from the first stage."""
        message = torch.empty(nbytes, dtype=torch.uint8)
        with peer_errors(self.name(0), "receiving a batch"):
            receive(self.control, message, 0, tag=self._next_data_tag(self.stage))
        return message.numpy().tobytes()

    def _next_data_tag(self, stage: int) -> int:
        self._num_data[stage] += 1
        return _DATA_TAG + self._num_data[stage] % _NUM_TAGS

    def _wait_for_data(self, most: int = 0) -> None:
        while len(self._sent_data) > most:
            stage, _, work = self._sent_data.popleft()
            with peer_errors(self.name(stage), "sending a batch"):
                current_epoch().wait(work.wait)

    def quickest_sends(self, kind: MicrobatchKind) -> list[Seconds | None]:
        """Return the times over NCCL of activations and of gradients, to the neighbours."""
        boxes = self.activations_out.get(self.stage + 1), self.gradients_out.get(self.stage - 1)
        return [None if box is None else box.quickest_send(kind) for box in boxes]

    def drain(self) -> None:
        """Wait until all messages have been sent."""
        self._wait_for_data()
        for outbox in self._outboxes:
            outbox.drain(self.step_timeout)

    def check_received(self) -> None:
        """Wait until the GPU has run the batch; raise PeerError if a message has not come whole."""
        confirm_nccl(self._nccl_groups, self._device, self.step_timeout)

    def close(self) -> None:
        """End the threads; no message may be in flight, except headers."""
        if not self._finalizer.alive:
            return
        if self._prefetches_headers and self._header_inbox is None:
            self._send_header(END_OF_DATA)
        if self._header_thread is not None:
            self._header_thread.join(self.timeout)
        self.drain()
        if self._uses_nccl:
            for box in self._boxes:
                box.finish_on_device()
            # An abort drops what NCCL still sends: before it, all stages have received all.
            with contextlib.suppress(PeerError):
                self.all_gather_bytes(b"", 8, "closing")
        self._finalizer.detach()
        for box in self._boxes:
            box.close()
        for group in self._nccl_groups:
            abort(group)

    def abort(self) -> None:
        """Close all connections without waiting: after a failure, when a peer may be lost."""
        if self._finalizer.detach() is not None:
            groups = (*self._groups, *self._nccl_groups)
            _abort(groups, self._boxes, self._header_thread)

    def check_consistent(self, text: str) -> None:
        """Raise ScheduleError unless `text` is the same on all stages."""
        payload = text.encode()[: _HEADER_BYTES - 4]
        gathered = self.all_gather_bytes(payload, _HEADER_BYTES, "comparing options")
        first, *others = (item.decode(errors="replace") for item in gathered)
        for stage, other in enumerate(others, start=1):
            if other != first:
                raise ScheduleError(
                    f"stage 0 was created with {first}; stage {stage} with {other}",
                    expected="the same options on every stage",
                    fix="read them from one config on all stages",
                )

    def all_gather_bytes(self, payload: bytes, nbytes: Bytes, action: str) -> list[bytes]:
        """Return the payloads of all stages, padded to `nbytes` on the wire."""
        with peer_errors("another stage", action):
            gathered = all_gather(self.control, pad_bytes(payload, nbytes))
        return [unpad_bytes(item) for item in gathered]

    def set_windows(self, in_flight: Sequence[int], own: int) -> None:
        """Post as many receives ahead as the schedule lets other stages send ahead.

        For activations that is what may be in flight on the sender; for gradients, on this stage.
        """
        for source, inbox in self.activations_in.items():
            inbox.window = self._window or in_flight[source]
        for inbox in self.gradients_in.values():
            inbox.window = self._window or own


def stage_ranks(process_group: dist.ProcessGroup | None) -> tuple[list[int], int]:
    """Return the ranks of the stages and the stage of this process."""
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise LaunchError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but no process group",
                expected="an initialised process group before a Pipeline is created",
                fix='call torch.distributed.init_process_group("gloo") first',
            )
        return [0], 0
    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    return ranks, ranks.index(dist.get_rank())


def _abort(
    groups: Sequence[dist.ProcessGroup],
    boxes: Sequence[Inbox | Outbox],
    header_thread: threading.Thread | None = None,
) -> None:
    for group in groups:
        abort(group)
    if header_thread is not None:
        header_thread.join(_JOIN_TIMEOUT)  # it must not post a receive in a closed inbox
    for box in boxes:
        box.close(_ABORT_TIMEOUT)


class _HeaderThread(threading.Thread):
    """Receives headers ahead of their use, relays them, and posts receives for the batches."""

    def __init__(self, connections: Connections, on_header: Callable[[BatchHeader], None]) -> None:
        super().__init__(name="receive batch headers", daemon=True)
        self._connections, self._on_header = connections, on_header
        self._received: queue.SimpleQueue[BatchHeader | Exception] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            try:
                header = self._connections._received(_HEADER_THREAD_TIMEOUT)
                self._connections._send_header(header)
                if header == END_OF_DATA:
                    return
                self._on_header(header)
            except Exception as error:
                is_lost = isinstance(error, PeerError)  # others are local: keep their traceback
                self._received.put(error.with_traceback(None) if is_lost else error)
                return
            self._received.put(header)

    def next(self) -> BatchHeader:
        timeout = self._connections.step_timeout
        try:
            received = self._received.get(timeout=timeout)
        except queue.Empty:
            previous = self._connections.name(self._connections.stage - 1)
            raise PeerError(
                previous,
                action="waiting for the next step",
                waited=timeout,
                cause=f"no message for {timeout:g} s",
            ) from None
        if isinstance(received, Exception):
            raise received
        return received
