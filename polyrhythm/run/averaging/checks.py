"""What cannot work is refused when a GroupSync is made, before anybody is waited for."""

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from polyrhythm.errors import PolicyError
from polyrhythm.run.averaging.buffers import trainable_parameters
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.sync.policies.local import OuterNesterov
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Worker


def check_model(module: nn.Module, optimizer: Optimizer) -> None:
    if not isinstance(module, nn.Module) or not isinstance(optimizer, Optimizer):
        raise PolicyError(
            f"GroupSync({type(module).__name__}, {type(optimizer).__name__})",
            expected="a model (nn.Module or Pipeline), then an optimizer of torch.optim",
            fix="GroupSync(model, optimizer, policy=...)",
        )
    if not trainable_parameters(module):
        raise PolicyError(
            f"a {type(module).__name__} without a parameter that is trained",
            expected="a model with at least one",
            fix="give the model that the optimizer updates, unfrozen",
        )
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(parameter) in updated for parameter in trainable_parameters(module)):
        raise PolicyError(
            f"an optimizer that updates no parameter of this {type(module).__name__}",
            expected="the optimizer of the model",
            fix="make the optimizer of model.parameters(), after the model has its final form",
        )


def check_worker(setup: Setup, worker: Worker) -> None:
    """That all workers of the plan can be there, and this one is one of them."""
    if not dist.is_initialized():
        return  # the next thing to be refused
    num_workers, world = len(setup.workers), dist.get_world_size()
    plan = f"{setup.num_stages} x {setup.num_pipelines}" if setup.num_stages > 1 else num_workers
    if setup.policy == "ssp" and world <= num_workers:
        raise PolicyError(
            f"ssp with {plan} workers in a job of {world} processes",
            expected="one process more, on the last rank, which is the parameter server",
            fix=f"start {num_workers + 1} processes; on rank {num_workers} call "
            f"ParameterServer(num_pipelines={setup.num_pipelines}).serve() instead of training",
        )
    if num_workers > world:
        raise PolicyError(
            f"{plan} workers in a job of {world} processes",
            expected="a process for each worker",
            fix=f"start {num_workers} processes, or leave num_pipelines away",
        )
    if worker not in setup.workers:
        raise PolicyError(
            f"{worker} in a job of {setup.num_stages} stages x {setup.num_pipelines} pipelines",
            expected=f"one of s0p0 to {setup.workers[-1]}: ranks from 0 on, unless worker= says "
            "otherwise",
            fix="let processes that do not train be the last ones, and make no GroupSync there",
        )


def check_options(
    setup: Setup,
    *,
    overlap: bool,
    decoupled: bool,
    outer: OuterNesterov | None,
    coordinator: str | None,
    keys: object,
) -> None:
    check_overlap(setup, overlap, decoupled)
    if decoupled:
        _check_decoupled(setup)
    if outer is not None and setup.policy != "local":
        raise PolicyError(
            f"an outer optimizer under {setup.policy}",
            expected="the policy local",
            fix="leave outer away, or use policy='local'",
        )
    if setup.policy == "balanced" and setup.steps_between > 1:
        raise PolicyError(
            f"every={setup.steps_between} under balanced",
            expected="every=1: the gradients of each step are averaged",
            fix="make more micro-batches of a larger batch instead",
        )
    if coordinator is not None and setup.policy == "static":
        raise PolicyError(
            f"coordinator={coordinator!r} under static",
            expected="no coordinator: a fixed rule says who averages with whom",
            fix="leave coordinator away, or use a policy that asks, such as adaptive",
        )
    if keys is not None and coordinator is None:
        raise PolicyError(
            f"keys={str(keys)!r} without a coordinator",
            expected="the address of the `polyrhythm coordinator` whose keys these are",
            fix="add coordinator='tcp://HOST:PORT', or leave keys away",
        )


def check_flush(model: object, decoupled: bool) -> None:
    if decoupled and isinstance(model, Pipeline) and not model.is_flushed:
        raise PolicyError(
            "decoupled=True with a Pipeline that is never flushed",
            expected="one version of the weights at a time: this one copies them before a forward",
            fix="make the Pipeline with flush=True, or use overlap=True instead of decoupled=True",
        )


def _check_decoupled(setup: Setup) -> None:
    if setup.averages_gradients:
        raise PolicyError(
            f"decoupled=True under {setup.policy}",
            expected="a policy that averages models; this one averages gradients",
            fix="use polyrhythm.DistributedOptimizer, which does the same for gradients",
        )
    if setup.why_not_decoupled is not None:
        raise PolicyError(
            f"decoupled=True under {setup.policy}",
            expected=f"a policy whose averages may come in parts; {setup.why_not_decoupled}",
            fix="use age or adaptive, or decoupled=False",
        )


def check_overlap(setup: Setup, overlap: bool, decoupled: bool) -> None:
    if overlap and decoupled:
        raise PolicyError(
            "overlap=True and decoupled=True",
            expected="one of them: with overlap nobody waits for an average, whole or in parts",
            fix="decoupled=True alone keeps exact copies, overlap=True alone hides slow groups",
        )
    if overlap and not setup.can_overlap:
        raise PolicyError(
            f"overlap under {setup.policy}",
            expected="a policy that averages models, with whom the scheduler says",
            fix="use age or adaptive, or overlap=False",
        )
