"""The rank, device and partition of a stage."""

import os

import torch
import torch.distributed as dist
from torch import nn

from polyrhythm.errors import LaunchError, ScheduleError
from polyrhythm.run.pipeline.partition import ModelPartition, linear_wiring


def stage_ranks(group: dist.ProcessGroup | None) -> tuple[list[int], int]:
    """Return the ranks of the stages and the stage of this process."""
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise LaunchError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but no process group",
                expected="an initialised process group before a Pipeline is created",
                fix='call torch.distributed.init_process_group("gloo") first',
            )
        return [0], 0
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return ranks, ranks.index(dist.get_rank())


def wrap_module(module: nn.Module, stage: int, num_stages: int) -> ModelPartition:
    """Make a partition of a module that the user has split by hand."""
    if not isinstance(module, nn.Module):
        raise ScheduleError(
            f"a {type(module).__name__} as a stage",
            expected="an nn.Module",
            fix="wrap it in one",
        )
    return ModelPartition(module=module, wiring=linear_wiring(stage, num_stages), tied=())


def module_device(module: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    parameter = next(module.parameters(), None)
    if parameter is not None and parameter.is_meta:
        raise ScheduleError(
            "a module on the meta device, without memory",
            expected="weights on a device, or device= of where they will be",
            fix="pass device='cpu' or device='cuda:0', and call module.to_empty(device=...)",
        )
    return torch.device("cpu") if parameter is None else parameter.device
