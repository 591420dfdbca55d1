"""Worker processes of a benchmark, on the hosts of a lab or on this machine, and their driver.

    with Lab(cluster) as lab, WorkerPool(lab, work, setting, serves_orders=True) as pool:
        answers = pool.call("train", 10)  # one per rank, in rank order: target.train(10)

Each worker runs `work(worker, setting)` and exchanges messages with the driver through a pipe:
`worker.serve(target)`, `for order in worker.orders()`, or `worker.send` and `worker.recv`. Every
wait has a timeout. All workers end with the `with` block.
"""

import contextlib
import mmap
import multiprocessing
import multiprocessing.connection
import os
import shutil
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from polyrhythm.describe.scenario import LinkChange
from polyrhythm.errors import LabError, PeerError, UserError
from polyrhythm.lab.lab import Lab
from polyrhythm.processes import Child, end_all, reserve_port, wait_for_all
from polyrhythm.types import Seconds

PORT = 29500  # of the rendezvous: each host of a lab has its own ports
TIMEOUT: Seconds = 60.0  # of any wait for another process, unless a benchmark names another
_LOOPBACK = "127.0.0.1"
_POLL: Seconds = 0.5
_EXIT_TIMEOUT: Seconds = 2.0  # from the end of a pipe until its process has ended with a reason
_IDLE: Seconds = 1800.0  # longest time between two orders
_STOP_TIMEOUT: Seconds = 10.0  # for workers to end after the last order
_HEAD_START: Seconds = 0.1  # from sending a start time until that time
# Of one host. A connection that is made on a fast network opens wide TCP windows; these would fill
# the queues of a link that has become slow for seconds, and TCP would take that for loss.
_RECEIVE_BUFFER = Path("/proc/sys/net/ipv4/tcp_rmem")
_SMALL_BUFFER = "4096 65536 131072"
_PRIORITY = 1  # before all processes outside the lab, after the lab's switch

T = TypeVar("T")


def shared_zeros(shape: int | tuple[int, ...], dtype: type) -> np.ndarray:
    """Return memory that forked processes share; it must be made before the fork."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)


class ProgressMessage:
    """Base class of messages which answer no order, and restart the timeout of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWorker:
    """One process of a pool, as it sees itself: rank, rendezvous address, pipe to the driver."""

    rank: int
    world_size: int
    host: str
    master: str  # address of the host of rank 0
    port: int
    in_lab: bool
    timeout: Seconds  # longest wait for another process
    driver: Connection
    folder: Path  # of the pool

    def send(self, message: object) -> None:
        self.driver.send(message)

    def recv(self, action: str, timeout: Seconds | None = None) -> Any:
        """Return the driver's next message; PeerError if none arrives within `timeout`."""
        timeout, start = self.timeout if timeout is None else timeout, time.monotonic()
        try:
            if self.driver.poll(timeout):
                return self.driver.recv()
            cause = f"no message within {timeout:g} s"
        except (EOFError, ConnectionResetError):
            cause = "the driver has ended"
        waited = time.monotonic() - start
        raise PeerError("the benchmark's driver", action=action, waited=waited, cause=cause)

    def orders(self) -> Iterator[Any]:
        """Report that this worker is ready, then yield orders until the driver sends None."""
        self.send("ready")
        while (order := self.recv("waiting for an order", _IDLE)) is not None:
            yield order

    def serve(self, target: object) -> None:
        """Call the methods of `target` that the driver names in `WorkerPool.call`."""
        for method, args in self.orders():
            self.send(getattr(target, method)(*args))

    def wait_for_start(self, timeout: Seconds | None = None) -> Seconds:
        """Report that this worker is ready; return the common start time once it has come."""
        self.send("ready")
        start: Seconds = self.recv("waiting for the start", timeout)
        time.sleep(max(0.0, start - time.monotonic()))
        return start

    @contextlib.contextmanager
    def process_group(self) -> Iterator[None]:
        """Join the default gloo process group of the pool; leave it together with all workers."""
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{self.master}:{self.port}",
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self.timeout),
        )
        yield
        dist.barrier()
        dist.destroy_process_group()

    def set_environment(self) -> None:
        """Set the variables that torchrun would set; the host is the Trainer's device."""
        os.environ |= {
            "RANK": str(self.rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.master,
            "MASTER_PORT": str(self.port),
            "POLYRHYTHM_DEVICE": self.host,
        }

    def keep_time(self) -> None:
        """Keep TCP windows short in a lab, and sleeps exact beside busy processes."""
        if self.in_lab:
            _RECEIVE_BUFFER.write_text(_SMALL_BUFFER)
        use_realtime_priority()


def use_realtime_priority() -> None:
    """Wake up from sleeps in time; compute with one thread."""
    import torch

    with contextlib.suppress(PermissionError):  # not root: sleeps end late where others compute
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY))
    torch.set_num_threads(1)


class LocalHosts:
    """This machine in place of a lab: workers share its loopback network, nothing is emulated."""

    def __init__(self, num_hosts: int = 1, *, inherits_output: bool = False) -> None:
        """`inherits_output`: workers print where the driver does."""
        self.hosts = tuple(f"local{number}" for number in range(num_hosts))
        self._inherits_output = inherits_output

    def spawn(
        self, host: str, function: Callable[..., object], *args: object, output: Path | None = None
    ) -> Child:
        output = None if self._inherits_output else output
        return Child(partial(_on_loopback, function, args), output=output)

    def address(self, host: str) -> str:
        return _LOOPBACK


def _on_loopback(function: Callable[..., object], args: tuple[object, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    function(*args)


class WorkerPool:
    """One worker process per host, from the start of a `with` block until its end."""

    def __init__(
        self,
        hosts: Lab | LocalHosts,
        work: Callable[..., object],
        *args: object,
        on: Sequence[str] | None = None,
        timeout: Seconds = TIMEOUT,
        serves_orders: bool = False,
        port: int | None = None,
    ) -> None:
        """Describe a pool which runs `work(worker, *args)` in each process.

        `on`: the host of each rank, by default every host once. `timeout`: longest wait, of the
        driver or a worker, unless a call names another. `serves_orders`: workers use `worker.serve`
        or `worker.orders`; the block starts when all are ready, and they may end by themselves
        after it. Pools in one lab need a `port` each; on this machine the default is a free one.
        """
        self._hosts, self._work, self._args = hosts, work, args
        self._names = hosts.hosts if on is None else tuple(on)
        self.folder = Path(tempfile.mkdtemp())  # of the workers' output
        self._reserved: socket.socket | None = None
        self._port = PORT if port is None and isinstance(hosts, Lab) else port
        self.timeout, self._serves_orders = timeout, serves_orders
        self._pipes: list[Connection] = []
        self._children: list[Child] = []

    def __len__(self) -> int:
        return len(self._names)

    def __enter__(self) -> Self:
        if self._port is None:
            self._reserved = reserve_port()
            self._port = self._reserved.getsockname()[1]
        try:
            for rank in range(len(self)):
                self._spawn(rank)
            self._wait_until_ready()
        except BaseException:
            self._end()
            raise
        return self

    def _wait_until_ready(self) -> None:
        if self._serves_orders:
            self.gather("joining")

    def _spawn(self, rank: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        self._pipes.append(ours)
        host = self._names[rank]
        assert self._port is not None, "reserved at the start of the block"
        worker = PoolWorker(
            rank=rank,
            world_size=len(self),
            host=host,
            master=self._hosts.address(self._names[0]),
            port=self._port,
            in_lab=isinstance(self._hosts, Lab),
            timeout=self.timeout,
            driver=theirs,
            folder=self.folder,
        )
        output = self.folder / f"{self._port} {rank}.log"
        child = self._hosts.spawn(host, self._work, worker, *self._args, output=output)
        self._children.append(child)
        theirs.close()  # this worker alone holds it: when the worker ends, the pipe does

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None and self._serves_orders:
                self.broadcast(None)
                wait_for_all(self._children, _STOP_TIMEOUT)
        finally:
            self._end()

    def _end(self) -> None:
        end_all(self._children)
        if self._reserved is not None:
            self._reserved.close()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self.folder)

    def broadcast(self, message: object) -> None:
        """Send a message to every worker."""
        for pipe in self._pipes:
            pipe.send(message)

    def start(self) -> Seconds:
        """Send the common start time to workers in `wait_for_start`; return it at once."""
        moment = time.monotonic() + _HEAD_START
        self.broadcast(moment)
        return moment

    def call(
        self,
        method: str,
        *args: object,
        timeout: Seconds | None = None,
        links: Iterable[LinkChange] = (),
    ) -> list[Any]:
        """Call a method of what each worker serves; return the results in rank order."""
        self.broadcast((method, args))
        return self.gather(f"calling {method}", timeout, links=links)

    def gather(
        self,
        action: str,
        timeout: Seconds | None = None,
        *,
        links: Iterable[LinkChange] = (),
        clock_start: Seconds | None = None,
        on_progress: Callable[[Any], None] | None = None,
    ) -> list[Any]:
        """Return one message per worker in rank order; LabError if one fails or is too slow.

        Meanwhile change `links` at their times after `clock_start` (default: now). Call
        `on_progress` with each ProgressMessage; the timeout counts from the last of them.
        """
        timeout = self.timeout if timeout is None else timeout
        last_progress = time.monotonic()
        start = last_progress if clock_start is None else clock_start
        changes, answers = iter(links), dict[int, Any]()
        upcoming = next(changes, None)
        while pending := [rank for rank in range(len(self)) if rank not in answers]:
            now = time.monotonic()
            while upcoming is not None and start + upcoming.at <= now:
                assert isinstance(self._hosts, Lab), "only a lab has links to change"
                self._hosts.change(upcoming)
                upcoming = next(changes, None)
            left = last_progress + timeout - now
            if left <= 0:
                raise machine_too_slow(f"{action}: no answer from ranks {pending} in {timeout:g} s")
            wait = min(_POLL, left)
            if upcoming is not None:
                wait = min(wait, max(0.0, start + upcoming.at - now))
            for rank, message in self.recv_any(pending, action, wait).items():
                if isinstance(message, ProgressMessage):
                    last_progress = time.monotonic()
                    if on_progress is not None:
                        on_progress(message)
                else:
                    answers[rank] = message
        return [answers[rank] for rank in range(len(self))]

    def recv_any(self, ranks: Collection[int], action: str, timeout: Seconds) -> dict[int, Any]:
        """Return the next messages of some of `ranks`, of none after `timeout`; raise its error."""
        by_pipe = {self._pipes[rank]: rank for rank in ranks}
        messages = {}
        for pipe in multiprocessing.connection.wait(list(by_pipe), timeout):
            assert isinstance(pipe, Connection), "only pipes are waited for"
            rank = by_pipe[pipe]
            try:
                messages[rank] = pipe.recv()
            except (EOFError, ConnectionResetError):
                self._children[rank].wait(_EXIT_TIMEOUT)
                raise self._failure(rank, action) from None
            if isinstance(messages[rank], UserError):
                raise messages[rank].at(f"rank {rank}, {action}")
        return messages

    def check_running(self, action: str) -> None:
        """Raise LabError if a worker has ended."""
        for rank, child in enumerate(self._children):
            if child.status is not None:
                raise self._failure(rank, action)

    def _failure(self, rank: int, action: str) -> LabError:
        return _broken(f"rank {rank}, {action}: {self._children[rank].reason}")


def _broken(what: str) -> LabError:
    return LabError(
        what,
        expected="every worker runs until the driver ends it",
        fix="report this error with the worker's output",
    )


def machine_too_slow(what: str) -> LabError:
    return LabError(
        what,
        expected="an answer within that time, on two idle cores",
        fix="run the benchmark while the machine has nothing else to do",
    )


Run = Callable[[Callable[[], object]], T]  # given a barrier to call when it is prepared


def run_concurrently(runs: Sequence[Run[T]], *, timeout: Seconds) -> list[T]:
    """Run each function in a process of its own; return their results in order.

    A run prepares itself, calls the barrier that it is given, and continues once all runs have: no
    run is timed while another makes its connections. LabError if one fails or is too slow.
    """
    barrier = multiprocessing.get_context("fork").Barrier(len(runs), timeout=timeout)
    hosts = LocalHosts(len(runs), inherits_output=True)
    with WorkerPool(hosts, _run_one, runs, barrier.wait, timeout=timeout) as pool:
        return pool.gather(f"running {len(runs)} jobs at once")


def _run_one(worker: PoolWorker, runs: Sequence[Run[Any]], barrier: Callable[[], object]) -> None:
    try:
        worker.send(runs[worker.rank](barrier))
    except UserError as error:
        worker.send(error)
    except Exception as error:
        traceback.print_exc()
        worker.send(_broken(f"{type(error).__name__}: {error}"))
