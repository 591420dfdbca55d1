"""Worker processes read the same samples and draw the same numbers, and end with their parent."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from polyrhythm.errors import LaunchError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.coordinator.client import SampleRequests
from polyrhythm.run.data.loader import SampleLoader, WorkerPrefetcher
from polyrhythm.run.data.order import DataError, SampleOrder
from polyrhythm.run.data.worker_pool import WorkerOptions, WorkerPool
from polyrhythm.run.trainer.config import DataConfig
from polyrhythm.sync.dispatch import Ranges
from polyrhythm.sync.protocol import Acquire, Acquired
from polyrhythm.types import Worker
from tests.gloo.trainer_jobs import fit, plan_of, run_job, samples, trainer

RANGES: Ranges = ((0, 4), (7, 11))


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count), 10 * torch.arange(count))


def draw_and_stack(items: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    drawn = torch.tensor([random.random(), np.random.rand(), torch.rand(1).item()])
    large = torch.rand(600, 600)  # goes through shared memory
    x = torch.stack([x for x, _ in items])
    return {"x": x, "half": x.bfloat16(), "text": "a", "large": large, "labels": drawn}


def two_each(ranges: Ranges) -> list[int]:
    return [2] * (sum(end - start for start, end in ranges) // 2)


def loader(dataset: Any, collate: Any = None, **options: Any) -> SampleLoader:
    order = None if isinstance(dataset, IterableDataset) else SampleOrder(len(dataset), 3)
    return SampleLoader(
        dataset, order, collate, seed=5, workers=WorkerOptions(**{"num_workers": 2, **options})
    )


@pytest.fixture
def opened() -> Iterator[list[SampleLoader]]:
    made = list[SampleLoader]()
    yield made
    for each in made:
        each.close()
    assert not multiprocessing.active_children()


def test_workers_draw_what_one_process_draws(opened: list[SampleLoader]) -> None:
    made = loader(numbers(20), draw_and_stack)
    opened.append(made)
    expected = made.load_microbatches(RANGES, two_each(RANGES)).microbatches
    before = torch.get_rng_state(), random.getstate()
    ahead = WorkerPrefetcher(made, two_each)
    for _ in range(2):  # the second time as predicted
        found = ahead.load(RANGES, two_each(RANGES), [((30, 34),), RANGES]).microbatches
        for m, other in zip(found, expected, strict=True):
            assert m.size == other.size
            assert m.kwargs.pop("text") == "a"
            assert m.kwargs.keys() == {"x", "half", "large"}
            assert all(torch.equal(value, other.kwargs[key]) for key, value in m.kwargs.items())
            assert torch.equal(m.target, other.target)
            m.target.zero_()  # not read-only
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


class Recorded(Dataset):
    """Writes the process that reads each sample into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 100

    def __getitem__(self, sample: int) -> tuple[int, int]:
        with (self.folder / f"{sample}").open("a") as file:
            file.write(f"{os.getpid()} ")
        return sample, sample

    def readers(self, sample: int) -> list[str]:
        path = self.folder / f"{sample}"
        return path.read_text().split() if path.exists() else []


def eventually(condition: Any) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_predicted_batches_are_read_ahead_once(tmp_path: Path, opened: list[SampleLoader]) -> None:
    dataset = Recorded(tmp_path)
    made = SampleLoader(
        dataset, SampleOrder(100, shuffle=False), workers=WorkerOptions(num_workers=2)
    )
    opened.append(made)
    ahead, requests = WorkerPrefetcher(made, two_each), SampleRequests()
    steps: list[Ranges] = [((4 * i, 4 * i + 4),) for i in range(6)]
    ahead.load(steps[0], [2, 2], steps[1:4])
    assert eventually(lambda: all(dataset.readers(sample) for sample in range(16)))
    later = requests.submit(Acquire(Worker(0, 0), 0, 4), 20.0)
    ahead.load(steps[1], [2, 2], [*steps[2:4], later])
    assert not dataset.readers(16)
    requests.on_receive(Acquired(Worker(0, 0), 0, None, steps[4]))
    assert eventually(lambda: all(dataset.readers(sample) for sample in range(16, 20)))
    ahead.load(steps[2], [4], [steps[3]])  # other sizes: it is read again; step 4 is dropped
    ahead.load(steps[3], [2, 2])
    ahead.load(steps[4], [2, 2])
    counts = [len(dataset.readers(sample)) for sample in range(24)]
    assert counts == [1] * 8 + [2] * 4 + [1] * 4 + [2] * 4 + [0] * 4
    assert str(os.getpid()) not in {pid for i in range(20) for pid in dataset.readers(i)}
    ahead.close()
    assert not multiprocessing.active_children()


class Broken(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, sample: int) -> tuple[int, int]:
        if sample == 5:
            raise OSError("no such picture")
        if sample == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        if sample == 7:
            return threading.Lock(), 0  # type: ignore[return-value]
        return sample, sample


def test_error_in_a_worker_shows_the_users_line(opened: list[SampleLoader]) -> None:
    made = SampleLoader(
        Broken(), SampleOrder(8, shuffle=False), list, workers=WorkerOptions(num_workers=1)
    )
    opened.append(made)
    failing, good, unsent, killed, after = (made.submit(((i, i + 1),)) for i in (5, 0, 7, 6, 0))
    with pytest.raises(DataError, match="sample 5, at position 5: OSError: no such") as caught:
        made.collect(failing)
    assert 'raise OSError("no such picture")' in str(caught.value.__cause__)
    assert "test_data_workers.py" in str(caught.value.__cause__)
    with pytest.raises(DataError, match="1 parts"):  # the collator makes a list of one item
        made.collect(good)
    with pytest.raises(DataError, match="1 parts"):
        made.collect(unsent)
    for future in (killed, after):
        with pytest.raises(DataError, match=r"data worker 0 ended with exit code -9 .*\(6, 7\)"):
            made.collect(future)


def test_batch_that_cannot_be_sent_is_an_error(opened: list[SampleLoader]) -> None:
    made = loader(numbers(4), lambda items: (threading.Lock(), 0))
    opened.append(made)
    with pytest.raises(DataError, match="is a lock"):
        made.collect(made.submit(((0, 1),)))
    made = loader(numbers(4), worker_init_fn=lambda number: 1 / 0)
    opened.append(made)
    with pytest.raises(DataError, match="ZeroDivisionError"):
        made.collect(made.submit(((0, 1),)))


def large_tensors(ranges: Ranges) -> Any:
    torch.manual_seed(ranges[0][0])
    images = torch.rand(64, 3, 50, 50)
    return {
        "images": images,
        "part": images[8:40],  # of a larger storage
        "columns": images.transpose(0, 1),
        "complex": torch.complex(images, images).conj(),
        "learned": torch.rand(70_000, requires_grad=True),
        "small": [(torch.arange(4), "text")],
        "many": [torch.full((70_000,), i) for i in range(210)] if ranges[0][0] == 1 else [],
    }


def test_large_tensors_pass_through_shared_memory() -> None:
    def num_descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with WorkerPool(large_tensors, None, WorkerOptions(num_workers=2)) as pool:
        pool.submit(((0, 1),)).result()
        before = num_descriptors()
        for start in (1, 2, 3):
            found, expected = (
                pool.submit(((start, start + 1),)).result(),
                large_tensors(((start, 0),)),
            )
            for part, other in zip(
                pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True
            ):
                if isinstance(other, Tensor):
                    assert torch.equal(part, other)
                    assert part.untyped_storage().nbytes() == other.numel() * other.element_size()
                else:
                    assert part == other
            assert found["images"].is_shared()
            assert not found["small"][0][0].is_shared()
            found["images"].add_(1)  # may be changed
        del found, part
        assert num_descriptors() <= before


class WorkerNumbers(Dataset):
    start = 0

    def __len__(self) -> int:
        return 9

    def __getitem__(self, sample: int) -> tuple[int, int]:
        return self.start + sample, get_worker_info().num_workers


def set_start(number: int) -> None:
    info = get_worker_info()
    assert info.id == number
    info.dataset.start = 100


def test_worker_init_fn_changes_the_dataset_of_its_process(opened: list[SampleLoader]) -> None:
    made = loader(WorkerNumbers(), worker_init_fn=set_start, multiprocessing_context="fork")
    opened.append(made)
    inputs, target = made.collect(made.submit(((0, 9),)))[1:]
    assert sorted(inputs.tolist()) == list(range(100, 109))
    assert set(target.tolist()) == {2}


SPAWNED = """
from tests.gloo.test_data_workers import *

if __name__ == "__main__":
    made = loader(numbers(9), draw_and_stack, num_workers=1, multiprocessing_context="spawn")
    (expected,) = made.load_microbatches(((0, 2),), [2]).microbatches
    assert torch.equal(made.collect(made.submit(((0, 2),))).target, expected.target)
    made.close()
    made = loader(numbers(4), lambda items: items, multiprocessing_context="spawn")
    with pytest.raises(DataError, match="cannot start") as caught:
        made.submit(((0, 1),))
    assert "fork" in caught.value.fix
"""


@pytest.mark.long
def test_spawned_workers_draw_the_same_and_need_picklable_datasets(tmp_path: Path) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    folder = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    subprocess.run([sys.executable, script], check=True, timeout=100, env=environment)


ORPHANS = """
import os, time, sys
from polyrhythm.run.data.worker_pool import WorkerOptions, WorkerPool

def read(ranges):
    os.write(1, f"{os.getpid()}\\n".encode())  # a whole line at once
    time.sleep(600 if ranges[0][0] else 0)

pool = WorkerPool(read, None, WorkerOptions(num_workers=3))
for start in (0, 0, 1):
    pool.submit(((start, start + 1),))
time.sleep(600)
"""


@pytest.mark.long
def test_workers_end_with_a_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        workers = [int(parent.stdout.readline()) for _ in range(3)]
        os.kill(workers[0], signal.SIGTERM)  # a notice to all processes: the parent may go on
        time.sleep(0.1)
        assert not has_ended(workers[0])
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert eventually(lambda: all(map(has_ended, workers)))


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_close_kills_a_process_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyrhythm.run.data.worker_pool.CLOSE_TIMEOUT", 0.5)
    pool = WorkerPool(lambda ranges: time.sleep(600), None, WorkerOptions(num_workers=1))
    futures = [pool.submit(((0, 1),)) for _ in range(4)]
    pool.close()
    pool.close()
    for future in futures:
        with pytest.raises(DataError, match="closed"):
            future.result(timeout=20)
    with pytest.raises(DataError, match="closed"):
        pool.submit(((0, 1),)).result(timeout=20)


class Stream(IterableDataset):
    """Draws its items from torch's generator; resumes from its state."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        while True:
            self.next += 1
            yield self.next - 1, torch.rand(2)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def test_stream_is_read_by_one_worker_and_its_states_are_known(
    opened: list[SampleLoader],
) -> None:
    plain, made = SampleLoader(Stream(), None, seed=5), loader(Stream(), num_workers=4)
    opened.append(made)
    ahead = WorkerPrefetcher(made, two_each)
    for start in (0, 8, 4):
        expected = plain.load_microbatches(((start, start + 4),), [2, 2]).microbatches
        next_: Ranges = ((start + 4, start + 8),)
        found = ahead.load(((start, start + 4),), [2, 2], [next_]).microbatches
        for m, other in zip(found, expected, strict=True):
            assert torch.equal(m.args[0], other.args[0])
            assert torch.equal(m.target, other.target)
    assert len(multiprocessing.active_children()) == 1
    state = made.state_at(10)
    assert [(s.position, s.state) for s in state.shards] == [(10, {"next": 10})]
    made.resume_from(state)
    assert made.collect(made.submit(((11, 13),))).inputs.tolist() == [11, 12]


def noisy(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x = torch.stack([x for x, _ in items])
    return x + 0.1 * torch.randn_like(x), torch.stack([y for _, y in items])


def test_trainer_with_workers_trains_as_without(tmp_path: Path) -> None:
    whole, _ = fit(tmp_path, 1, 1, collate_fn=noisy)

    def work(ctx: DistContext | None) -> tuple[list[float], list[int]]:
        data = DataConfig(num_workers=2, persistent_workers=True)
        num_children = list[int]()
        with trainer(plan_of(2, 1), dataset=samples(), data=data, collate_fn=noisy) as made:
            losses = made.fit(max_steps=6).losses
            num_children.append(len(multiprocessing.active_children()))
            losses += made.fit(max_steps=len(whole)).losses
            made.evaluate(samples())  # has worker processes of its own
            num_children.append(len(multiprocessing.active_children()))
        num_children.append(len(multiprocessing.active_children()))
        return list(losses), num_children

    (_, first), (losses, last) = run_job(2, work, tmp_path)
    assert losses == pytest.approx(whole, abs=1e-5)
    assert (first, last) == ([2, 2, 0], [0, 0, 0])  # later stages do not read


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, "num_workers=-1"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor=0"),
        ({"prefetch_factor": 2}, "with num_workers=0"),
        ({"persistent_workers": True}, "with num_workers=0"),
        ({"num_workers": 1, "worker_init_fn": 3}, "worker_init_fn=3"),
        ({"num_workers": 1, "multiprocessing_context": "thread"}, "multiprocessing_context="),
    ],
)
def test_impossible_worker_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        DataConfig(**options)


def test_pinned_memory_without_accelerator_is_a_warning() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with pytest.warns(UserWarning, match="pin_memory has no effect"):
        SampleLoader(numbers(4), SampleOrder(4), workers=WorkerOptions(pin_memory=True))
