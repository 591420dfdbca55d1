"""A parameter server: one process holds the model; workers push to it, and pull from it.

The baseline that group averaging is compared with. A worker pushes how far its weights have moved
since it last pulled; the server adds the mean over workers of these moves, one push at a time. Who
may go on when is the scheduler's matter (`sync/ssp.py`). The server is a process of the job beside
the workers, best on a host of its own:

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

from polyrhythm.errors import PeerError, PolicyError
from polyrhythm.run.averaging.peer_connections import Peer, PeerConnections
from polyrhythm.run.averaging.rendezvous import Rendezvous, next_name, server_worker
from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds, Worker

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_OPERATION_TAG, _WEIGHTS_TAG = 1, 2  # tags


class _Operation(IntEnum):
    """What a worker is about to do; it says so with the size and type of the buffer."""

    BEGIN = 0  # offers the weights to begin with
    PUSH = 1
    PULL = 2
    LEAVE = 3


class ParameterServerClient:
    """A worker's line to the server."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._timeout = timedelta(seconds=rendezvous.timeout)
        self._connections = PeerConnections(rendezvous.store, rendezvous.me)
        self._server = rendezvous.peer(
            server_worker(rendezvous.me.worker.stage, rendezvous.setup.num_pipelines)
        )
        self._connections.connect([self._server], "server", timeout=rendezvous.timeout)

    def begin(self, weights: Tensor) -> None:
        self._send_header(_Operation.BEGIN, weights)
        self._send(weights)

    def push(self, move: Tensor) -> None:
        """Returns when the server has added it: whoever pulls from now on gets it."""
        self._send_header(_Operation.PUSH, move)
        self._send(move)
        with peer_errors("the parameter server", "waiting until it has added a push"):
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
            return  # it is gone before us
        finally:
            self._connections.close()

    def _send_header(self, operation: _Operation, buffer: Tensor) -> None:
        header = torch.tensor([operation, buffer.numel(), _DTYPES.index(buffer.dtype)])
        with peer_errors("the parameter server", f"telling it to {operation.name.lower()}"):
            self._connections.send(self._server, header, tag=_OPERATION_TAG).wait(self._timeout)

    def _send(self, buffer: Tensor) -> None:
        with peer_errors("the parameter server", "sending to it"):
            self._connections.send(self._server, buffer, tag=_WEIGHTS_TAG).wait(self._timeout)


@dataclass(slots=True)
class _StageWeights:
    """In single precision at least: small moves add up, which half precision would round away."""

    num_pipelines: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    weights: Tensor | None = None

    def begin(self, weights: Tensor) -> None:
        with self.lock:
            if self.weights is None:  # all offer the same
                self.weights = _to_wide(weights)

    def push(self, move: Tensor) -> None:
        with self.lock:
            assert self.weights is not None, "a worker begins before it pushes"
            self.weights += _to_wide(move) / self.num_pipelines

    def pull(self, dtype: torch.dtype) -> Tensor:
        with self.lock:
            assert self.weights is not None, "a worker begins before it pulls"
            return self.weights.to(dtype, copy=True)


def _to_wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class ParameterServer:
    """Serves all stages of a job until every worker has left or is lost."""

    def __init__(
        self,
        *,
        num_pipelines: int,
        num_stages: int = 1,
        timeout: Seconds = 600.0,
        name: str | None = None,
    ) -> None:
        """All as in the workers' GroupSync; of several, in the same order or each with a name."""
        self._setup = Setup(policy="ssp", num_stages=num_stages, num_pipelines=num_pipelines)
        _check_rank(len(self._setup.workers))
        self._timeout, name = timeout, name or next_name(self._setup)
        self._stage_rendezvous = [
            Rendezvous(self._setup, server_worker(stage, num_pipelines), timeout=timeout, name=name)
            for stage in range(num_stages)
        ]
        self._weights = [_StageWeights(num_pipelines) for _ in range(num_stages)]
        self.lost: list[str] = []  # why, of workers that did not leave in good order

    def serve(self) -> None:
        """Raises PeerError if not all workers come."""
        try:
            self._stage_rendezvous[0].wait_for_all()
        except BaseException as error:
            self._stage_rendezvous[0].report_failure(error)
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
        rendezvous = self._stage_rendezvous[worker.stage]
        connections = PeerConnections(rendezvous.store, rendezvous.me)
        try:
            peer = rendezvous.peer(worker)
            connections.connect([peer], "server", timeout=self._timeout)
            while self._answer(connections, peer):
                pass
        except PeerError as error:
            self.lost.append(str(error))
        finally:
            connections.close()

    def _answer(self, connections: PeerConnections, peer: Peer) -> bool:
        """Do what a worker says; False when it leaves."""
        stage, timeout = self._weights[peer.worker.stage], timedelta(seconds=self._timeout)
        header = torch.empty(3, dtype=torch.int64)
        with peer_errors(peer.worker, "waiting for its next word"):
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
            if operation is _Operation.BEGIN:
                stage.begin(buffer)
            else:
                stage.push(buffer)
                connections.send(peer, torch.empty(1), tag=_WEIGHTS_TAG).wait(timeout)
        return True


def _check_rank(num_workers: int) -> None:
    """Workers have the ranks from 0 on; the first of them coordinates."""
    if dist.is_initialized() and dist.get_rank() < num_workers:
        raise PolicyError(
            f"a parameter server on rank {dist.get_rank()} of {dist.get_world_size()}, "
            f"for {num_workers} workers",
            expected=f"the rank after those of the workers, {num_workers}",
            fix=f"start {num_workers + 1} processes, and serve on the last one",
        )
