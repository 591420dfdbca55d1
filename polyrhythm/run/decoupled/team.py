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
from polyrhythm.run.decoupled.beside import Beside
from polyrhythm.run.decoupled.chosen_halves import halves_for, uses_nccl
from polyrhythm.run.decoupled.halves import Halves, PeerHalves
from polyrhythm.run.decoupled.nested import NestedHalves, places
from polyrhythm.run.decoupled.reducing import Reducing
from polyrhythm.run.fingerprint import fingerprint
from polyrhythm.run.groups import gather_objects, new_group
from polyrhythm.run.peers import waiting_for
from polyrhythm.sync.fusion.tuner import Kind
from polyrhythm.types import Seconds

Mode = Literal[
    "auto", "decoupled", "all_reduce", "nested decoupled", "nested all_reduce"
]  # or one kind alone

BEGINNING = "DistributedOptimizer()"


class Team:
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
        self._beside: Beside | None = None
        self.rank = ranks.index(dist.get_rank())
        self._groups = [new_group(ranks, "averaging gradients", deadline=timeout)]
        self.control = PeerHalves(self._groups[0], timeout=timeout)
        self._nested: Halves | None = None
        nodes = places(self.gathered(node or _name_of_this_node(), BEGINNING))
        has_nccl = group is not None and uses_nccl(device, group)
        if nodes is not None and not has_nccl:  # which knows nodes itself
            mine = next(node for node in nodes if self.rank in node)
            place = mine.index(self.rank)
            for where, members in (("inside of", mine), ("across", [of[place] for of in nodes])):
                what = f"averaging gradients {where} nodes"
                members = [ranks[member] for member in members]
                self._groups.append(new_group(members, what, deadline=timeout))
            inside, across = (PeerHalves(g, timeout=timeout) for g in self._groups[1:])
            self._nested = NestedHalves(inside, across)
        self.reducing = Reducing(self._groups, timeout=timeout)
        self._chosen: dict[bool, Halves] = {}

    def kinds(self, mode: Mode) -> list[Kind]:
        """Those that there are here, of a mode."""
        if mode != "auto" and Kind(mode).is_nested and self._nested is None:
            raise PolicyError(
                f"mode={mode!r} where nodes do not have equally many workers, and several",
                expected="two nodes or more, with two workers or more on each",
                fix='use mode="auto", or name the machine of each worker with node=...',
            )
        if mode != "auto":
            return [Kind(mode)]
        return [kind for kind in Kind if self._nested is not None or not kind.is_nested]

    def halves(self, kind: Kind) -> Halves:
        if kind.is_nested not in self._chosen:
            host = self._nested if kind.is_nested else self.control
            assert host is not None, "it is no candidate without"
            self._chosen[kind.is_nested] = halves_for(
                self._device, self._group, host, start=self.reducing.start
            )
        return self._chosen[kind.is_nested]

    def gathered(self, mine: Any, what: str) -> list[Any]:
        """What all give, by rank, who all call `what`."""
        with waiting_for("another worker", f"{what}, which all workers call"):
            found = gather_objects(self._groups[0], (what, mine))
        for rank, (theirs, _) in enumerate(found):
            if theirs != what:
                raise PolicyError(
                    f"rank {self.rank} is in {what}, and rank {rank} in {theirs}",
                    expected="all workers in the same call",
                    fix="call it on all of them, also where one alone needs what it gives",
                )
        return [given for _, given in found]

    def begin_equal(self, *parts: Sequence[Tensor]) -> None:
        """With those of the first one; a part is sent if anybody has another."""
        if self.control.num_workers == 1:
            return
        prints = self.gathered([fingerprint(part) for part in parts], BEGINNING)
        for part, of_part in zip(parts, zip(*prints, strict=True), strict=True):
            if len(set(of_part)) > 1:
                self._spread(part)

    @torch.no_grad()
    def _spread(self, tensors: Sequence[Tensor]) -> None:
        with waiting_for("another worker", "beginning with the same weights"):
            for tensor in tensors:
                if tensor.numel():
                    first = tensor.detach().cpu().contiguous()
                    raw = first.view(-1).view(torch.uint8)  # gloo need not know the type
                    self._groups[0].broadcast(raw, 0).wait()
                    tensor.copy_(first)

    def beside(self) -> Beside:
        """For what goes on beside training; made by all, when they first ask for it."""
        if self._beside is None:
            self._beside = Beside(self._ranks, timeout=self._timeout)
        return self._beside

    def close(self) -> None:
        if self._beside is not None:
            self._beside.close()
        self.reducing.close()


def members_of(
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
