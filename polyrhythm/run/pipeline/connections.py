"""The connections of one stage to the other stages of its pipeline, as its wiring prescribes.

There are three process groups: activations, gradients, and control, which also serves the exchanges
between steps. Before a step every stage receives a header of the batch from the previous stage.
"""

import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import groupby

import msgspec
import torch
import torch.distributed as dist

from polyrhythm.errors import LaunchError, PeerError, ScheduleError
from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.comm.process_groups import abort, all_gather, new_gloo_group
from polyrhythm.run.pipeline.message import MessageLayout, pad_bytes, unpad_bytes
from polyrhythm.run.pipeline.partition import Wiring
from polyrhythm.run.pipeline.transport import JOIN_TIMEOUT, Inbox, MicrobatchKind, Outbox, Route
from polyrhythm.types import Action, Bytes, Op, Seconds, Worker

_HEADER_BYTES: Bytes = 1024
_HEADER_LAYOUT = MessageLayout.of([torch.empty(_HEADER_BYTES, dtype=torch.uint8)])
_HEADER_KIND: MicrobatchKind = 0
_HEADER_ACTION = Action(Op.F, 0)


class BatchHeader(msgspec.Struct, frozen=True, array_like=True):
    """How a batch is split: runs of (kind, size, number of consecutive micro-batches)."""

    training: bool
    runs: tuple[tuple[MicrobatchKind, int, int], ...]
    metadata: tuple[int, ...] = ()  # a few numbers from the caller of the first stage

    @classmethod
    def of(
        cls,
        kinds: Sequence[MicrobatchKind],
        sizes: Sequence[int],
        *,
        training: bool,
        metadata: tuple[int, ...],
    ) -> "BatchHeader":
        grouped = groupby(zip(kinds, sizes, strict=True))
        runs = tuple((kind, size, len(list(run))) for (kind, size), run in grouped)
        return cls(training, runs, metadata)

    @property
    def kinds(self) -> list[MicrobatchKind]:
        return [kind for kind, _, count in self.runs for _ in range(count)]

    @property
    def sizes(self) -> list[int]:
        return [size for _, size, count in self.runs for _ in range(count)]


END_OF_DATA = BatchHeader(training=True, runs=())
_THREAD_TIMEOUT: Seconds = 86_400.0  # of the header thread; `next` has the pipeline's timeout


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
    ) -> None:
        """Connect `ranks`, the stages' ranks in the job; `window` overrides `set_windows`."""
        self.stage, self.num_stages = stage, len(ranks)
        self.pipeline, self.timeout = pipeline, timeout
        self._window = window
        self._groups = activations, gradients, self.control = [
            new_gloo_group(ranks, what, timeout=timeout)
            for what in ("activations", "gradients", "control")
        ]

        def route(group: dist.ProcessGroup, other: int, device: torch.device) -> Route:
            return Route(
                group=group, rank=other, peer=self.name(other), device=device, timeout=timeout
            )

        def inbox(group: dist.ProcessGroup, other: int, *, announced: bool) -> Inbox:
            return Inbox(route(group, other, device), announced=announced)

        self.activations_in = {s: inbox(activations, s, announced=True) for s in wiring.sources}
        self.gradients_in = {t: inbox(gradients, t, announced=False) for t in wiring.targets}
        self.activations_out = {
            t: Outbox(route(activations, t, device), announces=True) for t in wiring.targets
        }
        self.gradients_out = {
            s: Outbox(route(gradients, s, device), announces=False) for s in wiring.sources
        }
        host = torch.device("cpu")
        self._header_inbox: Inbox | None = None
        self._header_outbox: Outbox | None = None
        if stage > 0:
            self._header_inbox = Inbox(route(self.control, stage - 1, host), announced=False)
            self._header_inbox.set_layout(_HEADER_KIND, _HEADER_LAYOUT)
        if stage < self.num_stages - 1:
            self._header_outbox = Outbox(route(self.control, stage + 1, host), announces=False)
        self._header_thread: _HeaderThread | None = None
        self._prefetches_headers = False
        # A thread that waits in gloo while the interpreter ends would abort the process, even if
        # this object was collected before.
        self._finalizer = weakref.finalize(self, _abort, self._groups, self._boxes())

    def name(self, stage: int) -> str:
        return str(Worker(stage, self.pipeline))

    def relay_header(self, header: BatchHeader | None) -> BatchHeader:
        """Send the header to the next stage; all but the first receive it from the previous one.

        It is relayed at once, before any compute, so that all stages post their receives early.
        """
        if self._header_thread is not None:
            return self._header_thread.next()
        if self._header_inbox is not None:
            header = self._received(self.timeout)
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
        if self._header_outbox is not None:
            payload = pad_bytes(msgspec.msgpack.encode(header), _HEADER_BYTES)
            self._header_outbox.send(_HEADER_ACTION, _HEADER_KIND, [payload], _HEADER_LAYOUT)

    def drain(self) -> None:
        """Wait until all messages have been sent."""
        for outbox in self._outboxes():
            outbox.drain()

    def close(self) -> None:
        """End the threads; no message may be in flight, except headers."""
        if not self._finalizer.alive:
            return
        if self._prefetches_headers and self._header_inbox is None:
            self._send_header(END_OF_DATA)
        if self._header_thread is not None:
            self._header_thread.join(self.timeout)
        self.drain()
        self._finalizer.detach()
        _close(self._boxes())

    def abort(self) -> None:
        """Close all connections without waiting: after a failure, when a peer may be lost."""
        if self._finalizer.detach() is None:
            return
        _abort_groups(self._groups)
        if self._header_thread is not None:
            self._header_thread.join(JOIN_TIMEOUT)  # it must not post a receive in a closed inbox
        _close(self._boxes())

    def check_consistent(self, text: str) -> None:
        """Raise ScheduleError unless `text` is the same on all stages."""
        payload = pad_bytes(text.encode()[: _HEADER_BYTES - 4], _HEADER_BYTES)
        gathered = [torch.empty_like(payload) for _ in range(self.num_stages)]
        with peer_errors("another stage", "comparing options"):
            all_gather(self.control, gathered, payload)
        first, *others = (unpad_bytes(item).decode(errors="replace") for item in gathered)
        for stage, other in enumerate(others, start=1):
            if other != first:
                raise ScheduleError(
                    f"stage 0 was created with {first}; stage {stage} with {other}",
                    expected="the same options on every stage",
                    fix="read them from one config on all stages",
                )

    def set_windows(self, in_flight: Sequence[int], own: int) -> None:
        """Post as many receives ahead as the schedule lets other stages send ahead.

        For activations that is what may be in flight on the sender; for gradients, on this stage.
        """
        for source, inbox in self.activations_in.items():
            inbox.window = self._window or in_flight[source]
        for inbox in self.gradients_in.values():
            inbox.window = self._window or own

    def _boxes(self) -> list[Inbox | Outbox]:
        inboxes = (*self.activations_in.values(), *self.gradients_in.values(), self._header_inbox)
        return [*self._outboxes(), *(inbox for inbox in inboxes if inbox is not None)]

    def _outboxes(self) -> list[Outbox]:
        outboxes = [
            *self.activations_out.values(),
            *self.gradients_out.values(),
            self._header_outbox,
        ]
        return [outbox for outbox in outboxes if outbox is not None]


def stage_ranks(group: dist.ProcessGroup | None) -> tuple[list[int], int]:
    """Return the ranks of the stages and the stage of this process."""
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise LaunchError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but no process group",
                expected="an initialised process group before a Pipeline is created",
                fix='call torch.distributed.init_process_group("gloo") first',
            )
        return [0], 0
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return ranks, ranks.index(dist.get_rank())


def _abort(groups: Sequence[dist.ProcessGroup], boxes: Sequence[Inbox | Outbox]) -> None:
    _abort_groups(groups)
    _close(boxes)


def _abort_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    for group in groups:
        abort(group)


def _close(boxes: Sequence[Inbox | Outbox]) -> None:
    for box in boxes:
        box.close()


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
                header = self._connections._received(_THREAD_TIMEOUT)
                self._connections._send_header(header)
                if header == END_OF_DATA:
                    return
                self._on_header(header)
            except PeerError as error:
                self._received.put(error.with_traceback(None))
                return
            except Exception as error:  # local: keep its traceback
                self._received.put(error)
                return
            self._received.put(header)

    def next(self) -> BatchHeader:
        timeout = self._connections.timeout
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
