"""A coordinator on loopback, and fake workers that only exchange messages with it."""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import zmq

from polyrhythm.run.coordinator.client import CoordinatorClient
from polyrhythm.run.coordinator.keys import JobKeys
from polyrhythm.run.coordinator.server import Coordinator
from polyrhythm.run.coordinator.sessions import PROTOCOL, FromWorker, Hello, ToWorker
from polyrhythm.sync.protocol import Abort, Assign, Commit, CopyFrom, Done, Ready, Skip
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds, Worker

KEYS = JobKeys.new()
SHAPE = (("layers.0.weight", (4, 8)), ("layers.0.bias", (4,)))
TIMEOUT: Seconds = 20.0  # for fast operations, on a busy machine


def setup_of(policy: str = "all_reduce", stages: int = 1, pipelines: int = 2, **more) -> Setup:
    return Setup(policy=policy, num_stages=stages, num_pipelines=pipelines, **more)


def coordinator_of(setup: Setup, log: Path | None = None, **more) -> Coordinator:
    return Coordinator(setup, bind="tcp://127.0.0.1:0", keys=KEYS.server_keys, log=log, **more)


def hello_of(setup: Setup, worker: Worker, incarnation: int = 1, **more) -> Hello:
    fields = {"node": "here", "clock": 0, "policy": setup.text, "shape": SHAPE, **more}
    return Hello(protocol=PROTOCOL, worker=worker, incarnation=incarnation, **fields)


def workers_of(setup: Setup) -> list[Worker]:
    stages, pipelines = range(setup.num_stages), range(setup.num_pipelines)
    return [Worker(stage, pipeline) for stage in stages for pipeline in pipelines]


def eventually(condition: Callable[[], object], timeout: Seconds = TIMEOUT) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"the condition is false after {timeout:g} s"
        time.sleep(0.005)


class FakeWorker:
    """A worker that sends Ready, sends Done on Assign, and ends its step on Commit or Skip."""

    def __init__(
        self,
        address: str,
        setup: Setup,
        worker: Worker,
        incarnation: int = 1,
        *,
        heartbeat_timeout: Seconds = 15.0,
        pause: Seconds = 0.0,  # in each step
        **hello: object,
    ) -> None:
        self.worker, self.incarnation, self.clock = worker, incarnation, 0
        self.commands: list[ToWorker] = []
        self.failures: list[Exception] = []
        self.averages = True  # sends Done
        self.pause = pause
        self._steps: queue.SimpleQueue[ToWorker | Exception] = queue.SimpleQueue()
        self.client = CoordinatorClient(
            address,
            KEYS.client_keys,
            hello_of(setup, worker, incarnation, **hello),
            on_command=self._on_command,
            on_failure=self._on_failure,
            heartbeat_timeout=heartbeat_timeout,
        )

    def join(self) -> "FakeWorker":
        self.client.join(TIMEOUT)
        return self

    def ready(self) -> None:
        time.sleep(self.pause)
        self.clock += 1
        self.client.send(Ready(self.worker, self.clock, self.incarnation))

    def wait(self) -> ToWorker:
        """Wait for the command that ends the step."""
        end = self._steps.get(timeout=TIMEOUT)
        if isinstance(end, Exception):
            raise end
        return end

    def step(self) -> ToWorker:
        self.ready()
        return self.wait()

    def train(self, num_steps: int) -> None:
        self.join()
        for _ in range(num_steps):
            self.step()
        self.client.close()

    def commands_of(self, kind: type) -> list[ToWorker]:
        return [command for command in self.commands if isinstance(command, kind)]

    def _on_command(self, command: ToWorker) -> None:
        self.commands.append(command)
        if isinstance(command, Assign) and self.averages:
            self.client.send(Done(self.worker, command.gid, True, self.incarnation))
        elif isinstance(command, Commit):
            end_clock = command.end_clocks[command.members.index(self.worker)]
            if end_clock >= 0:
                assert end_clock == self.clock
                self._steps.put(command)
        elif isinstance(command, Skip):
            assert command.clock == self.clock
            self._steps.put(command)
        else:
            assert isinstance(command, Assign | Abort | CopyFrom), command

    def _on_failure(self, error: Exception) -> None:
        self.failures.append(error)
        self._steps.put(error)


@contextlib.contextmanager
def joined_workers(address: str, setup: Setup, **more: object) -> Iterator[list[FakeWorker]]:
    """Join a FakeWorker for each worker of the plan; they leave at the end."""
    fake_workers = [FakeWorker(address, setup, worker, **more) for worker in workers_of(setup)]
    try:
        yield [fake_worker.join() for fake_worker in fake_workers]
    finally:
        for fake_worker in fake_workers:
            fake_worker.client.close()


def train_all(fake_workers: list[FakeWorker], num_steps: int) -> None:
    """Train all workers in threads to the end; raise the first error."""
    errors: list[Exception] = []

    def train(fake_worker: FakeWorker) -> None:
        try:
            fake_worker.train(num_steps)
        except Exception as error:
            errors.append(error)

    threads = [
        threading.Thread(target=train, args=[fake_worker], daemon=True)
        for fake_worker in fake_workers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


class RawClient:
    """A connection that can send any message."""

    def __init__(self, address: str, keys: JobKeys | None = KEYS) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        if keys is not None:
            self.socket.curve_serverkey = keys.server_public.encode()
            self.socket.curve_publickey = keys.client_public.encode()
            self.socket.curve_secretkey = keys.client_secret.encode()
        self.socket.connect(address)

    def send(self, message: FromWorker | bytes) -> None:
        is_bytes = isinstance(message, bytes)
        self.socket.send(message if is_bytes else msgspec.msgpack.encode(message))

    def receive(self, kind: type, timeout: Seconds = TIMEOUT) -> ToWorker:
        """Return the next message of type `kind`; skip others."""
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            if self.socket.poll(max(1, int(1e3 * left))):
                message = msgspec.msgpack.decode(self.socket.recv(), type=ToWorker)
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"no {kind.__name__} within {timeout} s")

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close(linger=0)
        self._context.term()


class Proxy:
    """A TCP proxy between workers and a coordinator that can break connections."""

    def __init__(self, address: str, at: str = "tcp://127.0.0.1:0") -> None:
        self._target = _host_port(address)
        self._server = socket.create_server(_host_port(at))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.is_open = True
        self.drops_messages = False  # of workers
        self.num_dropped = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def disconnect_all(self) -> int:
        """Break all connections at once; return how many there were."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for each in pair:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        return len(pairs)

    def close(self) -> None:
        self.is_open = False
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self.disconnect_all()

    def _accept(self) -> None:
        with self._server, contextlib.suppress(OSError):
            while self.is_open:
                near, _ = self._server.accept()
                far = socket.create_connection(self._target)
                self._pairs.append((near, far))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError), source:
            while data := source.recv(65536):
                if self.drops_messages and sink.getpeername() == self._target:
                    self.num_dropped += len(data)
                else:
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)


def _host_port(address: str) -> tuple[str, int]:
    host, port = address.removeprefix("tcp://").split(":")
    return host, int(port)
