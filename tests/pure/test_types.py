"""Actions print and parse back; errors keep their three parts."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PeerError, PlanError, ScheduleError
from polyrhythm.types import Action, Op, Worker

actions = st.builds(Action, st.sampled_from(Op), st.integers(0, 10_000))


@given(actions)
def test_action_parses_back_from_its_text(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F", "3", "X3", "F-1", "F1.5", "f3", "F²", "FB"])
def test_invalid_action_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ScheduleError, match="micro-batch number") as caught:
        Action.parse(text)
    assert repr(text) in str(caught.value)


def test_a_worker_prints_short() -> None:
    assert str(Worker(stage=2, pipeline=13)) == "s2p13"


def test_error_has_wrong_expected_and_fix_and_survives_a_process_boundary() -> None:
    error = PlanError("9 stages", expected="at most 6", fix="use 6").at("plan.json")
    assert str(error) == "plan.json: 9 stages\n  expected: at most 6\n  fix: use 6"
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (PlanError, str(error))


def test_peer_error_names_peer_action_and_duration() -> None:
    error = PeerError("s1p0", action="receiving F3", waited=4.25, cause="closed")
    assert str(error) == "lost s1p0 during receiving F3 after 4.2 s: closed"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
