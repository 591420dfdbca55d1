"""Partitions of layers into stages, compared with all partitions."""

from collections.abc import Iterator
from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PlanError
from polyrhythm.plan.partition import Floats, partition_layers
from tests.pure.step_cases import seeds


def every_cut(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, num_layers)))


def bottleneck(
    layers: tuple[int, ...],
    work: list[float],
    slowness: list[float],
    transfers: Floats | None = None,
    fits: np.ndarray | None = None,
) -> float:
    """Return the slowest stage or transfer of a partition; inf if a stage does not fit."""
    ends = [0, *accumulate(layers)]
    takes = []
    for stage, (a, b) in enumerate(pairwise(ends)):
        takes.append(sum(work[a:b]) * slowness[stage])
        if fits is not None and not fits[stage, a, b]:
            return float("inf")
        if transfers is not None and stage < len(layers) - 1:
            takes.append(float(transfers[stage, b]))
    return max(takes)


@st.composite
def works_and_slowness(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    num_layers = draw(st.integers(1, 9))
    num_stages = draw(st.integers(1, min(num_layers, 5)))
    value = draw(st.sampled_from([st.floats(0, 5), st.sampled_from([1.0, 2.0])]))
    work = draw(st.lists(value, min_size=num_layers, max_size=num_layers))
    slowness = draw(st.lists(st.floats(0.2, 5), min_size=num_stages, max_size=num_stages))
    return work, slowness


@given(works_and_slowness(), seeds, st.booleans(), st.booleans())
def test_the_slowest_stage_is_as_fast_as_in_the_best_of_all_cuts(
    drawn: tuple[list[float], list[float]], seed: int, with_links: bool, with_memory: bool
) -> None:
    work, slowness = drawn
    shape = len(work) + 1, len(work) + 1
    rng = np.random.default_rng(seed)
    transfers = rng.uniform(0, 10, (len(slowness) - 1, shape[0])) if with_links else None
    fits = rng.random((len(slowness), *shape)) < 0.7 if with_memory else None
    best = min(
        bottleneck(cut, work, slowness, transfers, fits)
        for cut in every_cut(len(work), len(slowness))
    )
    if best == float("inf"):
        with pytest.raises(PlanError, match=f"{len(work)} layers into {len(slowness)} stages"):
            partition_layers(work, slowness, transfers=transfers, fits=fits)
        return
    layers = partition_layers(work, slowness, transfers=transfers, fits=fits)
    assert sum(layers) == len(work)
    assert len(layers) == len(slowness)
    assert min(layers) >= 1
    assert bottleneck(layers, work, slowness, transfers, fits) == pytest.approx(best)


@pytest.mark.parametrize(
    ("num_layers", "slowness", "expected"),
    [
        (8, [1, 1, 1, 1], (2, 2, 2, 2)),
        (8, [1, 3], (6, 2)),
        (12, [1, 1, 3, 3], (5, 5, 1, 1)),  # or (4, 4, 2, 2): 6 rather than 5
        (3, [1, 1, 100], (1, 1, 1)),  # every stage has a layer
        (5, [2], (5,)),
    ],
)
def test_layers_follow_device_speed(
    num_layers: int, slowness: list[float], expected: tuple[int, ...]
) -> None:
    assert partition_layers([1.0] * num_layers, slowness) == expected


def test_stages_besides_the_slowest_are_even() -> None:
    """The last layer takes 10 in any partition."""
    assert partition_layers([1, 1, 1, 1, 1, 1, 10], [1, 1, 1, 1]) == (2, 2, 2, 1)


def test_a_cut_with_a_slow_transfer_is_avoided() -> None:
    transfers = np.array([[0.0, 0.0, 9.0, 0.0, 0.0]])
    assert partition_layers([1.0] * 4, [1, 1], transfers=transfers) in [(1, 3), (3, 1)]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="5 stages for 4 layers"):
        partition_layers([1.0] * 4, [1.0] * 5)


def test_stages_without_memory_are_refused() -> None:
    fits = np.ones((2, 4, 4), bool)
    fits[1] = False
    with pytest.raises(PlanError, match="3 layers into 2 stages"):
        partition_layers([1.0] * 3, [1.0, 1.0], fits=fits)
