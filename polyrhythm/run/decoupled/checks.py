"""Checks of models and optimizers: refuse those that DistributedOptimizer cannot run."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from polyrhythm.describe.units import parse
from polyrhythm.errors import LaunchError, PolicyError
from polyrhythm.run.decoupled.buckets import Bucket
from polyrhythm.run.decoupled.communicator import CONSTRUCTOR
from polyrhythm.run.decoupled.state_dict import AllGatherObject
from polyrhythm.sync.fusion.tuner import FIRST, BucketMode
from polyrhythm.types import Bytes

# These update each number by itself: a shard is updated exactly as in the whole parameter.
ELEMENTWISE = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def parameters_of(optimizer: Optimizer, model: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    """Return the names and the parameters, in the order of the optimizer."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [names[p] for p in parameters], parameters


def check(optimizer: Optimizer, model: nn.Module, *, elementwise: bool) -> None:
    if not isinstance(optimizer, Optimizer) or not isinstance(model, nn.Module):
        raise PolicyError(
            f"DistributedOptimizer({type(optimizer).__name__}, {type(model).__name__})",
            expected="an optimizer of torch.optim, then the model",
            fix="DistributedOptimizer(optimizer, model)",
        )
    if not dist.is_initialized():
        raise LaunchError(
            "a DistributedOptimizer without a process group",
            expected="an initialised torch.distributed",
            fix="start with torchrun, and call torch.distributed.init_process_group first",
        )
    if hasattr(optimizer, "no_sync"):
        raise PolicyError(
            "an optimizer that is already a DistributedOptimizer",
            expected="an optimizer of torch.optim",
            fix="wrap it once",
        )
    if not elementwise and type(optimizer) not in ELEMENTWISE:
        raise PolicyError(
            f"the optimizer {type(optimizer).__name__}",
            expected="an optimizer that updates each element independently: "
            + ", ".join(kind.__name__ for kind in ELEMENTWISE),
            fix="pass elementwise=True if it does; one that needs whole tensors (LAMB, Muon, "
            'Adafactor) runs under GroupSync(model, optimizer, "all_reduce"), or DDP',
        )
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
            raise PolicyError(
                f"{name or 'a model'} wrapped in {type(module).__name__}",
                expected="a model that no other wrapper averages",
                fix="pass the module inside: model.module",
            )
    known = set(model.parameters())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in known:
                raise PolicyError(
                    f"an optimizer with a parameter of shape {tuple(parameter.shape)} that is not "
                    "the model's",
                    expected="the optimizer of this model",
                    fix="build it from model.parameters()",
                )
            if isinstance(parameter, DTensor):
                raise PolicyError(
                    "a model with sharded parameters (DTensor)",
                    expected="whole parameters on every worker",
                    fix="omit fully_shard: it averages gradients itself",
                )
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    if len(devices) != 1:
        raise PolicyError(
            f"parameters on {', '.join(sorted(map(str, devices))) or 'no device'}",
            expected="parameters, all on one device",
            fix="pass the optimizer the parameters of one device, and run a process per device",
        )


def parse_bucket_bytes(bucket_bytes: Bytes | str) -> Bytes:
    """Return the initial bucket size in bytes; accepts "auto" and sizes as "25MB"."""
    if bucket_bytes == "auto":
        return FIRST
    size = parse(bucket_bytes, Bytes) if isinstance(bucket_bytes, str) else bucket_bytes
    if not isinstance(size, int | float) or not size > 0:
        raise PolicyError(
            f"bucket_bytes={bucket_bytes!r}",
            expected='"auto", or more than 0 bytes',
            fix='use "25MB", as DDP does',
        )
    return int(size)


def check_mode(mode: object) -> None:
    if mode not in ("auto", *BucketMode):
        raise PolicyError(
            f"mode={mode!r}",
            expected=f"auto, {', '.join(BucketMode)}",
            fix="omit it: auto selects the fastest mode",
        )


def check_initialized() -> None:
    if not dist.is_initialized():
        raise PolicyError(
            "a DistributedOptimizer after destroy_process_group()",
            expected="the process group that it was created with",
            fix="destroy the group after the last step and the last state_dict()",
        )


def check_consistent(
    all_gather_object: AllGatherObject,
    optimizer: Optimizer,
    names: Sequence[str],
    settings: Mapping[str, object],
) -> None:
    """Raise PolicyError with the first difference between this worker and another one."""
    local = [f"{key}={value}" for key, value in settings.items()]
    local.append(f"optimizer {type(optimizer).__name__}")
    groups = optimizer.param_groups
    for number, group in enumerate(groups):
        options = {key: value for key, value in group.items() if key != "params"}
        local += [f"{key}={value} in group {number}" for key, value in options.items()]
    parameters = [(n, p) for n, group in enumerate(groups) for p in group["params"]]
    for index, (name, (number, parameter)) in enumerate(zip(names, parameters, strict=True)):
        shown = f"{name!r} {tuple(parameter.shape)} {parameter.dtype} in group {number}"
        if not parameter.is_contiguous():
            shown += f", strides {parameter.stride()}"
        if not parameter.requires_grad:
            shown += ", frozen"
        local.append(f"parameter {index} is {shown}")
    for rank, remote in enumerate(all_gather_object(local, CONSTRUCTOR)):
        for here, there in zip_longest(local, remote, fillvalue="no more parameters"):
            if here != there:
                raise PolicyError(
                    f"{here} on this rank, but on rank {rank}: {there}",
                    expected="the same model, optimizer and settings on all workers",
                    fix="build them by the same code in every process",
                )


def check_in_place(buckets: Iterable[Bucket], names: Sequence[str]) -> None:
    """Refuse weights that were moved out of their bucket: they would not be updated."""
    for bucket in buckets:
        if (index := bucket.find_replaced()) is not None:
            raise PolicyError(
                f"{names[index]} was moved to other memory",
                expected="a model that keeps its device and dtype after this optimizer is created",
                fix="call to(), half() and similar methods before creating the optimizer",
            )


def check_same_parameters(
    model: nn.Module, names: Sequence[str], parameters: Sequence[nn.Parameter]
) -> None:
    """Refuse parameters that replaced the original ones: they would not be trained."""
    now = dict(model.named_parameters())
    for name, parameter in zip(names, parameters, strict=True):
        if now.get(name) is not parameter:
            raise PolicyError(
                f"{name} was replaced by another parameter",
                expected="the parameters that this optimizer was created with",
                fix="call load_state_dict(...) without assign=True",
            )


def check_has_gradients(call: str, has_gradients: bool) -> None:
    if not has_gradients:
        raise PolicyError(
            f"{call} without a backward()",
            expected="loss.backward() before it, at least once outside no_sync()",
            fix="call it between backward() and zero_grad(); clip a norm before step()",
        )


def check_updating(is_updating: bool) -> None:
    """Refuse a step() of the wrapped optimizer that DistributedOptimizer has not called."""
    if not is_updating:
        raise PolicyError(
            "step() of the wrapped optimizer",
            expected="step() of the DistributedOptimizer around it, which averages first",
            fix="call step() and zero_grad() of the DistributedOptimizer",
        )
