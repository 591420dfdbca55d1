"""The enforcement token: one stage at a time, for a lease at most, and fairly."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policies.adaptive import Adaptive
from polyrhythm.sync.policies.windowed import NO_STAGE, EnforcementToken
from polyrhythm.types import Group, Worker

LEASE = 10.0
STAGES = st.integers(0, 3)


class Stages(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.token = EnforcementToken(LEASE)
        self.now = 0.0
        self.holders: dict[int, float] = {}  # acquisition time by stage, until release or expiry

    @rule(seconds=st.floats(0, 8))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.holders = {stage: at for stage, at in self.holders.items() if self.now < at + LEASE}

    @rule(stage=STAGES)
    def acquire(self, stage: int) -> None:
        if stage in self.holders:
            return
        held = bool(self.holders)
        acquired = self.token.acquire(stage, self.now)
        assert not (acquired and held), "two stages hold it"
        if acquired:
            self.holders[stage] = self.now
            assert self.token.expires == self.now + LEASE
        else:
            assert "token" in self.token.why_not(stage, self.now)

    @rule(stage=STAGES)
    def release(self, stage: int) -> None:
        self.holders.pop(stage, None)
        self.token.release(stage)

    @rule(stage=STAGES)
    def cancel_request(self, stage: int) -> None:
        self.token.cancel_request(stage)

    @invariant()
    def one_holder_at_most_and_the_right_one(self) -> None:
        assert len(self.holders) <= 1
        if self.holders:
            assert [self.token.holder] == list(self.holders)
        elif self.token.holder != NO_STAGE:
            assert self.now >= self.token.expires


TestStages = Stages.TestCase


def test_expired_lease_passes_the_token_on() -> None:
    token = EnforcementToken(LEASE)
    assert token.acquire(0, now=0.0)
    assert not token.acquire(1, now=9.9)
    assert token.why_not(1, now=9.9) == "stage 0 has the token"
    assert token.acquire(1, now=10.0)
    token.release(0)  # no effect: its lease has ended
    assert token.holder == 1
    assert not token.acquire(2, now=11.0)


def test_last_holder_yields_to_waiting_stages() -> None:
    token = EnforcementToken(LEASE)
    assert token.acquire(0, now=0.0)
    assert not token.acquire(1, now=1.0)
    token.release(0)
    assert not token.acquire(0, now=2.0)
    assert token.why_not(0, now=2.0) == "stage 1 has the token next"
    assert token.acquire(1, now=3.0)
    token.release(1)
    assert not token.acquire(1, now=4.0)  # stage 0 is next
    assert token.acquire(0, now=4.0)


def test_withdrawn_stage_does_not_block_the_token() -> None:
    token = EnforcementToken(LEASE)
    assert token.acquire(0, now=0.0)
    assert not token.acquire(1, now=1.0)
    token.release(0)
    token.cancel_request(1)
    assert token.acquire(0, now=2.0)


def test_refusals_older_than_a_lease_are_forgotten() -> None:
    token = EnforcementToken(LEASE)
    assert token.acquire(0, now=0.0)
    assert not token.acquire(1, now=1.0)
    token.release(0)
    assert not token.acquire(0, now=10.9)
    assert token.acquire(0, now=11.0)


@pytest.mark.parametrize("lease", [0.0, -1.0, float("nan")])
def test_non_positive_leases_are_refused(lease: float) -> None:
    with pytest.raises(PolicyError, match="lease="):
        EnforcementToken(lease)


def test_stage_stops_waiting_when_its_own_lease_ends() -> None:
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
    assert second.on_timer(11.0) == []  # the token is free at 11
    assert token.holder == 1
    assert first.next_timer() == 11.0
    (group,) = first.on_timer(11.0)
    assert group == Group((Worker(0, 0),), "waived: lacks s0p1 after 10 s")
    assert token.holder == 1
