"""The parity benchmark with torch's pipelining tests."""

import pytest

from benchmarks.parity.torch_cases import CASES, Case, Trial
from benchmarks.parity.torch_pipelining import measure, run_cases, silent


def passes(trial: Trial) -> None:
    trial.compare("equal", 1.0, 1.0)


def differs(trial: Trial) -> None:
    trial.compare("outputs", 1.0, 2.0 if trial.is_last else 1.0)


def fails(trial: Trial) -> None:
    if trial.is_last:
        raise RuntimeError("on purpose")


@pytest.mark.timeout(60)
def test_differences_errors_and_passes_are_distinguished() -> None:
    runs = [("a", fails), ("b", passes), ("c", differs), ("d", fails), ("e", passes)]
    facts = run_cases([Case(name, 2, run) for name, run in runs])
    assert [(fact.case, fact.value) for fact in facts] == [
        ("a", 0.0),
        ("b", 1.0),
        ("c", 0.0),
        ("d", 0.0),
        ("e", 1.0),
    ]
    assert silent(facts) == 1
    assert "rank 1: outputs" in facts[2].detail
    assert "on purpose" in facts[0].detail


@pytest.mark.timeout(60)
def test_quick_cases_pass() -> None:
    facts = measure(quick=True)
    assert facts
    assert not [fact for fact in facts if fact.value != 1.0]
    assert len({case.name for case in CASES}) == len(CASES)
