"""Which workers wait for one another, so that only a timeout could end their waits.

A step needs all stages of its pipeline, and a group all its members: policies that do not take
pipelines into account let stage 0 of pipelines A and B wait for A, and stage 1 for B.

Source: Holt, "Some deadlock properties of computer systems", ACM Computing Surveys 4(3), 1972: to
find a deadlock, let all who can end their work end it until nobody is left who can. Departures:
workers that may run ahead of a waiting one; waits for a policy.
"""

import math
from collections.abc import Sequence

from polyrhythm.sync.members import MemberState


def deadlocked(stages: Sequence[Sequence[MemberState]], steps_ahead: float) -> set[MemberState]:
    """Return the workers that wait for one another.

    One that is about to wait for a global average, or to leave, seems to compute a step: whoever
    waits for it may be among them, and loses an average. `steps_ahead`: how many steps a worker may
    run while another stage of its pipeline waits for a group, 0 with a flush and 1 with overlap.
    """
    candidates = {
        member
        for stage in stages
        for member in stage
        if member.is_active and not (member.is_idle or member.stage_policy.is_average_all)
    }
    if not any(member.is_ready for member in candidates):
        return set()
    pipelines = list(zip(*stages, strict=True))
    waiting, could_go_on = set(candidates), True
    while could_go_on:
        could_go_on = False
        for member in list(waiting):
            worker = member.worker
            if not member.is_ready:
                goes_on = not any(
                    fellow in waiting
                    and fellow.is_ready
                    and fellow.clock + steps_ahead <= member.clock
                    for fellow in pipelines[worker.pipeline]
                )
            elif member.queue:
                goes_on = waiting.isdisjoint(_awaited(member))
            else:  # its policy may form a group at its timer, or when another one becomes ready
                goes_on = member.stage_policy.policy.next_timer() < math.inf or any(
                    other in candidates and other not in waiting for other in stages[worker.stage]
                )
            if goes_on:
                waiting.remove(member)
                could_go_on = True
    return waiting


def _awaited(member: MemberState) -> list[MemberState]:
    """Return those for whom a worker's first group waits."""
    group_round = member.queue[0]
    if group_round.is_open:
        return [other for other in group_round.members if other.worker in group_round.unready]
    return [other for other in group_round.members if other.queue[0] is not group_round]
