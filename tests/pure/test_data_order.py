"""The order of samples: a shuffle per epoch, computed at any position without those before it."""

import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from subprocess import run

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polyrhythm.run.data.order import DataError, SampleOrder

seeds = st.integers(0, 2**64 - 1)
MIN_P_VALUE = 1e-6  # probability that a fair shuffle fails a test of fairness here


def p_value(counts: Sequence[int]) -> float:
    """Return the probability that equally likely values occur as unequally often, or more so."""
    from scipy.stats import chisquare  # takes a second, which other tests need not wait for

    return float(chisquare(counts).pvalue)


@given(st.integers(1, 10_000), seeds, st.integers(0, 10**12))
@example(1, 0, 0)
@example(2, 0, 0)
@example(3, 1, 5)
@example(10_000, 2, 1)
def test_epoch_has_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    ids = SampleOrder(num_samples, seed).ids(epoch * num_samples, (epoch + 1) * num_samples)
    assert ids.dtype == np.int64
    assert np.array_equal(np.sort(ids), np.arange(num_samples))


def test_every_small_number_of_samples_is_shuffled() -> None:
    for num_samples in range(1, 300):
        ids = SampleOrder(num_samples, 7).ids(0, 3 * num_samples).reshape(3, -1)
        assert (np.sort(ids) == np.arange(num_samples)).all()


@given(st.integers(1, 50), seeds, st.booleans(), st.integers(0, 300), st.integers(0, 300))
def test_any_range_equals_that_slice_of_the_whole_order(
    num_samples: int, seed: int, shuffle: bool, start: int, length: int
) -> None:
    order = SampleOrder(num_samples, seed, shuffle)
    assert np.array_equal(
        order.ids(start, start + length), order.ids(0, start + length)[start : start + length]
    )
    assert order.samples(start, start + length) == order.ids(start, start + length).tolist()


def test_few_samples_are_computed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    num_calls, ids = 0, SampleOrder.ids

    def counted(order: SampleOrder, start: int, end: int) -> np.ndarray:
        nonlocal num_calls
        num_calls += 1
        return ids(order, start, end)

    monkeypatch.setattr(SampleOrder, "ids", counted)
    order = SampleOrder(123_457, 987)
    found = [sample for start in range(0, 1000, 2) for sample in order.samples(start, start + 2)]
    assert found == ids(order, 0, 1000).tolist()
    assert num_calls < 5
    end = 1 << 62
    assert order.samples(end - 2, end) == ids(order, end - 2, end).tolist()


def test_epochs_and_seeds_differ() -> None:
    epochs = SampleOrder(500, 3).ids(0, 5000).reshape(10, 500)
    others = np.stack([SampleOrder(500, seed).ids(0, 500) for seed in range(10)])
    for first, second in [*combinations(epochs, 2), *combinations(others, 2)]:
        assert np.count_nonzero(first == second) < 20  # expected 1, rarely 5


def test_without_shuffling_samples_come_in_their_own_order() -> None:
    assert SampleOrder(4, shuffle=False).ids(2, 11).tolist() == [2, 3, 0, 1, 2, 3, 0, 1, 2]


@pytest.mark.parametrize("num_samples", [2, 3, 7, 64, 1000])
def test_each_position_has_each_sample_equally_often(num_samples: int) -> None:
    num_epochs = 400_000 // num_samples
    ids = SampleOrder(num_samples, 11).ids(0, num_epochs * num_samples).reshape(num_epochs, -1)
    for position in (0, num_samples // 2, num_samples - 1):
        counts = np.bincount(ids[:, position], minlength=num_samples)
        assert p_value(counts.tolist()) > MIN_P_VALUE


def test_all_permutations_of_few_samples_are_equally_likely() -> None:
    ids = SampleOrder(4, 5).ids(0, 4 * 24_000).reshape(-1, 4)
    counts = Counter(map(tuple, ids.tolist()))
    assert len(counts) == 24
    assert p_value(list(counts.values())) > MIN_P_VALUE


def test_shuffle_separates_neighbours() -> None:
    ids = SampleOrder(10_000, 1).ids(0, 10_000)
    steps = np.diff(ids)
    assert np.count_nonzero(np.abs(steps) <= 5) < 50  # expected 10
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.06  # six standard deviations


def test_huge_dataset_needs_little_memory_and_time() -> None:
    order = SampleOrder(10**12, 4)
    ids = order.ids(5 * 10**12 - 50_000, 5 * 10**12 + 50_000)
    assert len(set(ids[:50_000].tolist())) == len(set(ids[50_000:].tolist())) == 50_000
    assert ids.min() >= 0
    assert ids.max() < 10**12
    assert ids.std() > 10**11


def test_order_is_stable_across_versions() -> None:
    """A run must resume at the same samples with other versions of numpy or polyrhythm."""
    assert SampleOrder(10, 0).ids(0, 20).tolist() == ORDER_OF_10
    assert SampleOrder(10**12, 2**64 - 1).ids(10**15, 10**15 + 3).tolist() == ORDER_OF_MANY


def test_order_is_independent_of_global_rng_state() -> None:
    order = SampleOrder(100, 3)
    before = order.ids(0, 100)
    random.seed(1), np.random.seed(1)
    state = np.random.get_state()[1].copy()
    assert np.array_equal(order.ids(0, 100), before)
    assert np.array_equal(np.random.get_state()[1], state)


def test_million_samples_are_ordered_fast() -> None:
    def seconds(work: object) -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    order, rng = SampleOrder(10**6, 1), random.Random(1)
    order_time = min(seconds(lambda: order.ids(0, 10**6)) for _ in range(3))
    draw_time = min(seconds(lambda: [rng.random() for _ in range(10**6)]) for _ in range(3))
    assert order_time < 10 * draw_time


def test_order_does_not_import_torch() -> None:
    code = "import sys, polyrhythm.run.data.order; assert 'torch' not in sys.modules"
    assert run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("num_samples", "seed", "message"), [(0, 0, "0 samples"), (1, -1, "seed=-1")]
)
def test_invalid_order_is_rejected(num_samples: int, seed: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        SampleOrder(num_samples, seed)


ORDER_OF_10 = [0, 7, 1, 5, 9, 6, 4, 8, 2, 3, 2, 1, 0, 3, 8, 7, 4, 9, 6, 5]
ORDER_OF_MANY = [407532604189, 150013322830, 498369755289]
