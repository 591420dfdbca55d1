"""The workers of a distributed optimizer: how they reach each other, and what they tell."""

import os
import pickle
import socket
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.run.decoupled.halves import Halves, PeerHalves
from polyrhythm.run.decoupled.nested import NestedHalves, places
from polyrhythm.run.decoupled.reducing import Reducing
from polyrhythm.run.groups import all_gather, new_group
from polyrhythm.run.peers import waiting_for
from polyrhythm.sync.fusion.tuner import Kind
from polyrhythm.types import Seconds


class Team:
    """As one of them sees it; made by all together."""

    def __init__(
        self, group: dist.ProcessGroup | None, *, node: str | None, timeout: Seconds
    ) -> None:
        self._group, self._timeout = group, timeout
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank = ranks.index(dist.get_rank())
        self._groups = [new_group(ranks, "averaging gradients", deadline=timeout)]
        self.control = PeerHalves(self._groups[0], timeout=timeout)
        self._nested: Halves | None = None
        nodes = places(self.gathered(node or _name_of_this_node()))
        if nodes is not None:
            mine = next(node for node in nodes if self.rank in node)
            place = mine.index(self.rank)
            for where, members in (("inside of", mine), ("across", [of[place] for of in nodes])):
                what = f"averaging gradients {where} nodes"
                members = [ranks[member] for member in members]
                self._groups.append(new_group(members, what, deadline=timeout))
            inside, across = (PeerHalves(g, timeout=timeout) for g in self._groups[1:])
            self._nested = NestedHalves(inside, across)
        self.reducing = Reducing(self._groups, timeout=timeout)

    def kinds(self, mode: str) -> list[Kind]:
        """Those of a mode that there are here."""
        found = [kind for kind in Kind if self._nested is not None or not kind.is_nested]
        return [kind for kind in found if mode == "auto" or kind.is_whole == (mode == "all_reduce")]

    def halves(self, kind: Kind) -> Halves:
        if kind.is_nested:
            assert self._nested is not None, "it is no candidate without"
            return self._nested
        return self.control

    def gathered(self, mine: Any) -> list[Any]:
        """What all give, by rank."""
        with waiting_for("another worker", "agreeing"):
            given = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
            sizes = self._all_gathered(torch.tensor([len(given)]))
            largest = max(size.item() for size in sizes)
            padded = torch.zeros(int(largest), dtype=torch.uint8)
            padded[: len(given)] = given
            found = zip(self._all_gathered(padded), sizes, strict=True)
            return [pickle.loads(of[: size.item()].numpy().tobytes()) for of, size in found]

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Those of the first one."""
        with waiting_for("another worker", "beginning with the same weights"):
            for tensor in tensors:
                dist.broadcast(tensor.detach(), group=self._group, group_src=0)

    def close(self) -> None:
        self.reducing.close()

    def _all_gathered(self, mine: Tensor) -> list[Tensor]:
        found = [torch.empty_like(mine) for _ in range(self.control.num_workers)]
        all_gather(self._groups[0], found, mine)
        return found


@cache
def _name_of_this_node() -> str:
    """As torchrun numbers them; on its own, a process is on its host."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()
