"""`bytes_per_step`: growth of anonymous memory per step, of a worker and of a coordinator.

A worker trains a model of one parameter with the Trainer, run folder and all. At the same time a
coordinator with its decision log serves two clients that do nothing but send and answer the
messages of a step; the memory of all four is measured. Each makes 100,000 steps, or as many as fit
into the time. `fit` keeps the last 100 steps here instead of 1000, so that they are there before
the measurement. Growth is that of RssAnon, after a garbage collection and malloc_trim, from a fifth
of the steps to the end, but not before step 2000: until then pools of the allocators fill. It is
the median slope between the points of measurement (Theil-Sen), so that one late allocation is not
taken for a trend. Tens of thousands of steps are needed: pages of 4096 bytes come and go, so that
over 5000 steps the slope of the same code was 5 to 18 bytes.

`python -m benchmarks.parity.memory` also trains with two workers that average, decoupled and in
groups (`age`; the first then also hosts the coordinator). A step of theirs takes several
milliseconds on two cores, so each kind may take 20 minutes.
"""

import ctypes
import gc
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.parity.facts import Fact
from polyrhythm.processes import Child
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.coordinator.client import CoordinatorClient
from polyrhythm.run.coordinator.keys import JobKeys
from polyrhythm.run.coordinator.server import Coordinator
from polyrhythm.run.coordinator.sessions import PROTOCOL, Hello, ToWorker
from polyrhythm.run.trainer import fit_loop
from polyrhythm.run.trainer.trainer import Trainer
from polyrhythm.sync.protocol import Assign, Commit, Done, Ready, Skip
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Bytes, Seconds, Worker

NUM_STEPS: Final = 100_000
_NUM_POINTS = 20  # measurements over all steps
_NUM_FILLING = 2000  # steps until most pools of the allocators are full
_NUM_WARMUP = 100  # steps of the Trainer to measure its speed
_TIMEOUT: Seconds = 60.0
_SUFFIX = ".growth.json"
_WORKERS = (Worker(0, 0), Worker(0, 1))


@dataclass(slots=True)
class Growth:
    """Measures this process at `_NUM_POINTS` points of `num_steps` steps."""

    num_steps: int
    start: Seconds = field(default_factory=time.perf_counter)
    points: list[tuple[int, Bytes]] = field(default_factory=list)

    def after_step(self, step: int) -> None:
        """Measure if this step, from 1, is one of the points."""
        if step > 0 and step * _NUM_POINTS >= (len(self.points) + 1) * self.num_steps:
            self.points.append((step, _anonymous_bytes()))

    def save(self, path: Path) -> None:
        start = min(max(_NUM_FILLING, self.num_steps // 5), self.num_steps // 2)
        counted = [point for point in self.points if point[0] >= start]
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(counted, 2)]
        seconds, last = time.perf_counter() - self.start, self.points[-1][0]
        (first, at_first), (_, at_last) = counted[0], counted[-1]
        overall = (at_last - at_first) / (last - first)
        detail = (
            f"{last:,} steps in {seconds:.0f} s, of which the last {last - first:,} count; "
            f"{overall:.1f} from the first of them to the last"
        )
        path.write_bytes(msgspec.json.encode((median(slopes), detail)))


def measure(*, quick: bool, seconds: Seconds = 240.0) -> list[Fact]:
    """Return the growth in bytes per step of each process of two jobs that run at the same time."""
    seconds = 0.5 if quick else seconds
    with tempfile.TemporaryDirectory() as folder:
        jobs = [Child(partial(_run_trainers, 1, "decoupled", seconds, Path(folder)))]
        if not quick:
            jobs.append(Child(partial(_run_coordinator, seconds, Path(folder))))
        try:
            for job in jobs:
                assert job.wait(_time_limit(seconds)) == 0, f"a job {job.reason}"
        finally:
            for job in jobs:
                job.end()
        return _facts(Path(folder))


def _run_trainers(num_workers: int, sync: str, seconds: Seconds, folder: Path) -> None:
    name = f"trainer, {sync}, {num_workers} worker{'s' * (num_workers > 1)}"

    def work(ctx: DistContext) -> None:
        fit_loop.NUM_STEPS_KEPT = _NUM_WARMUP
        ones = torch.ones(64, 1)
        num_steps, growth, half_time = 0, Growth(NUM_STEPS), 0.0

        def count_step(_: Any) -> None:
            nonlocal num_steps, half_time
            num_steps += 1
            growth.after_step(num_steps)
            if num_steps == _NUM_WARMUP // 2:  # the first steps are slower
                half_time = time.perf_counter()

        with Trainer(
            lambda: nn.Sequential(nn.Linear(1, 1, bias=False)),
            nn.functional.mse_loss,
            lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
            TensorDataset(ones, ones),
            batch_size=2,
            sync=sync,
            run_dir=folder / name,
            timeout=_TIMEOUT,
        ) as trainer:
            trainer.fit(max_steps=_NUM_WARMUP, callbacks=[count_step])
            rate = torch.tensor([0.5 * _NUM_WARMUP / (time.perf_counter() - half_time)])
            if num_workers > 1:
                dist.broadcast(rate, 0)
            total = int(min(NUM_STEPS, rate.item() * seconds))
            # In groups a worker may make fewer steps than the other.
            num_steps, growth = 0, Growth(total if num_workers == 1 else int(0.9 * total))
            gc.freeze()  # a collection then only looks at what is new
            trainer.fit(max_steps=_NUM_WARMUP + total, callbacks=[count_step])
        growth.save(folder / f"{name}, worker {ctx.rank}{_SUFFIX}")

    with LocalJob(work, num_workers, output_folder=folder / f"{name}, output") as job:
        assert job.wait(_time_limit(seconds)), "not done in time"


def _run_coordinator(seconds: Seconds, folder: Path) -> None:
    """Serve two clients at full speed; measure all three processes."""
    setup, keys = Setup(policy="age", num_stages=1, num_pipelines=2), JobKeys.new()

    def serve() -> None:
        with Coordinator(
            setup, bind="tcp://127.0.0.1:0", keys=keys.server_keys, log=folder / "scheduler.jsonl"
        ) as coordinator:
            (folder / "new").write_text(coordinator.address)
            (folder / "new").rename(folder / "address")
            _wait_until(lambda: (folder / "rate").exists() or coordinator.is_over)
            num_steps = int((folder / "rate").read_text())
            growth, before = Growth(num_steps), coordinator.counters["committed"]
            while not coordinator.is_over:
                growth.after_step(coordinator.counters["committed"] - before)
                time.sleep(0.02)
        growth.save(folder / f"messages of age, coordinator{_SUFFIX}")

    def work(worker: Worker) -> None:
        _wait_until((folder / "address").exists)
        client = StepClient((folder / "address").read_text(), keys, setup, worker)
        start, num_warmup = time.perf_counter(), 500
        client.run(num_warmup, lambda step: None)
        if worker == _WORKERS[0]:
            num_steps = min(NUM_STEPS, num_warmup / (time.perf_counter() - start) * seconds)
            (folder / "new").write_text(str(int(num_steps)))
            (folder / "new").rename(folder / "rate")
        _wait_until((folder / "rate").exists)
        growth = Growth(int((folder / "rate").read_text()))
        client.run(growth.num_steps, growth.after_step)
        growth.save(folder / f"messages of age, client {worker.pipeline}{_SUFFIX}")
        client.close()

    children = [Child(serve), *(Child(partial(work, worker)) for worker in _WORKERS)]
    try:
        for child in children:
            assert child.wait(_time_limit(seconds)) == 0, f"a process {child.reason}"
    finally:
        for child in children:
            child.end()


class StepClient:
    """A worker that reports ready, answers Assign by Done, and goes on after Commit or Skip."""

    def __init__(self, address: str, keys: JobKeys, setup: Setup, worker: Worker) -> None:
        self._worker, self._clock, self._has_ended = worker, 0, threading.Semaphore(0)
        self._error: Exception | None = None
        self._client = CoordinatorClient(
            address,
            keys.client_keys,
            Hello(PROTOCOL, worker, "here", 0, 1, setup.text, (("weight", (1, 1)),)),
            on_command=self._on_command,
            on_failure=self._on_failure,
        )
        self._client.join(_TIMEOUT)

    def run(self, num_steps: int, after_step: Callable[[int], None]) -> None:
        for step in range(1, num_steps + 1):
            self._clock += 1
            self._client.send(Ready(self._worker, self._clock, 1))
            assert self._has_ended.acquire(timeout=_TIMEOUT), "no answer in time"
            if self._error is not None:
                raise self._error
            after_step(step)

    def close(self) -> None:
        self._client.close()

    def _on_command(self, command: ToWorker) -> None:
        if isinstance(command, Assign):
            self._client.send(Done(self._worker, command.gid, True, 1))
        elif isinstance(command, Skip):
            self._has_ended.release()
        elif isinstance(command, Commit):
            end_clock = command.end_clocks[command.members.index(self._worker)]
            if end_clock == self._clock:
                self._has_ended.release()

    def _on_failure(self, error: Exception) -> None:
        self._error = error
        self._has_ended.release()


def _facts(folder: Path) -> list[Fact]:
    facts = list[Fact]()
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        bytes_per_step, detail = msgspec.json.decode(path.read_bytes(), type=tuple[float, str])
        facts.append(Fact(path.name.removesuffix(_SUFFIX), bytes_per_step, detail))
    return facts


def _time_limit(seconds: Seconds) -> Seconds:
    return 10 * seconds + _TIMEOUT


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "it does not happen in time"
        time.sleep(0.01)


def _anonymous_bytes() -> Bytes:
    """Return the anonymous memory of this process that is in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{os.getpid()}/status").read_text())
    assert found is not None, "Linux reports it since 4.5"
    return 1024 * int(found[1])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for num_workers, sync in ((1, "decoupled"), (2, "decoupled"), (2, "age")):
            _run_trainers(num_workers, sync, 1200.0, Path(folder))
        _run_coordinator(1200.0, Path(folder))
        for fact in _facts(Path(folder)):
            print(fact.case, f"{fact.value:.1f}", fact.detail, sep="; ")


if __name__ == "__main__":
    main()
