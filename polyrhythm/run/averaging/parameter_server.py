"""A parameter server: one process holds the model; workers push to it, and pull from it.

The baseline that group averaging is compared with. A worker pushes the change of its weights since
its last pull; the server adds 1 / number of workers of it, one push at a time. Running statistics
decay, so the sum of their changes could make a variance negative: a worker pushes them as they are,
and the server moves its own towards them by 1 / number of workers. The scheduler decides which
worker may continue (`sync/policies/ssp.py`). The server is a process of the job in addition to the
workers, best on a host of its own:

    if rank == num_workers:
        pr.ParameterServer(num_pipelines=num_workers).serve()
"""

import threading
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.errors import PeerError, PolicyError, peer_errors
from polyrhythm.run.averaging.exchange import Peer, PeerConnections
from polyrhythm.run.averaging.rendezvous import Rendezvous, server_worker
from polyrhythm.run.comm.process_groups import DEFAULT_TIMEOUT, NUM_SOCKETS
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds, Worker

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_OPERATION_TAG, _WEIGHTS_TAG = 0, NUM_SOCKETS


class _Operation(IntEnum):
    """A request of a worker, sent in a header with the size and dtype of the buffer."""

    INIT = 0  # sends the initial weights
    PUSH = 1
    PULL = 2
    LEAVE = 3


class ParameterServerClient:
    """A worker's connection to the parameter server."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._timeout = timedelta(seconds=rendezvous.timeout)
        self._connections = rendezvous.connections_of(rendezvous.me)
        self._server = rendezvous.peer(
            server_worker(rendezvous.me.worker.stage, rendezvous.setup.num_pipelines)
        )
        self._connections.connect([self._server], "server", timeout=rendezvous.timeout)

    def init(self, flat: Tensor, num_weights: int) -> None:
        """Send the initial weights, followed by statistics."""
        self._send_header(_Operation.INIT, flat, num_weights)
        self._send(flat)

    def push(self, update: Tensor) -> None:
        """Push changes of weights, then statistics; return when every later pull has them."""
        self._send_header(_Operation.PUSH, update)
        self._send(update)
        with peer_errors("the parameter server", "waiting for the reply to a push"):
            self._connections.receive(self._server, torch.empty(1), tag=_WEIGHTS_TAG).wait(
                self._timeout
            )

    def pull(self, like: Tensor) -> Tensor:
        self._send_header(_Operation.PULL, like)
        weights = torch.empty_like(like)
        with peer_errors("the parameter server", "pulling weights"):
            self._connections.receive(self._server, weights, tag=_WEIGHTS_TAG).wait(self._timeout)
        return weights

    def close(self) -> None:
        try:
            self._send_header(_Operation.LEAVE, torch.empty(0))
        except PeerError:
            return  # the server is gone already
        finally:
            self._connections.close()

    def _send_header(self, operation: _Operation, buffer: Tensor, num_weights: int = 0) -> None:
        numbers = [operation, buffer.numel(), _DTYPES.index(buffer.dtype), num_weights]
        header = torch.tensor(numbers)
        with peer_errors("the parameter server", f"requesting {operation.name.lower()}"):
            self._connections.send(self._server, header, tag=_OPERATION_TAG).wait(self._timeout)

    def _send(self, buffer: Tensor) -> None:
        with peer_errors("the parameter server", "sending weights"):
            self._connections.send(self._server, buffer, tag=_WEIGHTS_TAG).wait(self._timeout)


@dataclass(slots=True)
class _StageWeights:
    """The weights of a stage, then its statistics; at least in float32.

    Half precision would round small pushes away.
    """

    num_pipelines: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    flat: Tensor | None = None
    num_weights: int = 0

    def init(self, flat: Tensor, num_weights: int) -> None:
        with self.lock:
            if self.flat is None:  # all workers send the same
                self.flat, self.num_weights = _to_wide(flat), num_weights

    def push(self, update: Tensor) -> None:
        with self.lock:
            assert self.flat is not None, "a worker sends INIT before it pushes"
            wide = _to_wide(update)
            wide[self.num_weights :] -= self.flat[self.num_weights :]
            self.flat += wide / self.num_pipelines

    def pull(self, dtype: torch.dtype) -> Tensor:
        with self.lock:
            assert self.flat is not None, "a worker sends INIT before it pulls"
            return self.flat.to(dtype, copy=True)


def _to_wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class ParameterServer:
    """Serves all stages of a job until every worker has left or is lost."""

    def __init__(
        self,
        *,
        num_pipelines: int,
        num_stages: int = 1,
        timeout: Seconds = DEFAULT_TIMEOUT,
        process_group: dist.ProcessGroup | None = None,
        name: str = "sync",
    ) -> None:
        """Take the arguments of the workers' GroupSync, with the same `name`."""
        self._setup = Setup(policy="ssp", num_stages=num_stages, num_pipelines=num_pipelines)
        _check_rank(len(self._setup.workers), process_group)
        self._timeout, server = timeout, server_worker(0, num_pipelines)
        self._rendezvous = Rendezvous(
            self._setup, server, timeout=timeout, name=name, process_group=process_group
        )
        self._weights = [_StageWeights(num_pipelines) for _ in range(num_stages)]
        self.lost: list[str] = []  # the errors of workers that did not leave

    def serve(self) -> None:
        """Serve until all workers have left; raises PeerError if not all workers join."""
        try:
            self._rendezvous.wait_for_all()
        except BaseException as error:
            self._rendezvous.report_failure(error)
            raise
        threads = [
            threading.Thread(target=self._serve, args=(Worker(stage, pipeline),), daemon=True)
            for stage in range(self._setup.num_stages)
            for pipeline in range(self._setup.num_pipelines)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _serve(self, worker: Worker) -> None:
        rendezvous, num_pipelines = self._rendezvous, self._setup.num_pipelines
        me = rendezvous.peer(server_worker(worker.stage, num_pipelines))
        connections, peer = rendezvous.connections_of(me), rendezvous.peer(worker)
        try:
            connections.connect([peer], "server", timeout=self._timeout)
            while self._answer(connections, peer):
                pass
        except PeerError as error:
            self.lost.append(str(error))
        finally:
            connections.close()

    def _answer(self, connections: PeerConnections, peer: Peer) -> bool:
        """Handle a worker's next request; False when it leaves."""
        stage, timeout = self._weights[peer.worker.stage], timedelta(seconds=self._timeout)
        header = torch.empty(4, dtype=torch.int64)
        with peer_errors(peer.worker, "waiting for its next request"):
            connections.receive(peer, header, tag=_OPERATION_TAG).wait(timeout)
        operation, size, dtype = _Operation(int(header[0])), int(header[1]), _DTYPES[int(header[2])]
        if operation is _Operation.LEAVE:
            return False
        with peer_errors(peer.worker, f"its {operation.name.lower()}"):
            if operation is _Operation.PULL:
                connections.send(peer, stage.pull(dtype), tag=_WEIGHTS_TAG).wait(timeout)
                return True
            buffer = torch.empty(size, dtype=dtype)
            connections.receive(peer, buffer, tag=_WEIGHTS_TAG).wait(timeout)
            if operation is _Operation.INIT:
                stage.init(buffer, int(header[3]))
            else:
                stage.push(buffer)
                connections.send(peer, torch.empty(1), tag=_WEIGHTS_TAG).wait(timeout)
        return True


def _check_rank(num_workers: int, process_group: dist.ProcessGroup | None) -> None:
    """Check that the server's rank follows the workers', which start at 0 with the coordinator."""
    if dist.is_initialized() and (rank := dist.get_rank(process_group)) < num_workers:
        raise PolicyError(
            f"a parameter server on rank {rank} of {dist.get_world_size(process_group)}, "
            f"for {num_workers} workers",
            expected=f"rank {num_workers}, the first one after the workers",
            fix=f"start {num_workers + 1} processes, and call serve() on the last one",
        )
