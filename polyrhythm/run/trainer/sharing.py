"""One state of the optimizer for all replicas, before they make every step together.

In groups each has its own, of the samples it has seen; with equal gradients and unequal momentum
they would drift apart, and nothing would bring them together again.
"""

import io

import torch
from torch.optim import Optimizer

from polyrhythm.run.groups import new_group
from polyrhythm.run.peers import waiting_for
from polyrhythm.run.trainer.assignment import Assignment
from polyrhythm.types import Worker


def share_state(optimizer: Optimizer, own: Assignment) -> None:
    """That of the first pipeline, to all workers of this stage, who all call this."""
    num_stages, stage = own.pipeline.num_stages, own.worker.stage
    ranks = [pipeline * num_stages + stage for pipeline in range(own.num_pipelines)]
    group = new_group(ranks, "the optimizer's state", deadline=own.settings.deadline)
    is_first, told = own.worker.pipeline == 0, torch.empty(0, dtype=torch.uint8)
    if is_first:
        packed = io.BytesIO()
        torch.save(optimizer.state_dict(), packed)
        told = torch.frombuffer(packed.getbuffer(), dtype=torch.uint8)
    size = torch.tensor([told.numel()])
    with waiting_for(Worker(stage, 0), "sharing the optimizer's state"):
        group.broadcast(size, 0).wait()
        told = told if is_first else torch.empty(int(size), dtype=torch.uint8)
        group.broadcast(told, 0).wait()
    if not is_first:
        state = torch.load(
            io.BytesIO(told.numpy().tobytes()), map_location="cpu", weights_only=False
        )
        optimizer.load_state_dict(state)
