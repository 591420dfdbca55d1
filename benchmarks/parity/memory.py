"""`bytes_per_step`: growth of anonymous memory per step, of a worker and of a coordinator.

Two processes train a model of one parameter with the Trainer, run folder and all, decoupled and in
groups (`age`; the first worker then also hosts the coordinator). A step of the Trainer takes
milliseconds, so they make as many steps as fit into the time, up to 100,000; `fit` keeps the last
100 steps here instead of 1000, so that they are there before the measurement. In addition a
coordinator in a process of its own, with its decision log, serves two clients that do nothing but
send and answer the messages of a step, up to 100,000 steps: there the clients' and the
coordinator's memory is measured. Growth is that of RssAnon, after a garbage collection and
malloc_trim, from a fifth of the steps to the end, but not before step 2000: until then pools of the
allocators fill. It is the median slope between the points of measurement (Theil-Sen), so that one
late allocation is not taken for a trend.

`python -m benchmarks.parity.memory` takes up to ten minutes for each kind of job, so that 100,000
steps are made where a step takes less than 6 ms.
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
_MIN_STEPS, _NUM_FILLING = 4000, 2000
_NUM_WARMUP = 100  # steps of the Trainer to measure its speed
_TIMEOUT: Seconds = 60.0
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


def measure(*, quick: bool, seconds: Seconds = 70.0) -> list[Fact]:
    """Return the growth in bytes per step of each process; `seconds` for each kind of job."""
    seconds, facts = (0.5 if quick else seconds), []
    with tempfile.TemporaryDirectory() as folder:
        for sync in ("decoupled",) if quick else ("decoupled", "age"):
            facts += _run_trainers(sync, seconds, Path(folder) / sync, quick=quick)
        if not quick:
            facts += _run_coordinator(seconds, Path(folder) / "coordinator")
    return facts


def _run_trainers(sync: str, seconds: Seconds, folder: Path, *, quick: bool) -> list[Fact]:
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
            run_dir=folder / "run",
            callbacks=[count_step],
            timeout=_TIMEOUT,
        ) as trainer:
            trainer.fit(max_steps=_NUM_WARMUP)
            rate = torch.tensor([0.5 * _NUM_WARMUP / (time.perf_counter() - half_time)])
            dist.broadcast(rate, 0)
            total = int(min(NUM_STEPS, max(rate.item() * seconds, 0 if quick else _MIN_STEPS)))
            num_steps, growth = 0, Growth(int(0.9 * total))  # in groups a worker may make fewer
            gc.freeze()  # a collection then only looks at what is new
            trainer.fit(max_steps=_NUM_WARMUP + total)
        growth.save(folder / f"worker{ctx.rank}")

    with LocalJob(work, 2, output_folder=folder) as job:
        assert job.wait(10 * seconds + _TIMEOUT), "not done in time"
    return [_fact(f"{sync}, worker {rank}", folder / f"worker{rank}") for rank in range(2)]


def _run_coordinator(seconds: Seconds, folder: Path) -> list[Fact]:
    """Serve two clients at full speed; measure all three processes."""
    folder.mkdir()
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
        growth.save(folder / "coordinator-growth")

    def work(worker: Worker) -> None:
        _wait_until((folder / "address").exists)
        client = StepClient((folder / "address").read_text(), keys, setup, worker)
        start, num_warmup = time.perf_counter(), 500
        client.run(num_warmup, lambda step: None)
        if worker == _WORKERS[0]:
            num_steps = min(NUM_STEPS, num_warmup / (time.perf_counter() - start) * seconds)
            num_steps = max(num_steps, _MIN_STEPS)
            (folder / "new").write_text(str(int(num_steps)))
            (folder / "new").rename(folder / "rate")
        _wait_until((folder / "rate").exists)
        growth = Growth(int((folder / "rate").read_text()))
        client.run(growth.num_steps, growth.after_step)
        growth.save(folder / f"client{worker.pipeline}-growth")
        client.close()

    children = [Child(serve), *(Child(partial(work, worker)) for worker in _WORKERS)]
    try:
        for child in children:
            assert child.wait(10 * seconds + _TIMEOUT) == 0, "a process failed"
    finally:
        for child in children:
            child.end()
    return [
        _fact(f"messages of age, {name}", folder / f"{name}-growth")
        for name in ("coordinator", "client0", "client1")
    ]


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


def _fact(case: str, path: Path) -> Fact:
    bytes_per_step, detail = msgspec.json.decode(path.read_bytes(), type=tuple[float, str])
    return Fact(case, bytes_per_step, detail)


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


if __name__ == "__main__":
    for fact in measure(quick=False, seconds=600.0):
        print(fact.case, f"{fact.value:.1f}", fact.detail, sep="; ", flush=True)
