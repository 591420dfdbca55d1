"""Jobs in which processes are killed, stopped or asked to leave at random: what must not happen.

Each job takes the next sync mode. Its faults leave one pipeline whole. It must end in time, use
each sample once, and leave equal weights in all replicas of a stage: in modes that average
gradients of all, those of one process that trained without a fault.

Faults may come at the same time, but in `decoupled` a replica and its buddy that are lost before
the optimizer's state is divided anew end the job (docs/guarantees.md). There such a fault comes
after the others have recovered.
"""

import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice

import torch
from torch import Tensor

from benchmarks.faults.job import Fault, Outcome, Setting
from benchmarks.faults.job import run as run_job
from polyrhythm.errors import WorkerError
from polyrhythm.sync.modes import SYNC_MODES, SyncConfig
from polyrhythm.types import AUTO, Seconds

MODES = (AUTO, *(mode.name for mode in SYNC_MODES.values() if not mode.has_server))
_TIMEOUT: Seconds = 120.0
_LAST_FAULT: Seconds = 1.0  # after all processes have made the first steps
_STOPPED: Seconds = 20.0  # longer than any heartbeat timeout
# Of ten faults of a mode the first two are one of each. A third kind stops a process, once in ten
# faults: the job then lasts until that process has been continued.
_FIRST = (signal.SIGKILL, signal.SIGTERM)
_OTHERS = (signal.SIGKILL,) * 5 + (signal.SIGTERM,) * 2
_MAX_LISTED = 8  # positions in a message


@dataclass(slots=True)
class SoakResult:
    """Jobs by what went wrong; the text of each names the job, so that it can be repeated."""

    hangs: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    diverged: list[str] = field(default_factory=list)
    num_faults: int = 0
    num_jobs: int = 0

    @property
    def ratios(self) -> dict[str, float]:
        return {
            "soak_hangs": float(len(self.hangs)),
            "soak_lost": float(len(self.lost)),
            "soak_diverged": float(len(self.diverged)),
        }


def soak(num_faults: int, show: Callable[[str], None]) -> SoakResult:
    """Run jobs until so many faults have come."""
    found = SoakResult()
    while found.num_faults < num_faults:
        setting, faults = soak_job(found.num_jobs)
        name = f"job {found.num_jobs} of {setting.sync}"
        show(f"fault {found.num_faults + 1} of {num_faults}: {name}")
        found.num_jobs += 1
        num_planned = sum(fault.what is not signal.SIGCONT for fault in faults)
        try:
            outcome = run_job(setting, faults, timeout=_TIMEOUT)
        except TimeoutError:
            found.num_faults += num_planned  # it is not known how many have come
            found.hangs.append(f"{name}: not ended after {_TIMEOUT:g} s")
        except WorkerError as error:
            found.num_faults += num_planned
            found.lost.append(f"{name}: {error}")
        else:
            found.num_faults += outcome.num_faults
            if (trouble := lost(outcome, setting)) is not None:
                found.lost.append(f"{name}: {trouble}")
            if (trouble := divergence(outcome, setting)) is not None:
                found.diverged.append(f"{name}: {trouble}")
    return found


def soak_job(number: int) -> tuple[Setting, list[Fault]]:
    """Return the job of a number; the same number has the same faults."""
    chosen, setting, pipelines = _drawn(number)
    num_before = sum(
        len(_drawn(earlier)[2]) for earlier in range(number % len(MODES), number, len(MODES))
    )
    kinds = islice(_kinds(setting.sync), num_before, None)
    return setting, list(_random_faults(chosen, setting, pipelines, kinds))


def _drawn(number: int) -> tuple[random.Random, Setting, list[int]]:
    """Return the setting of a job and the pipelines with faults, so that one whole one is left."""
    chosen = random.Random(number)
    setting = Setting(
        num_stages=chosen.choice((1, 2)),
        num_pipelines=chosen.choice((3, 4)),
        num_microbatches=12,
        forward=0.004,
        num_steps=40,
        sync=MODES[number % len(MODES)],
    )
    num_faults = chosen.randint(1, setting.num_pipelines - 1)
    return chosen, setting, chosen.sample(range(setting.num_pipelines), num_faults)


def _kinds(mode: str) -> Iterator[signal.Signals]:
    """Yield the kinds of a mode's faults without end, in random order by tens."""
    chosen, number = random.Random(mode), MODES.index(mode)
    while True:
        first, others = (chosen.sample(kinds, len(kinds)) for kinds in (_FIRST, _OTHERS))
        # Early in each second mode: few faults stop as many processes as many faults do.
        others.insert(chosen.randint(0, 2) if number % 2 else chosen.randint(3, 7), signal.SIGSTOP)
        yield from (*first, *others)


def _random_faults(
    chosen: random.Random,
    setting: Setting,
    pipelines: list[int],
    kinds: Iterator[signal.Signals],
) -> Iterator[Fault]:
    """Yield a fault of one process of each pipeline."""
    is_sharded = SyncConfig(setting.sync).first_mode.decoupled
    earlier = list[Fault]()
    times = sorted(chosen.uniform(0.0, _LAST_FAULT) for _ in pipelines)
    for pipeline, what, after in zip(pipelines, kinds, times, strict=False):
        rank = pipeline * setting.num_stages + chosen.randrange(setting.num_stages)
        fault = Fault(rank, what, after)
        if is_sharded and _may_take_both_copies(fault, earlier, setting):
            fault = replace(fault, after_recovery=True)
        earlier.append(fault)
        yield fault
        if what is signal.SIGSTOP:
            yield Fault(rank, signal.SIGCONT, after + _STOPPED)


def _may_take_both_copies(fault: Fault, earlier: list[Fault], setting: Setting) -> bool:
    """Whether earlier faults of this job may hit the buddy of a process, or the one it is for.

    After a loss replicas have other neighbours, so that any third fault may.
    """
    neighbours = {
        (fault.rank + side * setting.num_stages) % setting.num_processes for side in (-1, 1)
    }
    return len(earlier) > 1 or any(each.rank in neighbours for each in earlier)


def lost(outcome: Outcome, setting: Setting) -> str | None:
    """Return which samples or steps are missing, or were counted twice; None if none are."""
    num_samples = setting.num_steps * setting.num_microbatches
    expected = ((0, num_samples),)
    if wrong := {rank: each for rank, each in outcome.used.items() if each != expected}:
        return f"used samples by process: {wrong}, expected {expected}"
    if unread := sorted({*range(num_samples)} - outcome.read):
        more = f" and {len(unread) - _MAX_LISTED} more" * (len(unread) > _MAX_LISTED)
        return f"no process has read the samples {unread[:_MAX_LISTED]}{more}, which count as used"
    made = {step for ends in outcome.ends.values() for step in ends}
    if _is_exact(setting) and (missing := sorted({*range(setting.num_steps)} - made)):
        return f"no survivor has made the steps {missing}"
    return None if outcome.ends else "no process has trained to the end"


def divergence(outcome: Outcome, setting: Setting) -> str | None:
    """Return which weights differ from what they should be; None if none do."""
    weights = dict[str, Tensor]()
    for rank, own in outcome.weights.items():
        for name, value in own.items():
            if not (value.isfinite().all() and torch.equal(value, weights.setdefault(name, value))):
                return f"{name} of process {rank} differs from another replica's"
    expected = _alone(setting.num_stages, setting.num_steps, setting.num_microbatches)
    if missing := sorted(expected.keys() - weights.keys()):
        return f"no survivor has {missing[0]}"
    for name, value in expected.items() if _is_exact(setting) else ():
        if not torch.allclose(weights[name], value, rtol=1e-4, atol=1e-5):
            return f"{name} differs from that of one process"
    return None


def _is_exact(setting: Setting) -> bool:
    return setting.sync in SYNC_MODES and SYNC_MODES[setting.sync].exact


@cache
def _alone(num_layers: int, num_steps: int, num_microbatches: int) -> dict[str, Tensor]:
    """Return the weights of one process that has trained the same model without a fault."""
    setting = Setting(
        num_stages=1,
        num_pipelines=1,
        num_microbatches=num_microbatches,
        forward=0.0,
        num_steps=num_steps,
        num_layers=num_layers,
    )
    (weights,) = run_job(setting, [], timeout=_TIMEOUT).weights.values()
    return weights
