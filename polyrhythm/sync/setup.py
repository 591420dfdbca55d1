"""The setup of a scheduler as plain data: equal setups make schedulers that decide equally.

It is what `polyrhythm coordinator` reads from its command line and the first line of a decision
log.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from polyrhythm.errors import PolicyError
from polyrhythm.sync.dispatch import SampleLedger, SamplerState
from polyrhythm.sync.members import Limits
from polyrhythm.sync.modes import SyncConfig, SyncMode, make_policies
from polyrhythm.sync.policies.windowed import LEASE
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Seconds, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    policy: str
    num_stages: int
    num_pipelines: int
    options: Mapping[str, object] = field(default_factory=dict)
    every: int | None = None  # steps from one average to the next; None for the policy's default
    seed: int = 0
    lease: Seconds = LEASE  # of the enforcement token
    limits: Limits = field(default_factory=Limits)
    pipelines_die_whole: bool = True
    # How many steps a worker may run while another stage of its pipeline waits for a group: 0, or
    # 1 with overlap. inf without a flush, or if it is unknown: then only timeouts end deadlocks.
    steps_ahead: float = math.inf
    first_gid: int = 1
    sampler_state: SamplerState | None = None  # None for a job without sample dispatcher

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
                f"group timeouts up to {self.limits.ceiling:g} s, and a lease of the "
                f"enforcement token of {self.lease:g} s",
                expected="ceiling < lease: a stage that waits for a worker must not stop waiting "
                "before that worker's group can time out",
                fix="lower the ceiling, or make the lease longer",
            )
        self.scheduler()  # raises for unknown names now, not when workers wait
        if self.sampler_state is not None and not self.mode.has_coordinator:
            raise PolicyError(
                f"a sampler_state under {self.policy}",
                expected=f"another policy: {self.policy} has no scheduler that could dispatch "
                "samples",
                fix="let each worker compute its share from its rank and its step",
            )
        if self.mode.balances_microbatches and self.steps_between > 1:
            raise PolicyError(
                f"every={self.steps_between} under {self.policy}",
                expected="every=1: the gradients of each step are averaged",
                fix="use a larger batch of more micro-batches instead",
            )

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers of all stages and pipelines."""
        stages, pipelines = range(self.num_stages), range(self.num_pipelines)
        return tuple(Worker(stage, pipeline) for stage in stages for pipeline in pipelines)

    @property
    def steps_between(self) -> int:
        """Steps from one average to the next."""
        return SyncMode.named(self.policy).every if self.every is None else self.every

    @property
    def mode(self) -> SyncMode:
        """The sync mode, with models averaged if there are several steps between two averages."""
        mode = SyncMode.named(self.policy)
        return mode if self.steps_between == 1 else mode.after_local_steps()

    @property
    def text(self) -> str:
        """Text that is equal for two processes if they use the same policy and options."""
        options = [f"{name}={self.options[name]}" for name in sorted(self.options)]
        if self.sampler_state is not None:
            options.append(f"samples={self.sampler_state.num_used}:{self.sampler_state.limit}")
        return " ".join([self.policy, f"every={self.steps_between}", f"seed={self.seed}", *options])

    def scheduler(self) -> Scheduler:
        """Create a new scheduler."""
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
            waits_for_all=self.mode.waits_for_all,
            limits=self.mode.limits(self.num_stages, self.limits),
            pipelines_die_whole=self.pipelines_die_whole,
            steps_ahead=self.steps_ahead if self.ends_deadlocks else math.inf,
            first_gid=self.first_gid,
            dispatcher=self._ledger(),
        )

    @property
    def ends_deadlocks(self) -> bool:
        """Whether the scheduler ends waits of stages for one another's groups at once."""
        can_deadlock = self.mode.has_unbounded_wait and self.num_stages > 1
        return can_deadlock and self.steps_ahead < math.inf

    def _ledger(self) -> SampleLedger | None:
        if self.sampler_state is None:
            return None
        return SampleLedger(self.sampler_state, has_commits=self.mode.averages == "model")


def parse_options(texts: Sequence[str], *, flag: str) -> dict[str, object]:
    """Return a policy's options from a command line: name=value, or a JSON object.

    Errors name `flag`.
    """
    options: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        is_object = text.startswith("{")
        try:
            if is_object:
                options |= msgspec.json.decode(text, type=dict[str, object])
            else:
                options[name] = msgspec.json.decode(value)
            problem = ""
        except msgspec.MsgspecError as error:
            options[name] = value  # a string needs no quotes
            problem = str(error) if is_object else ""
        if problem or not (is_object or (name and equals)):
            raise PolicyError(
                f"{flag} {text!r}" + (f": {problem}" if problem else ""),
                expected="name=value, or a JSON object",
                fix=f"{flag} group_size=4 window=rate",
            )
    return options


def check_sync(sync: SyncConfig, *, num_stages: int, num_pipelines: int) -> None:
    """Refuse options that the policy of a sync mode does not take, before any training."""
    mode = sync.first_mode
    if mode.policy is not None:
        Setup(
            policy=mode.name,
            num_stages=num_stages,
            num_pipelines=num_pipelines,
            options=sync.options,
        )


def at_flag(error: PolicyError, *, flag: str) -> PolicyError:
    """Return the error with a fix for the command line instead of Python."""
    fix = error.fix.replace("options={...}", flag)
    return PolicyError(error.wrong, expected=error.expected, fix=fix)
