"""Join the job: initialise the process group and become one worker of the plan."""

from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from polyrhythm.plan.plan import Plan
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.trainer.rank_assignment import JobProcesses, assign_ranks
from polyrhythm.types import Seconds, Worker


@dataclass(slots=True)
class JobMembership:
    """This process's worker in the job. `join_job` makes it, `leave` ends it."""

    ctx: DistContext
    plan: Plan
    worker: Worker
    _stack: ExitStack

    def pipeline_group(self, timeout: Seconds) -> dist.ProcessGroup | None:
        """Make the group of this pipeline's stages, in order; None in a job of one process."""
        if not dist.is_initialized():
            return None
        plan, pipeline = self.plan, self.worker.pipeline
        ranks = [plan.rank(Worker(stage, pipeline)) for stage in range(plan.num_stages)]
        group = dist.new_group(
            ranks, timeout=timedelta(seconds=timeout), use_local_synchronization=True
        )
        assert isinstance(group, dist.ProcessGroup), "this process is a member"
        return group

    def device(self, wanted: torch.device | str | None) -> torch.device:
        """Return `wanted`, or by default this process's GPU if the machine has GPUs."""
        if wanted is not None:
            return torch.device(wanted)
        if torch.cuda.is_available():
            return torch.device("cuda", self.ctx.local_rank % torch.cuda.device_count())
        return torch.device("cpu")

    def leave(self) -> None:
        """Leave the process group; all processes call it."""
        self._stack.close()

    def abandon(self) -> None:
        """Leave without waiting after a failure: peers notice the lost connection."""
        self._stack.pop_all()


def join_job(plan: Plan, processes: JobProcesses) -> JobMembership:
    """Become the plan's worker for this process's device, or for its rank."""
    stack = ExitStack()
    if processes.are_joined:
        assign_ranks(plan, [""] * processes.num_processes)
        return JobMembership(processes.ctx, plan, plan.worker(dist.get_rank()), stack)
    rank = assign_ranks(plan, processes.device_names())[processes.ctx.rank]
    if processes.num_processes > 1:
        stack.enter_context(processes.ctx.process_group(processes.timeout, lambda _: rank))
    return JobMembership(processes.ctx, plan, plan.worker(rank), stack)
