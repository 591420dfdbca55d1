"""The connections of one stage to the others of its pipeline, as its wiring says.

Three process groups: activations, gradients, and control, which also carries what is agreed between
steps. Before a step every stage hears from the one before it how the batch is cut.
"""

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import msgspec
import torch
import torch.distributed as dist

from polyrhythm.errors import PeerError
from polyrhythm.run.groups import break_off, new_group
from polyrhythm.run.message import Layout, padded, unpadded
from polyrhythm.run.split import Wiring
from polyrhythm.run.transport import Inbox, Kind, Outbox, Route
from polyrhythm.types import Action, Bytes, Op, Seconds, Worker

_BRIEF: Bytes = 1024
_BRIEFING = Layout.of([torch.empty(_BRIEF, dtype=torch.uint8)])
_BRIEFING_KIND: Kind = 0
_BRIEFING_ACTION = Action(Op.F, 0)


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """How a batch is cut: runs of (kind, size, how many micro-batches in a row)."""

    training: bool
    runs: tuple[tuple[Kind, int, int], ...]

    @classmethod
    def of(cls, kinds: Sequence[Kind], sizes: Sequence[int], *, training: bool) -> "Cut":
        alike = groupby(zip(kinds, sizes, strict=True))
        return cls(training, tuple((kind, size, len(list(run))) for (kind, size), run in alike))

    @property
    def kinds(self) -> list[Kind]:
        return [kind for kind, _, number in self.runs for _ in range(number)]

    @property
    def sizes(self) -> list[int]:
        return [size for _, size, number in self.runs for _ in range(number)]


_NO_MORE = Cut(training=True, runs=())
_LONG: Seconds = 86_400.0  # a thread waits; whoever needs what it hears keeps the deadline


class Connections:
    """In- and outboxes by stage; made by all stages of a pipeline together."""

    def __init__(
        self,
        ranks: Sequence[int],
        stage: int,
        wiring: Wiring,
        *,
        device: torch.device,
        pipeline: int,
        window: int,
        deadline: Seconds,
    ) -> None:
        """`ranks` of the stages in the whole job."""
        self.stage, self.num_stages, self.ranks = stage, len(ranks), list(ranks)
        self.pipeline, self.deadline = pipeline, deadline
        self._groups = activations, gradients, self.control = [
            new_group(ranks, what, deadline=deadline)
            for what in ("activations", "gradients", "control")
        ]
        # A thread that waits in gloo while the interpreter ends would abort the process.
        self._at_exit = partial(_break_off, weakref.ref(self))
        atexit.register(self._at_exit)

        def route(group: dist.ProcessGroup, other: int, device: torch.device) -> Route:
            return Route(
                group=group,
                rank=other,
                peer=self.name(other),
                device=device,
                deadline=deadline,
            )

        def inbox(group: dist.ProcessGroup, other: int, *, announced: bool) -> Inbox:
            return Inbox(route(group, other, device), window=window, announced=announced)

        self.activations_in = {s: inbox(activations, s, announced=True) for s in wiring.sources}
        self.gradients_in = {t: inbox(gradients, t, announced=False) for t in wiring.targets}
        self.activations_out = {
            t: Outbox(route(activations, t, device), announces=True) for t in wiring.targets
        }
        self.gradients_out = {
            s: Outbox(route(gradients, s, device), announces=False) for s in wiring.sources
        }
        host = torch.device("cpu")
        self._briefed: Inbox | None = None
        self._briefs: Outbox | None = None
        if stage > 0:
            self._briefed = Inbox(route(self.control, stage - 1, host), window=1, announced=False)
            self._briefed.learn(_BRIEFING_KIND, _BRIEFING)
        if stage < self.num_stages - 1:
            self._briefs = Outbox(route(self.control, stage + 1, host), announces=False)
        self._hearing: _Hearing | None = None
        self._hears_ahead = False

    def name(self, stage: int) -> str:
        return str(Worker(stage, self.pipeline))

    def brief(self, cut: Cut | None) -> Cut:
        """Tell the next stage how the batch is cut; all but the first hear it from the one before.

        It is passed on at once, before any compute, so that receives are posted early everywhere.
        """
        if self._hearing is not None:
            return self._hearing.next()
        if self._briefed is not None:
            cut = self._heard(self.deadline)
        assert cut is not None, "the first stage cuts"
        self._pass_on(cut)
        return cut

    def hear_ahead(self, on_cut: Callable[[Cut], None]) -> None:
        """From now on hear of batches as they start on the first stage, long before our turn.

        `on_cut` posts receives for them; `brief` then gives them out one by one.
        """
        self._hears_ahead = True
        if self._briefed is not None:
            self._hearing = _Hearing(self, on_cut)

    def _heard(self, patience: Seconds) -> Cut:
        assert self._briefed is not None, "not the first stage"
        self._briefed.expect([(_BRIEFING_ACTION, _BRIEFING_KIND)])
        (told,), _ = self._briefed.take(_BRIEFING_ACTION, "waiting for the next step", patience)
        return msgspec.msgpack.decode(unpadded(told), type=Cut)

    def _pass_on(self, cut: Cut) -> None:
        if self._briefs is not None:
            told = padded(msgspec.msgpack.encode(cut), _BRIEF)
            self._briefs.send(_BRIEFING_ACTION, _BRIEFING_KIND, [told], _BRIEFING)

    def drain(self) -> None:
        """Wait until all that was sent has left."""
        for outbox in self._outboxes():
            outbox.drain()

    def close(self) -> None:
        if self._hears_ahead and self._briefed is None:
            self._pass_on(_NO_MORE)
        if self._hearing is not None:
            self._hearing.join(self.deadline)
        self.drain()
        self._end_threads()

    def break_off(self) -> None:
        """Let go of everybody without a word: after a failure, when a peer may be gone."""
        for group in self._groups:
            break_off(group)
        self._end_threads()

    def _end_threads(self) -> None:
        atexit.unregister(self._at_exit)
        for outbox in self._outboxes():
            outbox.close()
        for inbox in (*self.activations_in.values(), *self.gradients_in.values(), self._briefed):
            if inbox is not None:
                inbox.close()

    def _outboxes(self) -> list[Outbox]:
        found = [*self.activations_out.values(), *self.gradients_out.values(), self._briefs]
        return [outbox for outbox in found if outbox is not None]


def _break_off(connections: weakref.ref[Connections]) -> None:
    if (found := connections()) is not None:
        found.break_off()


class _Hearing(threading.Thread):
    """Hears of batches ahead of time, passes the word on and posts receives for them."""

    def __init__(self, connections: Connections, on_cut: Callable[[Cut], None]) -> None:
        super().__init__(name="hear of batches", daemon=True)
        self._connections, self._on_cut = connections, on_cut
        self._heard: queue.SimpleQueue[Cut | PeerError] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            try:
                cut = self._connections._heard(_LONG)
                self._connections._pass_on(cut)
            except PeerError as error:
                self._heard.put(error.with_traceback(None))
                return
            if cut == _NO_MORE:
                return
            self._on_cut(cut)
            self._heard.put(cut)

    def next(self) -> Cut:
        deadline = self._connections.deadline
        try:
            heard = self._heard.get(timeout=deadline)
        except queue.Empty:
            before = self._connections.name(self._connections.stage - 1)
            raise PeerError(
                before,
                action="waiting for the next step",
                waited=deadline,
                cause=f"silent for {deadline:g} s",
            ) from None
        if isinstance(heard, PeerError):
            raise heard
        return heard
