"""Bounded staleness: a parameter server whose workers may run ahead by a limited number of steps.

A worker pushes its gradients to the server, reports ready, and pulls new weights when it is
released, which is when it is no more than `staleness` steps ahead of the slowest. Staleness 0 is
the synchronous parameter server: no worker continues before all have pushed.

Every group has one worker: workers do not average, the server holds the one model.

Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", NIPS 2013. With staleness 0 it is the parameter server of Luo et al., "Prague", ASPLOS
2020, sections 7.1.3 and 7.3. In a pipeline it is Park et al., "HetPipe", USENIX ATC 2020: one
policy has the workers of all stages; a pipeline is one virtual worker, whose clock is that of its
slowest stage, and `staleness` is the number of stages by default, as in Miao et al., "SDPipe",
PVLDB 16(9), 2023, section 5.1.
Departures: a step is one clock, where HetPipe counts a wave of several mini-batches; a worker that
joins starts at the clock of the most advanced, since it pulls the newest weights, and blocks no
other. So does a pipeline that returns as a whole; but the distances between its stages stay as they
were: a stage counted as further than it is would wait for another one that waits for it in the
pipeline.
"""

from dataclasses import dataclass, field

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policy import Roster, RosterPolicy
from polyrhythm.sync.snapshot import register_state
from polyrhythm.types import Group, Seconds, Worker


@dataclass(slots=True)
class BoundedStaleness(RosterPolicy):
    num_workers: int  # of all stages that this policy decides for
    staleness: int | None = None  # None for the number of stages
    startup_timeout: Seconds = 60.0  # longest wait at the start for workers that have not joined
    num_stages: int = 1
    _max_ahead: int = field(init=False)
    _roster: Roster = field(init=False)
    _num_pushed: dict[Worker, int] = field(default_factory=dict, init=False)
    _away: dict[Worker, int] = field(default_factory=dict, init=False)  # pushes before it left

    def __post_init__(self) -> None:
        self._max_ahead = self.num_stages if self.staleness is None else self.staleness
        if self._max_ahead < 0:
            raise PolicyError(
                f"staleness={self.staleness}",
                expected="0 steps or more",
                fix="use 0 for the synchronous server, or the number of stages",
            )
        self._roster = Roster(self.num_workers, self.startup_timeout)

    def on_join(self, worker: Worker, node: str, now: Seconds) -> list[Group]:
        self._roster.join(worker, now)
        self._away.pop(worker, None)  # of an earlier incarnation
        self._num_pushed[worker] = max(self._num_pushed.values(), default=0)
        return self._release(now)

    def on_return(self, worker: Worker, node: str, now: Seconds) -> list[Group]:
        self._roster.join(worker, now)
        pushed = self._away.pop(worker)
        if not any(other.pipeline == worker.pipeline for other in self._num_pushed):
            missed = max(max(self._num_pushed.values(), default=0) - pushed, 0)
            pushed += missed
            for other in self._away:
                if other.pipeline == worker.pipeline:
                    self._away[other] += missed
        self._num_pushed[worker] = pushed
        return self._release(now)

    def on_ready(self, worker: Worker, now: Seconds) -> list[Group]:
        """Count a push and release all workers that may continue now."""
        self._roster.add_ready(worker, now)
        self._num_pushed[worker] += 1
        return self._release(now)

    def on_leave(self, worker: Worker, now: Seconds) -> list[Group]:
        self._roster.leave(worker)
        self._away[worker] = self._num_pushed.pop(worker)
        return self._release(now)

    def next_timer(self) -> Seconds:
        return self._roster.next_assembly_deadline()

    def _slowest(self, now: Seconds) -> int:
        is_missing = self._roster.is_assembling(now)  # a worker yet to join has pushed nothing
        return 0 if is_missing else min(self._num_pushed.values(), default=0)

    def _release(self, now: Seconds) -> list[Group]:
        slowest = self._slowest(now)
        released = []
        for worker in sorted(self._roster.ready):
            ahead = self._num_pushed[worker] - slowest
            if ahead <= self._max_ahead:
                del self._roster.ready[worker]
                released.append(Group((worker,), why=f"{ahead} of {self._max_ahead} steps ahead"))
        return released


register_state(BoundedStaleness)
