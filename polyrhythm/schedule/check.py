"""Check a schedule before it runs: complete, in order, free of deadlock.

Micro-batches travel in order 0, 1, 2, ... on every link and in both directions, so each stage must
run its forwards in that order and its backwards too. With receives that are posted ahead and sends
that do not block, such a schedule is free of deadlock if and only if

    f_s(m) >= f_{s+1}(m)   for all stages s and micro-batches m,

where f_s(m) is how many forwards stage s runs before B(m). If it fails, stage s waits in B(m) for a
gradient that stage s+1 produces only after a forward whose input stage s has not sent yet. The
tests compare this with executing the lists.
"""

from itertools import pairwise

from polyrhythm.errors import ScheduleError
from polyrhythm.schedule.builders import Schedule
from polyrhythm.types import Action, Op


def check(schedule: Schedule, *, num_microbatches: int) -> None:
    """Raise ScheduleError for the first defect found; a schedule that passes can be run."""
    if not schedule or num_microbatches < 1:
        raise ScheduleError(
            f"{len(schedule)} stages, {num_microbatches} micro-batches",
            expected="at least one of each",
            fix="build it with schedule.builders.build",
        )
    for stage, actions in enumerate(schedule):
        _check_complete_and_ordered(stage, actions, num_microbatches)
    _check_no_deadlock(schedule)


def forwards_before_backward(actions: list[Action]) -> list[int]:
    """f(m) for every micro-batch m: forwards this stage runs before B(m)."""
    forwards = 0
    before = []
    for op, _ in actions:
        if op is Op.F:
            forwards += 1
        else:
            before.append(forwards)
    return before


def _check_complete_and_ordered(stage: int, actions: list[Action], num_microbatches: int) -> None:
    for op in Op:
        found = [m for o, m in actions if o is op]
        if found != list(range(num_microbatches)):
            raise ScheduleError(
                f"stage {stage} runs {op} of micro-batches {found}",
                expected=f"each of 0 to {num_microbatches - 1} once, in order",
                fix="links deliver in order: list every micro-batch once, counting up",
            )
    for m, forwards in enumerate(forwards_before_backward(actions)):
        if forwards <= m:
            raise ScheduleError(
                f"stage {stage} runs B{m} before F{m}",
                expected=f"F{m} first",
                fix=f"move F{m} in front of B{m}",
            )


def _check_no_deadlock(schedule: Schedule) -> None:
    depths = [forwards_before_backward(actions) for actions in schedule]
    for stage, (here, after) in enumerate(pairwise(depths)):
        for m, (forwards, needed) in enumerate(zip(here, after, strict=True)):
            if forwards < needed:
                raise ScheduleError(
                    f"deadlock: stage {stage} runs {forwards} forwards before B{m}, "
                    f"stage {stage + 1} runs {needed}",
                    expected=f"stage {stage} to run at least as many as stage {stage + 1}",
                    fix=f"move F{needed - 1} of stage {stage} in front of its B{m}",
                )
