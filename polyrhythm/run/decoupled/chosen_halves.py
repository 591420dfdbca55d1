"""Which way buckets take: by the device they are on, and what the workers' group can do there."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from polyrhythm.errors import PolicyError
from polyrhythm.run.decoupled.halves import Halves
from polyrhythm.run.decoupled.nccl_halves import NcclHalves
from polyrhythm.run.decoupled.staged_halves import StagedHalves


def halves_for(
    device: torch.device,
    group: dist.ProcessGroup | None,
    host: Halves,
    *,
    start: Callable[[Callable[[], None]], object],
) -> Halves:
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
        return NcclHalves(group)
    return StagedHalves(host, device, start=start)


def uses_nccl(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether what is on `device` travels by NCCL."""
    # As in "cpu:gloo,cuda:nccl", which is the form of all, however they were asked for.
    backends = dist.get_backend_config(group).split(",")
    return device.type == "cuda" and "cuda:nccl" in backends
