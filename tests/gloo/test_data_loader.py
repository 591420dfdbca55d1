"""Loading samples: batches hold the right ones, and errors name the sample."""

import dataclasses
import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from polyrhythm.run.data.loader import SampleLoader, decode_microbatches, encode_microbatches
from polyrhythm.run.data.order import DataError, SampleOrder
from polyrhythm.run.data.reader import StreamState, make_order
from polyrhythm.run.pipeline.batch import Microbatch, split_ranges


def hugging_face() -> Any:
    import transformers  # takes seconds

    return transformers


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


def test_microbatches_are_collated_one_by_one() -> None:
    samples = SampleLoader(numbers(30), SampleOrder(30, shuffle=False), seed=3)
    batch = samples.load_microbatches(((3, 6), (18, 23)), [4, 4])
    assert [m.args[0].tolist() for m in batch.microbatches] == [[3, 4, 5, 18], [19, 20, 21, 22]]
    assert [m.target.tolist()[0] for m in batch.microbatches] == [30, 190]
    assert batch.sizes == [4, 4]


def noisy_collate(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    drawn = [random.random(), np.random.rand(), torch.rand(1).item()]
    return torch.stack([x for x, _ in items]), torch.tensor(drawn)


def test_draws_follow_from_the_position_and_restore_the_generators() -> None:
    def drawn(ranges: Any, sizes: list[int], seed: int = 0) -> list[list[float]]:
        samples = SampleLoader(numbers(9), SampleOrder(9), noisy_collate, seed=seed)
        return [m.target.tolist() for m in samples.load_microbatches(ranges, sizes).microbatches]

    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    first = drawn(((0, 4),), [2, 2])
    after = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    assert after == (random.random(), np.random.rand(), torch.rand(1).item())
    assert drawn(((0, 2),), [2]) + drawn(((2, 4),), [2]) == first  # of another pipeline
    assert first[0] != first[1]
    assert drawn(((0, 4),), [2, 2], seed=1) != first


def test_dataset_that_draws_is_not_prefetched(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    sizes, ranges = [2, 2], ((0, 4),)
    plain = SampleLoader(numbers(9), SampleOrder(9))
    plain.load_microbatches(ranges, sizes)
    assert plain.prefetch_microbatches(ranges, sizes) is not None
    assert not caplog.text
    drawing = SampleLoader(numbers(9), SampleOrder(9), noisy_collate)
    assert drawing.prefetch_microbatches(ranges, sizes) is None
    drawing.load_microbatches(ranges, sizes)
    assert drawing.prefetch_microbatches(ranges, sizes) is None
    assert caplog.text.count("a prefetched batch is read again") == 1
    assert caplog.text.count("not prefetched; to prefetch, draw from a generator") == 1


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        lambda: random.gauss(0.0, 1.0),  # half of these calls change only `gauss_next`
        np.random.rand,
        lambda: torch.rand(1),
        lambda: torch.ones(1).normal_(),
    ],
)
def test_draw_in_the_prefetch_thread_is_noticed(
    draw: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    def collate(items: list[tuple[Tensor, Tensor]]) -> tuple[int, int]:
        if int(items[0][0]) > 3:
            draw()
        return 0, 0

    samples = SampleLoader(numbers(9), SampleOrder(9, shuffle=False), collate)
    samples.load_microbatches(((0, 4),), [2, 2])
    assert samples.prefetch_microbatches(((0, 4),), [2, 2]) is not None
    assert samples.prefetch_microbatches(((4, 8),), [2, 2]) is None
    assert not caplog.text
    samples.load_microbatches(((4, 8),), [2, 2])  # seeded
    assert "positions 4 to 5 draw random numbers and earlier ones did not" in caplog.text
    assert samples.prefetch_microbatches(((0, 4),), [2, 2]) is None


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_ranges_are_split_without_loss(lengths: list[int], data: st.DataObject) -> None:
    starts = [100 * i for i in range(len(lengths))]
    ranges = tuple((start, start + n) for start, n in zip(starts, lengths, strict=True))
    sizes, left = [], sum(lengths)
    while left:
        sizes.append(data.draw(st.integers(1, left)))
        left -= sizes[-1]
    parts = split_ranges(ranges, sizes)
    assert [sum(end - start for start, end in part) for part in parts] == sizes
    positions = [p for part in parts for start, end in part for p in range(start, end)]
    assert positions == [p for start, end in ranges for p in range(start, end)]


def test_what_another_stage_takes_is_encoded() -> None:
    target = (torch.arange(4), {"weights": np.ones(2), "names": ["a", "b"]})
    sent = [
        Microbatch(size=2, kwargs={"ids": torch.ones(2, 3)[:, :2], "flag": True}, target=target),
        Microbatch(size=1, target=None),
    ]
    found = decode_microbatches(encode_microbatches(sent), [2, 1])
    assert [m.size for m in found] == [2, 1]
    assert found[1] == sent[1]
    assert torch.equal(found[0].kwargs["ids"], torch.ones(2, 2))
    assert found[0].kwargs["flag"] is True
    assert torch.equal(found[0].target[0], torch.arange(4))
    assert found[0].target[1]["names"] == ["a", "b"]
    with pytest.raises(DataError, match=r"is a Lock|is a lock"):
        encode_microbatches([Microbatch(size=1, target=threading.Lock())])


@pytest.mark.parametrize(
    "collate",
    [
        lambda items: items[0][0],
        lambda items: torch.ones(2, 3),  # not the inputs and the target of two samples
        lambda items: "ab",
        lambda items: (1, 2, 3),
        lambda items: 1 / 0,
    ],
)
def test_collate_without_input_target_pair_is_an_error(collate: Any) -> None:
    samples = SampleLoader(numbers(9), SampleOrder(9), collate)
    with pytest.raises(DataError, match=r"3 samples at positions 0 to 1, 5 to 5"):
        samples.load(((0, 2), (5, 6)))


@dataclasses.dataclass
class NamedBatch:
    x: Any = None
    mask: Any = None
    labels: Any = None


def by_name(items: list[tuple[Any, Any]]) -> dict[str, list[Any]]:
    return {"x": [x for x, _ in items], "labels": [y for _, y in items]}


@pytest.mark.parametrize(
    "collate",
    [
        lambda items: {"x": [x for x, _ in items], "label": [y for _, y in items]},
        lambda items: hugging_face().BatchEncoding(
            {"x": [x for x, _ in items], "labels": [y for _, y in items]}
        ),
        lambda items: NamedBatch(x=[x for x, _ in items], labels=[y for _, y in items]),
        lambda items: hugging_face().utils.ModelOutput(
            x=[x for x, _ in items], labels=[y for _, y in items]
        ),
        lambda items: ({"x": [x for x, _ in items]}, [y for _, y in items]),
    ],
)
def test_batch_by_name_has_labels_as_its_target(collate: Any) -> None:
    samples = SampleLoader(numbers(9), SampleOrder(9, shuffle=False), collate)
    (found,) = samples.load_microbatches(((1, 3),), [2]).microbatches
    assert (found.args, found.kwargs, found.target) == ((), {"x": [1, 2]}, [10, 20])


@pytest.mark.parametrize("make", [dict, lambda item: hugging_face().BatchEncoding(item)])
def test_items_by_name_are_collated_by_default(make: Any) -> None:
    items = [
        make({"input_ids": [i, i], "pixels": np.ones(3) * i, "text": "a", "labels": i})
        for i in range(4)
    ]
    (found,) = (
        SampleLoader(items, SampleOrder(4, shuffle=False))
        .load_microbatches(((1, 3),), [2])
        .microbatches
    )
    assert found.kwargs["input_ids"].tolist() == [[1, 1], [2, 2]]  # not transposed
    assert found.kwargs["pixels"].shape == (2, 3)
    assert found.kwargs["text"] == ["a", "a"]
    assert found.target.tolist() == [1, 2]


def ragged(count: int) -> list[dict[str, list[int]]]:
    return [{"input_ids": [1] * (i + 1), "labels": [1] * (i + 1)} for i in range(count)]


def tokenizer(**options: Any) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({"a": 1}))
    return hugging_face().PreTrainedTokenizerFast(tokenizer_object=words, **options)


def padded_without_token(items: list[Any]) -> Any:
    return hugging_face().DataCollatorWithPadding(tokenizer())(items)


def padded_without_labels(items: list[Any]) -> Any:
    return hugging_face().DataCollatorWithPadding(tokenizer(pad_token="a"))(items)


@pytest.mark.parametrize(
    ("collate", "wrong", "fix"),
    [
        (lambda items: None, "is nothing (None)", "return the batch"),
        (lambda items: {"x": 1}, "has no labels, but 'x'", "DataCollatorForLanguageModeling"),
        (None, "item['input_ids'] has shapes (3,) and (4,)", "DataCollatorWithPadding"),
        (padded_without_token, "ValueError: Asking to pad", "pad_token = tokenizer.eos_token"),
        (padded_without_labels, "features (`labels` in this case)", "DataCollatorForSeq2Seq"),
        (lambda items: items[0]["text"], "KeyError: 'text'", "its own error is the cause"),
    ],
)
def test_unusable_batch_is_refused_with_its_positions(collate: Any, wrong: str, fix: str) -> None:
    samples = SampleLoader(ragged(9), SampleOrder(9, shuffle=False), collate)
    with pytest.raises(DataError) as caught:
        samples.load(((2, 4),))
    assert "2 samples at positions 2 to 3" in caught.value.wrong
    assert wrong in caught.value.wrong
    assert fix in caught.value.fix


class Batched(Dataset):
    """Reads several samples at once, as Dataset of Hugging Face datasets does."""

    def __init__(self) -> None:
        self.read, self.is_short = list[list[int]](), False

    def __len__(self) -> int:
        return 9

    def __getitem__(self, sample: int) -> Any:
        raise AssertionError("read one by one")

    def __getitems__(self, samples: list[int]) -> list[tuple[int, int]]:
        if 8 in samples:
            raise OSError("torn")
        self.read.append(samples)
        return [(i, i) for i in samples][self.is_short :]


def test_batched_read_is_used_where_a_dataset_has_it() -> None:
    dataset = Batched()
    samples = SampleLoader(dataset, SampleOrder(9, shuffle=False))
    assert samples.load(((1, 3), (5, 6))).inputs.tolist() == [1, 2, 5]
    assert dataset.read == [[1, 2], [5]]
    with pytest.raises(DataError, match=r"samples \[7, 8\], at positions 7 to 8: OSError: torn"):
        samples.load(((7, 9),))
    dataset.is_short = True
    with pytest.raises(DataError, match="__getitems__ of the Batched returned 1"):
        samples.load(((0, 2),))


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_dataset_of_hugging_face_is_read_by_one_call(form: str | None) -> None:
    import datasets  # takes seconds

    columns = {"input_ids": [[i, i] for i in range(9)], "labels": list(range(9))}
    dataset = datasets.Dataset.from_dict(columns).with_format(form)
    order = make_order(dataset, shuffle=False)
    assert order == SampleOrder(9, shuffle=False)
    found = SampleLoader(dataset, order).load(((1, 3), (8, 10)))
    assert found.inputs["input_ids"].tolist() == [[1, 1], [2, 2], [8, 8], [0, 0]]
    assert found.target.tolist() == [1, 2, 8, 0]
    collate = hugging_face().DataCollatorForLanguageModeling(tokenizer(pad_token="a"), mlm=False)
    ragged_dataset = datasets.Dataset.from_list(ragged(4)).with_format(form)
    texts = SampleLoader(ragged_dataset.remove_columns("labels"), SampleOrder(4), collate)
    assert texts.load(((0, 4),)).inputs["input_ids"].shape == (4, 4)


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
    assert len(samples._reader._reader(0)._states) < 70


def test_stream_resumes_from_dataset_state_in_another_process() -> None:
    samples = SampleLoader(Stream(), None)
    for start in range(0, 100, 10):
        samples.load(((start, start + 2),))
    dataset_state = samples.state_at(57)
    assert [state.position for state in dataset_state.shards] == [50]
    stream = Stream()
    samples = SampleLoader(stream, None)
    samples.resume_from(StreamState.from_json(json.loads(json.dumps(dataset_state.as_json()))))
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
    samples.resume_from(StreamState.from_json(json.loads(encoded)))
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


@pytest.mark.parametrize("num_workers", [0, 1])
def test_stateful_dataloader_of_samples_resumes(num_workers: int) -> None:
    def load(shuffled: int) -> SampleLoader:
        torch.manual_seed(shuffled)
        stream = StatefulDataLoader(
            numbers(20), batch_size=None, shuffle=True, num_workers=num_workers
        )
        return SampleLoader(stream, None)

    samples = load(0)
    whole = samples.load(((0, 12),)).target.tolist()
    assert whole != sorted(whole)
    samples.load(((8, 9),))
    encoded = json.dumps(samples.state_at(8).as_json())
    samples = load(1)
    samples.resume_from(StreamState.from_json(json.loads(encoded)))
    assert samples.load(((8, 12),)).target.tolist() == whole[8:]


@pytest.mark.parametrize(
    ("dataset", "order", "message"),
    [
        (StatelessStream(), None, "type StatelessStream, which has neither a length nor a state"),
        (iter([]), None, "neither a length nor a state"),
        (numbers(4), None, "no order for a dataset of 4"),
        (numbers(4), SampleOrder(5), "an order of 5 samples for a dataset of 4"),
        (Stream(), SampleOrder(5), "an order for a Stream, which has its own"),
        (DataLoader(numbers(4), 2), None, "a DataLoader with batch_size=2 as the dataset"),
        (StatefulDataLoader(numbers(4), 2), None, "a StatefulDataLoader with batch_size=2 as the"),
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
