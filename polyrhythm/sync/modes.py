"""Sync modes: one record per `sync="..."`, and the policies that form the groups of a mode.

No other module compares or looks up the name of a mode: what a module needs to know about a mode is
a field of its record. A mode with a policy averages in groups, which the policy forms. `decoupled`
has no groups: it is `DistributedOptimizer`'s all-reduce. `auto` is no mode: it switches between
`AUTO_MODES`.

A policy is created from facts of the job (number of workers, stage, the token that all stages
share, a seed) and from options, which are all other parameters of its constructor. The module of a
policy is imported when the policy is created.
"""

import dataclasses
import difflib
import importlib
import inspect
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec

from polyrhythm.errors import PolicyError
from polyrhythm.sync.members import Limits
from polyrhythm.sync.policies.windowed import LEASE, EnforcementToken
from polyrhythm.sync.policy import Policy
from polyrhythm.types import AUTO, Seconds

MAX_GROUP_WAIT: Seconds = 30.0  # or `Limits.group_timeout_steps` steps, if that is longer

Options = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncMode:
    """What a sync mode does."""

    name: str
    policy: str | None  # forms the groups: "module:class" in `sync/policies/`; None for no groups
    averages: Literal["gradients", "model"] | None  # None: a server holds the only model
    every: int = 1  # default number of steps from one average to the next
    # All pipelines run the same number of steps, and know their samples in advance. Otherwise a
    # pipeline acquires samples when it needs some, and a fast one runs more steps.
    lockstep: bool = False
    # Every average is one of all workers. So a failed one is retried until it succeeds, and a
    # worker that joins late starts after a step that all others have ended.
    waits_for_all: bool = False
    # A group waits for certain workers without limit. In a pipeline another stage may block such a
    # worker while it waits in the same way for a worker that this stage blocks.
    has_unbounded_wait: bool = False
    can_overlap: bool = True  # a worker may continue, and apply an average one step later
    why_not_decoupled: str | None = None  # why `can_decouple` is False
    decoupled: bool = False  # backward hides the reduce-scatter, the next forward the all-gather
    across_stages: bool = False  # one policy for the workers of all stages
    asks_ahead: bool = False  # a worker requests its group when it starts a step
    answers_while_computing: bool = False  # a member may compute while it is averaged
    has_coordinator: bool = True  # in training; the simulator has one for every policy
    has_server: bool = False  # a parameter server: one more process
    has_outer_optimizer: bool = False  # takes a step from the last common model along the mean
    balances_microbatches: bool = False  # assigns the micro-batches of a step by measured speed

    @classmethod
    def named(cls, name: str) -> "SyncMode":
        """Return the mode with this name; raises PolicyError if there is none."""
        if name not in SYNC_MODES:
            raise _unknown("sync mode", name, list(SYNC_MODES))
        return SYNC_MODES[name]

    @property
    def exact(self) -> bool:
        """Whether a step equals that of a single process with the global batch."""
        return self.averages == "gradients" and self.waits_for_all

    @property
    def can_decouple(self) -> bool:
        """Whether an average can be split, to be hidden by backward and forward."""
        return self.why_not_decoupled is None

    def after_local_steps(self) -> "SyncMode":
        """Return this mode with several steps per average: then only models can be averaged."""
        if self.averages != "gradients":
            return self
        return dataclasses.replace(self, averages="model", can_overlap=True)

    def limits(self, num_stages: int, limits: Limits | None = None) -> Limits:
        """Adapt limits to the mode: bound waits that could deadlock a pipeline."""
        limits = limits or Limits()
        if self.waits_for_all:
            return dataclasses.replace(limits, max_retries=math.inf)
        if self.has_unbounded_wait and num_stages > 1 and limits.group_timeout == math.inf:
            return dataclasses.replace(limits, group_timeout=MAX_GROUP_WAIT)
        return limits


_MODES = (
    SyncMode(
        name="all_reduce",
        policy="all_reduce:AllReduce",
        averages="gradients",
        lockstep=True,
        waits_for_all=True,
        can_overlap=False,
    ),
    SyncMode(
        name="static",
        policy="static:StaticGroups",
        averages="model",
        lockstep=True,
        has_unbounded_wait=True,
        can_overlap=False,
        why_not_decoupled="without a scheduler no average is committed",
        has_coordinator=False,
    ),
    SyncMode(
        name="random",
        policy="random_groups:RandomGroups",
        averages="model",
        has_unbounded_wait=True,
        asks_ahead=True,
    ),
    SyncMode(
        name="smart",
        policy="smart:SmartGroups",
        averages="model",
        has_unbounded_wait=True,
        asks_ahead=True,
    ),
    SyncMode(
        name="partial_reduce",
        policy="partial_reduce:PartialReduce",
        averages="model",
        has_unbounded_wait=True,
    ),
    SyncMode(name="adaptive", policy="adaptive:Adaptive", averages="model"),
    SyncMode(name="age", policy="age:Age", averages="model"),
    SyncMode(
        name="pairwise",
        policy="pairwise:Pairwise",
        averages="model",
        why_not_decoupled="a passive worker is averaged while it computes",
        answers_while_computing=True,
    ),
    SyncMode(
        name="ssp",
        policy="ssp:BoundedStaleness",
        averages=None,
        can_overlap=False,
        why_not_decoupled="a parameter server holds the weights",
        across_stages=True,
        has_server=True,
    ),
    SyncMode(
        name="balanced",  # as all_reduce, with other shares of the batch
        policy="all_reduce:AllReduce",
        averages="gradients",
        lockstep=True,
        waits_for_all=True,
        can_overlap=False,
        why_not_decoupled="shares differ from step to step",
        balances_microbatches=True,
    ),
    SyncMode(
        name="local",  # as all_reduce of models, with an outer step (`policies/local.py`)
        policy="all_reduce:AllReduce",
        averages="model",
        every=500,  # as in DiLoCo
        waits_for_all=True,
        why_not_decoupled="the outer optimizer needs the whole mean at once",
        has_outer_optimizer=True,
    ),
    SyncMode(
        name="decoupled",
        policy=None,
        averages="gradients",
        lockstep=True,
        waits_for_all=True,
        can_overlap=False,
        decoupled=True,
        has_coordinator=False,
    ),
)
SYNC_MODES = {mode.name: mode for mode in _MODES}
POLICIES = tuple(mode.name for mode in _MODES if mode.policy is not None)
# Between these `auto` switches, the simplest first: a later one must pay.
AUTO_MODES = ("decoupled", "balanced", "adaptive", "age")


@dataclass(frozen=True, slots=True)
class SyncConfig:
    """A sync mode with options: those of its policy, and whether averaging overlaps with steps.

    `buddy`: in `decoupled`, each shard of the optimizer's state has a copy at another replica, if
    the job can go on after a loss.
    """

    mode: str = "decoupled"
    overlap: bool = False
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    buddy: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.mode, str):
            raise PolicyError(
                f"sync={self.mode!r}",
                expected="the name of a sync mode, or a SyncConfig",
                fix="use SyncConfig('adaptive', options=...)",
            )
        known = [AUTO, *(mode.name for mode in _MODES if not mode.has_server)]
        if self.mode in SYNC_MODES and SYNC_MODES[self.mode].has_server:
            raise PolicyError(
                f"sync={self.mode!r}: it needs a parameter server, one more process",
                expected=f"one of {', '.join(known)}",
                fix="use pr.GroupSync and pr.ParameterServer in a training loop of your own",
            )
        if self.mode not in known:
            raise _unknown("sync mode", str(self.mode), known)
        if self.options and (self.mode == AUTO or self.first_mode.policy is None):
            raise PolicyError(
                f"options={dict(self.options)} with sync={self.mode!r}",
                expected="options with a policy",
                fix="omit them, or name the policy: SyncConfig('adaptive', options=...)",
            )
        if not isinstance(self.buddy, bool):
            raise PolicyError(
                f"buddy={self.buddy!r}",
                expected="True or False",
                fix="SyncConfig('decoupled', buddy=False) for no copies of shards",
            )
        if not self.buddy and self.mode != AUTO and not self.first_mode.decoupled:
            raise PolicyError(
                f"buddy=False with sync={self.mode!r}",
                expected="decoupled or auto: other modes have no copies of shards",
                fix="omit buddy",
            )
        if self.overlap and (self.mode == AUTO or not self.first_mode.can_overlap):
            raise PolicyError(
                f"overlap=True with sync={self.mode!r}",
                expected="a policy that averages models, such as adaptive; auto overlaps by itself",
                fix="omit overlap, or use SyncConfig('adaptive', overlap=True)",
            )

    @property
    def has_coordinator(self) -> bool:
        """Whether a coordinator forms groups; under auto it may, later."""
        return self.mode == AUTO or self.first_mode.has_coordinator

    @property
    def first_mode(self) -> SyncMode:
        """The mode in which training starts; under auto it may change."""
        return SyncMode.named(AUTO_MODES[0] if self.mode == AUTO else self.mode)


def make_policy(
    name: str,
    *,
    num_workers: int,
    num_stages: int = 1,
    stage: int = 0,
    token: EnforcementToken | None = None,
    seed: int = 0,
    options: Options | None = None,
) -> Policy:
    """Create the policy of one stage with `num_workers` workers."""
    mode, options = _with_policy(name), options or {}
    module, _, class_name = (mode.policy or "").partition(":")
    policies = importlib.import_module(f"polyrhythm.sync.policies.{module}")
    constructor: Callable[..., Policy] = getattr(policies, class_name)
    takes = inspect.signature(constructor, eval_str=True).parameters
    job: dict[str, object] = {
        "num_workers": num_workers,
        "num_stages": num_stages,
        "stage": stage,
        "token": token,
        # A seed per stage that differs for neighbours and does not depend on hash().
        "seed": random.Random(f"{seed} {stage}").getrandbits(32),
    }
    known = {key: value for key, value in job.items() if key in takes}
    values = _checked(name, options, {k: takes[k] for k in takes if k not in job})
    _check_group_size(name, values, num_workers)
    return constructor(**known, **values)


def make_policies(
    name: str,
    *,
    num_stages: int,
    num_pipelines: int,
    lease: Seconds = LEASE,
    seed: int = 0,
    options: Options | None = None,
) -> list[Policy]:
    """Create one policy per stage; all share one enforcement token."""
    if num_stages < 1:
        raise PolicyError(f"num_stages={num_stages}", expected="at least 1", fix="use 1")
    token = EnforcementToken(lease)
    make = partial(
        make_policy, name, num_stages=num_stages, token=token, seed=seed, options=options
    )
    if _with_policy(name).across_stages:
        return [make(num_workers=num_stages * num_pipelines)] * num_stages
    return [make(num_workers=num_pipelines, stage=stage) for stage in range(num_stages)]


def _with_policy(name: str) -> SyncMode:
    if name not in POLICIES:
        raise _unknown("policy", name, list(POLICIES))
    return SYNC_MODES[name]


def _unknown(what: str, name: str, known: list[str]) -> PolicyError:
    best = difflib.get_close_matches(name, known, n=1)
    return PolicyError(
        f"unknown {what}: {name!r}",
        expected=f"one of {', '.join(known)}" if known else f"no {what}",
        fix=f"did you mean {best[0]!r}?" if best else "use one of these, or omit it",
    )


def _checked(
    name: str, options: Options, takes: Mapping[str, inspect.Parameter]
) -> dict[str, object]:
    """Convert options to the types of the policy's parameters; refuse unknown ones."""
    values = {}
    for option, value in options.items():
        if option not in takes:
            raise _unknown(f"option of {name}", option, list(takes))
        try:
            values[option] = msgspec.convert(value, takes[option].annotation)
        except msgspec.ValidationError as error:
            raise PolicyError(
                f"{option}={value!r} for policy {name}",
                expected=str(error).removesuffix("."),
                fix=f"pass {option} with that type in options={{...}}",
            ) from None
    return values


def _check_group_size(name: str, values: Mapping[str, object], num_workers: int) -> None:
    size = values.get("group_size")
    fewest = min(2, num_workers)
    if isinstance(size, int) and not fewest <= size <= num_workers:
        raise PolicyError(
            f"group_size={size} for policy {name}, in a job with {num_workers} workers per stage",
            expected=f"{fewest} to {num_workers}: a group of one does not average",
            fix="omit it for 3, or add pipelines",
        )
