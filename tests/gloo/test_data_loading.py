"""Loading samples: the right ones, ahead of training, and what goes wrong said where it matters."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from polyrhythm.errors import PeerError
from polyrhythm.run.coordinator.deals import Deals
from polyrhythm.run.data.errors import DataError
from polyrhythm.run.data.loading import Samples
from polyrhythm.run.data.order import Order
from polyrhythm.run.data.reading import order_of
from polyrhythm.sync.messages import Dealt, Take
from polyrhythm.types import Worker

ME = Worker(0, 0)


def numbers(num: int) -> TensorDataset:
    return TensorDataset(torch.arange(num), 10 * torch.arange(num))


class Stream(IterableDataset):
    """Gives 0, 1, 2, ... and can go on where it was; counts what it has given."""

    def __init__(self, num: int = 1000) -> None:
        self.num, self.next, self.num_read = num, 0, 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while self.next < self.num:
            self.next += 1
            self.num_read += 1
            yield self.next - 1, 10 * (self.next - 1)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Broken(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, sample: int) -> tuple[int, int]:
        if sample == 5:
            raise OSError("no such picture")
        return sample, sample


def test_a_batch_has_the_samples_at_its_positions() -> None:
    dataset = numbers(10)
    order = order_of(dataset, seed=4)
    assert order == Order(10, 4)
    with Samples(dataset, order) as samples:
        samples.ahead(((3, 6), (18, 22)))
        batch = samples.take()
    expected = [*order.ids(3, 6), *order.ids(18, 22)]
    assert batch.ranges == ((3, 6), (18, 22))
    assert batch.inputs.tolist() == expected
    assert batch.target.tolist() == [10 * sample for sample in expected]


@pytest.mark.parametrize(("inputs", "target"), [(True, False), (False, True), (False, False)])
def test_a_stage_has_only_what_it_needs(inputs: bool, target: bool) -> None:
    dataset = numbers(4)
    if not (inputs or target):
        dataset = Broken()  # it is not even asked
    order = order_of(dataset, shuffle=False)
    with Samples(dataset, order, needs_inputs=inputs, needs_target=target) as samples:
        samples.ahead(((0, 8),))
        batch = samples.take()
    assert (batch.inputs is not None, batch.target is not None) == (inputs, target)
    assert batch.ranges == ((0, 8),)


def test_samples_are_loaded_while_training_computes() -> None:
    loaded, may_load = threading.Event(), threading.Event()

    class Slow(Broken):
        def __getitem__(self, sample: int) -> tuple[int, int]:
            assert may_load.wait(20)
            loaded.set()
            return sample, sample

    with Samples(Slow(), Order(8)) as samples:
        samples.ahead(((0, 2),))  # returns, though nothing can be loaded yet
        may_load.set()
        assert loaded.wait(20)  # though nobody has asked for the batch
        assert len(samples.take().inputs) == 2


def test_positions_that_are_yet_to_be_dealt_are_loaded_when_they_come() -> None:
    deals = Deals()
    first, second = [deals.ask(Take(ME, number, 2), 20.0) for number in range(2)]
    with Samples(numbers(4), Order(4, shuffle=False), prefetch=2) as samples:
        samples.ahead(first)
        samples.ahead(second)
        deals.hear(Dealt(ME, 0, None, ((1, 3),)))
        assert samples.take().inputs.tolist() == [1, 2]
        deals.hear(Dealt(ME, 1, None, ()))
        assert samples.take() is None


def test_what_goes_wrong_is_raised_where_the_batch_is_taken() -> None:
    deals = Deals()
    lost = deals.ask(Take(ME, 0, 2), 20.0)
    with Samples(Broken(), Order(8, shuffle=False), prefetch=3) as samples:
        samples.ahead(((10, 15),))
        samples.ahead(lost)
        samples.ahead(((0, 3),))
        deals.fail(PeerError("the coordinator", action="training", waited=1.0, cause="gone"))
        with pytest.raises(DataError, match="sample 5, at position 13: OSError: no such picture"):
            samples.take()
        with pytest.raises(PeerError, match="gone"):
            samples.take()
        assert samples.take().inputs.tolist() == [0, 1, 2]  # and it goes on


def test_positions_that_do_not_come_are_waited_for_no_longer_than_asked() -> None:
    with Samples(numbers(4), Order(4)) as samples:
        samples.ahead(Deals().ask(Take(ME, 0, 2), 0.05))
        with pytest.raises(PeerError, match="waiting for positions"):
            samples.take()


def test_no_more_is_ahead_than_was_allowed() -> None:
    with Samples(numbers(4), Order(4), prefetch=2) as samples:
        with pytest.raises(DataError, match="a batch of no chunk"):
            samples.take()
        samples.ahead(((0, 1),))
        samples.ahead(((1, 2),))
        with pytest.raises(DataError, match="a chunk ahead of 2 others"):
            samples.ahead(((2, 3),))
        samples.take()
        samples.ahead(((2, 3),))
    with pytest.raises(DataError, match=r"after close\(\)"):
        samples.ahead(((2, 3),))


def test_closing_ends_the_thread_though_positions_are_still_to_come() -> None:
    before = threading.active_count()
    samples = Samples(numbers(4), Order(4), prefetch=2)
    samples.ahead(((0, 2),))
    samples.take()  # now the thread waits
    samples.ahead(Deals().ask(Take(ME, 0, 2), 600.0))
    began = time.monotonic()
    samples.close()
    samples.close()
    assert time.monotonic() - began < 4
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "collate", [lambda items: items[0][0], lambda items: (1, 2, 3), lambda items: 1 / 0]
)
def test_what_makes_no_pair_is_refused(collate: Any) -> None:
    with (
        Samples(numbers(9), Order(9), collate) as samples,
        pytest.raises(DataError, match=r"3 samples at positions 0 to 1, 5 to 5 make no batch"),
    ):
        samples.load(((0, 2), (5, 6)))


def test_items_are_collated_as_asked() -> None:
    def collate(items: list[tuple[Tensor, Tensor]]) -> tuple[int, int]:
        return sum(int(x) for x, _ in items), len(items)

    with Samples(numbers(9), Order(9, shuffle=False), collate) as samples:
        assert samples.load(((1, 4),)) == (((1, 4),), 6, 3)


def test_a_stream_is_read_forward_and_skips_what_others_take() -> None:
    stream = Stream()
    assert order_of(stream) is None
    with Samples(stream, None) as samples:
        assert samples.load(((2, 4),)).inputs.tolist() == [2, 3]
        assert samples.load(((8, 9), (12, 14))).target.tolist() == [80, 120, 130]
    assert stream.num_read == 14  # each of them once


def test_a_stream_goes_back_by_its_state() -> None:
    stream = Stream()
    with Samples(stream, None) as samples:
        for start in range(100, 900, 8):
            samples.load(((start, start + 4),))
        before = stream.num_read
        assert samples.load(((864, 866),)).inputs.tolist() == [864, 865]
        assert stream.num_read == before + 6  # from 860, where it was before
        assert samples.load(((40, 42),)).inputs.tolist() == [40, 41]  # from the beginning
        assert samples.load(((896, 898),)).inputs.tolist() == [896, 897]
        assert stream.num_read < before + 6 + 42 + 20  # not all that lies between
        assert len(samples._reader._places) < 70


def test_a_stream_goes_on_from_a_bookmark_in_another_process() -> None:
    with Samples(Stream(), None) as samples:
        for start in range(0, 100, 10):
            samples.load(((start, start + 2),))
        bookmark = samples.bookmark(57)
    assert bookmark.position == 50
    stream = Stream()
    with Samples(stream, None, start=bookmark) as samples:
        assert samples.load(((57, 60),)).inputs.tolist() == [57, 58, 59]
        assert stream.num_read == 10
        with pytest.raises(DataError, match="position 49 of a Stream that goes on from 50"):
            samples.load(((49, 51),))
    with Samples(numbers(3), Order(3)) as samples:
        assert samples.bookmark(57) is None


def test_a_stream_that_ends_says_where_and_can_be_read_again() -> None:
    with Samples(Stream(10), None) as samples:
        for _ in range(2):
            with pytest.raises(DataError, match="a Stream that ended after 10 samples"):
                samples.load(((8, 12),))
        assert samples.load(((8, 10),)).inputs.tolist() == [8, 9]


def test_a_stream_that_fails_names_the_sample_and_is_read_again() -> None:
    class FailsOnce(Stream):
        fails = True

        def __iter__(self) -> Iterator[tuple[int, int]]:
            for item in super().__iter__():
                if item[0] == 3 and self.fails:
                    self.fails = False
                    raise OSError("torn")
                yield item

    with Samples(FailsOnce(), None) as samples:
        with pytest.raises(DataError, match="sample 3: OSError: torn"):
            samples.load(((0, 5),))
        assert samples.load(((3, 5),)).inputs.tolist() == [3, 4]


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


@pytest.mark.parametrize(
    ("dataset", "order", "says"),
    [
        (Endless(), None, "type Endless, which has neither a length nor a state"),
        (iter([]), None, "neither a length nor a state"),
        (numbers(4), None, "no order for a dataset of 4"),
        (numbers(4), Order(5), "an order of 5 samples for a dataset of 4"),
        (Stream(), Order(5), "an order for a Stream, which has its own"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(dataset: Any, order: Order | None, says: str) -> None:
    with pytest.raises(DataError, match=says):
        Samples(dataset, order)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="0 samples"):
        order_of(numbers(0))
    with pytest.raises(DataError, match="prefetch=0"):
        Samples(numbers(4), Order(4), prefetch=0)
