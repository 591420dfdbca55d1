"""Buckets, and timelines of steps, against the bounds of the paper's equations."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import DescriptionError
from polyrhythm.sync.fusion.layers import (
    Buckets,
    LayerTimes,
    bucket_bounds,
    by_bytes,
    by_count,
    check_buckets,
    unfused,
)
from reproduction.dear.methods import mg_wfbp_buckets
from reproduction.dear.ring import Ring, StepTimes
from reproduction.dear.timeline import bytescheduler, dear, wfbp

times = st.floats(0, 10)
layers = st.lists(
    st.builds(LayerTimes, size=st.floats(0, 1e9), forward=times, backward=times),
    min_size=1,
    max_size=9,
)
rings = st.builds(Ring, latency=st.floats(0, 0.1), bandwidth=st.floats(1e6, 1e9))
workers = st.integers(2, 16)


def step_times(model: list[LayerTimes], ring: Ring, num_workers: int) -> StepTimes:
    """Step times with the whole model in one message, as in the paper's equations."""
    size = sum(layer.size for layer in model)
    return StepTimes(
        forward=sum(layer.forward for layer in model),
        backward=sum(layer.backward for layer in model),
        reduce_scatter=ring.reduce_scatter(size, num_workers),
        all_gather=ring.all_gather(size, num_workers),
    )


def split_buckets(model: list[LayerTimes], splits: list[bool]) -> Buckets:
    """Split a model into buckets at the layers where `splits` is True."""
    starts = [0, *(i for i in range(1, len(model)) if splits[i % len(splits)])]
    stops = [*starts[1:], len(model)]
    return tuple(range(start, stop) for start, stop in zip(starts, stops, strict=True))


@given(layers, rings, workers, st.lists(st.booleans(), min_size=1))
def test_no_schedule_beats_the_bounds(
    model: list[LayerTimes], ring: Ring, num_workers: int, splits: list[bool]
) -> None:
    bounds = step_times(model, Ring(latency=0.0, bandwidth=ring.bandwidth), num_workers)
    buckets = split_buckets(model, splits)
    decoupled = dear(model, buckets, ring, num_workers)
    coupled = wfbp(model, buckets, ring, num_workers)
    pieces = bytescheduler(model, ring, num_workers, piece=1e8, negotiation=0.001)
    slack = 1 + 1e-9
    assert decoupled.seconds * slack >= bounds.decoupled
    assert coupled.seconds * slack >= bounds.coupled
    for step in (decoupled, coupled, pieces):
        assert step.compute == pytest.approx(bounds.compute)
        assert step.exposed >= -1e-9
    if decoupled.compute > 0:
        speedup = num_workers * decoupled.compute / decoupled.seconds
        assert speedup <= bounds.max_speedup(num_workers) * slack


@pytest.mark.parametrize("ratio", [2.0, 3.0])
def test_fine_buckets_without_latency_reach_the_bounds(ratio: float) -> None:
    ring, num_workers, num_layers = Ring(latency=0.0, bandwidth=1e8), 4, 2000
    for total in (1e6, 2e7, 8e7, 3e8):
        layer = LayerTimes(
            size=total / num_layers, forward=0.3 / num_layers, backward=0.3 * ratio / num_layers
        )
        model = [layer] * num_layers
        bounds = step_times(model, ring, num_workers)
        buckets = unfused(num_layers)
        found = dear(model, buckets, ring, num_workers).seconds
        assert found == pytest.approx(bounds.decoupled, rel=5e-3)
        assert wfbp(model, buckets, ring, num_workers).seconds == pytest.approx(
            bounds.coupled, rel=5e-3
        )


@given(st.floats(0.01, 10), st.floats(0, 40))
def test_the_gain_is_that_of_equation_9_if_a_backward_takes_two_forwards(
    forward: float, gather: float
) -> None:
    times = StepTimes(
        forward=forward, backward=2 * forward, reduce_scatter=gather, all_gather=gather
    )
    expected = min(max(0.0, gather - forward), forward)
    assert times.gain == pytest.approx(expected, abs=1e-9)


def test_decoupling_can_lose_with_long_backwards() -> None:
    times = StepTimes(forward=1.0, backward=3.0, reduce_scatter=1.5, all_gather=1.5)
    assert times.coupled / times.decoupled == pytest.approx(4 / 4.5)


@given(st.lists(st.integers(0, 100)), st.integers(1, 20), st.integers(1, 5))
def test_bounds_cover_all_numbers_and_split_large_tensors_only(
    sizes: list[int], first: int, factor: int
) -> None:
    most = first * factor
    bounds, ends = bucket_bounds(sizes, first, most), [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    assert bounds[0] == 0
    assert bounds[-1] == ends[-1]
    lengths = [stop - start for start, stop in pairwise(bounds)]
    assert all(0 < length <= most for length in lengths)
    for bound in bounds:
        inside = [size for size, (a, b) in zip(sizes, pairwise(ends), strict=True) if a < bound < b]
        assert all(size > most for size in inside), "a tensor that fits is split"
    for number, (start, stop) in enumerate(pairwise(bounds)):
        num_tensors = sum(start <= a < b <= stop for a, b in pairwise(ends))
        assert num_tensors <= 1 or stop - start <= most
        if num_tensors > 1 and not any(size > most for size in sizes):
            assert stop - start <= first * 2**number


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20), st.floats(0.1, 300))
def test_buckets_by_bytes_are_as_large_as_allowed(sizes: list[float], most: float) -> None:
    buckets = by_bytes(sizes, most)
    check_buckets(buckets, len(sizes))
    bucket_sizes = [sum(sizes[i] for i in bucket) for bucket in buckets]
    for size, bucket in zip(bucket_sizes, buckets, strict=True):
        assert size <= most * (1 + 1e-9) or len(bucket) == 1
    for bucket, above in pairwise(buckets):
        assert sum(sizes[i] for i in above) + sizes[bucket[-1]] > most * (1 - 1e-9)


@given(st.integers(1, 30), st.integers(1, 40))
def test_buckets_by_count_are_full_except_the_first(num_layers: int, most: int) -> None:
    buckets = by_count(num_layers, most)
    check_buckets(buckets, num_layers)
    assert all(len(bucket) == most for bucket in buckets[1:])
    assert 1 <= len(buckets[0]) <= most


@given(layers, rings, workers)
def test_merging_never_takes_longer_than_no_fusion(
    model: list[LayerTimes], ring: Ring, num_workers: int
) -> None:
    buckets = mg_wfbp_buckets(model, ring, num_workers)
    check_buckets(buckets, len(model))
    plain = wfbp(model, unfused(len(model)), ring, num_workers).seconds
    assert wfbp(model, buckets, ring, num_workers).seconds <= plain * (1 + 1e-9) + 1e-9


def test_ranking_of_methods_matches_the_dear_paper() -> None:
    """Many small layers: fusion matters, and pieces cost more than they hide (Figures 6, 7)."""
    model = [LayerTimes(size=4 * 64e3, forward=0.15 / 161, backward=0.3 / 161)] * 161
    ring, num_workers = Ring(latency=50e-6, bandwidth=1.25e9), 64
    fused = by_bytes([layer.size for layer in model], 5e6)
    plain = unfused(len(model))
    assert (
        dear(model, plain, ring, num_workers).seconds
        < wfbp(model, plain, ring, num_workers).seconds
        < bytescheduler(model, ring, num_workers, piece=4e6, negotiation=1e-3).seconds
    )
    assert (
        dear(model, fused, ring, num_workers).seconds
        < dear(model, plain, ring, num_workers).seconds
    )
    large = [LayerTimes(size=2.1e6, forward=0.1 / 206, backward=0.2 / 206)] * 206  # as BERT-Base
    fused = by_bytes([layer.size for layer in large], 25e6)
    speedup = wfbp(large, fused, ring, num_workers).seconds / (
        dear(large, fused, ring, num_workers).seconds
    )
    assert 1.06 < speedup < 1.83  # the range that the paper measured


def test_the_first_layers_pieces_go_first() -> None:
    """Both layers are ready when the network is free; the forward waits for the first one only."""
    model = [
        LayerTimes(size=1e6, forward=1.0, backward=0.45),
        LayerTimes(size=1e7, forward=0, backward=0.5),
    ]
    ring = Ring(latency=0.0, bandwidth=1e7)
    pieces = bytescheduler(model, ring, 2, piece=1e6).seconds
    whole = wfbp(model, unfused(2), ring, 2).seconds
    assert pieces == pytest.approx(2.1)  # the first layer's piece ends 0.1 s after the other's 5th
    assert whole == pytest.approx(2.6)


@pytest.mark.parametrize(
    "buckets", [(range(2),), (range(1), range(2, 3)), (range(2), range(1, 3)), (range(0), range(3))]
)
def test_buckets_that_omit_or_repeat_layers_are_refused(buckets: Buckets) -> None:
    with pytest.raises(DescriptionError, match="of 3 layers"):
        check_buckets(buckets, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Ring(latency=-1.0, bandwidth=1.0),
        lambda: Ring(latency=0.0, bandwidth=0.0),
        lambda: LayerTimes(size=-1, forward=0, backward=0),
        lambda: by_bytes([1.0], 0),
        lambda: bucket_bounds([1], 2, 1),
        lambda: by_count(3, 0),
        lambda: bytescheduler([], Ring(latency=0, bandwidth=1), 2, piece=0),
    ],
)
def test_invalid_fusion_sizes_are_refused(make: object) -> None:
    with pytest.raises(DescriptionError, match="fix:"):
        make()
