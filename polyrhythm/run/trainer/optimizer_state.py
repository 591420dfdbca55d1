"""One state of the optimizer for all replicas, before they make every step together.

In groups each has its own, of the samples it has seen; with equal gradients and unequal momentum
they would drift apart, and nothing would bring them together again.
"""

import io

import torch
from torch.optim import Optimizer

from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.comm.process_groups import new_gloo_group
from polyrhythm.run.trainer.fit_context import FitContext
from polyrhythm.types import Worker


def broadcast_optimizer_state(optimizer: Optimizer, context: FitContext) -> None:
    """That of the first pipeline, to all workers of this stage, who all call this."""
    num_stages, stage = context.pipeline.num_stages, context.worker.stage
    ranks = [pipeline * num_stages + stage for pipeline in range(context.num_pipelines)]
    group = new_gloo_group(ranks, "the optimizer's state", timeout=context.config.timeout)
    is_first, told = context.worker.pipeline == 0, torch.empty(0, dtype=torch.uint8)
    if is_first:
        packed = io.BytesIO()
        torch.save(optimizer.state_dict(), packed)
        told = torch.frombuffer(packed.getbuffer(), dtype=torch.uint8)
    size = torch.tensor([told.numel()])
    with peer_errors(Worker(stage, 0), "sharing the optimizer's state"):
        group.broadcast(size, 0).wait()
        told = told if is_first else torch.empty(int(size), dtype=torch.uint8)
        group.broadcast(told, 0).wait()
    if not is_first:
        state = torch.load(
            io.BytesIO(told.numpy().tobytes()), map_location="cpu", weights_only=False
        )
        optimizer.load_state_dict(state)
