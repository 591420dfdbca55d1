"""Entering: from which step on a worker that comes late counts at its stage.

Who joins a job that has begun copies a model first. Until its first step is made nobody waits for
it, and nobody averages with what it holds meanwhile.

Where all workers go in lockstep, all stages of its pipeline have to enter with the same step of the
others. A pipeline that is in time at one stage and a step behind at another makes everybody wait
twice per step, for good: at the first stage for its forward, at the other for that of the rest. So
the first of its stages that is ready fixes the step, and each other one enters when the others
there have ended the step before. One that comes after that step has missed it, and goes on alone
once.

Source: none; the workers of SDPipe and Prague are there from the beginning.
"""

from collections.abc import Iterator

from polyrhythm.sync.member import Member
from polyrhythm.sync.membership import Membership


class Entering:
    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._waiting: dict[Member, int] = {}  # with the step of the others that it enters with

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def arrive(self, member: Member) -> None:
        """A worker that has not entered is ready; if none of its pipeline was before, it leads."""
        if member in self._waiting:
            return
        others = self._others(member)
        step = max((other.open_step for other in others), default=member.step)
        offset = step - member.step
        for fellow in self._membership.pipeline(member):
            if fellow.active and not fellow.has_entered:
                fellow.offset += offset
                self._waiting[fellow] = step

    def forget(self, member: Member) -> None:
        self._waiting.pop(member, None)

    def entered(self) -> Iterator[Member]:
        """Those who enter now; each before it is asked for the next."""
        for member, first in list(self._waiting.items()):
            others = self._others(member)
            step = max((other.next_step for other in others), default=first)
            if step >= first:
                del self._waiting[member]
                member.num_missed = step - first
                yield member

    def _others(self, member: Member) -> list[Member]:
        stage = self._membership.stages[member.worker.stage]
        return [other for other in stage if other.active and other.has_entered]
