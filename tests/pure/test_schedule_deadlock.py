"""A model of the runtime's messages: a schedule that passes the check never deadlocks.

Sends do not block the stage, a message is transferred only once its receive is posted, and a
receiver posts at most `window` receives ahead in each direction. Hypothesis chooses the next move.
"""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.schedule.builders import Schedule
from polyrhythm.schedule.check import check
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import Action, Op
from tests.pure.schedule_cases import ordered_schedules, specs


@dataclass
class Channel:
    """One direction of one link: messages in the order sent, receives in the order posted."""

    window: int
    sent: list[int] = field(default_factory=list)
    num_arrived: int = 0
    num_used: int = 0

    def can_travel(self) -> bool:
        posted = self.num_used + self.window
        return self.num_arrived < len(self.sent) and self.num_arrived < posted

    def travel(self) -> None:
        self.num_arrived += 1

    def next_is_here(self, microbatch: int) -> bool:
        here = self.num_used < self.num_arrived
        assert not here or self.sent[self.num_used] == microbatch, "paired with another message"
        return here


class Model:
    def __init__(self, schedule: Schedule, window: int) -> None:
        self.schedule = schedule
        self.position = [0] * len(schedule)
        links = range(len(schedule) - 1)
        self.down = [Channel(window) for _ in links]
        self.up = [Channel(window) for _ in links]

    def inbox(self, stage: int, op: Op) -> Channel | None:
        if op is Op.F:
            return self.down[stage - 1] if stage > 0 else None
        return self.up[stage] if stage < len(self.schedule) - 1 else None

    def outbox(self, stage: int, op: Op) -> Channel | None:
        if op is Op.F:
            return self.down[stage] if stage < len(self.schedule) - 1 else None
        return self.up[stage - 1] if stage > 0 else None

    def next_action(self, stage: int) -> Action | None:
        actions = self.schedule[stage]
        return actions[self.position[stage]] if self.position[stage] < len(actions) else None

    def moves(self) -> list[Channel | int]:
        """Return the possible moves: a message is transferred, or a stage runs its next action."""
        able: list[Channel | int] = [c for c in [*self.down, *self.up] if c.can_travel()]
        for stage in range(len(self.schedule)):
            action = self.next_action(stage)
            if action is not None:
                inbox = self.inbox(stage, action.op)
                if inbox is None or inbox.next_is_here(action.microbatch):
                    able.append(stage)
        return able

    def move(self, mover: Channel | int) -> None:
        if isinstance(mover, Channel):
            mover.travel()
            return
        action = self.next_action(mover)
        assert action is not None
        if (inbox := self.inbox(mover, action.op)) is not None:
            inbox.num_used += 1
        if (outbox := self.outbox(mover, action.op)) is not None:
            outbox.sent.append(action.microbatch)
        self.position[mover] += 1

    def run(self, choices: list[int]) -> bool:
        """Make moves by `choices`, repeatedly, until none is possible; return if all is done."""
        num_moves = 0
        while able := self.moves():
            self.move(able[choices[num_moves % len(choices)] % len(able)])
            num_moves += 1
        return all(self.next_action(stage) is None for stage in range(len(self.schedule)))


choices_s = st.lists(st.integers(0, 20), min_size=1, max_size=12)


@given(specs, st.integers(1, 8), st.integers(1, 12), st.integers(1, 4), choices_s)
def test_built_schedules_never_deadlock(
    spec: ScheduleSpec, num_stages: int, num_microbatches: int, window: int, choices: list[int]
) -> None:
    num_stages = num_stages if spec.limits is None else len(spec.limits)
    schedule = spec.build(num_stages=num_stages, num_microbatches=num_microbatches)
    assert Model(schedule, window).run(choices)


@given(ordered_schedules(), st.integers(1, 4), choices_s)
def test_schedule_deadlocks_exactly_when_check_fails(
    case: tuple[Schedule, int], window: int, choices: list[int]
) -> None:
    schedule, num_microbatches = case
    try:
        check(schedule, num_microbatches=num_microbatches)
    except ValueError:
        assert not Model(schedule, window).run(choices)
    else:
        assert Model(schedule, window).run(choices)


def test_nothing_is_delivered_without_posted_receive() -> None:
    schedule = ScheduleSpec("1f1b").build(num_stages=2, num_microbatches=3)
    assert not Model(schedule, window=0).run([0])
