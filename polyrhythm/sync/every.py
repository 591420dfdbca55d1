"""Every: average at each n-th step only; the steps in between are local.

A wrapper around any policy, which sees one step in `steps` of each worker and nothing of the
others. If the average of that step fails, the worker's next report is for it again. A worker that
joins begins where the most advanced one is between two averages, so that nobody waits for it. One
that is in a group without having reported (a passive one) gets no local step meanwhile: the end of
that group is what sends it on.

Source: Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized
Training", ASPLOS 2020, section 7.2, Figure 17 (the Section Length).
"""

from dataclasses import dataclass, field

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policy import Policy
from polyrhythm.types import Group, Seconds, Worker


@dataclass(slots=True)
class Every(Policy):
    policy: Policy
    steps: int
    _asks_ahead: bool = field(init=False)
    _step: dict[Worker, int] = field(default_factory=dict, init=False)  # since the last average
    _alone: set[Worker] = field(default_factory=set, init=False)  # in a local step
    _grouped: set[Worker] = field(default_factory=set, init=False)  # in a group of the policy

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise PolicyError(
                f"every={self.steps}", expected="at least 1 step", fix="use 1 for each step"
            )
        if isinstance(self.policy, Every):
            raise PolicyError(
                f"every={self.steps} of a policy that has every={self.policy.steps} already",
                expected="one of them",
                fix="say how many steps in one place",
            )
        # A step begins for a policy with the first thing that it wants to hear of it.
        self._asks_ahead = type(self.policy).on_request is not Policy.on_request

    def on_join(self, worker: Worker, node: str, now: Seconds) -> list[Group]:
        groups = self.policy.on_join(worker, node, now)
        self._step[worker] = max(self._step.values(), default=0)
        return self._opened(groups)

    def on_request(self, worker: Worker, now: Seconds) -> list[Group]:
        if not self._asks_ahead:
            return []
        if self._is_local(worker):
            return self._local_step(worker)
        return self._opened(self.policy.on_request(worker, now))

    def on_ready(self, worker: Worker, now: Seconds) -> list[Group]:
        if not self._asks_ahead and self._is_local(worker):
            return self._local_step(worker)
        if worker in self._alone:
            return []  # had its answer when it asked
        return self._opened(self.policy.on_ready(worker, now))

    def on_done(self, group: Group, ok: bool, now: Seconds) -> list[Group]:
        if len(group.members) == 1 and group.members[0] in self._alone:
            return []
        self._grouped.difference_update(group.members)
        if not ok:
            self._step.update(dict.fromkeys(group.members, self.steps - 1))
        return self._opened(self.policy.on_done(group, ok, now))

    def on_timer(self, now: Seconds) -> list[Group]:
        return self._opened(self.policy.on_timer(now))

    def on_leave(self, worker: Worker, now: Seconds) -> list[Group]:
        groups = self.policy.on_leave(worker, now)
        del self._step[worker]
        self._alone.discard(worker)
        return self._opened(groups)

    def next_timer(self) -> Seconds:
        return self.policy.next_timer()

    def _is_local(self, worker: Worker) -> bool:
        """Count a step of a worker; whether it is one without an average."""
        step = (self._step.get(worker, 0) + 1) % self.steps
        self._step[worker] = step
        self._alone.discard(worker)
        return step != 0

    def _local_step(self, worker: Worker) -> list[Group]:
        if worker in self._grouped:
            return []
        self._alone.add(worker)
        why = f"local step {self._step[worker]} of {self.steps - 1}"
        return [Group((worker,), why)]

    def _opened(self, groups: list[Group]) -> list[Group]:
        for group in groups:
            if len(group.members) > 1:
                self._grouped.update(group.members)
        return groups
