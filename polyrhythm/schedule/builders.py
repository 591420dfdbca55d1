"""Builders of schedules: which micro-batch a stage works on next, from integers alone.

A schedule is one list of actions per stage. Variants are derived, not written again: kFkB is 1F1B
over groups of k micro-batches, so k=1 is 1F1B and k >= the number of micro-batches is GPipe.
"""

from collections.abc import Callable

from polyrhythm.errors import ScheduleError
from polyrhythm.types import Action, Op

Schedule = list[list[Action]]  # index = stage


def gpipe(*, stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """All forwards, then all backwards (arXiv:1811.06965)."""
    _check_shape(stage, num_stages, num_microbatches)
    return [Action(op, m) for op in (Op.F, Op.B) for m in range(num_microbatches)]


def one_f_one_b(*, stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """Warm up, alternate, drain (arXiv:2104.04473)."""
    _check_shape(stage, num_stages, num_microbatches)
    warmup = min(num_stages - 1 - stage, num_microbatches)
    order = [Action(Op.F, m) for m in range(warmup)]
    for m in range(warmup, num_microbatches):
        order += [Action(Op.F, m), Action(Op.B, m - warmup)]
    return order + [Action(Op.B, m) for m in range(num_microbatches - warmup, num_microbatches)]


def kfkb(*, stage: int, num_stages: int, num_microbatches: int, k: int) -> list[Action]:
    """1F1B over groups of k micro-batches (arXiv:2303.01675)."""
    _check_shape(stage, num_stages, num_microbatches)
    if k < 1:
        raise ScheduleError(f"k={k}", expected="k >= 1", fix="use k=1 for plain 1F1B")
    num_groups = -(-num_microbatches // k)  # the last group may be shorter
    groups = one_f_one_b(stage=stage, num_stages=num_stages, num_microbatches=num_groups)
    return [
        Action(op, m)
        for op, group in groups
        for m in range(group * k, min((group + 1) * k, num_microbatches))
    ]


BUILDERS: dict[str, Callable[..., list[Action]]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "kfkb": kfkb,
}


def build(name: str, *, num_stages: int, num_microbatches: int, k: int | None = None) -> Schedule:
    """The named schedule for every stage; `k` belongs to kfkb alone."""
    if name not in BUILDERS:
        raise ScheduleError(
            f"schedule {name!r}", expected=f"one of {', '.join(BUILDERS)}", fix="use 1f1b"
        )
    if (name == "kfkb") != (k is not None):
        raise ScheduleError(
            f"schedule {name} with k={k}",
            expected="k with kfkb, and with kfkb alone",
            fix="choose kfkb with k=2 (--schedule kfkb --k 2), or leave k out",
        )
    group = {} if k is None else {"k": k}
    shape = {"num_stages": num_stages, "num_microbatches": num_microbatches}
    _check_shape(0, **shape)
    return [BUILDERS[name](stage=stage, **shape, **group) for stage in range(num_stages)]


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
