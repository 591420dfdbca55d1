"""Two processes that exchange messages, and helpers of their tests."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.pipeline import transport
from polyrhythm.run.pipeline.batch import MicrobatchKind
from polyrhythm.run.pipeline.transport import (
    ANNOUNCEMENT_BYTES,
    Inbox,
    MessageLayout,
    Outbox,
    Route,
)
from polyrhythm.types import Action, Op

SHAPES = {10: (3, 4), 11: (5,), 12: (2, 0)}  # by kind


def route(ctx: DistContext, *, timeout: float = 30.0) -> Route:
    """Return the route to the other of two processes."""
    group = dist.new_group([0, 1])
    assert isinstance(group, dist.ProcessGroup)
    other = 1 - ctx.rank
    return Route(
        group=group,
        rank=other,
        peer=f"s{other}p0",
        device=torch.device("cpu"),
        timeout=timeout,
    )


def content(number: int, kind: MicrobatchKind) -> list[Tensor]:
    values = torch.full(SHAPES[kind], float(number)).requires_grad_()
    return [values, torch.tensor(number), torch.tensor([True, number % 2 == 0])]


def send(outbox: Outbox, number: int, kind: MicrobatchKind) -> None:
    tensors = content(number, kind)
    sent = [tensor.detach() for tensor in tensors]
    outbox.send(Action(Op.F, number), kind, sent, MessageLayout.of(tensors))


def receive_and_check(inbox: Inbox, number: int, kind: MicrobatchKind) -> None:
    tensors, transfer = inbox.get(Action(Op.F, number))
    assert (transfer.action, transfer.kind) == (Action(Op.F, number), kind)
    assert transfer.nbytes == MessageLayout.of(tensors).nbytes
    for tensor, expected in zip(tensors, content(number, kind), strict=True):
        assert torch.equal(tensor, expected)
        assert tensor.requires_grad == expected.requires_grad


def signal_peer(other: int) -> None:
    """Let the other process return from `wait_for_peer`."""
    dist.send(torch.zeros(1), other)


def wait_for_peer(other: int) -> None:
    dist.recv(torch.zeros(1), other)


def record_receives() -> list[bool]:
    """Record, for every receive posted in this process, whether it is of an announcement."""
    real, posted = transport._buffer, []

    def recorded(nbytes: int, device: torch.device) -> Tensor:
        posted.append(nbytes == ANNOUNCEMENT_BYTES)
        return real(nbytes, device)

    transport._buffer = recorded
    return posted


def track_buffers() -> list[StorageWeakRef]:
    """Record the memory into which this process packs or receives messages."""
    real, made = transport._buffer, []

    def tracked(nbytes: int, device: torch.device) -> Tensor:
        buffer = real(nbytes, device)
        made.append(StorageWeakRef(buffer.untyped_storage()))
        return buffer

    transport._buffer = tracked
    return made


def num_alive(buffers: list[StorageWeakRef]) -> int:
    return sum(not buffer.expired() for buffer in buffers)


def wait_until(condition: Callable[[], bool], message: str) -> None:
    deadline = time.monotonic() + 45
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.01)


def run(
    sender: Callable[[DistContext], None], receiver: Callable[[DistContext], None], folder: Path
) -> None:
    """Run both functions in two processes of one process group until both return."""

    def work(ctx: DistContext) -> None:
        with ctx.process_group(30):
            (sender, receiver)[ctx.rank](ctx)

    with LocalJob(work, 2, output_folder=folder) as job:
        assert job.wait(45), "not done in time"
