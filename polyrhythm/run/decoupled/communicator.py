"""The process groups and collectives that connect the workers of a DistributedOptimizer."""

import os
import socket
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.errors import PeerError, PolicyError
from polyrhythm.run.comm.comm_thread import CommThread
from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.comm.process_groups import all_gather_object, fingerprint, new_gloo_group
from polyrhythm.run.comm.reduce_scatter import (
    Collectives,
    GlooCollectives,
    HierarchicalCollectives,
    select_backend,
    uses_nccl,
)
from polyrhythm.sync.fusion.tuner import BucketMode
from polyrhythm.types import Seconds

Mode = Literal[
    "auto", "decoupled", "all_reduce", "hierarchical decoupled", "hierarchical all_reduce"
]

CONSTRUCTOR = "DistributedOptimizer()"
_POLL_INTERVAL: Seconds = 1.0  # between checks that the thread of a gather is alive


class Communicator:
    """The connections of one worker to the others; created by all workers together."""

    def __init__(
        self,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        node: str | None,
        timeout: Seconds,
    ) -> None:
        """Connect `ranks` of the job; `group` is their process group, if there is one."""
        self._ranks, self._group, self._device = ranks, group, device
        self._timeout = timeout
        self._background: BackgroundGather | None = None
        self.rank = ranks.index(dist.get_rank())
        self._groups = [new_gloo_group(ranks, "averaging gradients", timeout=timeout)]
        self.control = GlooCollectives(self._groups[0], timeout=timeout)
        self._hierarchical: Collectives | None = None
        nodes = ranks_by_node(self.all_gather_object(node or _name_of_this_node(), CONSTRUCTOR))
        has_nccl = group is not None and uses_nccl(device, group)
        if nodes is not None and not has_nccl:  # NCCL builds its own hierarchy
            own_node = next(members for members in nodes if self.rank in members)
            local_index = own_node.index(self.rank)
            across_nodes = [members[local_index] for members in nodes]
            for where, members in (("inside", own_node), ("across", across_nodes)):
                what = f"averaging gradients {where} nodes"
                members = [ranks[member] for member in members]
                self._groups.append(new_gloo_group(members, what, timeout=timeout))
            inside, across = (GlooCollectives(g, timeout=timeout) for g in self._groups[1:])
            self._hierarchical = HierarchicalCollectives(inside, across)
        self.comm_thread = CommThread(self._groups, timeout=timeout)
        self._collectives: dict[bool, Collectives] = {}

    def modes(self, mode: Mode) -> list[BucketMode]:
        """Return the bucket modes that `mode` allows on these nodes."""
        if mode != "auto" and BucketMode(mode).is_hierarchical and self._hierarchical is None:
            raise PolicyError(
                f"mode={mode!r} on nodes with unequal numbers of workers, or one worker each",
                expected="two nodes or more, with two workers or more on each",
                fix='use mode="auto", or name the machine of each worker with node=...',
            )
        if mode != "auto":
            return [BucketMode(mode)]
        has_nodes = self._hierarchical is not None
        return [each for each in BucketMode if has_nodes or not each.is_hierarchical]

    def collectives(self, mode: BucketMode) -> Collectives:
        if mode.is_hierarchical not in self._collectives:
            host = self._hierarchical if mode.is_hierarchical else self.control
            assert host is not None, "hierarchical modes are candidates only with a hierarchy"
            self._collectives[mode.is_hierarchical] = select_backend(
                self._device, self._group, host, start=self.comm_thread.start
            )
        return self._collectives[mode.is_hierarchical]

    def all_gather_object(self, obj: Any, what: str) -> list[Any]:
        """Gather an object of every rank; `what` names the call, which all ranks must make."""
        with peer_errors("another worker", f"{what}, which all workers call"):
            gathered = all_gather_object(self._groups[0], (what, obj))
        for rank, (call, _) in enumerate(gathered):
            if call != what:
                raise PolicyError(
                    f"rank {self.rank} is in {what}, and rank {rank} in {call}",
                    expected="all workers in the same call",
                    fix="call it on all workers, even if only one needs the result",
                )
        return [received for _, received in gathered]

    def broadcast_initial_state(self, *parts: Sequence[Tensor]) -> None:
        """Broadcast the tensors of rank 0; skip each part that is already equal everywhere."""
        if self.control.num_workers == 1:
            return
        digests = self.all_gather_object([fingerprint(part) for part in parts], CONSTRUCTOR)
        for part, part_digests in zip(parts, zip(*digests, strict=True), strict=True):
            if len(set(part_digests)) > 1:
                self._broadcast(part)

    @torch.no_grad()
    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        with peer_errors("another worker", "broadcasting the initial weights"):
            for tensor in tensors:
                if tensor.numel():
                    first = tensor.detach().cpu().contiguous()
                    raw = first.view(-1).view(torch.uint8)  # gloo does not support every dtype
                    self._groups[0].broadcast(raw, 0).wait()
                    tensor.copy_(first)

    def background(self) -> "BackgroundGather":
        """Return the gatherer for async checkpoints; the first call is made by all workers."""
        if self._background is None:
            self._background = BackgroundGather(self._ranks, timeout=self._timeout)
        return self._background

    def close(self) -> None:
        if self._background is not None:
            self._background.close()
        self.comm_thread.close()


class GatherFuture:
    """The result of a gather; every wait inside the gather has a timeout, so this one ends, too."""

    def __init__(self, is_running: Callable[[], bool]) -> None:
        self._is_running, self._is_done = is_running, threading.Event()
        self._result: Any = None
        self._error: Exception | None = None

    def run(self, function: Callable[[], Any]) -> None:
        try:
            self._result = function()
        except Exception as error:  # raised by `result`
            self._error = error
        self._is_done.set()

    def wait(self) -> None:
        """Wait until the gather has ended, or its thread."""
        while not self._is_done.wait(_POLL_INTERVAL) and self._is_running():
            pass

    def result(self) -> Any:
        """Return the gathered object; raises PeerError if a worker is lost or has left."""
        self.wait()
        if self._error is not None:
            raise self._error
        if not self._is_done.is_set():
            raise PeerError(
                "another worker",
                action="gathering the optimizer's state",
                waited=0.0,
                cause="this worker's optimizer was closed meanwhile",
            )
        return self._result


class BackgroundGather:
    """Gather optimizer state while training continues, in a separate thread and process group.

    A checkpoint needs the whole state, of which each worker has a shard. Training waits only for
    the copy of its own shard, not for the gather: over slow links that takes longer than a step.
    Gathers run one after the other; all workers create this, and start each gather.
    """

    def __init__(self, ranks: Sequence[int], *, timeout: Seconds) -> None:
        self._group = new_gloo_group(ranks, "gathering state", timeout=timeout)
        self.collectives = GlooCollectives(self._group, timeout=timeout)
        self._thread = CommThread([self._group], timeout=timeout)

    def start(self, function: Callable[[], Any]) -> GatherFuture:
        future = GatherFuture(lambda: self._thread.is_alive)
        self._thread.start(lambda: future.run(function))
        return future

    def all_gather_object(self, obj: Any, what: str) -> list[Any]:
        """Gather an object of every rank; `what` names the call for error messages."""
        with peer_errors("another worker", what):
            return all_gather_object(self._group, obj)

    def close(self) -> None:
        self._thread.close()


def replica_ranks(
    group: dist.ProcessGroup | None, num_stages: int
) -> tuple[list[int], dist.ProcessGroup | None]:
    """Return the ranks of the replicas of this stage, and their process group, if there is one."""
    if group is None and num_stages == 1:
        group = dist.group.WORLD
    if group is not None:
        return dist.get_process_group_ranks(group), group
    return list(range(dist.get_rank() % num_stages, dist.get_world_size(), num_stages)), None


def ranks_by_node(nodes: Sequence[str]) -> list[list[int]] | None:
    """Group ranks by node; `nodes[rank]` names the node. None if a hierarchy gains nothing."""
    members: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    sizes = {len(ranks) for ranks in members.values()}
    if len(members) < 2 or len(sizes) > 1 or sizes == {1}:
        return None
    return list(members.values())


@cache
def _name_of_this_node() -> str:
    """Return torchrun's node rank, or else the host name."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()
