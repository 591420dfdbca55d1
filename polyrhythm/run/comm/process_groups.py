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

from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.types import Seconds

_UNUSED_TAG = 2**30  # a tag
_num_groups: Counter[tuple[int, ...]] = Counter()  # by members, who all count alike


def new_gloo_group(ranks: Sequence[int], purpose: str, *, timeout: Seconds) -> dist.ProcessGroup:
    """A gloo group of these processes of the job, made by them together; ranks inside are indices.

    It is not known to torch.distributed's functions: call its methods, or those below.
    """
    members = tuple(ranks)
    name = f"polyrhythm/{','.join(map(str, members))}/{_num_groups[members]}"
    _num_groups[members] += 1
    with peer_errors("another process", f"making the group for {purpose}"):
        return dist.ProcessGroupGloo(  # type: ignore[return-value]  # has the same methods
            PrefixStore(name, _get_default_store()),
            members.index(dist.get_rank()),
            len(members),
            timedelta(seconds=timeout),  # or it would wait half an hour
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


def all_gather(group: dist.ProcessGroup, outputs: list[Tensor], tensor: Tensor) -> None:
    group.allgather([outputs], [tensor]).wait()


def all_gather_object(group: dist.ProcessGroup, obj: Any) -> list[Any]:
    """What all give, by rank, whatever it is; small, since it is pickled."""
    payload = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    sizes = _all_gather(group, torch.tensor([len(payload)]))
    padded = torch.zeros(int(max(size.item() for size in sizes)), dtype=torch.uint8)
    padded[: len(payload)] = payload
    gathered = zip(_all_gather(group, padded), sizes, strict=True)
    return [pickle.loads(of[: size.item()].numpy().tobytes()) for of, size in gathered]


def _all_gather(group: dist.ProcessGroup, obj: Tensor) -> list[Tensor]:
    gathered = [torch.empty_like(obj) for _ in range(group.size())]
    all_gather(group, gathered, obj)
    return gathered


def abort(group: dist.ProcessGroup) -> None:
    """Wake whoever waits in the group, here and elsewhere; it is of no use afterwards.

    Gloo's abort does nothing, but a receive that times out closes all connections of its group. One
    from a peer that is gone fails at once and closes nothing: all are tried.
    """
    for other in range(group.size()):
        if other != group.rank():
            with contextlib.suppress(RuntimeError):
                unused = torch.empty(1, dtype=torch.uint8)
                group.recv([unused], other, _UNUSED_TAG).wait(timedelta(milliseconds=1))
