"""Which models and optimizers can be decoupled; the others are refused with the reason."""

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

# These update each number by itself, so that a part of a parameter is updated as in the whole.
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
    """Names and parameters, as the optimizer has them."""
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
            "a distributed optimizer outside of a job",
            expected="an initialised torch.distributed",
            fix="start with torchrun, and call torch.distributed.init_process_group first",
        )
    if hasattr(optimizer, "no_sync"):
        raise PolicyError(
            "an optimizer that is distributed already",
            expected="one of torch.optim",
            fix="wrap it once",
        )
    if not elementwise and type(optimizer) not in ELEMENTWISE:
        raise PolicyError(
            f"the optimizer {type(optimizer).__name__}",
            expected="one that updates each number by itself: "
            + ", ".join(kind.__name__ for kind in ELEMENTWISE),
            fix="say elementwise=True if it does; one that needs whole tensors (LAMB, Muon, "
            'Adafactor) runs under GroupSync(model, optimizer, "all_reduce"), or DDP',
        )
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
            raise PolicyError(
                f"{name or 'a model'} wrapped in {type(module).__name__}",
                expected="a model that nobody else averages",
                fix="give the module inside: model.module",
            )
    known = set(model.parameters())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in known:
                raise PolicyError(
                    f"an optimizer with a parameter of shape {tuple(parameter.shape)} that is not "
                    "the model's",
                    expected="the optimizer of this model",
                    fix="make it of model.parameters()",
                )
            if isinstance(parameter, DTensor):
                raise PolicyError(
                    "a model with sharded parameters (DTensor)",
                    expected="whole parameters on every worker",
                    fix="leave out fully_shard: it averages gradients itself",
                )
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    if len(devices) != 1:
        raise PolicyError(
            f"parameters on {', '.join(sorted(map(str, devices))) or 'no device'}",
            expected="parameters, all on one device",
            fix="give the optimizer the parameters of one device, with a process for each device",
        )


def parse_bucket_bytes(bucket_bytes: Bytes | str) -> Bytes:
    """Of buckets, to begin with; "25MB" is a size, too."""
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
            fix="leave it out: auto takes the fastest",
        )


def check_initialized() -> None:
    if not dist.is_initialized():
        raise PolicyError(
            "a distributed optimizer after destroy_process_group()",
            expected="the process group that it was made with",
            fix="destroy it after the last step and the last state_dict()",
        )


def check_consistent(
    all_gather_object: AllGatherObject,
    optimizer: Optimizer,
    names: Sequence[str],
    settings: Mapping[str, object],
) -> None:
    """Name the first difference between what this worker has and another one has."""
    mine = [f"{key}={value}" for key, value in settings.items()]
    mine.append(f"optimizer {type(optimizer).__name__}")
    for number, of in enumerate(optimizer.param_groups):
        mine += [f"{key}={value} in group {number}" for key, value in of.items() if key != "params"]
    parameters = [(n, p) for n, of in enumerate(optimizer.param_groups) for p in of["params"]]
    for number, (name, (group, parameter)) in enumerate(zip(names, parameters, strict=True)):
        shown = f"{name!r} {tuple(parameter.shape)} {parameter.dtype} in group {group}"
        if not parameter.is_contiguous():
            shown += f", strides {parameter.stride()}"
        if not parameter.requires_grad:
            shown += ", frozen"
        mine.append(f"parameter {number} is {shown}")
    for rank, theirs in enumerate(all_gather_object(mine, CONSTRUCTOR)):
        for here, there in zip_longest(mine, theirs, fillvalue="no more parameters"):
            if here != there:
                raise PolicyError(
                    f"{here} here, and on rank {rank}: {there}",
                    expected="the same model, optimizer and settings on all workers",
                    fix="build them in the same way in every process",
                )


def check_in_place(buckets: Iterable[Bucket], names: Sequence[str]) -> None:
    """Weights that lie elsewhere now would not be updated."""
    for bucket in buckets:
        if (index := bucket.find_replaced()) is not None:
            raise PolicyError(
                f"{names[index]} was moved to other memory",
                expected="a model that stays where and what it was when this optimizer was made",
                fix="call to(), half() and the like before that",
            )


def check_same_parameters(
    model: nn.Module, names: Sequence[str], parameters: Sequence[nn.Parameter]
) -> None:
    """Parameters that have taken the place of others would not be trained."""
    now = dict(model.named_parameters())
    for name, parameter in zip(names, parameters, strict=True):
        if now.get(name) is not parameter:
            raise PolicyError(
                f"{name} was replaced by another parameter",
                expected="the parameters that this optimizer was made for",
                fix="load_state_dict(...) without assign=True",
            )


def check_has_gradients(call: str, has_gradients: bool) -> None:
    if not has_gradients:
        raise PolicyError(
            f"{call} without a backward()",
            expected="loss.backward() before it, outside of no_sync() at least once",
            fix="call it between backward() and zero_grad(); a norm is clipped before step()",
        )


def check_updating(is_updating: bool) -> None:
    """Of the wrapped optimizer, which this one steps."""
    if not is_updating:
        raise PolicyError(
            "step() of an optimizer that is wrapped",
            expected="step() of the DistributedOptimizer around it, which averages first",
            fix="call that, and zero_grad() of it, too",
        )
