"""Streams of Hugging Face datasets: pipelines divide the shards, each sample is used once."""

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyrhythm.run.checkpoint.manifest import read_manifest
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.data.loader import SampleLoader, WorkerPrefetcher
from polyrhythm.run.data.order import DataError
from polyrhythm.run.data.reader import ShardLayout, StreamState
from polyrhythm.run.data.worker_pool import WorkerOptions
from polyrhythm.run.trainer.config import CheckpointConfig, DataConfig
from polyrhythm.sync.dispatch import Ranges
from tests.gloo.trainer_jobs import BATCH, NUM_STEPS, plan_of, run_job, trainer

NUM_FILES, FILE_SAMPLES = 8, 60
STOP_STEP = 6


def stream(
    read: list[int] | None = None, *, num_files: int = NUM_FILES, file_samples: int = FILE_SAMPLES
) -> Any:
    """Return a stream of numbered samples; the numbers of those that are read go to `read`."""

    def samples(files: list[int]) -> Iterator[dict[str, int]]:
        for file in files:
            for number in range(file * file_samples, (file + 1) * file_samples):
                yield {"number": number}

    def record(item: dict[str, int]) -> dict[str, int]:
        if read is not None:
            read.append(item["number"])
        return item

    files = {"files": list(range(num_files))}
    from datasets import IterableDataset  # takes seconds

    return IterableDataset.from_generator(samples, gen_kwargs=files).map(record)


def collate(items: list[dict[str, int]]) -> tuple[Tensor, Tensor]:
    """Make inputs and targets of the numbers alone, as the job in `trainer_jobs` takes them."""
    numbers = torch.tensor([item["number"] for item in items]).float()
    inputs = torch.sin(numbers[:, None] * torch.arange(1, 9))
    return inputs, torch.tanh(inputs[:, :4]) + inputs[:, 4:]


def only_numbers(items: list[dict[str, int]]) -> tuple[Tensor, Tensor]:
    numbers = torch.tensor([item["number"] for item in items])
    return numbers, numbers


def loader(dataset: Any, batch_size: int = 16, **options: Any) -> SampleLoader:
    return SampleLoader(dataset, None, only_numbers, batch_size=batch_size, **options)


def numbers(samples: SampleLoader, *ranges: tuple[int, int]) -> list[int]:
    found: list[int] = samples.load(ranges).inputs.tolist()
    return found


@given(st.integers(1, 12), st.integers(1, 8), st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_layout_gives_each_position_its_place_in_one_shard(
    num_shards: int, block: int, lengths: list[int]
) -> None:
    layout, end = ShardLayout(num_shards, block), sum(lengths)
    found = dict[int, list[int]]()
    start = 0
    for length in lengths:  # however the positions are divided
        for shard, low, high in layout.parts(((start, start + length),)):
            found.setdefault(shard, []).extend(range(low, high))
        start += length
    assert sum(map(len, found.values())) == end
    for shard, places in found.items():
        assert places == list(range(layout.num_before(shard, end)))


@pytest.mark.parametrize(
    ("num_files", "batch_size", "expected"), [(8, 24, 8), (100, 64, 16), (5, 24, 4), (7, 11, 1)]
)
def test_number_of_shards_divides_the_batch(num_files: int, batch_size: int, expected: int) -> None:
    assert loader(stream(num_files=num_files), batch_size).num_shards == expected


def test_pipeline_reads_only_its_own_shards() -> None:
    whole = loader(stream())
    read: tuple[list[int], list[int]] = ([], [])
    pipelines = [loader(stream(into)) for into in read]
    for step in range(10):
        start = 16 * step
        expected = numbers(whole, (start, start + 16))
        found = numbers(pipelines[0], (start, start + 8)) + numbers(
            pipelines[1], (start + 8, start + 16)
        )
        assert found == expected
        assert {number // FILE_SAMPLES for number in expected} == set(range(NUM_FILES))
    assert len({*read[0], *read[1]}) == len(read[0]) + len(read[1]) == 160  # each sample once


def test_stream_resumes_from_the_states_of_all_pipelines() -> None:
    whole, pipelines = loader(stream()), [loader(stream()) for _ in range(2)]
    for start in range(0, 160, 16):
        numbers(whole, (start, start + 16))
        numbers(pipelines[0], (start, start + 8))
        numbers(pipelines[1], (start + 8, start + 16))
    pipelines[0].remember(pipelines[1].state_at(160))
    state = StreamState.from_json(json.loads(json.dumps(pipelines[0].state_at(160).as_json())))
    read = list[int]()
    resumed = loader(stream(read), batch_size=4)  # the layout is that of the state
    resumed.resume_from(state)
    assert numbers(resumed, (160, 171)) == numbers(whole, (160, 171))
    assert len(read) <= 11 + NUM_FILES * 8  # a state is at most 8 samples old


def test_workers_divide_the_shards() -> None:
    plain, made = loader(stream()), loader(stream(), workers=WorkerOptions(num_workers=3))
    ahead = WorkerPrefetcher(made, lambda ranges: [4, 4, 4, 4])
    try:
        for start in (0, 16, 32, 16):
            next_: Ranges = ((start + 16, start + 32),)
            batch = ahead.load(((start, start + 16),), [4, 4, 4, 4], [next_])
            found = [number for m in batch.microbatches for number in m.args[0].tolist()]
            assert found == numbers(plain, (start, start + 16))
        assert len(multiprocessing.active_children()) == 3
        made.follow_all(True)
        assert made.workers.num_workers == 1
        resumed = loader(stream())
        resumed.resume_from(made.state_at(32))
        assert numbers(resumed, (32, 40)) == numbers(plain, (32, 40))
    finally:
        made.close()


def test_reader_that_may_get_any_samples_follows_all_shards() -> None:
    read = list[int]()
    samples = loader(stream(read))
    samples.follow_all(True)
    numbers(samples, (152, 160))
    assert len(read) == 160
    assert [shard.position for shard in samples.state_at(152).shards] == [20] * 4 + [18] * 4


class Unresumable:
    num_shards = 4

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...

    def shard(self, num_shards: int, index: int) -> Any:
        return iter(range(index))


def test_impossible_shards_are_refused() -> None:
    with pytest.raises(DataError, match="stream_shards=3 for a IterableDataset of 8 shards and"):
        loader(stream(), num_shards=3)
    with pytest.raises(DataError, match="stream_shards=16"):
        loader(stream(), num_shards=16)
    with pytest.raises(DataError, match=r"shard 0 of 4 of a Unresumable is a range_iterator"):
        loader(Unresumable())
    assert loader(Unresumable(), num_shards=1).num_shards == 1
    state = loader(stream()).state_at(0)
    with pytest.raises(DataError, match="a dataset of 9 shards, and the checkpoint has the state"):
        loader(stream(num_files=9)).resume_from(state)
    with pytest.raises(DataError, match="stream_shards=2, and the checkpoint has 8"):
        loader(stream(), num_shards=2).resume_from(state)


def test_shard_that_ends_is_an_error_that_says_how_to_repeat_it() -> None:
    dataset = stream(file_samples=3)
    samples = loader(dataset)
    assert len(numbers(samples, (0, 16))) == 16
    with pytest.raises(DataError, match=r"shard 0 of 8 of a .* ended after 3(.|\n)*repeat\(None\)"):
        numbers(samples, (16, 32))
    samples = loader(dataset.repeat(None))
    assert numbers(samples, (0, 16), (16, 32)).count(0) == 2


def train(
    folder: Path, shape: tuple[int, int], steps: int, *, saved: Path | None = None, **more: Any
) -> list[Any]:
    """Return by rank: losses by step, and the numbers of the samples read."""
    plan = plan_of(*shape)

    def work(ctx: DistContext | None) -> Any:
        read = list[int]()
        options = {"collate_fn": collate, "run_dir": folder / "run", **more}
        options["checkpoint"] = CheckpointConfig(every=STOP_STEP)
        with trainer(plan, dataset=stream(read), **options) as made:
            if saved is not None:
                made.restore(saved)
            ends = made.fit(max_steps=steps).steps
            return {end.step: end.loss for end in ends}, read

    return run_job(plan.num_workers, work, folder)


@pytest.mark.parametrize(
    ("before", "after", "sync"),
    [
        ((1, 2), (1, 1), "decoupled"),
        ((1, 1), (2, 2), "balanced"),
        pytest.param((2, 2), (1, 3), "all_reduce", marks=pytest.mark.long),
        pytest.param((1, 2), (1, 2), "adaptive", marks=pytest.mark.long),
    ],
)
def test_sharded_stream_continues_with_another_plan(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int], sync: str
) -> None:
    [(whole, _)] = train(tmp_path / "whole", (1, 1), NUM_STEPS)
    first = train(tmp_path, before, STOP_STEP + 1, sync=sync)
    saved, _ = sorted((tmp_path / "run" / "checkpoints").iterdir())  # during training, at its end
    second = train(tmp_path, after, NUM_STEPS, sync=sync, saved=saved)
    step = read_manifest(saved).step
    if sync != "adaptive":
        assert step == STOP_STEP
        losses = {number: loss for number, loss in first[0][0].items() if number < step}
        assert losses | second[0][0] == pytest.approx(whole, abs=1e-5)
    if before == (1, 2) and sync == "decoupled":
        both = [number for _, read in first for number in read]
        assert len(set(both)) == len(both) == (STOP_STEP + 1) * BATCH
    for _, read in second if sync != "balanced" else ():  # there shares, read ahead, may change
        # Nearly from where the first job has stopped.
        assert len(read) <= (NUM_STEPS - step) * BATCH + NUM_FILES * 8


def test_stream_shards_is_an_option_of_the_trainer(tmp_path: Path) -> None:
    [(_, read)] = train(tmp_path, (1, 1), 1, data=DataConfig(stream_shards=1))
    assert read[:BATCH] == list(range(BATCH))  # in the order of the dataset
