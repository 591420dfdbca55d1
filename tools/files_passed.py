"""Print what running jobs show of the structure, and fail when a bar is missed.

`make structure`: how many files of the package one training step and one group average pass, and
how often anything is unpickled while jobs train, save, restore, plan and join. A profile function
runs in every thread of every process: it is set before the first fork, and processes inherit it.

    python tools/files_passed.py [--list] [step] [average] [unpickling]
"""

import argparse
import mmap
import os
import pickle
import queue
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from structure import PACKAGE, ROOT, Row, print_rows
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import IterableDataset, TensorDataset

from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.coordinator.client import CoordinatorClient
from polyrhythm.run.coordinator.keys import JobKeys
from polyrhythm.run.coordinator.server import Coordinator
from polyrhythm.run.coordinator.sessions import PROTOCOL, Hello
from polyrhythm.run.trainer.config import CheckpointConfig
from polyrhythm.run.trainer.rank_assignment import DEVICE
from polyrhythm.run.trainer.run_dir import PLAN
from polyrhythm.run.trainer.trainer import Trainer
from polyrhythm.sync.protocol import Assign, Commit, CopyFrom, Done, Ready
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Worker

MAX_STEP_FILES = 30
MAX_AVERAGE_FILES = 18

MEASURED_STEP = 20
NUM_PIPELINES, NUM_STAGES = 2, 2
NUM_REPLICAS = 8  # of the group average
JOB_TIMEOUT = 60.0
PLAN_TIMEOUT = 300.0  # of a job that plans: on a new machine it compiles the planner first
WAIT_TIMEOUT = 30.0  # of every wait inside a job
OFF, FILES, UNPICKLING = range(3)

# By name, since a builtin is known by its name only: load of _pickle, loads, Unpickler.load ...
UNPICKLERS = {"_pickle", "pickle", "torch._weights_only_unpickler"}
# Counted on their own: Numba's cache of the planner's inner loops, and constants in that machine
# code, are pickled. They come from no other machine, but from a folder beside the package's
# bytecode (or in the home folder, or NUMBA_CACHE_DIR): who writes there can run code anyway.
NUMBA_CACHE = {"numba.core.caching", "numba.core.serialize"}
BY_NUMBA = "Numba: "


class Recorder:
    """Records files of the package, or calls that unpickle, in this process and its children.

    Every process has a byte of a shared page as its switch; a forked child has its parent's. Each
    measure has a recorder of its own: a recorder reports a file once per process.
    """

    def __init__(self, folder: Path) -> None:
        self._switches = mmap.mmap(-1, mmap.PAGESIZE)  # shared with forked processes
        self._switch = -1  # the last byte, until a worker selects its own
        self._seen = set[str]()
        self._found = os.open(folder / "found", os.O_CREAT | os.O_APPEND | os.O_RDWR)
        self._package = f"{ROOT / PACKAGE}{os.sep}"

    def install(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def select(self, switch: int) -> None:
        """Choose the switch of this process, and of those that it starts from now on."""
        self._switch = switch

    def set(self, what: int) -> None:
        self._switches[self._switch] = what

    def found(self) -> list[str]:
        """Return what all processes have found since the last call, sorted."""
        size = os.fstat(self._found).st_size
        lines = os.pread(self._found, size, 0).decode().splitlines()
        os.ftruncate(self._found, 0)
        return sorted(set(lines))

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        recording = self._switches[self._switch]
        if recording == FILES:
            path = frame.f_code.co_filename
            if path not in self._seen:
                self._seen.add(path)
                if path.startswith(self._package):
                    self._write(path.removeprefix(self._package))
        elif recording == UNPICKLING:
            if event == "c_call":
                module, name, caller = _module_of(arg), arg.__name__, frame
            elif event == "call":
                module, name, caller = _module(frame), frame.f_code.co_name, frame.f_back
            else:
                return
            if module in UNPICKLERS and name in ("load", "loads"):
                self._write(BY_NUMBA * (_module(caller) in NUMBA_CACHE) + _caller(frame))

    def _write(self, line: str) -> None:
        os.write(self._found, f"{line}\n".encode())


def _module(frame: FrameType | None) -> str | None:
    return frame and frame.f_globals.get("__name__")


def _module_of(builtin: Any) -> str | None:
    owner = getattr(builtin, "__self__", None)
    if isinstance(owner, pickle.Unpickler):  # or a subclass, such as torch.load's
        return pickle.__name__
    return type(owner).__module__ if hasattr(type(owner), "load") else builtin.__module__


def _caller(frame: FrameType) -> str:
    """Name the innermost line of the package, and the call that it reached."""
    stack = [f"{entry.filename.removeprefix(f'{ROOT}/')}:{entry.lineno} {entry.name}"
             for entry in traceback.extract_stack(frame)]  # fmt: skip
    ours = [entry for entry in stack if entry.startswith(f"{PACKAGE}/")]
    return f"{ours[-1] if ours else stack[0]} -> {stack[-1].rpartition('/')[2]}"


def measure_step(recorder: Recorder, folder: Path) -> list[Row]:
    """Run one training step of 2 stages x 2 pipelines in mode `decoupled`, without a save."""

    def switch(end: Any) -> None:
        if end.step in (MEASURED_STEP - 1, MEASURED_STEP):
            recorder.set(FILES if end.step == MEASURED_STEP - 1 else OFF)

    def work(ctx: DistContext) -> None:
        recorder.select(ctx.rank)
        with _trainer(_samples(), sync="decoupled", run_dir=folder / "run") as trainer:
            trainer.fit(max_steps=MEASURED_STEP + 5, callbacks=[switch])

    _run(work, NUM_STAGES * NUM_PIPELINES, folder)
    files = recorder.found()
    name = f"files a training step passes ({NUM_STAGES} x {NUM_PIPELINES} decoupled)"
    is_met = 0 < len(files) <= MAX_STEP_FILES
    return [(name, str(len(files)), f"<= {MAX_STEP_FILES}", is_met, files)]


def measure_average(recorder: Recorder, folder: Path) -> list[Row]:
    """Run one average in mode `adaptive`, from request to commit: workers and coordinator."""

    def work(ctx: DistContext) -> None:
        recorder.select(ctx.rank)
        with ctx.process_group(WAIT_TIMEOUT):
            model = nn.Linear(4, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with GroupSync(model, optimizer, "adaptive", timeout=WAIT_TIMEOUT) as sync:
                for step in range(MEASURED_STEP + 5):
                    optimizer.zero_grad()
                    model(torch.ones(4)).sum().backward()
                    optimizer.step()
                    dist.barrier()  # all workers ask for an average at the same time
                    if step == MEASURED_STEP:
                        _record_average(recorder, model.weight, sync.step)
                    else:
                        sync.step()

    _run(work, NUM_REPLICAS, folder)
    files = recorder.found()
    name = f"files a group average passes ({NUM_REPLICAS} workers, adaptive)"
    is_met = 0 < len(files) <= MAX_AVERAGE_FILES
    return [(name, str(len(files)), f"<= {MAX_AVERAGE_FILES}", is_met, files)]


def _record_average(recorder: Recorder, weight: Tensor, average: Callable[[], None]) -> None:
    """Record one average in all processes; fail unless a group commits it meanwhile."""
    weight.data.fill_(2.0 ** dist.get_rank())  # the mean of a group is none of its members' values
    before = weight.detach().clone()
    dist.barrier()
    recorder.set(FILES)
    dist.barrier()
    average()
    has_changed = torch.tensor(float(not weight.equal(before)))
    dist.barrier()
    recorder.set(OFF)
    dist.all_reduce(has_changed)
    if not has_changed:
        sys.exit("no group average was committed while it was recorded")


def measure_unpickling(recorder: Recorder, folder: Path) -> list[Row]:
    """Run the jobs of UNPICKLING_JOBS in 4 processes each, which inherit the parent's switch."""
    recorder.set(UNPICKLING)
    for job in UNPICKLING_JOBS:
        (folder / job.__name__).mkdir()
        job(folder / job.__name__)
    recorder.set(OFF)
    calls = recorder.found()
    by_numba = [call for call in calls if call.startswith(BY_NUMBA)]
    others = [call for call in calls if not call.startswith(BY_NUMBA)]
    name = "places that unpickle while 4 processes plan, join, train, save, restore"
    return [
        (name, str(len(others)), "0", not others, others),
        ("besides, places where Numba reads its own cache", str(len(by_numba)), "", True, by_numba),
    ]


def train_on_samples(folder: Path) -> None:
    _train_and_restore(folder, _samples, syncs=("decoupled", "adaptive", "auto"))


def train_on_stream(folder: Path) -> None:
    _train_and_restore(folder, Stream, syncs=("decoupled", "adaptive", "auto"))


def train_with_auto_plan(folder: Path) -> None:
    """Processes measure devices and network, as on four machines; a second job reads the plan."""
    _train_and_restore(folder, Stream, syncs=("auto", "auto"), plan="auto", timeout=PLAN_TIMEOUT)
    if not (folder / "run" / PLAN).exists():
        sys.exit("no plan was made")


def _train_and_restore(
    folder: Path,
    make_dataset: Callable[[], Any],
    *,
    syncs: Sequence[str],
    timeout: float = JOB_TIMEOUT,
    **options: Any,
) -> None:
    """Run one job after the other; each continues from the checkpoint of the job before."""

    def work(ctx: DistContext, *, sync: str, number: int) -> None:
        os.environ[DEVICE] = f"host{ctx.rank}"
        dataset = make_dataset()
        with _trainer(
            dataset,
            sync=sync,
            run_dir=folder / "run",
            checkpoint=CheckpointConfig(every=4),
            lr_schedule=partial(CosineAnnealingLR, T_max=20),
            **options,
        ) as trainer:
            has_restored = trainer.restore() > 0
            trainer.fit(max_steps=6 * number)
            trainer.evaluate(_samples())
            has_resumed = has_restored
            if trainer.pipeline.is_first:  # which reads for the others
                has_resumed = getattr(dataset, "has_resumed", has_restored)
            if not has_restored == has_resumed == (number > 1):
                sys.exit(f"job {number}: {has_restored=}, {has_resumed=}")

    for number, sync in enumerate(syncs, 1):
        job = partial(work, sync=sync, number=number)
        _run(job, NUM_STAGES * NUM_PIPELINES, folder, timeout)


def join_late(folder: Path) -> None:
    """Let all workers of a coordinator average, then one of them restart and join the running job.

    Without a Trainer: the coordinator accepts a worker that joins late, a Trainer refuses it.
    """
    keys, num_workers = JobKeys.new(), NUM_STAGES * NUM_PIPELINES
    setup = Setup(policy="all_reduce", num_stages=1, num_pipelines=num_workers)
    averaged = [f"rank {rank} has averaged" for rank in range(num_workers)]

    def work(ctx: DistContext) -> None:
        store = ctx.with_store(WAIT_TIMEOUT).store
        assert store is not None, "with_store opens it"
        worker = Worker(0, ctx.rank)
        with ExitStack() as undo:
            if ctx.rank == 0:
                coordinator = Coordinator(setup, bind="tcp://127.0.0.1:0", keys=keys.server_keys)
                store.set("address", undo.enter_context(coordinator).address)

            def join(incarnation: int) -> tuple[CoordinatorClient, queue.SimpleQueue[Any]]:
                commands = queue.SimpleQueue[Any]()
                client = CoordinatorClient(
                    store.get("address").decode(),
                    keys.client_keys,
                    Hello(PROTOCOL, worker, "here", 0, incarnation, setup.text, ()),
                    on_command=commands.put,
                    on_failure=commands.put,
                )
                undo.callback(client.close)
                client.join(WAIT_TIMEOUT)
                return client, commands

            client, commands = join(incarnation=1)
            client.send(Ready(worker, 1, 1))
            client.send(Done(worker, _wait_for(Assign, commands).gid, True, 1))
            _wait_for(Commit, commands)
            store.set(averaged[ctx.rank], "")
            store.wait(averaged)
            if ctx.rank == num_workers - 1:
                client.close(leave=False)
                _, commands = join(incarnation=2)
                _wait_for(CopyFrom, commands)
                store.set("rejoined", "")
            store.wait(["rejoined"])

    _run(work, num_workers, folder)


def _wait_for(kind: type, commands: queue.SimpleQueue[Any]) -> Any:
    """Return the next command of this kind; skip others, raise a failure."""
    deadline = time.monotonic() + WAIT_TIMEOUT
    while True:
        command = commands.get(timeout=max(0.0, deadline - time.monotonic()))
        if isinstance(command, Exception):
            raise command
        if isinstance(command, kind):
            return command


UNPICKLING_JOBS = (train_on_samples, train_on_stream, train_with_auto_plan, join_late)


def _trainer(dataset: Any, **options: Any) -> Trainer:
    plan = Plan(layers_per_stage=(2, 3), pipelines=(PipelinePlan(),) * NUM_PIPELINES)
    return Trainer(
        _model,
        mse_loss,
        partial(torch.optim.AdamW, lr=1e-2),
        dataset,
        batch_size=16,
        microbatch_size=2,
        timeout=WAIT_TIMEOUT,
        **{"plan": plan, **options},
    )


def _model() -> nn.Sequential:
    tanh, linear = nn.Tanh, nn.Linear
    return nn.Sequential(linear(8, 16), tanh(), linear(16, 16), tanh(), linear(16, 4))


def _samples() -> TensorDataset:
    return TensorDataset(torch.randn(64, 8), torch.randn(64, 4))


class Stream(IterableDataset[Any]):
    """Endless samples; knows whether it has resumed from the state of another process."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.has_resumed = False

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            values = torch.randn(12, generator=self._generator)
            yield values[:8], values[8:]

    def state_dict(self) -> dict[str, Any]:
        return {"of": ("process", os.getpid()), "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        self.has_resumed |= state["of"] != ("process", os.getpid())


def _run(
    work: Callable[[DistContext], None],
    num_processes: int,
    folder: Path,
    timeout: float = JOB_TIMEOUT,
) -> None:
    with LocalJob(work, num_processes, output_folder=folder / "logs") as job:
        if not job.wait(timeout):
            sys.exit(f"a job of {num_processes} processes runs longer than {timeout:g} s")


MEASURES: dict[str, Callable[[Recorder, Path], list[Row]]] = {
    "step": measure_step,
    "average": measure_average,
    "unpickling": measure_unpickling,
}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the files even if a bar is met")
    parser.add_argument("measures", nargs="*", choices=[[], *MEASURES], default=[])
    options = parser.parse_args(arguments)
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.measures or MEASURES:
            (Path(folder) / name).mkdir()
            recorder = Recorder(Path(folder) / name)
            recorder.install()
            rows += MEASURES[name](recorder, Path(folder) / name)
        sys.setprofile(None)
    if not options.list:
        rows = [(*row[:4], [] if row[3] else row[4]) for row in rows]
    if not print_rows(rows):
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
