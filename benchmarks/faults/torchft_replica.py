"""torchft's DDP example with an emulated step: its lighthouse and replicas, forks of one process.

    python torchft_replica.py FOLDER NUM_REPLICAS FORWARD JOIN_MS HEARTBEAT_MS

It runs until it is ended, in an environment of its own, made by `make baselines`, which has torchft
and not Polyrhythm. Manager, process group, transport and their timeouts are those of torchft's
`train_ddp.py`; the data set and the model are replaced by one layer that sleeps. As in the example,
each replica group is one process.

A replica writes a line of JSON when a step has ended: the time on the clock that all processes of a
machine share, and how many replicas took part.

Over gloo, replicas of torchft 0.2 end with an AssertionError when another one is lost during an
all-reduce. Here they do what its documentation promises: they skip the step.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before the forks: each would take seconds for it
import torch.distributed as dist
from torch import Tensor, nn
from torchft import (  # type: ignore[import-not-found]
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)
from torchft.checkpointing.pg_transport import PGTransport  # type: ignore[import-not-found]
from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]

_PARENT_DEATH_SIGNAL = 1
_LOOPBACK, _WIDTH, _LEARNING_RATE = "127.0.0.1", 32, 1e-3
_QUORUM_TICK_MS = 100  # as in torchft's README


class _Sleep(torch.autograd.Function):
    """Passes its input on; sleeps in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class _Layer(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(_WIDTH, _WIDTH), seconds

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.linear(inputs))
        found: Tensor = _Sleep.apply(hidden, self.seconds)  # type: ignore[no-untyped-call]
        return found


class _Replica(DistributedDataParallel):  # type: ignore[misc]
    @staticmethod
    def _comm_hook(
        manager: Manager,
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # public, but not listed as such
    ) -> torch.futures.Future[Tensor]:
        """Average as torchft does; after an error the manager does not commit the step."""
        work = manager.allreduce(bucket.buffer())
        if work.wait():
            found: torch.futures.Future[Tensor] | None = getattr(work.get_future(), "_fut", None)
            if found is not None:
                return found
        skipped = torch.futures.Future[Tensor]()
        skipped.set_result(bucket.buffer())
        return skipped


def run_lighthouse(folder: Path, join_ms: int, heartbeat_ms: int) -> None:
    """Serve until this process is ended; write the address when it is known."""
    server = LighthouseServer(
        bind=f"{_LOOPBACK}:0",
        min_replicas=1,
        join_timeout_ms=join_ms,
        quorum_tick_ms=_QUORUM_TICK_MS,
        heartbeat_timeout_ms=heartbeat_ms,
    )
    # Its address has the name of this machine, which need not be known to a name server.
    port = server.address().rpartition(":")[2]
    _write(folder / "lighthouse", f"http://{_LOOPBACK}:{port}")
    threading.Event().wait()


def run_replica(folder: Path, rank: int, forward: float) -> None:
    """Train until this process is ended."""
    torch.manual_seed(0)
    while not (folder / "lighthouse").exists():
        time.sleep(0.01)
    store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but not listed as such
        _LOOPBACK, 0, is_master=True, wait_for_workers=False
    )
    model = _Layer(forward)
    inner = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    group = ProcessGroupGloo(timeout=timedelta(seconds=5))
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=lambda state: _load(state, model, inner),
        state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict()},
        replica_id=f"train_ddp_{rank}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=PGTransport(
            group, timeout=timedelta(seconds=10), device=torch.device("cpu")
        ),
        rank=0,
        world_size=1,
        store_addr=_LOOPBACK,
        store_port=store.port,
        lighthouse_addr=(folder / "lighthouse").read_text(),
        hostname=_LOOPBACK,
    )
    replica = _Replica(manager, model)
    optimizer = Optimizer(manager, inner)
    inputs = torch.randn(1, _WIDTH, generator=torch.Generator().manual_seed(rank))
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    with (folder / f"steps{rank}.jsonl").open("w", buffering=1) as file:
        while True:
            step = manager.current_step()
            optimizer.zero_grad()
            replica(inputs).square().mean().backward()
            optimizer.step()
            if manager.current_step() > step:  # all replicas of the quorum have committed it
                ended = {"end": time.monotonic(), "num": manager.num_participants()}
                file.write(json.dumps(ended) + "\n")


def _load(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)


def _fork(run: Callable[[], None]) -> None:
    """Run a function in a child, which the kernel ends with this process."""
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        run()


def main() -> None:
    name, num_replicas, forward, join_ms, heartbeat_ms = sys.argv[1:]
    folder = Path(name)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    _fork(lambda: run_lighthouse(folder, int(join_ms), int(heartbeat_ms)))
    for rank in range(int(num_replicas)):
        _fork(lambda rank=rank: run_replica(folder, rank, float(forward)))  # type: ignore[misc]
    while True:  # the owner ends this process
        process, status = os.wait()
        if not os.WIFSIGNALED(status):
            sys.exit(f"process {process} ended by itself")


if __name__ == "__main__":
    main()
