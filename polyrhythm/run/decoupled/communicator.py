"""The workers of a distributed optimizer: how they reach each other, and what they tell."""

import os
import socket
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.errors import PolicyError
from polyrhythm.run.comm.collective_backend import select_backend, uses_nccl
from polyrhythm.run.comm.comm_thread import CommThread
from polyrhythm.run.comm.hierarchical import HierarchicalCollectives, ranks_by_node
from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.comm.process_groups import all_gather_object, new_gloo_group
from polyrhythm.run.comm.reduce_scatter import Collectives, GlooCollectives
from polyrhythm.run.decoupled.background_gather import BackgroundGather
from polyrhythm.run.fingerprint import fingerprint
from polyrhythm.sync.fusion.tuner import BucketMode
from polyrhythm.types import Seconds

Mode = Literal[
    "auto", "decoupled", "all_reduce", "hierarchical decoupled", "hierarchical all_reduce"
]  # or one kind alone

CONSTRUCTOR = "DistributedOptimizer()"


class Communicator:
    """As one of them sees it; made by all together."""

    def __init__(
        self,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        node: str | None,
        timeout: Seconds,
    ) -> None:
        """Of these ranks of the job, who are those of `group`, if there is one."""
        self._ranks, self._group, self._device = ranks, group, device
        self._timeout = timeout
        self._background: BackgroundGather | None = None
        self.rank = ranks.index(dist.get_rank())
        self._groups = [new_gloo_group(ranks, "averaging gradients", timeout=timeout)]
        self.control = GlooCollectives(self._groups[0], timeout=timeout)
        self._hierarchical: Collectives | None = None
        nodes = ranks_by_node(self.all_gather_object(node or _name_of_this_node(), CONSTRUCTOR))
        has_nccl = group is not None and uses_nccl(device, group)
        if nodes is not None and not has_nccl:  # which knows nodes itself
            mine = next(node for node in nodes if self.rank in node)
            local_index = mine.index(self.rank)
            for where, members in (
                ("inside of", mine),
                ("across", [of[local_index] for of in nodes]),
            ):
                what = f"averaging gradients {where} nodes"
                members = [ranks[member] for member in members]
                self._groups.append(new_gloo_group(members, what, timeout=timeout))
            inside, across = (GlooCollectives(g, timeout=timeout) for g in self._groups[1:])
            self._hierarchical = HierarchicalCollectives(inside, across)
        self.comm_thread = CommThread(self._groups, timeout=timeout)
        self._collectives: dict[bool, Collectives] = {}

    def kinds(self, mode: Mode) -> list[BucketMode]:
        """Those that there are here, of a mode."""
        if mode != "auto" and BucketMode(mode).is_hierarchical and self._hierarchical is None:
            raise PolicyError(
                f"mode={mode!r} where nodes do not have equally many workers, and several",
                expected="two nodes or more, with two workers or more on each",
                fix='use mode="auto", or name the machine of each worker with node=...',
            )
        if mode != "auto":
            return [BucketMode(mode)]
        return [
            kind
            for kind in BucketMode
            if self._hierarchical is not None or not kind.is_hierarchical
        ]

    def collectives(self, kind: BucketMode) -> Collectives:
        if kind.is_hierarchical not in self._collectives:
            host = self._hierarchical if kind.is_hierarchical else self.control
            assert host is not None, "it is no candidate without"
            self._collectives[kind.is_hierarchical] = select_backend(
                self._device, self._group, host, start=self.comm_thread.start
            )
        return self._collectives[kind.is_hierarchical]

    def all_gather_object(self, mine: Any, what: str) -> list[Any]:
        """What all give, by rank, who all call `what`."""
        with peer_errors("another worker", f"{what}, which all workers call"):
            found = all_gather_object(self._groups[0], (what, mine))
        for rank, (theirs, _) in enumerate(found):
            if theirs != what:
                raise PolicyError(
                    f"rank {self.rank} is in {what}, and rank {rank} in {theirs}",
                    expected="all workers in the same call",
                    fix="call it on all of them, also where one alone needs what it gives",
                )
        return [given for _, given in found]

    def broadcast_initial_state(self, *parts: Sequence[Tensor]) -> None:
        """With those of the first one; a part is sent if anybody has another."""
        if self.control.num_workers == 1:
            return
        digests = self.all_gather_object([fingerprint(part) for part in parts], CONSTRUCTOR)
        for part, of_part in zip(parts, zip(*digests, strict=True), strict=True):
            if len(set(of_part)) > 1:
                self._broadcast(part)

    @torch.no_grad()
    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        with peer_errors("another worker", "beginning with the same weights"):
            for tensor in tensors:
                if tensor.numel():
                    first = tensor.detach().cpu().contiguous()
                    raw = first.view(-1).view(torch.uint8)  # gloo need not know the type
                    self._groups[0].broadcast(raw, 0).wait()
                    tensor.copy_(first)

    def background(self) -> BackgroundGather:
        """For what goes on beside training; made by all, when they first ask for it."""
        if self._background is None:
            self._background = BackgroundGather(self._ranks, timeout=self._timeout)
        return self._background

    def close(self) -> None:
        if self._background is not None:
            self._background.close()
        self.comm_thread.close()


def replica_ranks(
    group: dist.ProcessGroup | None, num_stages: int
) -> tuple[list[int], dist.ProcessGroup | None]:
    """The ranks of all replicas of what this process has, and their group, if there is one."""
    if group is None and num_stages == 1:
        group = dist.group.WORLD
    if group is not None:
        return dist.get_process_group_ranks(group), group
    return list(range(dist.get_rank() % num_stages, dist.get_world_size(), num_stages)), None


@cache
def _name_of_this_node() -> str:
    """As torchrun numbers them; on its own, a process is on its host."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()
