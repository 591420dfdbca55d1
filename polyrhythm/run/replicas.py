"""Replicas of a stage stay equal: their gradients are averaged in one all-reduce per step."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from polyrhythm.plan.plan import Plan
from polyrhythm.run.peers import waiting_for
from polyrhythm.types import Seconds, Worker


class Replicas:
    """The workers of one stage; made by every process of the job, in the same order."""

    def __init__(self, plan: Plan, worker: Worker, *, deadline: Seconds) -> None:
        self._stage = worker.stage
        self._num_pipelines = plan.num_pipelines
        for stage in range(plan.num_stages):  # new_group is collective over the whole job
            with waiting_for("another worker", f"making the group of stage {stage}"):
                group = dist.new_group(
                    [plan.rank(member) for member in plan.replicas(stage)],
                    timeout=timedelta(seconds=deadline),  # or it would wait half an hour
                )
            if stage == worker.stage:
                self._group = group

    def average_gradients(self, module: nn.Module) -> None:
        """Replace every gradient by its mean over the replicas."""
        if self._num_pipelines == 1:
            return
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients]).cpu()
        with waiting_for(f"a replica of stage {self._stage}", "averaging gradients"):
            dist.all_reduce(flat, group=self._group)
        flat /= self._num_pipelines
        means = flat.split([gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))
