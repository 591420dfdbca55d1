"""The members of a job and its epochs: who takes part, when an epoch ends, which steps count.

A member is a process of the job. All members of an epoch build their connections together, as one
job of a fixed size; when one is lost, the epoch ends for all, and the others begin the next one.
Nothing of an epoch is used in a later one but what each member has in memory.

In lockstep a step counts when it is committed: each worker that updates weights votes once it has
all that its update needs, and none changes anything before all have voted. So after a loss all
others have made the same steps. A member that is asked to leave goes at such a boundary, when
nothing is in flight: the last commit of the epoch says that it ends.

Groups have no such votes. There members without a lost one in their pipeline end their step and
average once more when the epoch has ended, also when it ends for a member that is asked to leave.

A process may take the place of a member that is gone, as its next incarnation. It is a candidate
until it awaits an epoch, and the others train on; the next one begins at the same kind of boundary
as for a member that leaves.

A coordinator that is started again rebuilds this state from its log, which may lack the last
events. So with `Resume` it waits until all members have enrolled again: each sends the last Begin
and the last Committed that it knows. What one knows has been decided, and all learn it. Then the
epoch ends, as its coordinator was lost.

`step` takes one event and returns commands, without a clock, a thread or randomness, as the
scheduler of groups does (`scheduler.py`).

Source: none. torchft's quorum and vote per step (`should_commit`) are similar; there a replica
group that misses a vote copies a checkpoint.
"""

import math
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, get_args

import msgspec

from polyrhythm.sync.protocol import Count, Name
from polyrhythm.sync.snapshot import register_state
from polyrhythm.types import Seconds

Member = int  # the rank that the launcher gave to a process
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all messages: immutable, and never part of a reference cycle (gc=False)."""


class Enroll(_Message, frozen=True):
    """A process is a member from now on, or still is, after a reconnect.

    In a job that has begun it is a candidate.
    """

    member: Count
    incarnation: Count
    node: Name  # the machine it runs on
    now: Seconds = 0.0
    begin: "Begin | None" = None  # of its epoch, if it has had one
    committed: "Committed | None" = None  # the last one of its epoch that it knows


class Await(_Message, frozen=True):
    """A member waits for the epoch after `epoch`, 0 at the start.

    `why` it has left `epoch`, which ends for all; empty if it is a spare, which ends nothing. A
    candidate waits for the next one, whatever its number.
    """

    member: Count
    incarnation: Count
    epoch: Count
    why: Text = ""
    now: Seconds = 0.0


class Vote(_Message, frozen=True):
    """A member has all that its update of `number` needs; `num_voters` members vote on it."""

    member: Count
    incarnation: Count
    epoch: Count
    number: Count  # of a step
    num_voters: Annotated[int, msgspec.Meta(ge=1)]
    may_end: bool = True  # the epoch, for a member that leaves: more steps follow
    now: Seconds = 0.0


class TrainInGroups(_Message, frozen=True):
    """From now on nobody votes for steps: for those who join, the epoch ends soon."""

    member: Count
    incarnation: Count
    epoch: Count
    now: Seconds = 0.0


class Depart(_Message, frozen=True):
    """A member asks to leave: the epoch ends with the next commit, and the next one is its last.

    `without_commit`: it ends soon, since nobody votes.
    """

    member: Count
    incarnation: Count
    why: Text = ""
    without_commit: bool = False
    now: Seconds = 0.0


class Unreachable(_Message, frozen=True):
    """A member cannot reach others of its epoch: packets to them are not confirmed any more."""

    member: Count
    incarnation: Count
    epoch: Count
    peers: tuple[Count, ...]
    now: Seconds = 0.0


class Finish(_Message, frozen=True):
    """A member needs the others no more, and they do not need it."""

    member: Count
    incarnation: Count
    now: Seconds = 0.0


class Lost(_Message, frozen=True):
    """A process has ended, or has sent nothing for too long."""

    member: Count
    incarnation: Count
    why: Text
    now: Seconds = 0.0


class Resume(_Message, frozen=True):
    """The coordinator was started again, with the state of its log: members enroll again."""

    now: Seconds = 0.0


class Tick(_Message, frozen=True):
    """The time of `next_timer` is reached; `silent` members have sent nothing for some seconds."""

    now: Seconds = 0.0
    silent: tuple[Member, ...] = ()


class Absence(_Message, frozen=True):
    """Why a process is no longer a member."""

    member: int
    why: str


class Begin(_Message, frozen=True):
    """An epoch begins: its members connect.

    Those that depart hand over what only they have, and finish. `committed` is the last step of the
    epoch before, None if it has committed none.
    """

    epoch: int
    members: tuple[Member, ...]  # sorted
    departing: tuple[Member, ...]
    lost: tuple[Absence, ...]  # since the epoch before began
    committed: int | None
    joined: tuple[Member, ...] = ()  # members that were in no epoch before: they have no state


class End(_Message, frozen=True):
    """An epoch has ended: no step of it is committed any more.

    Sent again if more of its members are lost before the next one begins.
    """

    epoch: int
    why: str
    lost: tuple[Member, ...] = ()  # of its members, so far


class Committed(_Message, frozen=True):
    """All have voted: make the update. If `is_last`, the epoch ends when it is made."""

    epoch: int
    number: int
    is_last: bool
    why: str = ""  # it is the last
    departing: tuple[Member, ...] = ()  # for whom it ends; if these are all, the job does


class Fenced(_Message, frozen=True):
    """A process is no longer a member, and must not go on."""

    member: int
    incarnation: int
    why: str


Event = Enroll | Await | Vote | TrainInGroups | Depart | Unreachable | Finish | Lost | Resume | Tick
Command = Begin | End | Committed | Fenced
_MemberEvent = Await | Vote | TrainInGroups | Depart | Unreachable | Finish | Lost


class _Phase(Enum):
    FORMING = "forming"  # members await the next epoch
    RUNNING = "running"
    LAST_STEP = "last step"  # the last commit is sent: members make that update, then await


@dataclass(slots=True)
class _Record:
    """What is known of a present member."""

    incarnation: int
    node: str
    is_candidate: bool = False  # it has enrolled in a job that had begun, and is in no epoch yet
    is_awaiting: bool = False
    is_departing: bool = False
    is_announced: bool = False  # as departing, by the Begin of the current epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochsSetup:
    """The setup of a job's epochs as plain data: equal setups make epochs that decide equally."""

    num_expected: int  # members without which the first epoch does not begin
    answer_timeout: Seconds  # until a member awaits the next epoch after an end
    # After the first one asks to leave, or to join: others that do so at the same time go with it.
    departure_window: Seconds = 0.5
    # After the first report of a broken link: others tell which of its ends has more of them.
    report_window: Seconds = 1.0
    # After a restart of the coordinator: until a member that has not enrolled again is lost.
    resume_timeout: Seconds = 15.0

    def epochs(self) -> "JobEpochs":
        """Create new epochs."""
        return JobEpochs(
            self.num_expected,
            self.answer_timeout,
            departure_window=self.departure_window,
            report_window=self.report_window,
            resume_timeout=self.resume_timeout,
        )


@dataclass(slots=True)
class JobEpochs:
    """The epochs of one job. `answer_timeout`: until a member awaits the next epoch after an end.

    A member that is alive and does not do so is lost, too, since the others wait for it.
    """

    num_expected: int  # members without which the first epoch does not begin
    answer_timeout: Seconds
    epoch: int = 0
    # After the first one asks to leave, or to join: others that do so at the same time go with it.
    departure_window: Seconds = 0.5
    # After the first report of a broken link: others tell which of its ends has more of them.
    report_window: Seconds = 1.0
    resume_timeout: Seconds = 15.0
    counters: Counter[str] = field(default_factory=Counter)  # of ignored messages, by kind
    present: dict[Member, _Record] = field(default_factory=dict)
    _phase: _Phase = _Phase.FORMING
    _members: set[Member] = field(default_factory=set)  # of the current epoch, that are present
    _gone: dict[Member, tuple[int, str]] = field(default_factory=dict)  # incarnation, and why
    _lost: list[Absence] = field(default_factory=list)  # since the epoch began
    _lost_members: list[Member] = field(default_factory=list)  # of them, those of the epoch
    _committed: int | None = None
    # By step, how many voters each of them has counted.
    _votes: dict[int, dict[Member, int]] = field(default_factory=dict)
    _answer_by: Seconds = math.inf  # of members that do not await the next epoch yet
    _departs_at: Seconds = -math.inf  # the earliest end of an epoch for those that leave or join
    _ends_at: Seconds = math.inf  # of an epoch without commits, for those that leave or join
    _is_in_groups: bool = False  # nobody votes for steps
    _broken_links: set[frozenset[Member]] = field(default_factory=set)  # of the epoch
    _reported_by: Seconds = math.inf  # all that are broken
    _begin: Begin | None = None  # of the current epoch
    _resumes_by: Seconds = math.inf  # after a restart of the coordinator
    _returned: set[Member] = field(default_factory=set)  # since then
    _deferred: list[Enroll | _MemberEvent] = field(default_factory=list)  # until then
    _last_commit: Committed | None = None  # of the current epoch
    _now: Seconds = -math.inf
    _out: list[Command] = field(default_factory=list)

    def step(self, event: Event) -> list[Command]:
        """Handle `event` and return commands; all but Fenced go to all present members.

        A duplicate changes nothing. Fenced goes to the incarnation that it names, even if lost.
        """
        out: list[Command] = []
        self._out = out
        self._now = max(self._now, event.now)
        if isinstance(event, Resume):
            self._resumes_by = self._now + self.resume_timeout
            self._returned, self._deferred = set(), []  # of an earlier restart
        elif not isinstance(event, Tick) and self.is_resuming:
            self._defer(event)
        elif isinstance(event, Enroll):
            self._on_enroll(event)
        elif not isinstance(event, Tick):
            self._on_member_event(event)
        if self.is_resuming:
            self._resume_if_complete()
        if isinstance(event, Tick) and self._now >= self._reported_by:
            self._drop_unreachable(event.silent)
        if self.is_resuming:
            return out
        if self._now >= self._ends_at:
            self._end(self._why_changing(self._departing(), self._joining()))
        if self._now >= self._answer_by:
            self._drop_silent()
        self._begin_if_complete()
        return out

    def next_timer(self) -> Seconds:
        """Time at which to send Tick if nothing happens before; inf for never."""
        if self.is_resuming:
            return self._resumes_by
        return min(self._answer_by, self._ends_at, self._reported_by)

    @property
    def is_over(self) -> bool:
        """Whether all expected members were known, and all have finished or are lost."""
        return not self.present and self._num_known >= self.num_expected

    @property
    def is_resuming(self) -> bool:
        """Whether members have to enroll again, after a restart of the coordinator."""
        return self._resumes_by < math.inf

    @property
    def vacancies(self) -> tuple[tuple[Member, int], ...]:
        """The members that are gone, each with the incarnation of its successor."""
        gone = sorted(self._gone.keys() - self.present.keys())
        return tuple((member, self._gone[member][0] + 1) for member in gone)

    def is_member(self, member: Member, incarnation: int) -> bool:
        record = self.present.get(member)
        return record is not None and record.incarnation == incarnation

    def why_absent(self, member: Member, incarnation: int) -> str:
        """Return why a process is no member."""
        record = self.present.get(member)
        if record is not None and incarnation < record.incarnation:
            return f"process {member} has restarted, as incarnation {record.incarnation}"
        last, why = self._gone.get(member, (-1, ""))
        if incarnation <= last:
            return why
        return "the job has begun without it" if self.epoch else "it has not enrolled"

    @property
    def _num_known(self) -> int:
        return len(self.present.keys() | self._gone.keys())

    def _on_enroll(self, event: Enroll) -> None:
        member, incarnation = event.member, event.incarnation
        if self.is_member(member, incarnation):
            return
        known = self.present.get(member)
        if known is not None and incarnation > known.incarnation:
            self._lose(member, "it has restarted")
        last, _ = self._gone.get(member, (-1, ""))
        # Who begins a job is known; later a process takes the place of one that is gone.
        is_candidate = bool(self.epoch)
        has_place = not is_candidate or (member in self._gone and bool(self._settled()))
        if member in self.present or incarnation <= last or not has_place:
            self._fence(member, incarnation)
        else:
            self.present[member] = _Record(incarnation, event.node, is_candidate)

    def _defer(self, event: Enroll | _MemberEvent) -> None:
        """After a restart: learn what a member knows, and let all else wait for the others."""
        if isinstance(event, Enroll) and event.begin is not None:
            self._learn(event, event.begin)
        record = self.present.get(event.member)
        is_answer = isinstance(event, Enroll | Lost | Finish)
        if is_answer and record is not None and event.incarnation >= record.incarnation:
            self._returned.add(event.member)
        self._deferred.append(event)

    def _learn(self, event: Enroll, begin: Begin) -> None:
        """Learn of decisions that the log lacks from a member that knows them."""
        member = event.member
        last, _ = self._gone.get(member, (-1, ""))
        is_later = begin.epoch > self.epoch
        if is_later and member not in self.present and event.incarnation > last:
            self.present[member] = _Record(event.incarnation, event.node)
        if not self.is_member(member, event.incarnation):
            return
        if is_later:
            self.epoch, self._begin, self._phase = begin.epoch, begin, _Phase.RUNNING
            self._committed, self._last_commit, self._lost_members = None, None, []
            self._members = {each for each in begin.members if each in self.present}
        if begin.epoch == self.epoch:
            self.present[member].is_candidate = False
            self._members.add(member)
            last_commit, own = self._last_commit, event.committed
            if own is not None and (last_commit is None or last_commit.number < own.number):
                self._last_commit, self._committed = own, own.number

    def _resume_if_complete(self) -> None:
        """When all members have enrolled again, or the others are lost: end the epoch."""
        missing = [member for member in self.present if member not in self._returned]
        if missing and self._now < self._resumes_by:
            return
        deferred, self._deferred, self._returned = self._deferred, [], set()
        self._resumes_by = self._ends_at = self._reported_by = math.inf
        # What some have had: the others may not.
        self._out += [each for each in (self._begin, self._last_commit) if each is not None]
        for record in self.present.values():
            record.is_awaiting = False
        if self.epoch:
            self._end("its coordinator was started again")
            self._answer_by = self._now + self.answer_timeout
        for member in missing:
            self._lose(member, "it has not come back after a restart of the coordinator")
        members = () if self._begin is None else self._begin.members
        for member in [m for m in self._settled() if self.epoch and m not in members]:
            self._lose(member, "an epoch has begun without it")  # which the log lacks
        for event in deferred:
            if isinstance(event, Enroll):
                self._on_enroll(event)
            else:
                self._on_member_event(event)

    def _on_member_event(self, event: _MemberEvent) -> None:
        member, incarnation = event.member, event.incarnation
        if not self.is_member(member, incarnation):
            self.counters["late"] += 1
            last, _ = self._gone.get(member, (-1, ""))
            if isinstance(event, Lost):
                if member not in self.present and incarnation > last and not self.epoch:
                    # It has ended before it could enroll: the first epoch need not wait for it.
                    self._gone[member] = incarnation, event.why
                    self._lost.append(Absence(member, event.why))
            elif not isinstance(event, Finish):
                self._fence(member, incarnation)
            return
        if self.present[member].is_candidate and not isinstance(event, Await | Finish | Lost):
            self.counters["late"] += 1  # it has no part in this epoch, and may go at once
            return
        handlers: dict[type[_MemberEvent], Callable[[Any], None]] = {
            Await: self._on_await,
            Vote: self._on_vote,
            TrainInGroups: self._on_train_in_groups,
            Depart: self._on_depart,
            Unreachable: self._on_unreachable,
            Finish: self._on_finish,
            Lost: lambda lost: self._lose(lost.member, lost.why),
        }
        handlers[type(event)](event)

    def _on_await(self, event: Await) -> None:
        record = self.present[event.member]
        if record.is_candidate:
            if not record.is_awaiting:
                record.is_awaiting = True
                self._open_window()
                self._end_in_groups()
            return
        if event.epoch != self.epoch:
            self.counters["late"] += 1
            return
        record.is_awaiting = True
        if self._phase is _Phase.RUNNING and event.why:
            self._end(event.why)

    def _on_vote(self, event: Vote) -> None:
        is_duplicate = self._committed is not None and event.number <= self._committed
        if event.epoch != self.epoch or self._phase is not _Phase.RUNNING or is_duplicate:
            self.counters["late"] += 1
            return
        votes = self._votes.setdefault(event.number, {})
        votes[event.member] = event.num_voters
        if len(votes) < max(votes.values()):
            return
        self._votes.clear()
        self._committed, self._is_in_groups = event.number, False
        departing = [m for m in self._departing() if not self.present[m].is_announced]
        joining = self._joining()
        is_early = len(departing) < len(self._members) and self._now < self._departs_at
        if is_early or not event.may_end:
            departing, joining = [], []
        if not event.may_end:  # outside of a fit nobody goes on in another epoch
            self._ends_at = math.inf
        why = self._why_changing(departing, joining)
        self._last_commit = Committed(self.epoch, event.number, bool(why), why, tuple(departing))
        self._out.append(self._last_commit)
        if why:
            self._phase, self._ends_at = _Phase.LAST_STEP, math.inf
            self._answer_by = self._now + self.answer_timeout

    def _on_train_in_groups(self, event: TrainInGroups) -> None:
        if event.epoch != self.epoch or self._phase is not _Phase.RUNNING:
            self.counters["late"] += 1
            return
        self._is_in_groups = True
        self._end_in_groups()

    def _end_in_groups(self) -> None:
        """End an epoch without votes soon, if a process waits to join."""
        if self._is_in_groups and self._phase is _Phase.RUNNING and self._joining():
            self._ends_at = min(self._ends_at, self._departs_at)

    def _open_window(self) -> None:
        if self._now >= self._departs_at:
            self._departs_at = self._now + self.departure_window

    def _on_depart(self, event: Depart) -> None:
        record = self.present[event.member]
        if not record.is_departing:
            self._open_window()
        record.is_departing = True
        if event.without_commit and self._phase is _Phase.RUNNING and not record.is_announced:
            self._ends_at = min(self._ends_at, self._departs_at)

    def _on_unreachable(self, event: Unreachable) -> None:
        if event.epoch != self.epoch or self._phase is _Phase.FORMING:
            self.counters["late"] += 1
            return
        peers = self._members.intersection(event.peers) - {event.member}
        if peers and event.member in self._members:
            self._broken_links |= {frozenset((event.member, peer)) for peer in peers}
            self._reported_by = min(self._reported_by, self._now + self.report_window)

    def _drop_unreachable(self, silent: Container[Member]) -> None:
        """Lose as few members as have an end of each broken link: those with most links first.

        Before them the silent ones: machines that are dead, and not only a link.
        """
        links, self._broken_links, self._reported_by = self._broken_links, set(), math.inf
        while links := {link for link in links if link <= self._members}:
            counts = Counter(member for link in links for member in link)
            dropped = max(counts, key=lambda m: (m in silent, counts[m], m))
            others = sorted({m for link in links if dropped in link for m in link} - {dropped})
            names = ", ".join(f"process {m} on {self.present[m].node}" for m in others)
            self._lose(dropped, f"it has no connection with {names}")

    def _on_finish(self, event: Finish) -> None:
        record = self.present.pop(event.member)
        self._gone[event.member] = record.incarnation, "it has finished"
        self._members.discard(event.member)

    def _lose(self, member: Member, why: str) -> None:
        record = self.present.pop(member)
        self._gone[member] = record.incarnation, why
        if not record.is_candidate:
            self._lost.append(Absence(member, why))
        self._fence(member, record.incarnation)
        if member in self._members:
            self._members.remove(member)
            self._lost_members.append(member)
            self._end(f"process {member} on {record.node} is lost: {why}")

    def _fence(self, member: Member, incarnation: int) -> None:
        self._out.append(Fenced(member, incarnation, self.why_absent(member, incarnation)))

    def _end(self, why: str) -> None:
        if self._phase is not _Phase.FORMING:
            self._phase, self._ends_at = _Phase.FORMING, math.inf
            self._votes.clear()
            self._answer_by = self._now + self.answer_timeout
        self._out.append(End(self.epoch, why, tuple(self._lost_members)))

    def _drop_silent(self) -> None:
        self._answer_by = math.inf
        for member in [m for m in self._settled() if not self.present[m].is_awaiting]:
            self._lose(member, f"it is alive, but has not answered for {self.answer_timeout:g} s")

    def _begin_if_complete(self) -> None:
        settled = self._settled()
        if self.epoch and not settled:  # nobody is left from whom a candidate could get its state
            for member in list(self.present):
                self._lose(member, "the job has ended")
        if not settled or not all(self.present[member].is_awaiting for member in settled):
            return
        if self.epoch == 0 and self._num_known < self.num_expected:
            return
        if self._phase is _Phase.RUNNING:
            self._end("all but its spares have finished")
        joined, departing = tuple(self._joining()), tuple(self._departing())
        members = tuple(sorted((*settled, *joined)))
        # A process that has restarted before the job has begun is not missing.
        lost = tuple(a for a in self._lost if self.epoch or a.member not in self.present)
        self.epoch += 1
        self._begin = Begin(self.epoch, members, departing, lost, self._committed, joined)
        self._out.append(self._begin)
        self._phase, self._answer_by = _Phase.RUNNING, math.inf
        self._members, self._lost, self._committed = set(members), [], None
        self._last_commit = None
        self._lost_members, self._ends_at = [], math.inf
        self._broken_links, self._reported_by = set(), math.inf
        self._is_in_groups = False
        for record in (self.present[member] for member in members):
            record.is_awaiting = record.is_candidate = False
            record.is_announced = record.is_departing

    def _settled(self) -> list[Member]:
        """The present members that are no candidates."""
        return sorted(m for m, record in self.present.items() if not record.is_candidate)

    def _joining(self) -> list[Member]:
        """The candidates that await an epoch."""
        records = self.present.items()
        return sorted(m for m, record in records if record.is_candidate and record.is_awaiting)

    def _departing(self) -> list[Member]:
        return sorted(m for m, record in self.present.items() if record.is_departing)

    def _why_changing(self, departing: Sequence[Member], joining: Sequence[Member]) -> str:
        """Say who leaves and who joins; empty if nobody does."""
        texts = []
        for members, verb in ((departing, "leave"), (joining, "join")):
            names = ", ".join(f"process {m} on {self.present[m].node}" for m in members)
            texts += [f"{names} {verb}{'s' * (len(members) == 1)}"] * bool(names)
        return "; ".join(texts)


register_state(JobEpochs, Absence, _Phase, _Record, *get_args(Command), *get_args(Event))
