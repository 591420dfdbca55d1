"""Check the arguments of a GroupSync before it waits for other workers."""

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
            f"a {type(module).__name__} without a trainable parameter",
            expected="a model with at least one trainable parameter",
            fix="pass the model that the optimizer updates, unfrozen",
        )
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(parameter) in updated for parameter in trainable_parameters(module)):
        raise PolicyError(
            f"an optimizer that updates no parameter of this {type(module).__name__}",
            expected="the optimizer of the model; a DistributedOptimizer averages by itself",
            fix="create the optimizer from model.parameters() after the model is complete",
        )


def check_worker(setup: Setup, worker: Worker) -> None:
    """Check that the job has a process for each worker, and that `worker` is in the plan."""
    if not dist.is_initialized():
        return  # Rendezvous refuses that
    num_workers, world = len(setup.workers), dist.get_world_size()
    plan = f"{setup.num_stages} x {setup.num_pipelines}" if setup.num_stages > 1 else num_workers
    if setup.mode.has_server and world <= num_workers:
        raise PolicyError(
            f"{setup.policy} with {plan} workers in a job of {world} processes",
            expected="one more process, on the last rank, which is the parameter server",
            fix=f"start {num_workers + 1} processes; on rank {num_workers} call "
            f"ParameterServer(num_pipelines={setup.num_pipelines}).serve() instead of training",
        )
    if num_workers > world:
        raise PolicyError(
            f"{plan} workers in a job of {world} processes",
            expected="a process for each worker",
            fix=f"start {num_workers} processes, or omit num_pipelines",
        )
    if worker not in setup.workers:
        raise PolicyError(
            f"{worker} in a job of {setup.num_stages} stages x {setup.num_pipelines} pipelines",
            expected=f"a worker from s0p0 to {setup.workers[-1]}: the rank, unless worker= is set",
            fix="put processes that do not train on the last ranks, and create no GroupSync there",
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
    if outer is not None and not setup.mode.has_outer_optimizer:
        raise PolicyError(
            f"an outer optimizer under {setup.policy}",
            expected="the policy local",
            fix="omit outer, or use policy='local'",
        )
    if coordinator is not None and not setup.mode.has_coordinator:
        raise PolicyError(
            f"coordinator={coordinator!r} under {setup.policy}",
            expected="no coordinator: a fixed rule forms the groups",
            fix="omit coordinator, or use a policy with a scheduler, such as adaptive",
        )
    if keys is not None and coordinator is None:
        raise PolicyError(
            f"keys={str(keys)!r} without a coordinator",
            expected="the address of the `polyrhythm coordinator` whose keys these are",
            fix="pass coordinator='tcp://HOST:PORT', or omit keys",
        )


def check_flush(model: object, decoupled: bool) -> None:
    if decoupled and isinstance(model, Pipeline) and not model.is_flushed:
        raise PolicyError(
            "decoupled=True with a Pipeline with flush=False",
            expected="one version of the weights: flush=False copies them before each forward",
            fix="use flush=True, or overlap=True instead of decoupled=True",
        )


def _check_decoupled(setup: Setup) -> None:
    if setup.mode.averages == "gradients":
        raise PolicyError(
            f"decoupled=True under {setup.policy}",
            expected=f"a policy that averages models; {setup.policy} averages gradients",
            fix="use polyrhythm.DistributedOptimizer, which decouples the gradients' all-reduce",
        )
    if not setup.mode.can_decouple:
        raise PolicyError(
            f"decoupled=True under {setup.policy}",
            expected=f"a policy whose averages can be split; {setup.mode.why_not_decoupled}",
            fix="use age or adaptive, or decoupled=False",
        )


def check_overlap(setup: Setup, overlap: bool, decoupled: bool) -> None:
    if overlap and decoupled:
        raise PolicyError(
            "overlap=True and decoupled=True",
            expected="one of them: with overlap no worker waits for an average or a part of it",
            fix="use decoupled=True for exact copies, or overlap=True to hide slow groups",
        )
    if overlap and not setup.mode.can_overlap:
        raise PolicyError(
            f"overlap under {setup.policy}",
            expected="a policy that averages models in groups of the scheduler",
            fix="use age or adaptive, or overlap=False",
        )
