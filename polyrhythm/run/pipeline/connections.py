"""The connections of one stage to the others of its pipeline, as its wiring says.

Three process groups: activations, gradients, and control, which also carries what is agreed between
steps. Before a step every stage hears from the one before it how the batch is cut.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import groupby

import msgspec
import torch
import torch.distributed as dist

from polyrhythm.errors import PeerError, ScheduleError
from polyrhythm.run.groups import all_gather, break_off, new_group
from polyrhythm.run.peers import waiting_for
from polyrhythm.run.pipeline.message import Layout, padded, unpadded
from polyrhythm.run.pipeline.split import Wiring
from polyrhythm.run.pipeline.transport import GOODBYE, Inbox, Kind, Outbox, Route
from polyrhythm.types import Action, Bytes, Op, Seconds, Worker

_BRIEF: Bytes = 1024
_BRIEFING = Layout.of([torch.empty(_BRIEF, dtype=torch.uint8)])
_BRIEFING_KIND: Kind = 0
_BRIEFING_ACTION = Action(Op.F, 0)


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """How a batch is cut: runs of (kind, size, how many micro-batches in a row)."""

    training: bool
    runs: tuple[tuple[Kind, int, int], ...]
    note: tuple[int, ...] = ()  # a few numbers from the first stage's caller to the others'

    @classmethod
    def of(
        cls, kinds: Sequence[Kind], sizes: Sequence[int], *, training: bool, note: tuple[int, ...]
    ) -> "Cut":
        alike = groupby(zip(kinds, sizes, strict=True))
        runs = tuple((kind, size, len(list(run))) for (kind, size), run in alike)
        return cls(training, runs, note)

    @property
    def kinds(self) -> list[Kind]:
        return [kind for kind, _, number in self.runs for _ in range(number)]

    @property
    def sizes(self) -> list[int]:
        return [size for _, size, number in self.runs for _ in range(number)]


NO_MORE = Cut(training=True, runs=())
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
        deadline: Seconds,
        window: int | None = None,
    ) -> None:
        """`ranks` of the stages in the whole job; `window` overrides what `set_windows` says."""
        self.stage, self.num_stages = stage, len(ranks)
        self.pipeline, self.deadline = pipeline, deadline
        self._window = window
        self._groups = activations, gradients, self.control = [
            new_group(ranks, what, deadline=deadline)
            for what in ("activations", "gradients", "control")
        ]

        def route(group: dist.ProcessGroup, other: int, device: torch.device) -> Route:
            return Route(
                group=group,
                rank=other,
                peer=self.name(other),
                device=device,
                deadline=deadline,
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
        self._briefed: Inbox | None = None
        self._briefs: Outbox | None = None
        if stage > 0:
            self._briefed = Inbox(route(self.control, stage - 1, host), announced=False)
            self._briefed.learn(_BRIEFING_KIND, _BRIEFING)
        if stage < self.num_stages - 1:
            self._briefs = Outbox(route(self.control, stage + 1, host), announces=False)
        self._hearing: _Hearing | None = None
        self._hears_ahead = False
        # A thread that waits in gloo while the interpreter ends would abort the process, whether
        # we are still there or were collected before.
        self._end = weakref.finalize(self, _break_off, self._groups, self._boxes())

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
        """Say goodbye; nothing may be under way any more."""
        if not self._end.alive:
            return
        if self._hears_ahead and self._briefed is None:
            self._pass_on(NO_MORE)
        if self._hearing is not None:
            self._hearing.join(self.deadline)
        self.drain()
        self._end.detach()
        _close(self._boxes())

    def break_off(self) -> None:
        """Let go of everybody without a word: after a failure, when a peer may be gone."""
        if self._end.detach() is None:
            return
        _wake(self._groups)
        if self._hearing is not None:
            self._hearing.join(GOODBYE)  # or it might post a receive in an inbox that is closed
        _close(self._boxes())

    def agree(self, text: str) -> None:
        """Raise ScheduleError unless all stages say the same."""
        mine = padded(text.encode()[: _BRIEF - 4], _BRIEF)
        heard = [torch.empty_like(mine) for _ in range(self.num_stages)]
        with waiting_for("another stage", "comparing options"):
            all_gather(self.control, heard, mine)
        first, *others = (unpadded(one).decode(errors="replace") for one in heard)
        for stage, other in enumerate(others, start=1):
            if other != first:
                raise ScheduleError(
                    f"stage 0 was made with {first}; stage {stage} with {other}",
                    expected="the same options on every stage",
                    fix="give them from one place",
                )

    def set_windows(self, in_flight: Sequence[int], own: int) -> None:
        """Receive ahead as much as the schedule lets others send ahead.

        Activations: what may be in flight on the stage that sends; gradients: on this one.
        """
        for source, inbox in self.activations_in.items():
            inbox.window = self._window or in_flight[source]
        for inbox in self.gradients_in.values():
            inbox.window = self._window or own

    def _boxes(self) -> list[Inbox | Outbox]:
        inboxes = (*self.activations_in.values(), *self.gradients_in.values(), self._briefed)
        return [*self._outboxes(), *(inbox for inbox in inboxes if inbox is not None)]

    def _outboxes(self) -> list[Outbox]:
        found = [*self.activations_out.values(), *self.gradients_out.values(), self._briefs]
        return [outbox for outbox in found if outbox is not None]


def _break_off(groups: Sequence[dist.ProcessGroup], boxes: Sequence[Inbox | Outbox]) -> None:
    _wake(groups)
    _close(boxes)


def _wake(groups: Sequence[dist.ProcessGroup]) -> None:
    for group in groups:
        break_off(group)


def _close(boxes: Sequence[Inbox | Outbox]) -> None:
    for box in boxes:
        box.close()


class _Hearing(threading.Thread):
    """Hears of batches ahead of time, passes the word on and posts receives for them."""

    def __init__(self, connections: Connections, on_cut: Callable[[Cut], None]) -> None:
        super().__init__(name="hear of batches", daemon=True)
        self._connections, self._on_cut = connections, on_cut
        self._heard: queue.SimpleQueue[Cut | Exception] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            try:
                cut = self._connections._heard(_LONG)
                self._connections._pass_on(cut)
                if cut == NO_MORE:
                    return
                self._on_cut(cut)
            except PeerError as error:
                self._heard.put(error.with_traceback(None))
                return
            except Exception as error:  # of our own: where it came from stays with it
                self._heard.put(error)
                return
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
        if isinstance(heard, Exception):
            raise heard
        return heard
