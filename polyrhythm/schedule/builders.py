"""Build schedules from integers alone: gpipe, 1f1b, kfkb, bounded.

A schedule is one list of actions per stage. There is one loop: a stage runs as many forwards as it
may hold in flight, then alternates backward and forward, then drains. 1F1B and GPipe choose that
number, bounded takes it as an argument, and kFkB is 1F1B over groups of k micro-batches, so k=1 is
1F1B and k >= the number of micro-batches is GPipe.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

from polyrhythm.errors import ScheduleError
from polyrhythm.types import Action, Op

Schedule = list[list[Action]]  # index = stage


def gpipe(*, stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """All forwards, then all backwards (arXiv:1811.06965)."""
    _check_shape(stage, num_stages, num_microbatches)
    return _holding(num_microbatches, num_microbatches)


def one_f_one_b(*, stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """Warm up, alternate, drain (arXiv:2104.04473): one in flight per stage still to come."""
    _check_shape(stage, num_stages, num_microbatches)
    return _holding(num_stages - stage, num_microbatches)


def kfkb(*, stage: int, num_stages: int, num_microbatches: int, k: int) -> list[Action]:
    """1F1B over groups of k micro-batches (arXiv:2303.01675)."""
    _check_shape(stage, num_stages, num_microbatches)
    if k < 1:
        raise ScheduleError(f"k={k}", expected="k >= 1", fix="use k=1 for plain 1F1B")
    num_groups = -(-num_microbatches // k)  # the last group may be shorter
    groups = one_f_one_b(stage=stage, num_stages=num_stages, num_microbatches=num_groups)
    every = {op: _in_order(op, num_microbatches) for op in Op}
    return [action for op, g in groups for action in every[op][g * k : (g + 1) * k]]


def bounded(
    *, stage: int, num_stages: int, num_microbatches: int, limits: Sequence[int]
) -> list[Action]:
    """At most `limits[stage]` micro-batches in flight; one limit per stage, never increasing.

    A stage with a higher limit than the stage before it would deadlock: it waits for an activation
    that the stage before sends only after a backward of this stage.
    """
    _check_shape(stage, num_stages, num_microbatches)
    _check_limits(limits, num_stages)
    return _holding(limits[stage], num_microbatches)


BUILDERS: dict[str, Callable[..., list[Action]]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "kfkb": kfkb,
    "bounded": bounded,
}


def build(
    name: str,
    *,
    num_stages: int,
    num_microbatches: int,
    k: int | None = None,
    limits: Sequence[int] | None = None,
) -> Schedule:
    """Build the named schedule for every stage; only kfkb takes `k`, only bounded `limits`."""
    if name not in BUILDERS:
        raise ScheduleError(
            f"schedule {name!r}", expected=f"one of {', '.join(BUILDERS)}", fix="use 1f1b"
        )
    if (name == "kfkb") != (k is not None):
        raise ScheduleError(
            f"schedule {name} with k={k}",
            expected="k with kfkb, and with kfkb alone",
            fix="choose kfkb with k=2 (written kfkb:2), or leave k out",
        )
    if (name == "bounded") != (limits is not None):
        raise ScheduleError(
            f"schedule {name} with limits={limits}",
            expected="limits with bounded, and with bounded alone",
            fix="choose bounded with a limit per stage (bounded:7,5,3,1), or leave limits out",
        )
    options = {
        option: value for option, value in (("k", k), ("limits", limits)) if value is not None
    }
    shape = {"num_stages": num_stages, "num_microbatches": num_microbatches}
    _check_shape(0, **shape)
    return [BUILDERS[name](stage=stage, **shape, **options) for stage in range(num_stages)]


def _holding(limit: int, num_microbatches: int) -> list[Action]:
    """Run `limit` forwards, alternate backward and forward, drain."""
    forwards, backwards = _in_order(Op.F, num_microbatches), _in_order(Op.B, num_microbatches)
    warmup = min(limit, num_microbatches)
    alternating = num_microbatches - warmup
    order = list(forwards[:warmup])
    for backward, forward in zip(backwards, forwards[warmup:], strict=False):
        order += (backward, forward)
    order += backwards[alternating:]
    return order


@lru_cache(maxsize=64)  # actions are values, so a search over many schedules can share them
def _in_order(op: Op, num_microbatches: int) -> tuple[Action, ...]:
    return tuple(Action(op, m) for m in range(num_microbatches))


def _check_shape(stage: int, num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"num_stages={num_stages}, num_microbatches={num_microbatches}",
            expected="at least one of each",
            fix="use 1 stage for a model that is not split, 1 micro-batch for a whole batch",
        )
    if not 0 <= stage < num_stages:
        raise ScheduleError(
            f"stage {stage} of {num_stages}",
            expected=f"0 to {num_stages - 1}",
            fix="count stages from 0",
        )


def _check_limits(limits: Sequence[int], num_stages: int) -> None:
    written = ",".join(map(str, limits))
    if len(limits) != num_stages:
        raise ScheduleError(
            f"limits {written or '()'} for {num_stages} stages",
            expected=f"{num_stages} limits, one per stage",
            fix=f"1F1B has {','.join(map(str, range(num_stages, 0, -1)))}; start from there",
        )
    if min(limits) < 1:
        raise ScheduleError(
            f"limits {written}",
            expected="at least 1 on every stage",
            fix="a stage holds the micro-batch it works on: raise the limit to 1",
        )
    for stage, (here, after) in enumerate(pairwise(limits)):
        if here < after:
            raise ScheduleError(
                f"limits {written}: stage {stage} may hold {here}, stage {stage + 1} {after}",
                expected="limits that never increase along the stages, or they deadlock",
                fix=f"raise the limit of stage {stage} to {after}, "
                f"or lower that of stage {stage + 1} to {here}",
            )
