"""The bench's predictions of steps after faults come from the simulator, and from real losses."""

import signal

import pytest

from benchmarks.faults.predicted import FaultCase, cases, fault_predictions, simulated_job
from polyrhythm.simulate.simulator import simulate

# Steps after the loss / before it. Micro-batches of survivors, by the slowest pipeline.
EXPECTED = {
    "one of 4 pipelines, decoupled": 4 / 3,  # 3 micro-batches become 4
    # 4, 3, 3, and 2 of twice the time; then 5, 5 and 2.
    "one of 4 pipelines of unequal speeds, balanced": 5 / 4,
    "two of 4 pipelines leave, all_reduce": 6 / 3,
    "a stage of 2 pipelines x 4 stages, decoupled": (8 + 3) / (4 + 3),  # with filling and draining
    "a stage of the fast one of 3 pipelines x 2 stages, decoupled": (6 + 1) / (4 + 1),
}


@pytest.mark.parametrize("case", cases(quick=False), ids=lambda case: case.what)
def test_steps_after_a_fault_are_longer_by_what_survivors_compute(case: FaultCase) -> None:
    forward = case.setting.forward
    found = simulate(simulated_job(case, (forward, 2 * forward)), num_steps=case.setting.num_steps)
    assert found.stop_reason == ""
    assert [change.what for change in found.changes] == [f"d{rank} is lost" for rank in case.lost]
    ends = found.ends[0]
    assert len(ends) == case.setting.num_steps
    assert found.changes[-1].resumed < ends[-5], "steps are left to measure"
    *_, start, end = (each for each in ends if each < found.changes[0].at)
    assert (ends[-1] - ends[-2]) / (end - start) == pytest.approx(EXPECTED[case.what], rel=0.05)


def test_the_five_cases_are_losses_and_a_leave() -> None:
    assert EXPECTED.keys() == {case.what for case in cases(quick=False)}
    kinds = [case.what_each_gets for case in cases(quick=False)]
    assert (kinds.count(signal.SIGKILL), kinds.count(signal.SIGTERM)) == (4, 1)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_measured_step_after_a_fault_is_as_predicted() -> None:
    """Loosely: other work runs on the same cores."""
    (found,) = fault_predictions(quick=True)
    assert found.error < 0.5
    assert found.measured < found.measured_pause
    assert found.predicted_pause is not None
    assert found.predicted < found.predicted_pause
