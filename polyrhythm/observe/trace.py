"""Convert a run to a Chrome trace: every worker's actions, waits and transfers with their senders.

It opens in Perfetto and in chrome://tracing. A worker is a process of the trace with up to three
rows: `events` (plan switches and other instants), `work` (its steps, and in them waits, actions and
syncs) and `transfers` (received tensors, each with an arrow from the sender's action). A viewer
needs the slices of a row nested or disjoint, so slices that overlap partly get a further row.

Format: the JSON object format of Google's "Trace Event Format". Perfetto follows its sort indices
since October 2025 (its pull request 3273) and wants row numbers that are unique in the whole trace.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from polyrhythm.errors import UserError
from polyrhythm.events import Event, Value
from polyrhythm.observe.report import is_switch, pipeline_then_stage, waited
from polyrhythm.types import Op, Seconds, Worker

# chrome://tracing knows colours by these names only; Perfetto takes one per name without digits.
_COLOURS = {
    "forward": "thread_state_running",
    "backward": "thread_state_runnable",
    "wait": "grey",
    "transfer": "thread_state_iowait",
    "sync": "rail_response",
    "step": "thread_state_sleeping",
    "plan": "rail_animation",
}
_CATEGORIES: dict[str, str] = {Op.F: "forward", Op.B: "backward"}


class TraceEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One object of `traceEvents`, with the format's own names; times in whole microseconds."""

    name: str
    ph: str  # X slice, i instant, s and f the ends of an arrow, M metadata
    pid: int
    tid: int
    cat: str | None = None
    ts: int | None = None
    dur: int | None = None
    s: str | None = None  # scope of an instant
    id: int | None = None
    bp: str | None = None  # "e": the arrow ends in the slice around it, not in the next one
    cname: str | None = None
    args: dict[str, Value] = {}


@dataclass(slots=True, eq=False)
class _Mark:
    """One slice or instant (without end): an event, or one part of an action."""

    name: str
    category: str
    start: int
    end: int | None
    event: Event
    pid: int = 0
    tid: int = 0

    @property
    def until(self) -> int:
        return self.start if self.end is None else self.end

    @property
    def last(self) -> int:
        """The last microsecond inside; the next slice may start at the end of this one."""
        return max(self.start, self.until - 1)

    def draw(self) -> TraceEvent:
        event = self.event
        args = dict(event.values)
        if event.step is not None:
            args["step"] = event.step
        if event.why is not None:
            args["why"] = event.why
        return TraceEvent(
            name=self.name,
            ph="i" if self.end is None else "X",
            cat=self.category,
            ts=self.start,
            dur=None if self.end is None else self.end - self.start,
            s="t" if self.end is None else None,
            pid=self.pid,
            tid=self.tid,
            cname=_COLOURS.get(self.category),
            args=args,
        )


def chrome_trace(events: Iterable[Event]) -> list[TraceEvent]:
    """Return the whole trace; times start at the first event, and the result is deterministic."""
    events = list(events)
    begin = min((event.time for event in events), default=0.0)
    marks: dict[Worker | None, list[_Mark]] = defaultdict(list)
    for event in events:
        marks[event.worker] += _marks(event, begin)
    metadata: list[TraceEvent] = []
    placed: list[_Mark] = []
    tid = len(marks) + 1  # a row with the number of a process would be its main thread
    for pid, worker in enumerate(sorted(marks, key=pipeline_then_stage), 1):
        metadata += _metadata("process", pid, tid, "run" if worker is None else str(worker))
        for row, members in _rows(marks[worker]):
            metadata += _metadata("thread", pid, tid, row)
            for mark in members:
                mark.pid, mark.tid = pid, tid
            placed += members
            tid += 1
    return [*metadata, *(mark.draw() for mark in placed), *_arrows(placed)]


def write_trace(trace: Iterable[TraceEvent], path: Path) -> None:
    encode = msgspec.json.Encoder().encode
    lines = b",\n".join(map(encode, trace))
    try:
        path.write_bytes(b'{"displayTimeUnit":"ms","traceEvents":[\n' + lines + b"\n]}\n")
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}",
            expected="a writable file",
            fix="pass a file in an existing folder: --trace trace.json",
        ) from None


def _marks(event: Event, begin: Seconds) -> Iterator[_Mark]:
    start = _microseconds(event.time - begin)
    if event.duration is None:
        yield _Mark(_title(event), event.kind, start, None, event)
        return
    end = max(start, _microseconds(event.time - begin + event.duration))
    if event.kind != "action":
        yield _Mark(_title(event), event.kind, start, end, event)
        return
    ready = min(_microseconds(event.time - begin + waited(event)), end)
    name = event.name or "action"
    if ready > start:
        peer = event.values.get("waited_for")
        yield _Mark(
            f"wait for {name}" + (f" from {peer}" if peer else ""), "wait", start, ready, event
        )
    yield _Mark(name, _CATEGORIES.get(name[0], "action"), ready, end, event)


def _title(event: Event) -> str:
    name = event.name or ""
    if event.kind == "plan":
        return f"plan {name}" if is_switch(event) else f"stay with {name}"
    if event.kind == "transfer":
        return f"{name} from {event.values.get('peer', 'a peer')}"
    if event.kind == "step" and not name:
        name = "" if event.step is None else str(event.step)
    return f"{event.kind} {name}".rstrip()


def _microseconds(seconds: Seconds) -> int:
    return round(seconds * 1e6)


def _metadata(kind: str, pid: int, tid: int, name: str) -> Iterator[TraceEvent]:
    yield TraceEvent(name=f"{kind}_name", ph="M", pid=pid, tid=tid, args={"name": name})
    index = pid if kind == "process" else tid
    yield TraceEvent(
        name=f"{kind}_sort_index", ph="M", pid=pid, tid=tid, args={"sort_index": index}
    )


def _rows(marks: list[_Mark]) -> list[tuple[str, list[_Mark]]]:
    """Return the rows of one worker with their names, from top to bottom."""
    instants = [mark for mark in marks if mark.end is None]
    slices = [mark for mark in marks if mark.end is not None]
    work = _pack_rows([mark for mark in slices if mark.event.kind != "transfer"], nested=True)
    received = _pack_rows([mark for mark in slices if mark.event.kind == "transfer"], nested=False)
    return [
        *([("events", instants)] if instants else []),
        *((f"work {n}" if n > 1 else "work", row) for n, row in enumerate(work, 1)),
        *((f"transfers {n}" if n > 1 else "transfers", row) for n, row in enumerate(received, 1)),
    ]


@dataclass(slots=True, eq=False)
class _Row:
    nested: bool  # False: all slices are disjoint
    marks: list[_Mark] = field(default_factory=list)
    around: list[_Mark] = field(default_factory=list)  # the last slice and those that contain it

    def try_add(self, mark: _Mark) -> bool:
        while self.around and self.around[-1].until <= mark.start:
            self.around.pop()
        if self.around and not (self.nested and mark.until <= self.around[-1].until):
            return False
        self.marks.append(mark)
        self.around.append(mark)
        return True


def _pack_rows(slices: list[_Mark], *, nested: bool) -> list[list[_Mark]]:
    rows: list[_Row] = []
    # Outer slices come before inner ones; a step contains an action of the same length.
    for mark in sorted(slices, key=lambda mark: (mark.start, -mark.until, mark.category != "step")):
        if not any(row.try_add(mark) for row in rows):
            rows.append(_Row(nested))
            rows[-1].try_add(mark)
    return [row.marks for row in rows]


def _arrows(marks: list[_Mark]) -> Iterator[TraceEvent]:
    """Yield an arrow from the action that computed a tensor to its transfer.

    The arrow starts inside the action when the transfer starts, at the latest at the action's end.
    Clocks of machines differ: an arrow that would go back in time ends later within its transfer,
    and is omitted if that is not enough.
    """
    actions: dict[tuple[str, int | None, str | None], list[_Mark]] = defaultdict(list)
    for mark in marks:
        if mark.event.kind == "action" and mark.end is not None and mark.category != "wait":
            actions[str(mark.event.worker), mark.event.step, mark.event.name].append(mark)
    number = 0
    for mark in marks:
        if mark.event.kind != "transfer" or mark.end is None:
            continue
        peer = str(mark.event.values.get("peer"))
        candidates = actions.get((peer, mark.event.step, mark.event.name), [])
        # A repeated step has the action twice: the last one before the arrival is the sender.
        started = [action for action in candidates if action.start <= mark.last]
        if not started:
            continue
        number += 1
        sender = max(started, key=lambda action: action.start)
        sent = min(max(sender.start, mark.start), sender.last)
        received = max(sent, mark.start)
        for end, phase, at in ((sender, "s", sent), (mark, "f", received)):
            yield TraceEvent(
                name="transfer",
                cat="transfer",
                ph=phase,
                id=number,
                ts=at,
                bp="e" if phase == "f" else None,
                pid=end.pid,
                tid=end.tid,
            )
