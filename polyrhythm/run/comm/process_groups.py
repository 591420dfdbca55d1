"""Gloo process groups that only their members create, under names of their own.

torch.distributed.new_group needs every process of the job or, with local synchronisation, the same
number of groups made before on all members: a stage with one more (as for tensor parallelism)
would wait under a name that no other member uses. Here the name depends on the members alone. The
rendezvous uses the store of the default group.
"""

import contextlib
import hashlib
import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.types import Seconds

_UNUSED_TAG = 2**30
_num_groups: Counter[tuple[int, ...]] = Counter()  # by members: the same count on all of them


def new_gloo_group(ranks: Sequence[int], purpose: str, *, timeout: Seconds) -> dist.ProcessGroup:
    """Create a gloo group of these ranks, called by all of them; ranks inside it are indices.

    The functions of torch.distributed do not know this group: use its methods or those below.
    """
    members = tuple(ranks)
    name = f"polyrhythm/{','.join(map(str, members))}/{_num_groups[members]}"
    _num_groups[members] += 1
    with peer_errors("another process", f"making the group for {purpose}"):
        return dist.ProcessGroupGloo(  # type: ignore[return-value]  # has the same methods
            PrefixStore(name, _get_default_store()),
            members.index(dist.get_rank()),
            len(members),
            timedelta(seconds=timeout),  # torch's default is half an hour
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
    """Gather an object of every rank, in rank order; for small objects, since it is pickled."""
    payload = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    sizes = _all_gather(group, torch.tensor([len(payload)]))
    padded = torch.zeros(int(max(size.item() for size in sizes)), dtype=torch.uint8)
    padded[: len(payload)] = payload
    gathered = zip(_all_gather(group, padded), sizes, strict=True)
    return [pickle.loads(raw[: size.item()].numpy().tobytes()) for raw, size in gathered]


def _all_gather(group: dist.ProcessGroup, obj: Tensor) -> list[Tensor]:
    gathered = [torch.empty_like(obj) for _ in range(group.size())]
    all_gather(group, gathered, obj)
    return gathered


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Hash the bytes and the boundaries of `tensors`; equal exactly for equal contents.

    Most replicas start from the same seed or checkpoint; comparing hashes avoids a broadcast.
    """
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(raw.numel().to_bytes(8, "big"))
        digest.update(raw.numpy().data)
    return digest.hexdigest()


def abort(group: dist.ProcessGroup) -> None:
    """Wake all threads that wait in the group, here and on peers; the group is unusable afterwards.

    Gloo's abort does nothing, but a receive that times out closes all connections of its group. A
    receive from a lost peer fails at once and closes nothing: try every peer.
    """
    for other in range(group.size()):
        if other != group.rank():
            with contextlib.suppress(RuntimeError):
                unused = torch.empty(1, dtype=torch.uint8)
                group.recv([unused], other, _UNUSED_TAG).wait(timedelta(milliseconds=1))
