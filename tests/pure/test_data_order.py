"""The order of samples: a shuffle per epoch, known at any place without what comes before it."""

import random
import sys
import time
from collections import Counter
from itertools import combinations
from subprocess import run

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import chisquare

from polyrhythm.run.data.errors import DataError
from polyrhythm.run.data.order import Order

seeds = st.integers(0, 2**64 - 1)
A_MILLIONTH = 1e-6  # the chance that a fair shuffle fails a test of fairness here


@given(st.integers(1, 10_000), seeds, st.integers(0, 10**12))
@example(1, 0, 0)
@example(2, 0, 0)
@example(3, 1, 5)
@example(10_000, 2, 1)
def test_an_epoch_has_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    ids = Order(num_samples, seed).ids(epoch * num_samples, (epoch + 1) * num_samples)
    assert ids.dtype == np.int64
    assert np.array_equal(np.sort(ids), np.arange(num_samples))


def test_every_small_number_of_samples_is_shuffled() -> None:
    for num_samples in range(1, 300):
        ids = Order(num_samples, 7).ids(0, 3 * num_samples).reshape(3, -1)
        assert (np.sort(ids) == np.arange(num_samples)).all()


@given(st.integers(1, 50), seeds, st.booleans(), st.integers(0, 300), st.integers(0, 300))
def test_any_part_is_the_same_part_of_the_whole(
    num_samples: int, seed: int, shuffle: bool, start: int, length: int
) -> None:
    order = Order(num_samples, seed, shuffle)
    assert np.array_equal(
        order.ids(start, start + length), order.ids(0, start + length)[start : start + length]
    )


def test_epochs_and_seeds_differ() -> None:
    epochs = Order(500, 3).ids(0, 5000).reshape(10, 500)
    others = np.stack([Order(500, seed).ids(0, 500) for seed in range(10)])
    for first, second in [*combinations(epochs, 2), *combinations(others, 2)]:
        assert np.count_nonzero(first == second) < 20  # by chance 1, and rarely 5


def test_without_shuffling_samples_come_in_their_own_order() -> None:
    assert Order(4, shuffle=False).ids(2, 11).tolist() == [2, 3, 0, 1, 2, 3, 0, 1, 2]


@pytest.mark.parametrize("num_samples", [2, 3, 7, 64, 1000])
def test_each_place_has_each_sample_equally_often(num_samples: int) -> None:
    num_epochs = 400_000 // num_samples
    ids = Order(num_samples, 11).ids(0, num_epochs * num_samples).reshape(num_epochs, -1)
    for place in (0, num_samples // 2, num_samples - 1):
        counts = np.bincount(ids[:, place], minlength=num_samples)
        assert chisquare(counts).pvalue > A_MILLIONTH


def test_all_shuffles_of_a_few_samples_come_about_equally_often() -> None:
    ids = Order(4, 5).ids(0, 4 * 24_000).reshape(-1, 4)
    counts = Counter(map(tuple, ids.tolist()))
    assert len(counts) == 24
    assert chisquare(list(counts.values())).pvalue > A_MILLIONTH


def test_neighbours_are_no_neighbours_any_more() -> None:
    ids = Order(10_000, 1).ids(0, 10_000)
    steps = np.diff(ids)
    assert np.count_nonzero(np.abs(steps) <= 5) < 50  # by chance 10
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.06  # six deviations


def test_samples_without_number_need_neither_memory_nor_time() -> None:
    order = Order(10**12, 4)
    ids = order.ids(5 * 10**12 - 50_000, 5 * 10**12 + 50_000)
    assert len(set(ids[:50_000].tolist())) == len(set(ids[50_000:].tolist())) == 50_000
    assert ids.min() >= 0
    assert ids.max() < 10**12
    assert ids.std() > 10**11


def test_the_order_stays_what_it_is() -> None:
    """A run that goes on with another version of numpy, or of this, has to find its place."""
    assert Order(10, 0).ids(0, 20).tolist() == ORDER_OF_10
    assert Order(10**12, 2**64 - 1).ids(10**15, 10**15 + 3).tolist() == ORDER_OF_MANY


def test_the_state_of_random_generators_does_not_matter() -> None:
    order = Order(100, 3)
    before = order.ids(0, 100)
    random.seed(1), np.random.seed(1)
    state = np.random.get_state()[1].copy()
    assert np.array_equal(order.ids(0, 100), before)
    assert np.array_equal(np.random.get_state()[1], state)


def test_a_million_samples_take_less_than_drawing_them_one_by_one() -> None:
    def seconds(work: object) -> float:
        began = time.process_time()
        work()
        return time.process_time() - began

    order, chance = Order(10**6, 1), random.Random(1)
    ours = min(seconds(lambda: order.ids(0, 10**6)) for _ in range(3))
    drawn = min(seconds(lambda: [chance.random() for _ in range(10**6)]) for _ in range(3))
    assert ours < 10 * drawn


def test_no_torch_is_needed() -> None:
    code = "import sys, polyrhythm.run.data.order; assert 'torch' not in sys.modules"
    assert run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(("num", "seed", "says"), [(0, 0, "0 samples"), (1, -1, "seed=-1")])
def test_what_has_no_order_is_refused(num: int, seed: int, says: str) -> None:
    with pytest.raises(DataError, match=says):
        Order(num, seed)


ORDER_OF_10 = [0, 7, 1, 5, 9, 6, 4, 8, 2, 3, 2, 1, 0, 3, 8, 7, 4, 9, 6, 5]
ORDER_OF_MANY = [407532604189, 150013322830, 498369755289]
