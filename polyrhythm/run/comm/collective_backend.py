"""Which way buckets take: by the device they are on, and what the workers' group can do there."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from polyrhythm.errors import PolicyError
from polyrhythm.run.comm.nccl_collectives import NcclCollectives
from polyrhythm.run.comm.pinned_staging import PinnedCollectives
from polyrhythm.run.comm.reduce_scatter import Collectives


def select_backend(
    device: torch.device,
    group: dist.ProcessGroup | None,
    host: Collectives,
    *,
    start: Callable[[Callable[[], None]], object],
) -> Collectives:
    """For buckets on `device`, as parameters have it.

    `group` is the user's, if there is one; `host` are those for buckets in main memory, and `start`
    runs things in the thread that waits for them.
    """
    if device.type == "cpu":
        return host
    if device.type != "cuda":
        raise PolicyError(
            f"parameters on {device}",
            expected="parameters on the CPU, or on a CUDA device",
            fix="use DDP on other devices",
        )
    if group is not None and uses_nccl(device, group):
        return NcclCollectives(group)
    return PinnedCollectives(host, device, start=start)


def uses_nccl(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether what is on `device` travels by NCCL."""
    # As in "cpu:gloo,cuda:nccl", which is the form of all, however they were asked for.
    backends = dist.get_backend_config(group).split(",")
    return device.type == "cuda" and "cuda:nccl" in backends
