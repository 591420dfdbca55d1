"""A coordinator on loopback, and workers that do nothing but speak with it."""

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
from polyrhythm.run.coordinator.coordinator import Coordinator
from polyrhythm.run.coordinator.keys import JobKeys
from polyrhythm.run.coordinator.wire import PROTOCOL, FromWorker, Hello, ToWorker
from polyrhythm.sync.messages import Abort, Assign, Commit, Done, Heal, Ready, Skip
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds, Worker

KEYS = JobKeys.new()
SHAPE = (("layers.0.weight", (4, 8)), ("layers.0.bias", (4,)))
PATIENCE: Seconds = 20.0  # for what should take a moment, on a busy machine


def setup_of(policy: str = "all_reduce", stages: int = 1, pipelines: int = 2, **more) -> Setup:
    return Setup(policy=policy, num_stages=stages, num_pipelines=pipelines, **more)


def coordinator_of(setup: Setup, log: Path | None = None, **more) -> Coordinator:
    return Coordinator.of(setup, bind="tcp://127.0.0.1:0", keys=KEYS, log=log, **more)


def hello_of(setup: Setup, worker: Worker, life: int = 1, **more) -> Hello:
    fields = {"node": "here", "clock": 0, "policy": setup.text, "shape": SHAPE, **more}
    return Hello(protocol=PROTOCOL, worker=worker, incarnation=life, **fields)


def workers_of(setup: Setup) -> list[Worker]:
    stages, pipelines = range(setup.num_stages), range(setup.num_pipelines)
    return [Worker(stage, pipeline) for stage in stages for pipeline in pipelines]


def eventually(holds: Callable[[], object], timeout: Seconds = PATIENCE) -> None:
    gives_up = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < gives_up, "it does not come true"
        time.sleep(0.005)


class Trainee:
    """A worker: says Ready, says Done when it is assigned, and goes on when it is told to."""

    def __init__(
        self,
        address: str,
        setup: Setup,
        worker: Worker,
        life: int = 1,
        *,
        silence: Seconds = 15.0,
        pause: Seconds = 0.0,  # in each step
        **hello: object,
    ) -> None:
        self.worker, self.life, self.clock = worker, life, 0
        self.heard: list[ToWorker] = []
        self.failures: list[Exception] = []
        self.averages = True  # says Done
        self.pause = pause
        self._steps: queue.SimpleQueue[ToWorker | Exception] = queue.SimpleQueue()
        self.client = CoordinatorClient(
            address,
            KEYS,
            hello_of(setup, worker, life, **hello),
            hear=self._hear,
            fail=self._fail,
            silence=silence,
        )

    def join(self) -> "Trainee":
        self.client.join(PATIENCE)
        return self

    def ready(self) -> None:
        time.sleep(self.pause)
        self.clock += 1
        self.client.send(Ready(self.worker, self.clock, self.life))

    def wait(self) -> ToWorker:
        """What ends the step."""
        end = self._steps.get(timeout=PATIENCE)
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

    def told(self, kind: type) -> list[ToWorker]:
        return [command for command in self.heard if isinstance(command, kind)]

    def _hear(self, command: ToWorker) -> None:
        self.heard.append(command)
        if isinstance(command, Assign) and self.averages:
            self.client.send(Done(self.worker, command.gid, True, self.life))
        elif isinstance(command, Commit):
            ends = command.ends[command.members.index(self.worker)]
            if ends >= 0:
                assert ends == self.clock
                self._steps.put(command)
        elif isinstance(command, Skip):
            assert command.clock == self.clock
            self._steps.put(command)
        else:
            assert isinstance(command, Assign | Abort | Heal), command

    def _fail(self, error: Exception) -> None:
        self.failures.append(error)
        self._steps.put(error)


@contextlib.contextmanager
def trainees(address: str, setup: Setup, **more: object) -> Iterator[list[Trainee]]:
    """One for each worker of the plan, joined; they leave in the end."""
    made = [Trainee(address, setup, worker, **more) for worker in workers_of(setup)]
    try:
        yield [trainee.join() for trainee in made]
    finally:
        for trainee in made:
            trainee.client.close()


def train_all(made: list[Trainee], num_steps: int) -> None:
    """All at once, and to the end; raises what one of them met."""
    errors: list[Exception] = []

    def train(trainee: Trainee) -> None:
        try:
            trainee.train(num_steps)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=[trainee], daemon=True) for trainee in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


class Raw:
    """A connection that can say anything."""

    def __init__(self, address: str, keys: JobKeys | None = KEYS) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        if keys is not None:
            self.socket.curve_serverkey = keys.server_public.encode()
            self.socket.curve_publickey = keys.client_public.encode()
            self.socket.curve_secretkey = keys.client_secret.encode()
        self.socket.connect(address)

    def say(self, message: FromWorker | bytes) -> None:
        is_bytes = isinstance(message, bytes)
        self.socket.send(message if is_bytes else msgspec.msgpack.encode(message))

    def hear(self, kind: type, timeout: Seconds = PATIENCE) -> ToWorker:
        """The next message of that kind."""
        gives_up = time.monotonic() + timeout
        while (left := gives_up - time.monotonic()) > 0:
            if self.socket.poll(max(1, int(1e3 * left))):
                message = msgspec.msgpack.decode(self.socket.recv(), type=ToWorker)
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"no {kind.__name__} within {timeout} s")

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close(linger=0)
        self._context.term()


class Proxy:
    """Between workers and a coordinator; cuts their connections when it is told to."""

    def __init__(self, address: str, at: str = "tcp://127.0.0.1:0") -> None:
        self._target = _place(address)
        self._server = socket.create_server(_place(at))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.is_open = True
        self.loses = False  # what workers say
        self.num_lost = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> int:
        """All of them, at once; how many there were."""
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
        self.cut()

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
                if self.loses and sink.getpeername() == self._target:
                    self.num_lost += len(data)
                else:
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)


def _place(address: str) -> tuple[str, int]:
    host, port = address.removeprefix("tcp://").split(":")
    return host, int(port)
