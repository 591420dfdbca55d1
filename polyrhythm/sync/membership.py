"""Membership: the status of workers, which pipelines are active, and sources of model copies.

A pipeline with a dead stage cannot train, so all its workers are inactive, at every stage, until
the dead worker has joined again. If that worker has no model (its clock is 0), each worker of the
pipeline copies the model of its stage from the same other pipeline, so that the stages match. A
worker that leaves has finished: the rest of its pipeline finishes too, and stays active. Each
change of the active workers starts an epoch.

Source: none; neither SDPipe nor Prague survives a loss (SDPipe, PVLDB 16(9), 2023, section 4,
leaves it to future work).
"""

from collections.abc import Iterator, Sequence

from polyrhythm.sync.members import MemberState, MemberStatus
from polyrhythm.types import Worker


class Membership:
    def __init__(self, num_stages: int, num_pipelines: int, *, pipelines_die_whole: bool) -> None:
        self.epoch = 0
        self.pipelines_die_whole = pipelines_die_whole
        self.stages = [
            [MemberState(Worker(stage, pipeline)) for pipeline in range(num_pipelines)]
            for stage in range(num_stages)
        ]
        self.members = {member.worker: member for stage in self.stages for member in stage}

    def change(self, member: MemberState, status: MemberStatus) -> list[MemberState]:
        """Set the status of a worker; return the workers that became active or inactive."""
        member.status = status
        affected = self.pipeline(member) if self.pipelines_die_whole else [member]
        complete = all(o.status in (MemberStatus.ACTIVE, MemberStatus.LEFT) for o in affected)
        changed = []
        for other in affected:
            active = complete and other.status is MemberStatus.ACTIVE
            if active != other.is_active:
                other.is_active = active
                changed.append(other)
        self.epoch += bool(changed)
        return changed

    def missing(self, member: MemberState) -> str:
        """Describe the lost workers because of which an alive worker is not active."""
        lost = [
            o for o in self.pipeline(member) if o.status in (MemberStatus.ABSENT, MemberStatus.DEAD)
        ]
        return ", ".join(f"{other.worker} {other.status.value}" for other in lost)

    def sources(self, behind: Sequence[MemberState]) -> list[tuple[MemberState, MemberState]]:
        """Pair workers of one pipeline with their sources, all in one pipeline if possible.

        The source pipeline is the one whose slowest stage is furthest; one without a trained model
        is no source.
        """
        pipeline = behind[0].worker.pipeline
        columns = zip(*(self.stages[member.worker.stage] for member in behind), strict=True)
        others = [column for column in columns if column[0].worker.pipeline != pipeline]
        active = [column for column in others if all(source.is_active for source in column)]
        if not active and len(behind) > 1:  # no pipeline has all these stages: one source each
            return [pair for member in behind for pair in self.sources([member])]
        best = max(active, key=lambda column: min(source.clock for source in column), default=())
        has_started = any(source.clock > 0 for source in best)
        return list(zip(behind, best, strict=True)) if has_started else []

    def pipeline(self, member: MemberState) -> list[MemberState]:
        """All workers of the member's pipeline, by stage."""
        return [stage[member.worker.pipeline] for stage in self.stages]


class LateJoins:
    """Workers that join late, copy a model, and take part once their source has ended a step.

    If each average is one of all workers, a late worker needs the others' weights, at each stage of
    its pipeline after the same step: one that no worker has ended when it joins. So the scheduler
    names a step of the source pipeline, and each stage copies and joins when its source has ended
    it; if one stage joined a step later, all workers would wait twice in every further step.
    Otherwise no group waits for a late worker before its first step.
    """

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
