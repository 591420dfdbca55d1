"""AD-PSGD as SDPipe's authors built it: random pairs, the same in all stages, that wait.

Before each mini-batch all workers shuffle one list with one seed and split it into pairs. So no
coordinator is needed, and a worker waits for its partner, however late that is. AD-PSGD itself (the
policy `pairwise`) never waits for a partner.

Source: Miao et al., "SDPipe", PVLDB 16(9), 2023, section 5.1 (`AD-PSGD+Pipe`), and the code
published with it (class ADPSGD).
"""

import random
from dataclasses import dataclass, field

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policy import Policy
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Group, Seconds, Worker


@dataclass(slots=True)
class RandomMatching(Policy):
    """The policy of one stage; all stages have the same `seed`."""

    num_workers: int
    seed: int = 0
    _num_steps: dict[int, int] = field(default_factory=dict, init=False)  # by pipeline
    _ready: set[Worker] = field(default_factory=set, init=False)
    _random: random.Random = field(init=False)
    _partners: list[list[int]] = field(default_factory=list, init=False)  # [step][pipeline]

    def __post_init__(self) -> None:
        if self.num_workers % 2:
            raise PolicyError(
                f"{self.num_workers} workers in pairs",
                expected="an even number, so that every worker has a partner",
                fix="add a pipeline, or use the policy pairwise",
            )
        self._random = random.Random(self.seed)

    def partner(self, pipeline: int, step: int) -> int:
        while len(self._partners) <= step:
            order = list(range(self.num_workers))
            self._random.shuffle(order)
            drawn = [0] * self.num_workers
            for a, b in zip(order[::2], order[1::2], strict=True):
                drawn[a], drawn[b] = b, a
            self._partners.append(drawn)
        return self._partners[step][pipeline]

    def on_ready(self, worker: Worker, now: Seconds) -> list[Group]:
        step = self._num_steps.get(worker.pipeline, 0)
        self._num_steps[worker.pipeline] = step + 1
        partner = Worker(worker.stage, self.partner(worker.pipeline, step))
        if partner not in self._ready or self._num_steps[partner.pipeline] != step + 1:
            self._ready.add(worker)
            return []
        self._ready.remove(partner)
        return [Group(tuple(sorted((worker, partner))), why=f"drawn for step {step}")]

    def on_done(self, group: Group, ok: bool, now: Seconds) -> list[Group]:
        if not ok:  # both retry the same step
            for member in group.members:
                self._num_steps[member.pipeline] -= 1
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchingSetup(Setup):
    """A setup whose scheduler pairs workers at random, whatever its policy."""

    def scheduler(self) -> Scheduler:
        return Scheduler(
            [RandomMatching(self.num_pipelines, self.seed) for _ in range(self.num_stages)],
            self.num_pipelines,
            limits=self.limits,
            pipelines_die_whole=self.pipelines_die_whole,
            first_gid=self.first_gid,
        )
