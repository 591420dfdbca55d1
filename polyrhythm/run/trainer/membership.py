"""This process as a member of the job: joined, seated, and with its stage of the model."""

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
    """Made by `join_job`, ended by `leave`."""

    place: DistContext
    plan: Plan
    worker: Worker
    _stack: ExitStack

    def pipeline_group(self, timeout: Seconds) -> dist.ProcessGroup | None:
        """Of the stages of this pipeline, in order; None in a job of one process."""
        if not dist.is_initialized():
            return None
        plan, pipeline = self.plan, self.worker.pipeline
        ranks = [plan.rank(Worker(stage, pipeline)) for stage in range(plan.num_stages)]
        group = dist.new_group(
            ranks, timeout=timedelta(seconds=timeout), use_local_synchronization=True
        )
        assert isinstance(group, dist.ProcessGroup), "this process is in it"
        return group

    def device(self, wanted: torch.device | str | None) -> torch.device:
        """Where to compute: a GPU of this machine's if it has any, unless it is said."""
        if wanted is not None:
            return torch.device(wanted)
        if torch.cuda.is_available():
            return torch.device("cuda", self.place.local_rank % torch.cuda.device_count())
        return torch.device("cpu")

    def leave(self) -> None:
        """All leave together."""
        self._stack.close()

    def abandon(self) -> None:
        """After a failure: the others hear of it from who has lost us, and nobody waits."""
        self._stack.pop_all()


def join_job(plan: Plan, processes: JobProcesses) -> JobMembership:
    """Take the seat in the plan that goes with this process's device, or its rank."""
    stack = ExitStack()
    if processes.are_joined:
        assign_ranks(plan, [""] * processes.num_processes)
        return JobMembership(processes.place, plan, plan.worker(dist.get_rank()), stack)
    own = assign_ranks(plan, processes.device_names())[processes.place.rank]
    if processes.num_processes > 1:
        stack.enter_context(processes.place.process_group(processes.timeout, lambda _: own))
    return JobMembership(processes.place, plan, plan.worker(own), stack)
