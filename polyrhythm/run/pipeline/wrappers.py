"""Stage modules that share their work with other processes: which ones run, which are refused.

FSDP2 (`fully_shard`) and tensor parallelism talk to the other processes of the stage from inside of
a forward and a backward, so all of these must run the same actions in the same order: they are the
same stage of pipelines side by side, under one schedule that does not change. FSDP2 reduces
gradients with the last backward of a step; until then they add up where they are, as in torch's
own pipelines.
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

_WHOLE_STEP = "average the gradients after step(), or use fully_shard, which is told when to"


def check_module(module: nn.Module, *, stage: int, is_tuned: bool, flush: bool) -> None:
    """Refuse what a pipeline would run wrongly."""
    for name, inner in module.named_modules():
        where = f"stage {stage}" + (f": {name}" if name else "")
        if isinstance(inner, DistributedDataParallel):
            raise ScheduleError(
                f"{where} is wrapped in DistributedDataParallel",
                expected="gradients that are averaged once per step: it would all-reduce them "
                "after every micro-batch, and wait there for the other pipelines",
                fix=f"give the module inside of it, and {_WHOLE_STEP}",
            )
        if isinstance(inner, FullyShardedDataParallel | DataParallel):
            raise ScheduleError(
                f"{where} is wrapped in {type(inner).__name__}",
                expected="a module that can run several forwards before the first backward",
                fix="shard the module with torch.distributed.fsdp.fully_shard instead",
            )
        if _exits_early(inner) and isinstance(inner, FSDPModule):
            raise ScheduleError(
                f"{where} is sharded around layers of which the next stages hold some",
                expected="no fully_shard on a module whose forward ends at the next stage: "
                "what it does after the forward would not happen",
                fix="call fully_shard on each layer, embedding and norm, not on what holds them",
            )
    if (is_tuned or not flush) and is_shared(module):
        what = "schedule='auto'" if is_tuned else "flush=False"
        why = "each would choose its own" if is_tuned else "shared weights cannot be stashed"
        raise ScheduleError(
            f"{what} with a module of stage {stage} that several processes share",
            expected=f"one schedule for all that share it, and a flush: {why}",
            fix="name the schedule, such as schedule='1f1b', and leave flush=True",
        )


def _exits_early(module: nn.Module) -> bool:
    """Whether its forward ends where the first layer of the next stage would be called."""
    return any(isinstance(m, stage_modules.ExitLayer) for m in module.modules() if m is not module)


def is_shared(module: nn.Module) -> bool:
    """Whether its forward needs other processes: FSDP2 or tensor parallelism."""
    tensors = (*module.parameters(), *module.buffers())
    return any(isinstance(t, DTensor) and t.device_mesh.size() > 1 for t in tensors)


class ShardedModules:
    """The modules of a stage that FSDP2 shards."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = [inner for inner in module.modules() if isinstance(inner, FSDPModule)]

    @contextmanager
    def accumulation_context(self) -> Iterator[None]:
        """Backwards in this block leave their gradients to the first one after it."""
        self._reduce(False)
        yield
        self._reduce(True)

    def _reduce(self, now: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(now, recurse=False)
            module.set_is_last_backward(now)


def local(tensor: Tensor) -> Tensor:
    """The piece of it that this process holds, in the same memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()
