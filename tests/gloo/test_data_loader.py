"""Loading samples: batches hold the right ones, and errors name the sample."""

import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from polyrhythm.run.data.loader import SampleLoader
from polyrhythm.run.data.order import DataError, SampleOrder
from polyrhythm.run.data.reader import DatasetState, make_order


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count), 10 * torch.arange(count))


class Stream(IterableDataset):
    """Returns 0, 1, 2, ..., resumes from its state, and counts what is read."""

    def __init__(self, count: int = 1000) -> None:
        self.count, self.next, self.num_read = count, 0, 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while self.next < self.count:
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


def test_batch_holds_the_samples_at_its_positions() -> None:
    dataset = numbers(10)
    order = make_order(dataset, seed=4)
    assert order == SampleOrder(10, 4)
    samples = SampleLoader(dataset, order)
    batch = samples.load(((3, 6), (18, 22)))
    expected = [*order.ids(3, 6), *order.ids(18, 22)]
    assert batch.ranges == ((3, 6), (18, 22))
    assert batch.inputs.tolist() == expected
    assert batch.target.tolist() == [10 * sample for sample in expected]


@pytest.mark.parametrize(("inputs", "target"), [(True, False), (False, True), (False, False)])
def test_stage_loads_only_what_it_needs(inputs: bool, target: bool) -> None:
    dataset = numbers(4)
    if not (inputs or target):
        dataset = Broken()  # it is not read
    order = make_order(dataset, shuffle=False)
    samples = SampleLoader(dataset, order, needs_inputs=inputs, needs_target=target)
    batch = samples.load(((0, 8),))
    assert (batch.inputs is not None, batch.target is not None) == (inputs, target)
    assert batch.ranges == ((0, 8),)


@pytest.mark.parametrize(
    "collate", [lambda items: items[0][0], lambda items: (1, 2, 3), lambda items: 1 / 0]
)
def test_collate_without_input_target_pair_is_an_error(collate: Any) -> None:
    samples = SampleLoader(numbers(9), SampleOrder(9), collate)
    with pytest.raises(DataError, match=r"3 samples at positions 0 to 1, 5 to 5"):
        samples.load(((0, 2), (5, 6)))


def test_custom_collate_fn_is_used() -> None:
    def collate(items: list[tuple[Tensor, Tensor]]) -> tuple[int, int]:
        return sum(int(x) for x, _ in items), len(items)

    samples = SampleLoader(numbers(9), SampleOrder(9, shuffle=False), collate)
    assert samples.load(((1, 4),)) == (((1, 4),), 6, 3)


def test_stream_is_read_forward_and_skips_positions_of_other_pipelines() -> None:
    stream = Stream()
    assert make_order(stream) is None
    samples = SampleLoader(stream, None)
    assert samples.load(((2, 4),)).inputs.tolist() == [2, 3]
    assert samples.load(((8, 9), (12, 14))).target.tolist() == [80, 120, 130]
    assert stream.num_read == 14  # each once


def test_stream_seeks_back_by_its_state_dict() -> None:
    stream = Stream()
    samples = SampleLoader(stream, None)
    for start in range(100, 900, 8):
        samples.load(((start, start + 4),))
    before = stream.num_read
    assert samples.load(((864, 866),)).inputs.tolist() == [864, 865]
    assert stream.num_read == before + 6  # from the state at 860
    assert samples.load(((40, 42),)).inputs.tolist() == [40, 41]  # from the first state
    assert samples.load(((896, 898),)).inputs.tolist() == [896, 897]
    assert stream.num_read < before + 6 + 42 + 20  # from a later state, not from 42 on
    assert len(samples._reader._states) < 70


def test_stream_resumes_from_dataset_state_in_another_process() -> None:
    samples = SampleLoader(Stream(), None)
    for start in range(0, 100, 10):
        samples.load(((start, start + 2),))
    dataset_state = samples.state_at(57)
    assert dataset_state.position == 50
    stream = Stream()
    samples = SampleLoader(stream, None)
    samples.resume_from(DatasetState.from_json(json.loads(json.dumps(dataset_state.as_json()))))
    assert samples.load(((57, 60),)).inputs.tolist() == [57, 58, 59]
    assert stream.num_read == 10
    with pytest.raises(DataError, match=r"position 49 of a Stream .*\b50"):
        samples.load(((49, 51),))
    samples = SampleLoader(numbers(3), SampleOrder(3))
    assert samples.state_at(57) is None
    samples.resume_from(dataset_state)
    assert samples.load(((0, 3),)).inputs.sum() == 3  # a map-style dataset needs no state


def test_dataset_state_may_hold_values_that_json_cannot() -> None:
    class RandomStream(Stream):
        def __init__(self) -> None:
            super().__init__()
            self.rng, self.seen = random.Random(3), torch.zeros(1)

        def __iter__(self) -> Iterator[tuple[float, float]]:
            while True:
                self.seen += 1
                yield self.rng.random(), self.seen.item()

        def state_dict(self) -> dict[str, Any]:
            return {"chance": self.rng.getstate(), "seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.rng.setstate(state["chance"])
            self.seen = state["seen"]

    samples = SampleLoader(RandomStream(), None)
    samples.load(((0, 4),))
    expected = samples.load(((4, 6),))
    encoded = json.dumps(samples.state_at(4).as_json())
    samples = SampleLoader(RandomStream(), None)
    samples.resume_from(DatasetState.from_json(json.loads(encoded)))
    found = samples.load(((4, 6),))
    assert found.inputs.tolist() == expected.inputs.tolist()
    assert found.target.tolist() == expected.target.tolist() == [5, 6]


def test_dataset_state_that_cannot_be_encoded_is_rejected_at_start() -> None:
    class StreamWithLock(Stream):
        def state_dict(self) -> dict[str, Any]:
            return {"files": [{"lock": threading.Lock()}]}

    message = r"the state of a StreamWithLock\['files'\]\[0\]\['lock'\] is a lock"
    with pytest.raises(DataError, match=message):
        SampleLoader(StreamWithLock(), None)


def test_exhausted_stream_error_names_position_and_stream_is_reusable() -> None:
    samples = SampleLoader(Stream(10), None)
    for _ in range(2):
        with pytest.raises(DataError, match="a Stream that ended after 10 samples"):
            samples.load(((8, 12),))
    assert samples.load(((8, 10),)).inputs.tolist() == [8, 9]


def test_stream_error_names_the_sample_and_stream_is_reusable() -> None:
    class FailsOnce(Stream):
        fails = True

        def __iter__(self) -> Iterator[tuple[int, int]]:
            for item in super().__iter__():
                if item[0] == 3 and self.fails:
                    self.fails = False
                    raise OSError("torn")
                yield item

    samples = SampleLoader(FailsOnce(), None)
    with pytest.raises(DataError, match="sample 3: OSError: torn"):
        samples.load(((0, 5),))
    assert samples.load(((3, 5),)).inputs.tolist() == [3, 4]


class StatelessStream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


@pytest.mark.parametrize(
    ("dataset", "order", "message"),
    [
        (StatelessStream(), None, "type StatelessStream, which has neither a length nor a state"),
        (iter([]), None, "neither a length nor a state"),
        (numbers(4), None, "no order for a dataset of 4"),
        (numbers(4), SampleOrder(5), "an order of 5 samples for a dataset of 4"),
        (Stream(), SampleOrder(5), "an order for a Stream, which has its own"),
    ],
)
def test_unsupported_dataset_is_rejected(
    dataset: Any, order: SampleOrder | None, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        SampleLoader(dataset, order)


def test_dataset_error_names_the_sample() -> None:
    samples = SampleLoader(Broken(), SampleOrder(8, shuffle=False))
    with pytest.raises(DataError, match="sample 5, at position 13: OSError: no such picture"):
        samples.load(((10, 15),))
    assert samples.load(((0, 3),)).inputs.tolist() == [0, 1, 2]  # still usable


def test_empty_dataset_is_rejected() -> None:
    with pytest.raises(DataError, match="0 samples"):
        make_order(numbers(0))
