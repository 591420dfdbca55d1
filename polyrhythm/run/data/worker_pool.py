"""Worker processes that read and collate micro-batches, as those of torch's DataLoader do.

    with WorkerPool(read, dataset, WorkerOptions(num_workers=8)) as pool:
        future = pool.submit(((0, 32),))  # read(((0, 32),)) in a process; any thread may submit
        microbatch = future.result()

DataLoader itself asks for indices in its own time and returns batches in the order of requests.
Here positions become known while training runs, some predictions are wrong, and the next free
process takes the next micro-batch.

A pipe per process carries tasks and results. A process ends on request, and within a second after
the parent has died, also in the middle of an item. That matters to other machines, too: a forked
process has copies of the parent's sockets. SIGINT and SIGTERM are for the parent, which may still
need data to finish a step and save.

Nothing is unpickled: a batch is encoded as the state in a checkpoint is. Large tensors stay in
shared memory, where torch's `default_collate` puts them: a file descriptor passes through the pipe,
which is a Unix socket, and the memory ends with its last user.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import _utils as torch_data

from polyrhythm.errors import UserError
from polyrhythm.run.checkpoint.encoding import decode_state, encode_state
from polyrhythm.run.checkpoint.manifest import CheckpointError
from polyrhythm.run.data.order import DataError
from polyrhythm.sync.dispatch import Ranges
from polyrhythm.types import Seconds

CLOSE_TIMEOUT: Seconds = 5.0  # for the item that a process or thread is reading
_WATCH_INTERVAL: Seconds = 1.0
_MAX_TASKS = 2  # of a process: one to read, and the next, so that it need not wait for the parent
_MAX_COPIED = 1 << 18  # bytes of a tensor that is sent by value
_MAX_SHARED = 200  # tensors of a batch; Linux passes up to 253 descriptors at once
_SHARED = "number of a tensor in shared memory"  # a key
_ERROR = 255  # first byte of a message, otherwise the number of descriptors that follow
Read = Callable[[Ranges], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Worker processes of a dataset; as in torch's DataLoader."""

    num_workers: int = 0
    prefetch_factor: int = 2  # micro-batches ahead, for each process
    pin_memory: bool = False
    persistent_workers: bool = False  # keep the processes between two fits
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: str | None = None

    @property
    def num_ahead(self) -> int:
        """Micro-batches that are read ahead."""
        return self.num_workers * self.prefetch_factor


NO_WORKERS = WorkerOptions()


class _Task(NamedTuple):
    ranges: Ranges
    future: "Future[Any]"
    lane: int | None


class _Process:
    """A worker process, on the parent's side."""

    def __init__(self, process: Any, connection: "Connection[Any, Any]") -> None:
        self.process, self.connection = process, connection
        self.tasks = deque[_Task]()  # sent, without a result


class WorkerPool:
    """Processes that call `read`; they start with the first task."""

    def __init__(
        self, read: Read, dataset: Any, options: WorkerOptions, *, is_stream: bool = False
    ) -> None:
        """`dataset` is that of torch's `get_worker_info`.

        For `is_stream` that says "worker 0 of 1": a dataset that divides itself among workers, as
        those of Hugging Face do, would return only a part of what `read` asks for.
        """
        self._read, self._dataset, self._options = read, dataset, options
        self._is_stream = is_stream
        self._processes = list[_Process]()
        self._waiting = deque[_Task]()
        self._lock = threading.Lock()
        self._wake_receiver, self._wake_sender = multiprocessing.Pipe(duplex=False)
        self._thread: threading.Thread | None = None
        self._error: DataError | None = None  # after a process has died
        self._is_closed = False

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, ranges: Ranges, lane: int | None = None) -> "Future[Any]":
        """Read a micro-batch after those that were submitted before; raises DataError.

        All tasks of a lane are read by one process; without a lane, by the next one that is free.
        """
        task = _Task(ranges, Future(), lane)
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._start()
            if self._error is not None or self._is_closed:
                task.future.set_exception(self._error or _closed())
                return task.future
            self._waiting.append(task)
            self._send_waiting()
        return task.future

    def close(self) -> None:
        """End the processes; those that are still reading after a while are killed."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            atexit.unregister(self.close)
            self._wake_sender.send_bytes(b"close")
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT)
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for worker in self._processes:
            with contextlib.suppress(OSError):
                worker.connection.send_bytes(b"")
        for worker in self._processes:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.exitcode is None:
                worker.process.kill()
                worker.process.join(CLOSE_TIMEOUT)
            worker.connection.close()
            self._fail(worker.tasks)
        self._fail(self._waiting)
        self._wake_sender.close()
        self._wake_receiver.close()

    def _start(self) -> None:
        options = self._options
        context: Any = multiprocessing.get_context(options.multiprocessing_context)
        try:
            for number in range(options.num_workers):
                parent, child = context.Pipe()
                process = context.Process(
                    target=_run,
                    args=(
                        child,
                        os.getpid(),
                        self._read,
                        self._dataset,
                        number,
                        options,
                        self._is_stream,
                    ),
                    daemon=True,
                    name=f"data worker {number}",
                )
                with warnings.catch_warnings():  # of fork with threads, which torch's loader does
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                child.close()
                self._processes.append(_Process(process, parent))
        except Exception as error:  # a dataset that cannot be pickled raises anything
            for worker in self._processes:
                worker.connection.send_bytes(b"")
                worker.connection.close()
            num_started, self._processes = len(self._processes), []
            raise DataError(
                f"worker process {num_started} of {options.num_workers} cannot start: "
                f"{type(error).__name__}: {error}",
                expected="a dataset and a collate_fn that another process can use",
                fix='use multiprocessing_context="fork", which need not pickle them, or fewer '
                "workers",
            ) from error
        atexit.register(self.close)  # before multiprocessing waits for its processes
        self._thread = threading.Thread(target=self._receive, name="data workers", daemon=True)
        self._thread.start()

    def _send_waiting(self) -> None:
        """Give tasks to the processes with the fewest; the caller has the lock."""
        for _ in range(len(self._waiting)):
            task = self._waiting.popleft()
            if task.lane is None:
                worker = min(self._processes, key=lambda worker: len(worker.tasks))
            else:
                worker = self._processes[task.lane % len(self._processes)]
            if len(worker.tasks) >= _MAX_TASKS:
                self._waiting.append(task)  # all are tried in turn: the order stays
                continue
            if task.future.set_running_or_notify_cancel():
                worker.tasks.append(task)
                with contextlib.suppress(OSError):  # it died: `_receive` says so
                    worker.connection.send_bytes(msgspec.json.encode(task.ranges))

    def _receive(self) -> None:
        """Pass results on, in a thread."""
        workers = {worker.connection: worker for worker in self._processes}
        while True:
            for connection in wait([*workers, self._wake_receiver]):
                if connection is self._wake_receiver:
                    return
                worker = workers[connection]  # type: ignore[index]
                try:
                    sent = worker.connection.recv_bytes()
                    storages = _receive_storages(worker.connection, sent[0])
                except (EOFError, OSError) as error:
                    self._break(worker, error)
                    return
                with self._lock:
                    task = worker.tasks.popleft()
                    self._send_waiting()
                self._resolve(task.future, sent, storages)

    def _resolve(
        self, future: "Future[Any]", sent: bytes, storages: Sequence[torch.UntypedStorage]
    ) -> None:
        try:
            if sent[0] == _ERROR:
                future.set_exception(msgspec.json.decode(sent[1:], type=_SentError).error())
            else:
                result = _decoded(sent[1:], storages)
                future.set_result(pinned(result) if self._options.pin_memory else result)
        except Exception as error:  # of `pin_memory`
            future.set_exception(error)

    def _break(self, worker: _Process, why: Exception) -> None:
        """After the loss of a process, fail all tasks."""
        worker.process.join(CLOSE_TIMEOUT)
        code, reading = worker.process.exitcode, [task.ranges for task in worker.tasks][:1]
        ended = "sent what cannot be received" if code is None else f"ended with exit code {code}"
        with self._lock:
            if self._is_closed:
                return
            self._error = DataError(
                f"{worker.process.name} {ended} while it read positions "
                f"{reading[0] if reading else '(none)'}: {type(why).__name__}: {why}",
                expected="worker processes that live as long as training",
                fix="-9 is mostly a lack of memory, -7 of /dev/shm: lower num_workers or "
                "prefetch_factor; otherwise try num_workers=0 to see the error",
            )
            tasks = [*self._waiting, *(task for each in self._processes for task in each.tasks)]
            self._waiting.clear()
            for each in self._processes:
                each.tasks.clear()
        self._fail(tasks)

    def _fail(self, tasks: Sequence[_Task] | deque[_Task]) -> None:
        for task in tasks:
            if not task.future.done() and (
                task.future.running() or task.future.set_running_or_notify_cancel()
            ):
                task.future.set_exception(self._error or _closed())


def _closed() -> DataError:
    return DataError(
        "a micro-batch that is read after the worker processes were closed",
        expected="worker processes",
        fix="load it before close()",
    )


def pinned(batch: Any) -> Any:
    """Copy tensors, and other objects with `pin_memory`, to page-locked memory.

    Tensors on a GPU stay there: a small dataset may be.
    """

    def pin(leaf: Any) -> Any:
        is_elsewhere = isinstance(leaf, Tensor) and not leaf.is_cpu
        return leaf if is_elsewhere or not hasattr(leaf, "pin_memory") else leaf.pin_memory()

    return pytree.tree_map(pin, batch)


class WorkerTracebackError(Exception):
    """The cause of an error in a worker process: its traceback as text, with the user's lines."""

    def __str__(self) -> str:
        return f"in a worker process:\n{self.args[0]}"


class _SentError(msgspec.Struct, frozen=True):
    wrong: str
    expected: str
    fix: str
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> "_SentError":
        if isinstance(error, CheckpointError):
            error = DataError(
                error.wrong,
                expected="numbers, strings, tensors and arrays, in lists, tuples and dicts",
                fix="let collate_fn return these, or use num_workers=0",
            )
        if not isinstance(error, UserError):
            error = DataError(
                f"{type(error).__name__}: {error}",
                expected="a batch that a worker process can read and send",
                fix="correct the dataset, collate_fn or worker_init_fn; see the traceback above",
            ).with_traceback(error.__traceback__)
        return cls(error.wrong, error.expected, error.fix, traceback.format_exc())

    def error(self) -> DataError:
        error = DataError(self.wrong, expected=self.expected, fix=self.fix)
        error.__cause__ = WorkerTracebackError(self.traceback)
        return error


def _run(
    connection: "Connection[Any, Any]",
    parent: int,
    read: Read,
    dataset: Any,
    number: int,
    options: WorkerOptions,
    is_stream: bool,
) -> None:
    """The main function of a worker process."""
    signal.set_wakeup_fd(-1)  # the parent's
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    torch_data.worker._worker_info = torch_data.worker.WorkerInfo(  # for get_worker_info()
        id=0 if is_stream else number,
        num_workers=1 if is_stream else options.num_workers,
        seed=torch.initial_seed(),
        dataset=dataset,
    )
    failed = b""
    if options.worker_init_fn is not None:
        try:
            options.worker_init_fn(number)
        except Exception as error:
            failed = _sent_error(error)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while task := connection.recv_bytes():
            ranges = msgspec.json.decode(task, type=Ranges)
            shared = list[Tensor]()
            try:
                sent = failed or _encoded(read(ranges), shared)
            except Exception as error:
                sent = _sent_error(error)
            connection.send_bytes(sent)
            if sent[0] != _ERROR:
                _send_storages(connection, shared)


def _sent_error(error: Exception) -> bytes:
    return bytes([_ERROR]) + msgspec.json.encode(_SentError.of(error))


def _exit_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_INTERVAL)
    os._exit(1)


def _encoded(batch: Any, shared: list[Tensor]) -> bytes:
    """Encode a batch, but for large tensors: those are moved to `shared`, in shared memory."""
    can_share = sys.platform == "linux"

    def convert(tensor: Tensor) -> Any:
        nbytes = tensor.numel() * tensor.element_size()
        is_plain = type(tensor) is Tensor and tensor.layout == torch.strided
        is_plain = is_plain and tensor.device.type == "cpu" and not tensor.is_quantized
        if nbytes <= _MAX_COPIED or not (can_share and is_plain) or len(shared) == _MAX_SHARED:
            return tensor
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if tensor.untyped_storage().nbytes() != nbytes:  # a part of a larger one
            tensor = tensor.clone()
        shared.append(tensor.share_memory_())
        name = str(tensor.dtype).removeprefix("torch.")
        return {_SHARED: len(shared) - 1, "shape": list(tensor.shape), "dtype": name}

    encoded = encode_state(pytree.tree_map_only(Tensor, convert, batch), "the batch")
    return bytes([len(shared)]) + encoded


def _decoded(sent: bytes, storages: Sequence[torch.UntypedStorage]) -> Any:
    def is_shared(value: Any) -> bool:
        return isinstance(value, dict) and _SHARED in value

    def convert(value: Any) -> Any:
        if not is_shared(value):
            return value
        empty = torch.empty(0, dtype=getattr(torch, value["dtype"]))
        return empty.set_(storages[value[_SHARED]], 0, value["shape"])  # type: ignore[call-overload]

    return pytree.tree_map(convert, decode_state(sent, "a batch"), is_leaf=is_shared)


def _send_storages(connection: "Connection[Any, Any]", tensors: Sequence[Tensor]) -> None:
    """Send the descriptors and sizes of shared memory, as torch's DataLoader does."""
    if not tensors:
        return
    found = [tensor.untyped_storage()._share_fd_cpu_() for tensor in tensors]
    connection.send_bytes(msgspec.json.encode([size for _, size in found]))
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as pipe:
        socket.send_fds(pipe, [b"f"], [descriptor for descriptor, _ in found])


def _receive_storages(
    connection: "Connection[Any, Any]", count: int
) -> Sequence[torch.UntypedStorage]:
    if count in (0, _ERROR):
        return ()
    sizes = msgspec.json.decode(connection.recv_bytes(), type=list[int])
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as pipe:
        _, descriptors, _, _ = socket.recv_fds(pipe, 1, count)
    try:
        if len(descriptors) < count:
            raise OSError(f"{count} tensors, and too many open files: see ulimit -n")
        map_shared: Any = torch.UntypedStorage._new_shared_fd_cpu  # type: ignore[attr-defined]
        return [
            map_shared(descriptor, size)
            for descriptor, size in zip(descriptors, sizes, strict=True)
        ]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
