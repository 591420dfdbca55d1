"""Entering: from when on a worker that comes late, and copies a model first, counts at its stage.

Where models are averaged, from its first step on: until then nobody waits for it, and nobody
averages with what it holds meanwhile.

Where all workers go in lockstep and average gradients, it has to hold what the others hold, at each
stage of its pipeline after the same step: one that nobody has begun to end when it joins. So the
scheduler names a step of the pipeline that it copies from, and each stage enters, and copies, when
the source there has ended that step. The others then wait for it before they end the next one. Were
it in time at one stage and a step behind at another, everybody would wait twice per step, for good.

Source: none; the workers of SDPipe and Prague are there from the beginning.
"""

from collections.abc import Iterator

from polyrhythm.sync.members import MemberState


class LateJoins:
    """Those who wait for another one to end a step."""

    def __init__(self) -> None:
        self._waiting: dict[MemberState, tuple[MemberState, int]] = {}  # for whom, and its clock

    def wait(self, member: MemberState, source: MemberState, clock: int) -> None:
        self._waiting[member] = source, clock

    def forget(self, member: MemberState) -> None:
        self._waiting.pop(member, None)

    def joinable(self) -> Iterator[MemberState]:
        """Those who enter now."""
        for member, (source, clock) in list(self._waiting.items()):
            if source.clock > clock or (source.clock == clock and not source.is_ready):
                del self._waiting[member]
                yield member
