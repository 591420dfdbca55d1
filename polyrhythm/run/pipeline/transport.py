"""Messages between two stages: sent without blocking, received ahead of their use, and timed.

Gloo moves data only once the receive is posted, so receives are posted ahead: up to `window`
messages may be in flight or waiting to be used. Gloo's work objects do not report completion before
a call of `wait`, so one thread per direction waits. Messages of one direction between two stages
arrive in the order in which they were sent; each direction has its own process group, so that
neither delays the other. A message carries the time of its sending: links are measured on the
messages of the training, which never stops for a measurement.

Gloo aborts on CUDA tensors: these are staged through pinned host memory, on a separate stream.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.errors import PeerError
from polyrhythm.run.comm.peer_errors import short_cause
from polyrhythm.run.pipeline.message import (
    ANNOUNCEMENT_BYTES,
    MessageLayout,
    read_timestamp,
    write_timestamp,
)
from polyrhythm.types import Action, Bytes, Seconds

# A hash of the first stage's inputs: messages of one kind have equal layouts on every stage.
MicrobatchKind = int

# Threads wait for messages that may be posted long before they are due; `Inbox.get` and
# `Outbox.drain` have the real timeout. A peer that dies closes its connections, noticed at once.
_WAIT_TIMEOUT = timedelta(days=1)
JOIN_TIMEOUT: Seconds = 5.0  # for a thread without work
_NUM_TAGS = 2**20  # more than are ever in flight at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A peer stage and the process group of one direction."""

    group: dist.ProcessGroup
    rank: int  # in that group
    peer: str
    device: torch.device
    timeout: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The times of one received message; `sent` is on the sender's clock."""

    action: Action
    kind: MicrobatchKind
    nbytes: Bytes
    sent: Seconds
    posted: Seconds
    arrived: Seconds


@dataclass(slots=True, kw_only=True)
class _Posted:
    work: dist.Work
    buffer: Tensor
    at: Seconds
    kind: MicrobatchKind
    action: Action | None  # None: the announcement of a layout
    layout: MessageLayout | None


class Inbox:
    """Receives the messages of one stage after `post_receives`; `get` waits for the next."""

    def __init__(self, route: Route, *, announced: bool, window: int = 1) -> None:
        """`announced`: the sender announces the layout of every kind; otherwise call `set_layout`.

        `window`: the number of messages that may be in flight or waiting to be used.
        """
        self.route, self.window, self._announced = route, window, announced
        self._layouts: dict[MicrobatchKind, MessageLayout] = {}
        self._expected: deque[tuple[Action, MicrobatchKind]] = deque()
        self._arrived: deque[tuple[Transfer, list[Tensor], torch.cuda.Event | None]] = deque()
        self._num_open = 0  # posted, or arrived and not used yet
        self._num_posted = 0  # since the start; gives the tag
        self._is_awaiting_layout = False
        self._failure: str | None = None  # of the peer or the network
        self._local_error: Exception | None = None  # of this process, such as out of memory
        self._changed = threading.Condition()
        self._posted: queue.SimpleQueue[_Posted | None] = queue.SimpleQueue()
        self._stream = _side_stream(route.device)
        self._thread = threading.Thread(
            target=self._wait_for_receives, name=f"receive from {route.peer}", daemon=True
        )
        self._thread.start()

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
            torch.cuda.current_stream(self.route.device).wait_event(copy_event)
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(self.route.device))
        return tensors, transfer

    def close(self) -> None:
        """End the thread and free unused messages; no receive may be pending."""
        self._posted.put(None)
        self._thread.join(JOIN_TIMEOUT)
        with self._changed:
            self._expected.clear()
            self._arrived.clear()
            self._local_error = None  # its traceback references messages
        if not self._thread.is_alive():  # after a failure the queue may still hold receives
            self._posted = queue.SimpleQueue()

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
                posted = self._post_receive(ANNOUNCEMENT_BYTES, tag + 1, kind)
            else:
                self._expected.popleft()
                self._num_posted += 1
                self._num_open += 1
                posted = self._post_receive(layout.nbytes, tag, kind, action, layout)
            if posted is None:
                return
            self._posted.put(posted)

    def _post_receive(
        self,
        nbytes: Bytes,
        tag: int,
        kind: MicrobatchKind,
        action: Action | None = None,
        layout: MessageLayout | None = None,
    ) -> _Posted | None:
        buffer = _buffer(nbytes, self.route.device)
        try:
            work = self.route.group.recv([buffer], self.route.rank, tag)
        except RuntimeError as error:
            self._fail(error)
            return None
        at = time.perf_counter()
        return _Posted(work=work, buffer=buffer, at=at, kind=kind, action=action, layout=layout)

    def _wait_for_receives(self) -> None:
        while (posted := self._posted.get()) is not None:
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
        if posted.action is None:
            with self._changed:
                self._layouts[posted.kind] = MessageLayout.from_announcement(posted.buffer)
                self._is_awaiting_layout = False
                self._post()
            return
        assert posted.layout is not None, "only an announcement has no layout"
        transfer = Transfer(
            action=posted.action,
            kind=posted.kind,
            nbytes=posted.layout.nbytes,
            sent=read_timestamp(posted.buffer),
            posted=posted.at,
            arrived=arrived,
        )
        tensors, copy_event = posted.layout.views(posted.buffer), None
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                buffer = posted.buffer.to(self.route.device, non_blocking=True)
                copy_event = self._stream.record_event()
            tensors = posted.layout.views(buffer)
        for tensor, spec in zip(tensors, posted.layout.specs, strict=True):
            tensor.requires_grad_(spec.needs_grad)
        with self._changed:
            self._arrived.append((transfer, tensors, copy_event))
            self._changed.notify_all()

    def _fail(self, error: RuntimeError) -> None:
        # As text: a stored exception would keep the group's sockets open.
        self._failure = short_cause(error)
        self._changed.notify_all()


class Outbox:
    """Sends to one stage, in order; frees a message's memory when it has been sent."""

    def __init__(self, route: Route, *, announces: bool) -> None:
        self.route, self._announces = route, announces
        self._announced: dict[MicrobatchKind, MessageLayout] = {}
        self._num_sent = 0
        self._in_flight: deque[str] = deque()  # names of messages that are not sent yet
        self._last_sent_at: Seconds = 0.0
        self._failure: tuple[str, str] | None = None  # message and cause
        self._local_error: Exception | None = None  # of this process
        self._changed = threading.Condition()
        self._sends: queue.SimpleQueue[tuple[str, Tensor, Callable[[], object]] | None]
        self._sends = queue.SimpleQueue()
        self._stream = _side_stream(route.device)
        self._thread = threading.Thread(
            target=self._wait_for_sends, name=f"send to {route.peer}", daemon=True
        )
        self._thread.start()

    def layout(self, kind: MicrobatchKind) -> MessageLayout | None:
        """Return the announced layout of a kind."""
        return self._announced.get(kind)

    def send(
        self, action: Action, kind: MicrobatchKind, tensors: Sequence[Tensor], layout: MessageLayout
    ) -> None:
        self._raise_failure(0.0)
        tag = 2 * (self._num_sent % _NUM_TAGS)
        self._num_sent += 1
        if self._announces and kind not in self._announced:
            self._announced[kind] = layout
            payload = layout.announcement()
            self._track_send(f"layout of {action}", payload, self._start_send(payload, tag + 1))
        buffer = _buffer(layout.nbytes, self.route.device)
        if self._stream is None:
            layout.pack(tensors, buffer)
            write_timestamp(buffer, time.perf_counter())
            self._track_send(str(action), buffer, self._start_send(buffer, tag))
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.route.device))
        with torch.cuda.stream(self._stream):
            layout.pack(tensors, buffer)
            packed = self._stream.record_event()
        for tensor in tensors:
            tensor.record_stream(self._stream)
        self._track_send(str(action), buffer, partial(self._start_send_after, packed, buffer, tag))

    def drain(self) -> None:
        """Wait until all messages are sent; raises PeerError if none is sent for the timeout."""
        start = time.perf_counter()
        with self._changed:
            while self._in_flight and self._failure is None and self._local_error is None:
                waited = time.perf_counter() - max(start, self._last_sent_at)
                if waited >= self.route.timeout:
                    cause = f"it received nothing for {self.route.timeout:g} s"
                    self._failure = (self._in_flight[0], cause)
                    break
                self._changed.wait(self.route.timeout - waited)
            self._raise_failure(time.perf_counter() - start)

    def close(self) -> None:
        """End the thread and free unsent messages; the outbox must be drained or failed."""
        self._sends.put(None)
        self._thread.join(JOIN_TIMEOUT)
        self._local_error = None  # its traceback references messages
        if not self._thread.is_alive():
            self._sends = queue.SimpleQueue()

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
        self._sends.put((what, buffer, wait))  # the buffer must live until it is sent

    def _wait_for_sends(self) -> None:
        while (sending := self._sends.get()) is not None:
            what, _, wait = sending
            failure: str | None = None
            local_error: Exception | None = None
            try:
                wait()
            except torch.OutOfMemoryError as error:
                local_error = error
            except RuntimeError as error:
                failure = short_cause(error)
            except Exception as error:
                local_error = error
            del sending, _, wait
            with self._changed:
                self._in_flight.popleft()
                self._last_sent_at = time.perf_counter()
                if failure is not None:
                    self._failure = (what, failure)
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


def _buffer(nbytes: Bytes, device: torch.device) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None
