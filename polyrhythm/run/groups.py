"""Process groups of our own, under names of our own.

torch.distributed.new_group needs every process of the job or, with local synchronisation, that all
members have made equally many groups before: a stage that has one more (for tensor parallelism,
say) would wait for a name that nobody uses. A pipeline asks its members alone, whatever else they
have made. The same store serves the rendezvous.
"""

import contextlib
import pickle
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from polyrhythm.run.peers import waiting_for
from polyrhythm.types import Seconds

_NEVER_SENT = 2**30  # a tag
_num_made: Counter[tuple[int, ...]] = Counter()  # by members, who all count alike


def new_group(ranks: Sequence[int], what: str, *, deadline: Seconds) -> dist.ProcessGroup:
    """A gloo group of these processes of the job, made by them together; ranks inside are indices.

    It is not known to torch.distributed's functions: call its methods, or those below.
    """
    members = tuple(ranks)
    name = f"polyrhythm/{','.join(map(str, members))}/{_num_made[members]}"
    _num_made[members] += 1
    with waiting_for("another process", f"making the group for {what}"):
        return dist.ProcessGroupGloo(  # type: ignore[return-value]  # has the same methods
            PrefixStore(name, _get_default_store()),
            members.index(dist.get_rank()),
            len(members),
            timedelta(seconds=deadline),  # or it would wait half an hour
        )


def send(group: dist.ProcessGroup, tensor: Tensor, to: int, *, tag: int) -> None:
    group.send([tensor], to, tag).wait()


def receive(group: dist.ProcessGroup, tensor: Tensor, sender: int, *, tag: int) -> None:
    group.recv([tensor], sender, tag).wait()


def all_reduce(
    group: dist.ProcessGroup, tensor: Tensor, operation: dist.ReduceOp.RedOpType
) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(operation)
    group.allreduce([tensor], options).wait()


def all_gather(group: dist.ProcessGroup, into: list[Tensor], tensor: Tensor) -> None:
    group.allgather([into], [tensor]).wait()


def gather_objects(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    """What all give, by rank, whatever it is; small, since it is pickled."""
    given = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    sizes = _gathered(group, torch.tensor([len(given)]))
    padded = torch.zeros(int(max(size.item() for size in sizes)), dtype=torch.uint8)
    padded[: len(given)] = given
    found = zip(_gathered(group, padded), sizes, strict=True)
    return [pickle.loads(of[: size.item()].numpy().tobytes()) for of, size in found]


def _gathered(group: dist.ProcessGroup, mine: Tensor) -> list[Tensor]:
    found = [torch.empty_like(mine) for _ in range(group.size())]
    all_gather(group, found, mine)
    return found


def break_off(group: dist.ProcessGroup) -> None:
    """Wake whoever waits in the group, here and elsewhere; it is of no use afterwards.

    Gloo's abort does nothing, but a receive that times out closes all connections of its group. One
    from a peer that is gone fails at once and closes nothing: all are tried.
    """
    for other in range(group.size()):
        if other != group.rank():
            with contextlib.suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8)
                group.recv([nothing], other, _NEVER_SENT).wait(timedelta(milliseconds=1))
