"""The enforcement token: one stage at a time, for a lease at most, and each gets its turn."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from polyrhythm.errors import PolicyError
from polyrhythm.sync.adaptive import Adaptive
from polyrhythm.sync.token import NOBODY, EnforcementToken
from polyrhythm.types import Group, Worker

LEASE = 10.0
STAGES = st.integers(0, 3)


class Stages(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.token = EnforcementToken(LEASE)
        self.now = 0.0
        self.taken: dict[int, float] = {}  # by whom, and when; until given back or over

    @rule(seconds=st.floats(0, 8))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.taken = {stage: at for stage, at in self.taken.items() if self.now < at + LEASE}

    @rule(stage=STAGES)
    def take(self, stage: int) -> None:
        if stage in self.taken:
            return
        held = bool(self.taken)
        got = self.token.take(stage, self.now)
        assert not (got and held), "two stages hold it"
        if got:
            self.taken[stage] = self.now
            assert self.token.expires == self.now + LEASE
        else:
            assert "token" in self.token.why_not(stage, self.now)

    @rule(stage=STAGES)
    def give_back(self, stage: int) -> None:
        self.taken.pop(stage, None)
        self.token.give_back(stage)

    @rule(stage=STAGES)
    def forgo(self, stage: int) -> None:
        self.token.forgo(stage)

    @invariant()
    def one_holder_at_most_and_the_right_one(self) -> None:
        assert len(self.taken) <= 1
        if self.taken:
            assert [self.token.holder] == list(self.taken)
        elif self.token.holder != NOBODY:
            assert self.now >= self.token.expires


TestStages = Stages.TestCase


def test_it_passes_to_another_stage_when_the_lease_is_over() -> None:
    token = EnforcementToken(LEASE)
    assert token.take(0, now=0.0)
    assert not token.take(1, now=9.9)
    assert token.why_not(1, now=9.9) == "stage 0 has the token"
    assert token.take(1, now=10.0)
    token.give_back(0)  # too late: it is not its own any more
    assert token.holder == 1
    assert not token.take(2, now=11.0)


def test_a_stage_that_had_it_lets_one_that_asked_go_first() -> None:
    token = EnforcementToken(LEASE)
    assert token.take(0, now=0.0)
    assert not token.take(1, now=1.0)
    token.give_back(0)
    assert not token.take(0, now=2.0)
    assert token.why_not(0, now=2.0) == "stage 1 has the token next"
    assert token.take(1, now=3.0)
    token.give_back(1)
    assert not token.take(1, now=4.0)  # now it is stage 0's turn
    assert token.take(0, now=4.0)


def test_nobody_waits_for_a_stage_that_needs_it_no_more() -> None:
    token = EnforcementToken(LEASE)
    assert token.take(0, now=0.0)
    assert not token.take(1, now=1.0)
    token.give_back(0)
    token.forgo(1)
    assert token.take(0, now=2.0)


def test_nor_for_one_that_has_not_asked_for_a_lease() -> None:
    token = EnforcementToken(LEASE)
    assert token.take(0, now=0.0)
    assert not token.take(1, now=1.0)
    token.give_back(0)
    assert not token.take(0, now=10.9)
    assert token.take(0, now=11.0)


@pytest.mark.parametrize("lease", [0.0, -1.0, float("nan")])
def test_a_lease_lasts(lease: float) -> None:
    with pytest.raises(PolicyError, match="lease="):
        EnforcementToken(lease)


def test_a_stage_whose_lease_is_over_does_not_wait_for_the_end_of_the_next_one() -> None:
    token = EnforcementToken(LEASE)
    first, second = (
        Adaptive(2, last_groups=1, window=1.0, stage=stage, token=token) for stage in range(2)
    )
    for stage, policy in enumerate((first, second)):
        for pipeline in range(2):
            policy.on_join(Worker(stage, pipeline), "node", 0.0)
    first.on_ready(Worker(0, 0), 0.0)
    assert first.on_timer(1.0) == []  # it waits for the other worker, from 1 to 11
    second.on_ready(Worker(1, 0), 10.0)
    assert second.on_timer(11.0) == []  # at that moment the token is free
    assert token.holder == 1
    assert first.next_timer() == 11.0
    (group,) = first.on_timer(11.0)
    assert group == Group((Worker(0, 0),), "waived: lacks s0p1 after 10 s")
    assert token.holder == 1
