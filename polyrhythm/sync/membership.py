"""Who is in the job: lives of workers, pipelines that work only whole, whom to copy a model from.

A pipeline with a dead stage cannot train, so all its workers are inactive, at every stage, until
the dead one has joined again. If that one has no model (its clock is 0), each worker of the
pipeline copies the model of its stage from one and the same other pipeline, so that the parts fit
together. A worker that leaves in good order has finished: the rest of its pipeline finishes too,
and stays active. Each change of who is active begins an epoch.

Source: none; neither SDPipe nor Prague survives a loss (SDPipe, PVLDB 16(9), 2023, section 4,
leaves it to future work).
"""

from collections.abc import Sequence

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
        """Set the life of a worker; those who become active or inactive by it, by stage."""
        member.status = status
        affected = self.pipeline(member) if self.pipelines_die_whole else [member]
        whole = all(other.status in (MemberStatus.ALIVE, MemberStatus.LEFT) for other in affected)
        changed = []
        for other in affected:
            active = whole and other.status is MemberStatus.ALIVE
            if active != other.is_active:
                other.is_active = active
                changed.append(other)
        self.epoch += bool(changed)
        return changed

    def missing(self, member: MemberState) -> str:
        """Why a worker that is here is not active."""
        lost = [
            o for o in self.pipeline(member) if o.status in (MemberStatus.ABSENT, MemberStatus.DEAD)
        ]
        return ", ".join(f"{other.worker} {other.status.value}" for other in lost)

    def sources(self, behind: Sequence[MemberState]) -> list[tuple[MemberState, MemberState]]:
        """Of workers of one pipeline, each with whom to copy from: one pipeline, if there is one.

        The one that has come furthest, with its stage that has come least; none that has not begun.
        """
        pipeline = behind[0].worker.pipeline
        columns = zip(*(self.stages[member.worker.stage] for member in behind), strict=True)
        others = [column for column in columns if column[0].worker.pipeline != pipeline]
        whole = [column for column in others if all(source.is_active for source in column)]
        if not whole and len(behind) > 1:  # no pipeline has all these stages: each finds its own
            return [pair for member in behind for pair in self.sources([member])]
        best = max(whole, key=lambda column: min(source.clock for source in column), default=())
        has_begun = any(source.clock > 0 for source in best)
        return list(zip(behind, best, strict=True)) if has_begun else []

    def pipeline(self, member: MemberState) -> list[MemberState]:
        """Its workers, by stage."""
        return [stage[member.worker.pipeline] for stage in self.stages]
