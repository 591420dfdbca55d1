"""A coordinator is started again, with a log that lacks its last events: nobody loses a step.

The test plays the members as `EpochClient` does, with commands that are lost on their way, and
checks that all have made the same steps whenever they begin an epoch.
"""

import copy
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from polyrhythm.sync.epochs import (
    Await,
    Begin,
    Command,
    Committed,
    End,
    Enroll,
    Event,
    Fenced,
    Finish,
    JobEpochs,
    Lost,
    Resume,
    Tick,
    Vote,
)
from tests.grids import num_examples

NUM_MEMBERS, RESUME_TIMEOUT = 4, 5.0


@dataclass
class Member:
    """What a client knows, and what is on its way to it."""

    number: int
    begin: Begin | None = None
    committed: Committed | None = None
    has_ended: bool = True
    vote: Vote | None = None
    wait: Await | None = None
    num_made: int = 0  # steps in this epoch
    is_alive: bool = True
    commands: deque[Command] = field(default_factory=deque)

    @property
    def epoch(self) -> int:
        return 0 if self.begin is None else self.begin.epoch

    def enroll(self) -> list[Event]:
        """Return what it sends when it connects."""
        enrolled = Enroll(self.number, 0, "host", begin=self.begin, committed=self.committed)
        return [each for each in (enrolled, self.vote, self.wait) if each is not None]

    def act(self) -> Event | None:
        if self.has_ended and self.wait is None:
            self.wait = Await(self.number, 0, self.epoch, "it has ended")
            return self.wait
        if not self.has_ended and self.vote is None:
            assert self.begin is not None
            num_voters = len(self.begin.members)
            self.vote = Vote(self.number, 0, self.epoch, self.num_made, num_voters)
            return self.vote
        return None

    def receive(self, command: Command) -> None:
        match command:
            case Begin() if command.epoch > self.epoch and self.number in command.members:
                if self.begin is not None:
                    num_committed = 0 if command.committed is None else command.committed + 1
                    assert num_committed == self.num_made, "it knows of each step that counts"
                self.begin, self.committed, self.num_made = command, None, 0
                self.has_ended, self.vote, self.wait = False, None, None
            case Committed() if command.epoch == self.epoch and not self.has_ended:
                if self.committed is None or command.number > self.committed.number:
                    assert command.number == self.num_made, "no step is left out"
                    self.committed, self.vote = command, None
                    self.num_made += 1
            case End() if command.epoch == self.epoch:
                self.has_ended, self.vote = True, None
            case Fenced() if command.member == self.number:
                self.is_alive = False


class Job:
    def __init__(self, seed: int) -> None:
        self.random, self.now = random.Random(seed), 0.0
        self.reports_exits = self.random.random() < 0.5
        self.server = JobEpochs(NUM_MEMBERS, 1000.0, resume_timeout=RESUME_TIMEOUT)
        self.earlier = deque([copy.deepcopy(self.server)], maxlen=4)  # after the last events
        self.members = [Member(number) for number in range(NUM_MEMBERS)]
        self.connected: set[int] = set()
        for member in self.members:
            self.connect(member)

    @property
    def alive(self) -> list[Member]:
        return [member for member in self.members if member.is_alive]

    def send(self, event: Event) -> None:
        self.now += 0.01
        commands = self.server.step(copy.copy(event))
        self.earlier.append(copy.deepcopy(self.server))
        for command in commands:
            for member in self.members:
                is_for_all = not isinstance(command, Fenced) and member.number in self.connected
                if is_for_all or (isinstance(command, Fenced) and command.member == member.number):
                    member.commands.append(command)

    def connect(self, member: Member) -> None:
        self.connected.add(member.number)
        for event in member.enroll():
            self.send(event)

    def crash(self) -> None:
        """Lose the last events, and all commands on their way; some members die meanwhile."""
        self.server = copy.deepcopy(self.random.choice(self.earlier))
        self.earlier = deque([copy.deepcopy(self.server)], maxlen=4)
        self.connected.clear()
        for member in self.members:
            member.commands.clear()
        self.send(Resume())
        returning = [member for member in self.alive if not self.may_kill(member, reports=False)]
        self.random.shuffle(returning)
        for member in returning:
            self.connect(member)
            if self.random.random() < 0.2:
                self.step()
        for member in self.members:
            if not member.is_alive and self.reports_exits:  # as launchers do
                self.send(Lost(member.number, 0, "killed"))
        self.now += RESUME_TIMEOUT
        self.send(Tick(self.now))

    def may_kill(self, member: Member, *, reports: bool) -> bool:
        if self.random.random() < 0.03 and len(self.alive) > 2:
            member.is_alive = False
            if reports:
                self.send(Lost(member.number, 0, "killed"))
            return True
        return False

    def step(self) -> None:
        member = self.random.choice(self.alive)
        if member.number not in self.connected:
            return
        if member.commands and self.random.random() < 0.7:
            member.receive(member.commands.popleft())
        elif not self.may_kill(member, reports=True) and (event := member.act()) is not None:
            self.send(event)

    def settle(self) -> None:
        """Deliver everything, until all that are left train in one epoch."""
        for _ in range(2000):
            for member in self.alive:
                while member.commands:
                    member.receive(member.commands.popleft())
                if member.is_alive and member.has_ended and (event := member.act()) is not None:
                    self.send(event)
            if all(not member.has_ended for member in self.alive):
                return
        raise AssertionError("it does not settle")


@pytest.mark.parametrize("part", range(4))
def test_all_make_the_same_steps_whenever_the_coordinator_ends(part: int) -> None:
    num_steps = 0
    for seed in range(part, num_examples(400), 4):
        job = Job(seed)
        for _ in range(120):
            if job.random.random() < 0.03:
                job.crash()
            if job.alive:
                job.step()
        for member in job.members:
            if not member.is_alive:
                job.send(Lost(member.number, 0, "killed"))
        job.settle()
        begins = {member.begin for member in job.alive}
        assert len(begins) == 1, f"seed {seed}"
        (begin,) = begins
        assert begin is not None
        assert {member.number for member in job.alive} == {*begin.members}
        num_steps += sum(member.num_made for member in job.alive)
    assert num_steps > 100, "training goes on"


def test_a_member_that_does_not_come_back_is_lost() -> None:
    job = Job(0)
    job.settle()
    job.send(Resume())
    for member in job.members[:3]:
        for event in member.enroll():
            job.send(event)
    assert not any(isinstance(each, End) for each in job.members[0].commands)
    job.send(Tick(job.now + RESUME_TIMEOUT))
    ends = [each for each in job.members[0].commands if isinstance(each, End)]
    assert [end.lost for end in ends] == [(), (3,)]


def test_one_that_has_finished_is_not_waited_for() -> None:
    job = Job(0)
    job.settle()
    job.send(Finish(3, 0))
    job.members[3].is_alive = False
    job.send(Resume())
    for member in job.members[:3]:
        for event in member.enroll():
            job.send(event)
    job.settle()
    assert {member.begin.members for member in job.alive if member.begin} == {(0, 1, 2)}
