"""Replicas of which one is killed; the others average again among themselves."""

import os
import signal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from polyrhythm.errors import PeerError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
from tests.gloo.pipelines import random_batch, stack_of

KILLED, SURVIVORS, KILLED_AT = 1, [0, 2], 5
_NUM_STEPS, _TIMEOUT = 15, 20.0


def train_with_survivors(
    ctx: DistContext, device: torch.device, site: str | None
) -> tuple[list[str], dict[str, Tensor]]:
    """Train as one of three; return the errors that the step after a loss raised, and weights."""
    model, errors = stack_of(4).to(device), list[str]()

    def wrapped(group: dist.ProcessGroup | None) -> DistributedOptimizer:
        return DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.01),
            model,
            bucket_bytes=600,
            process_group=group,
            site=site,
            timeout=_TIMEOUT,
        )

    optimizer, step = wrapped(None), 0
    while step < _NUM_STEPS:
        if (ctx.rank, step) == (KILLED, KILLED_AT):
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, target = (t.to(device) for t in random_batch(4, 8, seed=10 * step + ctx.rank))
        is_lost = False
        try:
            functional.mse_loss(model(inputs), target).backward()
            optimizer.step()
            optimizer.zero_grad()
        except PeerError as error:
            errors.append(str(error))
            is_lost = True
        if is_lost:  # after the handler: its traceback holds the sockets of the old group
            optimizer.abort()
            model.zero_grad()
            group = dist.new_group(SURVIVORS, use_local_synchronization=True)
            optimizer = wrapped(group)
            step = _step_of_the_first(step, group)
        step += 1
    optimizer.close()
    return errors, {name: p.detach().cpu() for name, p in model.named_parameters()}


def _step_of_the_first(step: int, group: dist.ProcessGroup) -> int:
    """Return the step of the first survivor: others may have noticed the loss a step later."""
    number = torch.tensor(step)
    dist.broadcast(number, SURVIVORS[0], group)
    return int(number)
