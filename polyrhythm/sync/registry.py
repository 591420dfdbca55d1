"""Policies by name, as in `sync="adaptive"` or a configuration file.

A policy is created from facts of the job (number of workers, stage, the token that all stages
share, a seed) and from options, which are all other parameters of its constructor. The module of a
policy is imported when the policy is created. Policies do not see the steps between two averages:
workers report at every n-th step only, and `default_every` is the default n of a policy.
"""

import dataclasses
import difflib
import importlib
import inspect
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policy import Policy
from polyrhythm.sync.timeouts import Limits
from polyrhythm.sync.token import LEASE, EnforcementToken
from polyrhythm.types import Seconds

POLICIES = {
    "all_reduce": "polyrhythm.sync.policies.all_reduce:AllReduce",
    "static": "polyrhythm.sync.policies.static:StaticGroups",
    "random": "polyrhythm.sync.policies.random_groups:RandomGroups",
    "smart": "polyrhythm.sync.policies.smart:SmartGroups",
    "partial_reduce": "polyrhythm.sync.policies.partial_reduce:PartialReduce",
    "adaptive": "polyrhythm.sync.policies.adaptive:Adaptive",
    "age": "polyrhythm.sync.policies.age:Age",
    "pairwise": "polyrhythm.sync.policies.pairwise:Pairwise",
    "ssp": "polyrhythm.sync.policies.ssp:BoundedStaleness",
    # Groups as with all_reduce; balanced has other shares, local an outer step (`local.py`).
    "balanced": "polyrhythm.sync.policies.all_reduce:AllReduce",
    "local": "polyrhythm.sync.policies.all_reduce:AllReduce",
}
ACROSS_STAGES = ("ssp",)  # one policy for the workers of all stages
EVERY = {"local": 500}  # steps from one average to the next if not 1; 500 as in DiLoCo
# These wait for certain workers without limit. In a pipeline another stage may block such a worker
# while it waits in the same way for a worker that this stage blocks.
UNBOUNDED_WAIT = ("random", "smart", "partial_reduce", "static")
MAX_GROUP_WAIT: Seconds = 30.0  # or `Limits.group_timeout_steps` steps, if that is longer
# These guarantee equal models: no worker continues alone because averages fail.
EXACT = ("all_reduce", "balanced", "local")

Options = Mapping[str, object]


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
    maker, options = _maker(name), options or {}
    takes = inspect.signature(maker, eval_str=True).parameters
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
    policy: Policy = maker(**known, **values)
    return policy


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

    def of_stage(stage: int, num_workers: int) -> Policy:
        return make_policy(
            name,
            num_workers=num_workers,
            num_stages=num_stages,
            stage=stage,
            token=token,
            seed=seed,
            options=options,
        )

    if name in ACROSS_STAGES:
        return [of_stage(0, num_stages * num_pipelines)] * num_stages
    return [of_stage(stage, num_pipelines) for stage in range(num_stages)]


def default_every(name: str) -> int:
    """Default number of steps from one average to the next."""
    _check_name(name)
    return EVERY.get(name, 1)


def limits_for(name: str, num_stages: int, limits: Limits | None = None) -> Limits:
    """Adapt limits to a policy: bound waits that could deadlock a pipeline; EXACT ones retry."""
    _check_name(name)
    limits = limits or Limits()
    if name in EXACT:
        return dataclasses.replace(limits, max_retries=math.inf)
    if name in UNBOUNDED_WAIT and num_stages > 1 and limits.group_timeout == math.inf:
        return dataclasses.replace(limits, group_timeout=MAX_GROUP_WAIT)
    return limits


def _maker(name: str) -> Callable[..., Any]:
    _check_name(name)
    module, _, maker = POLICIES[name].partition(":")
    constructor: Callable[..., Any] = getattr(importlib.import_module(module), maker)
    return constructor


def _check_name(name: str) -> None:
    if name not in POLICIES:
        raise _unknown("policy", name, list(POLICIES))


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
