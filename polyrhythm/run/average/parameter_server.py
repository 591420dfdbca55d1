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
from polyrhythm.run.average.meeting import Meeting, next_name, server_of
from polyrhythm.run.average.pairs import Pairs, Peer
from polyrhythm.run.peers import waiting_for
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds, Worker

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_WORD, _WEIGHTS = 1, 2  # tags


class _Word(IntEnum):
    """What a worker is about to do; it says so with the size and type of the buffer."""

    BEGIN = 0  # offers the weights to begin with
    PUSH = 1
    PULL = 2
    LEAVE = 3


class ServerLine:
    """A worker's line to the server."""

    def __init__(self, meeting: Meeting) -> None:
        self._timeout = timedelta(seconds=meeting.timeout)
        self._pairs = Pairs(meeting.store, meeting.me)
        self._server = meeting.peer(server_of(meeting.me.worker.stage, meeting.setup.num_pipelines))
        self._pairs.connect([self._server], "server", deadline=meeting.timeout)

    def begin(self, weights: Tensor) -> None:
        self._say(_Word.BEGIN, weights)
        self._send(weights)

    def push(self, move: Tensor) -> None:
        """Returns when the server has added it: whoever pulls from now on gets it."""
        self._say(_Word.PUSH, move)
        self._send(move)
        with waiting_for("the parameter server", "waiting until it has added a push"):
            self._pairs.receive(self._server, torch.empty(1), tag=_WEIGHTS).wait(self._timeout)

    def pull(self, like: Tensor) -> Tensor:
        self._say(_Word.PULL, like)
        weights = torch.empty_like(like)
        with waiting_for("the parameter server", "pulling weights"):
            self._pairs.receive(self._server, weights, tag=_WEIGHTS).wait(self._timeout)
        return weights

    def close(self) -> None:
        try:
            self._say(_Word.LEAVE, torch.empty(0))
        except PeerError:
            return  # it is gone before us
        finally:
            self._pairs.close()

    def _say(self, word: _Word, buffer: Tensor) -> None:
        told = torch.tensor([word, buffer.numel(), _DTYPES.index(buffer.dtype)])
        with waiting_for("the parameter server", f"telling it to {word.name.lower()}"):
            self._pairs.send(self._server, told, tag=_WORD).wait(self._timeout)

    def _send(self, buffer: Tensor) -> None:
        with waiting_for("the parameter server", "sending to it"):
            self._pairs.send(self._server, buffer, tag=_WEIGHTS).wait(self._timeout)


@dataclass(slots=True)
class _StageWeights:
    """In single precision at least: small moves add up, which half precision would round away."""

    num_pipelines: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    weights: Tensor | None = None

    def begin(self, weights: Tensor) -> None:
        with self.lock:
            if self.weights is None:  # all offer the same
                self.weights = _widened(weights)

    def push(self, move: Tensor) -> None:
        with self.lock:
            assert self.weights is not None, "a worker begins before it pushes"
            self.weights += _widened(move) / self.num_pipelines

    def pull(self, dtype: torch.dtype) -> Tensor:
        with self.lock:
            assert self.weights is not None, "a worker begins before it pulls"
            return self.weights.to(dtype, copy=True)


def _widened(tensor: Tensor) -> Tensor:
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
        self._meetings = [
            Meeting(self._setup, server_of(stage, num_pipelines), timeout=timeout, name=name)
            for stage in range(num_stages)
        ]
        self._weights = [_StageWeights(num_pipelines) for _ in range(num_stages)]
        self.lost: list[str] = []  # why, of workers that did not leave in good order

    def serve(self) -> None:
        """Raises PeerError if not all workers come."""
        try:
            self._meetings[0].gather()
        except BaseException as error:
            self._meetings[0].give_up(error)
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
        meeting = self._meetings[worker.stage]
        pairs = Pairs(meeting.store, meeting.me)
        try:
            peer = meeting.peer(worker)
            pairs.connect([peer], "server", deadline=self._timeout)
            while self._answer(pairs, peer):
                pass
        except PeerError as error:
            self.lost.append(str(error))
        finally:
            pairs.close()

    def _answer(self, pairs: Pairs, peer: Peer) -> bool:
        """Do what a worker says; False when it leaves."""
        stage, timeout = self._weights[peer.worker.stage], timedelta(seconds=self._timeout)
        told = torch.empty(3, dtype=torch.int64)
        with waiting_for(peer.worker, "waiting for its next word"):
            pairs.receive(peer, told, tag=_WORD).wait(timeout)
        word, size, dtype = _Word(int(told[0])), int(told[1]), _DTYPES[int(told[2])]
        if word is _Word.LEAVE:
            return False
        with waiting_for(peer.worker, f"its {word.name.lower()}"):
            if word is _Word.PULL:
                pairs.send(peer, stage.pull(dtype), tag=_WEIGHTS).wait(timeout)
                return True
            buffer = torch.empty(size, dtype=dtype)
            pairs.receive(peer, buffer, tag=_WEIGHTS).wait(timeout)
            if word is _Word.BEGIN:
                stage.begin(buffer)
            else:
                stage.push(buffer)
                pairs.send(peer, torch.empty(1), tag=_WEIGHTS).wait(timeout)
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
