"""Checks of models and optimizers: refuse those that DistributedOptimizer cannot run."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from polyrhythm.describe.units import parse
from polyrhythm.errors import LaunchError, PolicyError
from polyrhythm.run.comm.process_groups import Replicas
from polyrhythm.sync.fusion.tuner import FIRST, BucketMode
from polyrhythm.types import Bytes

Mode = Literal["auto", "decoupled", "all_reduce", "hierarchical", "hierarchical_all_reduce"]
_OLD_MODES = {
    "hierarchical decoupled": BucketMode.HIERARCHICAL,
    "hierarchical all_reduce": BucketMode.HIERARCHICAL_ALL_REDUCE,
}

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


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside the wrappers of accelerate and Lightning Fabric."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def check_not_averaged(model: nn.Module, ranks: Collection[int] | None = None) -> None:
    """Refuse a model that a wrapper averages, if over several of `ranks`: they wait for it."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
            averaged = dist.get_process_group_ranks(module.process_group)
            if ranks is not None and len({*averaged} & {*ranks}) < 2:
                continue
            raise PolicyError(
                f"{name or 'a model'} wrapped in {type(module).__name__}",
                expected="a model that no other wrapper averages",
                fix="pass and call the module inside, model.module; omit the model in "
                "accelerator.prepare() and fabric.setup(), which wrap it",
            )


def check(optimizer: Optimizer, model: nn.Module, *, elementwise: bool) -> None:
    """Refuse an optimizer or model that cannot be wrapped."""
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
    if (inner := unwrapped(optimizer)) is not optimizer:
        raise PolicyError(
            f"{type(inner).__name__} inside a wrapper, {type(optimizer).__name__}",
            expected="an optimizer of torch.optim: the wrapper decides when to step, and would be "
            "passed over",
            fix="wrap the DistributedOptimizer instead: "
            "accelerator.prepare(optimizer) or fabric.setup_optimizers(optimizer)",
        )
    if not elementwise and type(optimizer) not in ELEMENTWISE:
        raise PolicyError(
            f"the optimizer {type(optimizer).__name__}",
            expected="an optimizer that updates each element independently: "
            + ", ".join(kind.__name__ for kind in ELEMENTWISE),
            fix="pass elementwise=True if it does; one that needs whole tensors (LAMB, Muon, "
            'Adafactor) runs under GroupSync(model, optimizer, "all_reduce"), or DDP',
        )
    _check_parameters(optimizer, model)


def _check_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    check_not_averaged(model)
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
            if is_lazy(parameter) or parameter.is_meta:
                what = "lazy parameters" if is_lazy(parameter) else "parameters on the meta device"
                raise PolicyError(
                    f"a model with {what}, without values",
                    expected="weights with values on every worker; those of the first are sent to "
                    "the others",
                    fix="call the model once, or model.to_empty(device=...) and load its weights, "
                    "before this optimizer is created",
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
        new_name = _OLD_MODES.get(str(mode))
        raise PolicyError(
            f"mode={mode!r}" + (f" is now mode={new_name.value!r}" if new_name else ""),
            expected=f"auto, {', '.join(BucketMode)}",
            fix="rename it" if new_name else "omit it: auto selects the fastest mode",
        )


def allowed_modes(mode: Mode, *, has_hierarchy: bool) -> list[BucketMode]:
    """Return the bucket modes that `mode` allows on these nodes."""
    if mode == "auto":
        return [each for each in BucketMode if has_hierarchy or not each.is_hierarchical]
    if BucketMode(mode).is_hierarchical and not has_hierarchy:
        raise PolicyError(
            f"mode={mode!r} on one node, or nodes with unequal numbers of workers or one each",
            expected="two nodes or more, with two workers or more on each",
            fix='use mode="auto", or name the machine of each worker with node=...',
        )
    return [BucketMode(mode)]


def check_consistent(
    replicas: Replicas,
    optimizer: Optimizer,
    names: Sequence[str],
    settings: Mapping[str, object],
    call: str,
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
    digest = hashlib.blake2b("\n".join(local).encode(), digest_size=16).hexdigest()
    if len(set(replicas.all_gather_object(digest, call))) == 1:
        return
    for rank, remote in enumerate(replicas.all_gather_object(local, call)):
        for here, there in zip_longest(local, remote, fillvalue="no more parameters"):
            if here != there:
                raise PolicyError(
                    f"{here} on this rank, but on rank {rank}: {there}",
                    expected="the same model, optimizer and settings on all workers",
                    fix="build them by the same code in every process",
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
