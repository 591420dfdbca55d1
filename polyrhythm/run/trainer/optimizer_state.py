"""Make the optimizer state of all replicas equal before a lockstep phase.

In groups each replica has its own state, from its own samples. With equal gradients but unequal
momentum the replicas would diverge, and a lockstep mode does not average weights again.
"""

import io

import torch
from torch.optim import Optimizer

from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.comm.process_groups import new_gloo_group
from polyrhythm.run.trainer.fit_context import FitContext
from polyrhythm.types import Worker


def broadcast_optimizer_state(optimizer: Optimizer, context: FitContext) -> None:
    """Broadcast the first pipeline's state to all workers of this stage; all of them call it."""
    num_stages, stage = context.pipeline.num_stages, context.worker.stage
    ranks = [pipeline * num_stages + stage for pipeline in range(context.num_pipelines)]
    group = new_gloo_group(ranks, "the optimizer's state", timeout=context.config.timeout)
    is_first, packed = context.worker.pipeline == 0, torch.empty(0, dtype=torch.uint8)
    if is_first:
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        packed = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    size = torch.tensor([packed.numel()])
    with peer_errors(Worker(stage, 0), "sharing the optimizer's state"):
        group.broadcast(size, 0).wait()
        packed = packed if is_first else torch.empty(int(size), dtype=torch.uint8)
        group.broadcast(packed, 0).wait()
    if not is_first:
        state = torch.load(
            io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=False
        )
        optimizer.load_state_dict(state)
