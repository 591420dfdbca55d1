"""The setup of a scheduler as plain data: the same setup makes one that decides alike.

It is what `polyrhythm scheduler` reads from its command line, and the first line of a decision log.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from polyrhythm.errors import PolicyError
from polyrhythm.sync.deadlines import Limits
from polyrhythm.sync.policy import Policy
from polyrhythm.sync.registry import default_every, limits_for, make_policies
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.sync.token import LEASE
from polyrhythm.types import Seconds, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    policy: str
    num_stages: int
    num_pipelines: int
    options: Mapping[str, object] = field(default_factory=dict)
    every: int | None = None  # steps from one average to the next; None for what the policy says
    seed: int = 0
    lease: Seconds = LEASE  # of the enforcement token
    limits: Limits = field(default_factory=Limits)
    pipelines_die_whole: bool = True
    first_gid: int = 1

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_pipelines"):
            if getattr(self, name) < 1:
                raise PolicyError(
                    f"{name}={getattr(self, name)}", expected="1 or more", fix="use 1"
                )
        if self.every is not None and self.every < 1:
            raise PolicyError(f"every={self.every}", expected="1 step or more", fix="use 1")
        if not self.limits.ceiling < self.lease < math.inf:
            raise PolicyError(
                f"deadlines of groups up to {self.limits.ceiling:g} s, and a lease of the "
                f"enforcement token of {self.lease:g} s",
                expected="ceiling < lease: a stage that waits for a worker may not give up while "
                "that worker's group can still be on its way",
                fix="lower the ceiling, or make the lease longer",
            )
        self.scheduler()  # refuses what is unknown now, not when workers wait

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Of all stages and pipelines."""
        stages, pipelines = range(self.num_stages), range(self.num_pipelines)
        return tuple(Worker(stage, pipeline) for stage in stages for pipeline in pipelines)

    @property
    def steps_between(self) -> int:
        """From one average to the next."""
        return default_every(self.policy) if self.every is None else self.every

    @property
    def asks_ahead(self) -> bool:
        """Whether the policy is asked at the start of a step."""
        return type(self.scheduler().policies[0]).on_request is not Policy.on_request

    @property
    def text(self) -> str:
        """The same for two processes if they mean the same policy."""
        options = " ".join(f"{name}={self.options[name]}" for name in sorted(self.options))
        return f"{self.policy} every={self.steps_between} seed={self.seed} {options}".strip()

    def scheduler(self) -> Scheduler:
        """A new one."""
        policies = make_policies(
            self.policy,
            num_stages=self.num_stages,
            num_pipelines=self.num_pipelines,
            lease=self.lease,
            seed=self.seed,
            options=self.options,
        )
        return Scheduler(
            policies,
            self.num_pipelines,
            limits=limits_for(self.policy, self.num_stages, self.limits),
            pipelines_die_whole=self.pipelines_die_whole,
            first_gid=self.first_gid,
        )
