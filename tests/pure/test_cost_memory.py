"""Memory of a stage: the sum, and how many micro-batches fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.cost.memory import MemoryBudget, StageMemory, needed, peak_temporary
from polyrhythm.errors import DescriptionError

amounts = st.integers(0, 10**12)
stages = st.builds(
    StageMemory,
    weights=amounts,
    gradients=amounts,
    optimizer=amounts,
    activation=amounts,
    message=amounts,
    recomputed=amounts,
    cast=amounts,
    temporary=amounts,
)


def test_every_term_is_counted_once() -> None:
    stage = StageMemory(
        weights=1,
        gradients=20,
        optimizer=300,
        activation=4000,
        message=50000,
        recomputed=600000,
        cast=7 * 10**6,
        temporary=8 * 10**7,
    )
    assert needed(stage, in_flight=2, window=3) == 87758321


def test_a_layer_runs_while_later_layers_hold_nothing() -> None:
    assert peak_temporary([50, 30, 5], [10, 10, 10]) == 30  # the first: 50 less 20
    assert peak_temporary([50, 45, 5], [10, 10, 10]) == 35
    assert peak_temporary([5, 5], [10, 10]) == 5
    assert peak_temporary([], []) == 0


@given(st.lists(st.tuples(amounts, amounts), min_size=1))
def test_temporary_memory_is_at_least_that_of_the_last_layer(layers: list[tuple[int, int]]) -> None:
    temporary, held = zip(*layers, strict=True)
    assert temporary[-1] <= peak_temporary(temporary, held) <= max(temporary)


@given(stages, amounts, st.integers(0, 4), st.integers(1, 40))
def test_max_in_flight_is_the_most_that_fits(
    stage: StageMemory, limit: int, window: int, num_microbatches: int
) -> None:
    budget = MemoryBudget(stages={4: [stage]}, limits=[limit], window=window)
    (max_in_flight,) = budget.max_in_flight(4, num_microbatches)
    assert 0 <= max_in_flight <= num_microbatches
    if max_in_flight > 0:
        assert needed(stage, in_flight=max_in_flight, window=window) <= limit
    if max_in_flight < num_microbatches:
        assert needed(stage, in_flight=max_in_flight + 1, window=window) > limit


def test_each_stage_has_its_own_memory_limit() -> None:
    stage = StageMemory(weights=10, gradients=0, optimizer=0, activation=5, message=1)
    budget = MemoryBudget(stages={1: [stage] * 3}, limits=(100, 22, 9), window=2)
    assert budget.needed(1, (2, 1, 0)) == (22, 17, 12)
    assert budget.max_in_flight(1, 8) == (8, 2, 0)


def test_microbatch_size_without_memory_figures_does_not_fit() -> None:
    assert MemoryBudget(stages={}, limits=(100, 100), window=2).max_in_flight(1, 8) == (0, 0)


def test_missing_stage_limit_is_refused() -> None:
    stage = StageMemory(weights=0, gradients=0, optimizer=0, activation=0, message=0)
    with pytest.raises(DescriptionError, match="memory of 2 stages for micro-batches of 4"):
        MemoryBudget(stages={4: [stage] * 2}, limits=(100,), window=2)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(DescriptionError, match="activation is -1B"):
        StageMemory(weights=0, gradients=0, optimizer=0, activation=-1, message=0)
