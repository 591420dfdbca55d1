"""Late join: from which step on a worker that joins late and copies a model takes part.

With model averaging, from its first step on: until then no group waits for it, and none averages
with its old weights.

In lockstep with gradient averaging it must have the same weights as the others, at each stage of
its pipeline after the same step: one that no worker has ended when it joins. So the scheduler names
a step of the source pipeline, and each stage copies and joins when its source has ended that step.
The other workers then wait for it before they end the next step. If it joined in time at one stage
and a step later at another, all workers would wait twice in every further step.

Source: none; the workers of SDPipe and Prague are present from the start.
"""

from collections.abc import Iterator

from polyrhythm.sync.members import MemberState


class LateJoins:
    """Workers that join when their source has ended a step."""

    def __init__(self) -> None:
        self._waiting: dict[MemberState, tuple[MemberState, int]] = {}  # source and its clock

    def wait(self, member: MemberState, source: MemberState, clock: int) -> None:
        self._waiting[member] = source, clock

    def forget(self, member: MemberState) -> None:
        self._waiting.pop(member, None)

    def joinable(self) -> Iterator[MemberState]:
        """Remove and yield the workers whose source has ended its step."""
        for member, (source, clock) in list(self._waiting.items()):
            if source.clock > clock or (source.clock == clock and not source.is_ready):
                del self._waiting[member]
                yield member
