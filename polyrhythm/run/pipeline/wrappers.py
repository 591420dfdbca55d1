"""Stage modules that are sharded over processes: which wrappers a pipeline runs or refuses.

FSDP2 (`fully_shard`) and tensor parallelism run collectives with the other processes of the stage
inside a forward and a backward, so all of them must run the same actions in the same order: they
are the same stage of parallel pipelines with one fixed schedule. FSDP2 reduces gradients in the
last backward of a step; until then gradients accumulate locally, as in torch's own pipelines.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from polyrhythm.errors import ScheduleError
from polyrhythm.run.pipeline import stage_modules

_WHOLE_STEP = "average the gradients after step(), or use fully_shard, which reduces them once"


def check_module(module: nn.Module, *, stage: int, is_tuned: bool, flush: bool) -> None:
    """Refuse modules that a pipeline would run wrongly."""
    for name, inner in module.named_modules():
        where = f"stage {stage}" + (f": {name}" if name else "")
        if isinstance(inner, DistributedDataParallel):
            raise ScheduleError(
                f"{where} is wrapped in DistributedDataParallel",
                expected="gradients that are averaged once per step: DDP would all-reduce them "
                "after every micro-batch, and wait there for the other pipelines",
                fix=f"pass the module inside it, and {_WHOLE_STEP}",
            )
        if isinstance(inner, FullyShardedDataParallel | DataParallel):
            raise ScheduleError(
                f"{where} is wrapped in {type(inner).__name__}",
                expected="a module that can run several forwards before the first backward",
                fix="shard the module with torch.distributed.fsdp.fully_shard instead",
            )
        if _exits_early(inner) and isinstance(inner, FSDPModule):
            raise ScheduleError(
                f"{where} is sharded around layers that are partly on the next stages",
                expected="no fully_shard on a module whose forward ends at the next stage: "
                "its post-forward hooks would not run",
                fix="call fully_shard on each layer, embedding and norm, not on their parents",
            )
    if (is_tuned or not flush) and is_shared(module):
        what = "schedule='auto'" if is_tuned else "flush=False"
        why = "each would choose its own" if is_tuned else "sharded weights cannot be stashed"
        raise ScheduleError(
            f"{what} with a module of stage {stage} that several processes share",
            expected=f"one schedule for all these processes, and a flush: {why}",
            fix="name the schedule, such as schedule='1f1b', and leave flush=True",
        )


def _exits_early(module: nn.Module) -> bool:
    """Whether the forward of a module ends at the first layer of the next stage."""
    return any(isinstance(m, stage_modules.ExitLayer) for m in module.modules() if m is not module)


def is_shared(module: nn.Module) -> bool:
    """Whether the forward of a module needs other processes: FSDP2 or tensor parallelism."""
    tensors = (*module.parameters(), *module.buffers())
    return any(isinstance(t, DTensor) and t.device_mesh.size() > 1 for t in tensors)


class ShardedModules:
    """The modules of a stage that FSDP2 shards."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = [inner for inner in module.modules() if isinstance(inner, FSDPModule)]

    @contextmanager
    def accumulation_context(self) -> Iterator[None]:
        """Accumulate gradients locally in this block; the next backward after it reduces them."""
        self._reduce(False)
        yield
        self._reduce(True)

    def _reduce(self, is_enabled: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(is_enabled, recurse=False)
            module.set_is_last_backward(is_enabled)


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, in the same memory; other tensors unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()
