"""Which models and optimizers can be decoupled; the others are refused with the reason."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from polyrhythm.errors import LaunchError, PolicyError

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


def check(optimizer: Optimizer, model: nn.Module) -> None:
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
    if not isinstance(optimizer, ELEMENTWISE):
        raise PolicyError(
            f"a {type(optimizer).__name__}",
            expected="an optimizer that updates each number by itself: "
            + ", ".join(kind.__name__ for kind in ELEMENTWISE),
            fix="one that needs whole tensors (LAMB, Muon, Adafactor) runs under "
            'GroupSync(model, optimizer, "all_reduce"), or DDP',
        )
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise PolicyError(
                f"{name or 'a model'} wrapped in DistributedDataParallel",
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
            if parameter.device.type != "cpu":
                raise PolicyError(
                    f"parameters on {parameter.device}",
                    expected="parameters on the CPU: only gloo is supported so far",
                    fix="use DDP on GPUs",
                )
