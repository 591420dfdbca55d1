"""A scheduler of all-reduce with all workers joined, and a scripted policy, for tests."""

from polyrhythm.sync.members import Limits
from polyrhythm.sync.policies.all_reduce import AllReduce
from polyrhythm.sync.policy import Policy
from polyrhythm.sync.protocol import Command, Join, Ready
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Group, Seconds, Worker

A, B, C = (Worker(0, pipeline) for pipeline in range(3))
LIMITS = Limits(floor=1.0, ceiling=10.0, max_retries=1)


def scheduler_of(num_pipelines: int = 2, num_stages: int = 1, **options: object) -> Scheduler:
    """A scheduler of all-reduce whose workers have all joined."""
    policies = [AllReduce(num_pipelines) for _ in range(num_stages)]
    scheduler = Scheduler(policies, num_pipelines, waits_for_all=True, limits=LIMITS, **options)
    for worker in scheduler.membership.members:
        assert scheduler.step(Join(worker, "node", 0)) == []
    return scheduler


def ready(
    scheduler: Scheduler, *workers: Worker, clock: int = 1, now: float = 1.0
) -> list[Command]:
    return [c for worker in workers for c in scheduler.step(Ready(worker, clock, now=now))]


class ScriptedPolicy(Policy):
    """Returns the given groups at a worker's request, and records all calls."""

    def __init__(self, on_request: dict[Worker, list[Group]] | None = None) -> None:
        self.requests = on_request or {}
        self.calls: list[str] = []

    def on_request(self, worker: Worker, now: Seconds) -> list[Group]:
        self.calls.append(f"request {worker}")
        return self.requests.pop(worker, [])

    def on_ready(self, worker: Worker, now: Seconds) -> list[Group]:
        self.calls.append(f"ready {worker}")
        return []

    def on_done(self, group: Group, ok: bool, now: Seconds) -> list[Group]:
        self.calls.append(f"done {' '.join(map(str, group.members))} {ok}")
        return []

    def on_leave(self, worker: Worker, now: Seconds) -> list[Group]:
        self.calls.append(f"leave {worker}")
        return []
