"""The epochs of a job under random events: members follow the protocol, and may be lost any time.

The test plays the members: what they await, vote for and know of commits. It checks each command
against that, and in the end that all who are left begin one more epoch together.
"""

import copy
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from polyrhythm.sync.epochs import (
    Await,
    Begin,
    Command,
    Committed,
    Depart,
    End,
    Enroll,
    Event,
    Fenced,
    Finish,
    JobEpochs,
    Lost,
    Tick,
    TrainInGroups,
    Unreachable,
    Vote,
)
from tests.grids import num_examples

NUM_MEMBERS = 4
ANSWER_TIMEOUT = 10.0
members = st.integers(0, NUM_MEMBERS - 1)


@dataclass
class PlayedMember:
    """A member that follows the protocol, and what it knows."""

    incarnation: int = 0
    is_present: bool = False
    is_candidate: bool = False
    is_awaiting: bool = False
    is_departing: bool = False
    is_announced: bool = False  # its departure, by the Begin of this epoch
    has_voted: bool = False


@dataclass
class EpochOfTest:
    number: int = 0
    voters: tuple[int, ...] = ()
    has_ended: bool = True
    is_last_step: bool = False
    lost: tuple[int, ...] = ()
    last_step: int = 0
    num_committed: int = 0  # in this epoch
    votes: set[int] = field(default_factory=set)  # members that have voted for the next step


class RandomEvents(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.job = JobEpochs(NUM_MEMBERS, ANSWER_TIMEOUT, departure_window=0.0)
        self.played = {member: PlayedMember() for member in range(NUM_MEMBERS)}
        self.gone: set[tuple[int, int]] = set()
        self.known: set[int] = set()  # members that have been present, or have ended before
        self.epoch = EpochOfTest()
        self.sent: list[Event] = []
        self.now = 0.0
        self.may_end = True  # of the votes

    @initialize(num=st.sampled_from([0, NUM_MEMBERS - 1, NUM_MEMBERS, NUM_MEMBERS]))
    def start(self, num: int) -> None:
        for member in range(num):
            self.enroll(member)
            self.await_next(member, "")

    def send(self, event: Event) -> list[Command]:
        self.sent.append(event)
        commands = self.job.step(event)
        for command in commands:
            self.check(command)
        return commands

    def present(self) -> list[int]:
        return [member for member, played in self.played.items() if played.is_present]

    def settled(self) -> list[int]:
        return [member for member in self.present() if not self.played[member].is_candidate]

    def joining(self) -> list[int]:
        candidates = set(self.present()) - set(self.settled())
        return sorted(member for member in candidates if self.played[member].is_awaiting)

    def check(self, command: Command) -> None:
        epoch = self.epoch
        match command:
            case Begin():
                self.check_begin(command)
            case End():
                assert command.epoch == epoch.number
                assert command.why
                assert not epoch.has_ended or len(command.lost) > len(epoch.lost)
                assert not set(command.lost) & set(self.settled())
                epoch.has_ended, epoch.lost = True, command.lost
            case Committed():
                assert (command.epoch, epoch.has_ended) == (epoch.number, False)
                assert command.number == epoch.last_step + 1
                assert epoch.votes >= set(epoch.voters)
                leaving = [
                    m for m in self.present() if self.played[m].is_departing
                    and not self.played[m].is_announced
                ]  # fmt: skip
                leaving = leaving if self.may_end else []
                changes = self.may_end and bool(leaving or self.joining())
                assert command.is_last == changes == bool(command.why)
                epoch.is_last_step = command.is_last
                assert list(command.departing) == leaving
                epoch.last_step, epoch.votes = command.number, set()
                epoch.num_committed += 1
                for played in self.played.values():
                    played.has_voted = False
            case Fenced():
                played = self.played[command.member]
                if played.is_present and played.incarnation == command.incarnation:
                    self.mark_gone(command.member)
                assert (command.member, command.incarnation) in self.gone or self.epoch.number

    def check_begin(self, begin: Begin) -> None:
        settled, present = self.settled(), sorted((*self.settled(), *self.joining()))
        assert begin.epoch == self.epoch.number + 1
        assert list(begin.members) == present
        assert list(begin.joined) == self.joining()
        assert all(self.played[member].is_awaiting for member in present)
        assert settled, "nobody has any state"
        assert len(self.known) == NUM_MEMBERS
        assert list(begin.departing) == [m for m in present if self.played[m].is_departing]
        assert (begin.committed is None) == (self.epoch.num_committed == 0)
        assert begin.committed in (None, self.epoch.last_step)
        assert not {absence.member for absence in begin.lost} & set(settled)
        voters = tuple(m for m in present if m not in begin.departing)
        self.epoch = EpochOfTest(begin.epoch, voters, False, last_step=self.epoch.last_step)
        for member in present:
            played = self.played[member]
            played.is_awaiting = played.has_voted = played.is_candidate = False
            played.is_announced = played.is_departing

    def mark_gone(self, member: int) -> None:
        played = self.played[member]
        self.gone.add((member, played.incarnation))
        played.is_present = played.is_awaiting = played.is_candidate = False

    @rule(member=members)
    def enroll(self, member: int) -> None:
        played = self.played[member]
        if played.is_present:  # a reconnect
            assert self.send(Enroll(member, played.incarnation, "here", self.now)) == []
        elif self.epoch.number == 0 and (member, played.incarnation) not in self.gone:
            played.is_present = True
            self.known.add(member)
            assert self.send(Enroll(member, played.incarnation, "here", self.now)) == []
        else:
            (fenced,) = self.send(Enroll(member, played.incarnation, "here", self.now))
            assert isinstance(fenced, Fenced)

    @rule(member=members)
    def enroll_a_new_incarnation(self, member: int) -> None:
        """It is lost if it was present; in a job that has begun it is a candidate."""
        played, was_present = self.played[member], self.played[member].is_present
        has_started = self.epoch.number > 0
        can_join = not has_started or bool({*self.settled()} - {member})
        if was_present or (member, played.incarnation) in self.gone:
            event = Enroll(member, played.incarnation + 1, "here", self.now)
            commands = self.job.step(event)
            if was_present:
                self.mark_gone(member)
            self.played[member] = PlayedMember(
                played.incarnation + 1, is_present=can_join, is_candidate=can_join and has_started
            )
            if not can_join:
                self.gone.add((member, event.incarnation))
            for command in commands:
                self.check(command)

    @rule(member=members, why=st.sampled_from(["", "a lost connection"]))
    def await_next(self, member: int, why: str) -> None:
        played = self.played[member]
        if played.is_present:
            played.is_awaiting = True
            number = self.epoch.number * (not played.is_candidate)  # which it does not know
            is_candidate = played.is_candidate
            self.send(Await(member, played.incarnation, number, why, self.now))
            is_awaiting = self.job.present[member].is_awaiting
            assert is_candidate or self.epoch.has_ended or not why or not is_awaiting

    @precondition(lambda self: self.epoch.number)
    @rule(member=members)
    def train_in_groups(self, member: int) -> None:
        """The epoch ends if a process waits to join; here the window for others is 0 s."""
        played, epoch = self.played[member], self.epoch
        if played.is_present:
            is_running = not (epoch.has_ended or epoch.is_last_step or played.is_candidate)
            ends = is_running and bool(self.joining())
            event = TrainInGroups(member, played.incarnation, epoch.number, self.now)
            found = [type(command) for command in self.send(event)]
            assert found[:1] == [End] * ends

    @precondition(lambda self: not self.epoch.has_ended)
    @rule(missing=st.sampled_from([None, None, *range(NUM_MEMBERS)]), may_end=st.booleans())
    def vote(self, missing: int | None, may_end: bool) -> None:
        self.may_end = may_end
        for member in [m for m in range(NUM_MEMBERS) if m != missing]:
            played, epoch = self.played[member], self.epoch
            is_voter = member in epoch.voters and played.is_present and not played.is_candidate
            # Unlike a spare; after a last commit all await the next epoch.
            if is_voter and not played.has_voted and not played.is_awaiting:
                played.has_voted = True
                epoch.votes.add(member)
                vote = Vote(
                    member,
                    played.incarnation,
                    epoch.number,
                    epoch.last_step + 1,
                    len(epoch.voters),
                    may_end,
                )
                commands = self.send(vote)
                if any(isinstance(c, Committed) and c.is_last for c in commands):
                    return

    @precondition(lambda self: self.epoch.number)
    @rule()
    def all_await(self) -> None:
        before = self.epoch.number
        for member in self.present():
            if self.epoch.number == before:
                self.await_next(member, "a lost connection")
        assert self.epoch.number == before + bool(self.present())

    @rule(member=members, without_commit=st.booleans())
    def depart(self, member: int, without_commit: bool) -> None:
        played, epoch = self.played[member], self.epoch
        if played.is_present and not played.is_candidate:
            is_running = not (epoch.has_ended or epoch.is_last_step)
            ends = without_commit and is_running and not played.is_announced
            played.is_departing = True
            event = Depart(member, played.incarnation, "SIGTERM", without_commit, self.now)
            assert [type(command) for command in self.send(event)] == [End] * ends

    @precondition(lambda self: self.epoch.number)
    @rule(member=members, others=st.sets(members, max_size=2), silent=st.sets(members))
    def cannot_reach(self, member: int, others: set[int], silent: set[int]) -> None:
        """One end of each link is lost, and one of the two goes on."""
        played, epoch = self.played[member], self.epoch
        others = others & set(self.settled()) - {member}
        if member in self.settled() and others:
            before, can_end = self.settled(), not epoch.has_ended
            number, peers = epoch.number, tuple(sorted(others))
            self.send(Unreachable(member, played.incarnation, number, peers, self.now))
            self.now += self.job.report_window
            self.send(Tick(self.now, tuple(silent)))
            left = set(self.settled())
            assert left, "all are lost"
            assert bool(set(before) - left) == can_end
            assert not can_end or member not in left or not others & left

    @rule(member=members)
    def finish(self, member: int) -> None:
        played = self.played[member]
        if played.is_present and self.epoch.number:
            self.mark_gone(member)
            self.send(Finish(member, played.incarnation, self.now))

    @rule(member=members)
    def lose(self, member: int) -> None:
        played, was_settled = self.played[member], member in self.settled()
        if played.is_present or (member, played.incarnation) not in self.gone:
            self.mark_gone(member)
            self.known.add(member)
            before = self.epoch.number
            commands = self.send(Lost(member, played.incarnation, "SIGKILL", self.now))
            ends = [c for c in commands if isinstance(c, End) and c.epoch == before]
            assert bool(ends) == (was_settled and before > 0)

    @rule(duration=st.sampled_from([1.0, ANSWER_TIMEOUT]))
    def wait(self, duration: float) -> None:
        self.now += duration
        is_due = self.job.next_timer() <= self.now  # of answers: epochs end at once here
        silent = {m for m in self.settled() if not self.played[m].is_awaiting}
        self.send(Tick(self.now))
        if is_due:
            assert not silent & set(self.settled()), "the others wait for it"
        assert self.job.next_timer() > self.now

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def repeat_a_message(self, data: st.DataObject) -> None:
        """After a reconnect, or of an incarnation that is gone."""
        event = data.draw(st.sampled_from(self.sent))
        before = copy.deepcopy(self.job)
        commands = self.job.step(event)
        is_member = before.is_member(event.member, event.incarnation) if hasattr(
            event, "member"
        ) else True  # fmt: skip
        if not is_member:
            assert all(isinstance(command, Fenced) for command in commands)
            assert [c.member for c in commands if isinstance(c, Fenced)] in ([], [event.member])
        if not is_member or isinstance(event, Enroll | Vote):
            assert state_of(self.job) == state_of(before)
        else:  # it means something now, as a new message would
            self.job = before

    def teardown(self) -> None:
        """All that are left begin one more epoch together, if all have been there."""
        for member in range(NUM_MEMBERS):
            if member not in self.known:
                self.lose(member)
        self.all_await()
        if self.present():
            assert self.job.next_timer() == float("inf")
        else:
            assert self.job.is_over


def state_of(job: JobEpochs) -> tuple[object, ...]:
    return job.epoch, job.present, job._phase, job._gone, job._lost, job._committed, job._votes


TestRandomEvents = RandomEvents.TestCase
TestRandomEvents.settings = settings(max_examples=num_examples(120), deadline=None)


def job_of(*present: int, num_expected: int | None = None) -> JobEpochs:
    """A job whose first epoch has begun."""
    job = JobEpochs(num_expected or len(present), ANSWER_TIMEOUT, departure_window=1.0)
    for member in present:
        job.step(Enroll(member, 0, f"n{member}"))
    for member in present:
        commands = job.step(Await(member, 0, 0))
    assert commands == [Begin(1, present, (), (), None)]
    return job


def test_loss_ends_the_epoch_and_the_others_begin_the_next() -> None:
    job = job_of(0, 1, 2)
    assert job.step(Vote(0, 0, 1, 1, 3)) == []
    fenced, end = job.step(Lost(1, 0, "it was ended by SIGKILL"))
    assert fenced == Fenced(1, 0, "it was ended by SIGKILL")
    assert end == End(1, "process 1 on n1 is lost: it was ended by SIGKILL", (1,))
    assert job.step(Vote(2, 0, 1, 1, 3)) == [], "the epoch has ended"
    assert job.step(Await(0, 0, 1, end.why)) == []
    (begin,) = job.step(Await(2, 0, 1, end.why))
    assert (begin.members, begin.lost[0].member, begin.committed) == ((0, 2), 1, None)


def test_second_loss_is_sent_before_the_next_epoch_begins() -> None:
    """In groups the others of its pipeline may still wait for it."""
    job = job_of(0, 1, 2)
    job.step(Lost(1, 0, "SIGKILL"))
    assert job.step(Await(0, 0, 1, "it is lost")) == []
    fenced, end, begin = job.step(Lost(2, 0, "SIGKILL"))
    assert (fenced.member, end.epoch, end.lost) == (2, 1, (1, 2))
    assert begin.members == (0,)


def test_epoch_without_commits_ends_soon_for_all_that_leave() -> None:
    job = job_of(0, 1, 2)
    assert job.step(Depart(1, 0, "SIGTERM", without_commit=True, now=5.0)) == []
    assert job.step(Depart(2, 0, "SIGTERM", without_commit=True, now=5.5)) == []
    assert job.next_timer() == 6.0
    (end,) = job.step(Tick(6.0))
    assert end == End(1, "process 1 on n1, process 2 on n2 leave")
    for member in (0, 1):
        assert job.step(Await(member, 0, 1)) == []
    (begin,) = job.step(Await(2, 0, 1))
    assert (begin.members, begin.departing) == ((0, 1, 2), (1, 2))


def test_vote_that_ends_nothing_leaves_those_that_depart_in_the_epoch() -> None:
    """After the last step of a fit the others await no epoch."""
    job = job_of(0, 1)
    assert job.step(Depart(1, 0, "SIGTERM")) == []
    job.step(Vote(0, 0, 1, 6, 2, may_end=False, now=9.0))
    assert job.step(Vote(1, 0, 1, 6, 2, may_end=False)) == [Committed(1, 6, False)]


def test_epoch_without_commits_does_not_end_after_the_last_vote_of_a_fit() -> None:
    job = job_of(0, 1)
    assert job.step(Depart(1, 0, "SIGTERM", without_commit=True, now=5.0)) == []
    job.step(Vote(0, 0, 1, 0, 2, may_end=False, now=5.1))
    assert job.step(Vote(1, 0, 1, 0, 2, may_end=False)) == [Committed(1, 0, False)]
    assert job.next_timer() == math.inf
    (end,) = job.step(Depart(1, 0, "SIGTERM", without_commit=True, now=9.0))  # of the next fit
    assert end == End(1, "process 1 on n1 leaves")


def test_member_with_most_broken_links_is_lost() -> None:
    job = job_of(0, 1, 2, 3)
    assert job.step(Unreachable(0, 0, 1, (1,), now=5.0)) == []
    assert job.step(Unreachable(2, 0, 1, (1,), now=5.5)) == []
    assert job.step(Unreachable(1, 0, 1, (0, 2), now=5.9)) == []
    fenced, end = job.step(Tick(job.next_timer()))
    assert job.next_timer() == 6.0 + ANSWER_TIMEOUT
    assert fenced == Fenced(1, 0, "it has no connection with process 0 on n0, process 2 on n2")
    assert end.lost == (1,)


def test_one_end_of_a_broken_link_is_lost() -> None:
    job = job_of(0, 1, 2)
    job.step(Unreachable(0, 0, 1, (2,), now=5.0))
    job.step(Unreachable(2, 0, 1, (0, 2, 7), now=5.0))  # itself, and one that is not known
    _, end = job.step(Tick(6.0))
    assert end.lost == (2,)


@pytest.mark.parametrize("dead", [(0,), (0, 2), (0, 2, 3)])
def test_members_that_send_no_heartbeat_are_lost_instead_of_those_that_report_them(
    dead: tuple[int, ...],
) -> None:
    """The machine that is left has most broken links, or as many as the other end."""
    job = job_of(0, 1, 2, 3)
    job.step(Unreachable(1, 0, 1, dead, now=7.0))
    end = job.step(Tick(8.0, silent=dead))[-1]
    assert isinstance(end, End)
    assert sorted(end.lost) == list(dead)


@pytest.mark.parametrize("epoch", [0, 2])
def test_broken_link_of_another_epoch_is_ignored(epoch: int) -> None:
    job = job_of(0, 1)
    assert job.step(Unreachable(0, 0, epoch, (1,), now=5.0)) == []
    assert job.step(Tick(99.0)) == []


def test_departing_member_leaves_after_the_next_commit() -> None:
    job = job_of(0, 1)
    assert job.step(Depart(1, 0, "SIGTERM")) == []
    job.step(Vote(0, 0, 1, 6, 2))
    assert job.step(Vote(1, 0, 1, 6, 2)) == [Committed(1, 6, False)], "others may leave, too"
    job.step(Vote(0, 0, 1, 7, 2, now=1.0))
    assert job.step(Vote(1, 0, 1, 7, 2)) == [Committed(1, 7, True, "process 1 on n1 leaves", (1,))]
    job.step(Await(0, 0, 1, "it leaves"))
    assert job.step(Await(1, 0, 1, "it leaves")) == [Begin(2, (0, 1), (1,), (), 7)]
    assert job.step(Vote(0, 0, 2, 8, 1)) == [Committed(2, 8, False)], "it was announced"
    assert job.step(Finish(1, 0)) == []
    assert job.step(Vote(0, 0, 2, 9, 1)) == [Committed(2, 9, False)]


def test_repeated_vote_commits_nothing_again() -> None:
    """The answer to it was lost with a connection."""
    job = job_of(0, 1)
    vote = Vote(0, 0, 1, 1, 1)
    assert job.step(vote) == [Committed(1, 1, False)]
    assert job.step(vote) == []


def test_first_epoch_does_not_wait_for_a_process_that_has_ended_before_it_enrolled() -> None:
    job = JobEpochs(2, ANSWER_TIMEOUT)
    job.step(Enroll(0, 0, "n0"))
    assert job.step(Await(0, 0, 0)) == []
    (begin,) = job.step(Lost(1, 0, "it was ended by SIGSEGV"))
    assert (begin.members, begin.lost[0].member) == ((0,), 1)
    (fenced,) = job.step(Enroll(1, 0, "n1"))
    assert isinstance(fenced, Fenced)


def test_spare_ends_no_epoch_and_begins_the_next_when_all_others_have_finished() -> None:
    job = job_of(0, 1)
    assert job.step(Await(1, 0, 1)) == []
    assert job.step(Vote(0, 0, 1, 1, 1)) == [Committed(1, 1, False)]
    end, begin = job.step(Finish(0, 0))
    assert end == End(1, "all but its spares have finished")
    assert (begin.members, begin.lost) == ((1,), ())


@pytest.mark.parametrize("ends_by", ["loss", "last commit"])
def test_member_that_does_not_await_the_next_epoch_is_lost(ends_by: str) -> None:
    job = job_of(0, 1, 2)
    if ends_by == "loss":
        job.step(Lost(2, 0, "SIGKILL", now=5.0))
    else:
        job.step(Depart(2, 0))
        (committed,) = job.step(Vote(0, 0, 1, 1, 1, now=5.0))
        assert committed.is_last
    for member in (0, 2):
        job.step(Await(member, 0, 1, "the epoch has ended"))
    assert job.next_timer() == 5.0 + ANSWER_TIMEOUT
    *_, begin = job.step(Tick(job.next_timer()))
    assert 1 not in begin.members
    assert begin.lost[-1].member == 1
    assert "has not answered for 10 s" in begin.lost[-1].why


def job_without_member_1() -> JobEpochs:
    """Its members 0 and 2 train in epoch 2."""
    job = job_of(0, 1, 2)
    job.step(Lost(1, 0, "SIGKILL"))
    for member in (0, 2):
        commands = job.step(Await(member, 0, 1))
    assert [type(command) for command in commands] == [Begin]
    return job


def test_a_process_joins_with_the_next_commit_once_it_is_prepared() -> None:
    job = job_without_member_1()
    assert job.vacancies == ((1, 1),)
    assert job.step(Enroll(1, 1, "n9")) == []
    assert job.vacancies == ()
    job.step(Vote(0, 0, 2, 0, 2, now=1.0))
    assert job.step(Vote(2, 0, 2, 0, 2, now=1.0)) == [Committed(2, 0, False)], "it prepares itself"
    assert job.step(Await(1, 1, 0, now=2.0)) == []
    job.step(Vote(0, 0, 2, 1, 2, now=2.1))
    assert job.step(Vote(2, 0, 2, 1, 2, now=2.1)) == [Committed(2, 1, False)], "others may come"
    job.step(Vote(0, 0, 2, 2, 2, now=3.0))
    (last,) = job.step(Vote(2, 0, 2, 2, 2, now=3.0))
    assert last == Committed(2, 2, True, "process 1 on n9 joins")
    job.step(Await(0, 0, 2, last.why))
    (begin,) = job.step(Await(2, 0, 2, last.why))
    assert begin == Begin(3, (0, 1, 2), (), (), 2, joined=(1,))


def test_a_process_joins_groups_soon() -> None:
    job = job_without_member_1()
    job.step(Enroll(1, 1, "n9"))
    assert job.step(TrainInGroups(2, 0, 2, now=1.0)) == []
    assert job.step(Await(1, 1, 0, now=2.0)) == []
    assert job.next_timer() == 3.0
    assert job.step(Tick(3.0)) == [End(2, "process 1 on n9 joins")]
    job.step(Await(0, 0, 2))
    (begin,) = job.step(Await(2, 0, 2))
    assert (begin.members, begin.joined) == ((0, 1, 2), (1,))


def test_a_candidate_that_is_lost_or_goes_changes_nothing_for_the_others() -> None:
    job = job_without_member_1()
    job.step(Enroll(1, 1, "n9"))
    job.step(Await(1, 1, 0, now=2.0))
    assert job.step(Lost(1, 1, "SIGKILL", 2.5)) == [Fenced(1, 1, "SIGKILL")]
    job.step(Enroll(1, 2, "n9"))
    assert job.step(Finish(1, 2)) == []
    assert job.vacancies == ((1, 3),)
    job.step(Vote(0, 0, 2, 0, 2, now=9.0))
    assert job.step(Vote(2, 0, 2, 0, 2, now=9.0)) == [Committed(2, 0, False)]


def test_candidates_end_with_the_job() -> None:
    job = job_without_member_1()
    job.step(Enroll(1, 1, "n9"))
    job.step(Await(1, 1, 0))
    assert job.step(Finish(0, 0)) == []
    assert job.step(Finish(2, 0)) == [Fenced(1, 1, "the job has ended")]
    assert job.is_over
    (fenced,) = job.step(Enroll(1, 2, "n9"))
    assert isinstance(fenced, Fenced)
