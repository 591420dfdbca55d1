"""Select the collectives of buckets by their device and by the backend of the process group."""

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
    """Select the collectives for buckets on `device`, the device of the parameters.

    `group` is the user's process group, if there is one; `host` are the collectives of buckets in
    main memory; `start` runs a function in the communication thread.
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
    """Whether `group` sends tensors on `device` over NCCL."""
    # Torch normalises every backend name to this form: "cpu:gloo,cuda:nccl".
    backends = dist.get_backend_config(group).split(",")
    return device.type == "cuda" and "cuda:nccl" in backends
