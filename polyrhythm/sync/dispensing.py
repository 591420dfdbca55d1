"""Dispensing: answers workers that ask for positions, and sees that none is forgotten.

All stages of a pipeline ask for its chunks, or those of them that need to know; a chunk is used
when all that have asked for it have made their update. A worker that is lost takes its pipeline's
chunks back with it.

If there are no positions left, but others still have some, the answer waits: should one of those be
lost, its positions are dealt again. So a pipeline is told that there are none only when it is over,
and every position is used, whoever dies in the last moment. Meanwhile nobody waits for it to
average: who has the last positions may want to, before it goes on.

Source: none; SDPipe and Prague end with the first worker that is lost.
"""

from collections import Counter
from collections.abc import Iterator

from polyrhythm.sync.dispenser import Dispenser, Ranges
from polyrhythm.sync.member import Life, Member
from polyrhythm.sync.membership import Membership
from polyrhythm.sync.messages import Command, Dealt, Take, Tallied, Tally, Used
from polyrhythm.types import Worker

_Asked = tuple[Worker, int, int | None]  # who, for which chunk, before which position


class Dispensing:
    def __init__(
        self, dispenser: Dispenser, membership: Membership, counters: Counter[str]
    ) -> None:
        self._dispenser, self._membership, self._counters = dispenser, membership, counters
        # By pipeline and chunk: the stages that have asked for it, and not used it yet.
        self._users: dict[int, dict[int, set[int]]] = {}
        self._used: dict[Worker, int] = {}  # the last chunk of each
        self._waiting: dict[_Asked, Take] = {}  # in the order in which they came

    def hear(self, event: Take | Used | Tally) -> Iterator[Command]:
        """What a worker that takes part says, and what it, or another one, is answered."""
        if isinstance(event, Take):
            yield from self._take(event)
        elif isinstance(event, Used):
            yield from self._use(event)
        else:
            if event.batch is not None:
                self._dispenser.end(event.batch)
                yield from self._again()
            yield Tallied(event.worker, event.number, self._dispenser.state())

    def idle(self) -> Iterator[Member]:
        """Those whose pipelines have used all they had, and wait for more, if there will be any."""
        for pipeline in {worker.pipeline for worker, _, _ in self._waiting}:
            if not self._users.get(pipeline):
                yield from (stage[pipeline] for stage in self._membership.stages)

    def restart(self, pipeline: int, why: str) -> Iterator[Command]:
        """A life of a pipeline is over: those who wait for its chunks are told why."""
        self._dispenser.lost(pipeline)
        self._users.pop(pipeline, None)
        for worker in [worker for worker in self._used if worker.pipeline == pipeline]:
            del self._used[worker]
        for asked, take in list(self._waiting.items()):
            if take.worker.pipeline == pipeline:
                del self._waiting[asked]
                if self._membership.members[take.worker].life is Life.ALIVE:
                    yield _nothing(take, why=why)
        yield from self._again()

    def leave(self, member: Member, why: str) -> Iterator[Command]:
        """A worker has finished; when all of its pipeline have, what they did not use goes back."""
        pipeline = self._membership.pipeline(member)
        if all(other.life is not Life.ALIVE for other in pipeline):
            yield from self.restart(member.worker.pipeline, why)
        else:
            for asked in [asked for asked in self._waiting if asked[0] == member.worker]:
                del self._waiting[asked]

    def _take(self, take: Take) -> Iterator[Command]:
        """At most one answer; what was asked for before is answered as before."""
        member, num_taken = self._membership.members[take.worker], self._num_taken(take)
        if not member.active:
            missing = self._membership.missing(member)
            yield _nothing(take, why=f"its pipeline is not whole: {missing}")
        elif take.number > num_taken and not self._waits_for_the_one_before(take):
            why = f"it asks for chunk {take.number}, and its pipeline has taken {num_taken}"
            yield _nothing(take, why=why)
        else:
            yield from self._answer(take)

    def _waits_for_the_one_before(self, take: Take) -> bool:
        """Or there is none any more."""
        before = take.worker, take.number - 1, take.until
        pipeline = take.worker.pipeline
        return before in self._waiting or self._dispenser.is_over(pipeline, take.until)

    def _use(self, used: Used) -> Iterator[Command]:
        """Once more is harmless."""
        stage, pipeline = used.worker
        users = self._users.get(pipeline, {})
        chunks = [n for n, stages in users.items() if n <= used.number and stage in stages]
        if not chunks:
            self._counters["late"] += 1
            return
        self._used[used.worker] = max(chunks)
        for number in chunks:
            users[number].remove(stage)
            if not users[number]:
                del users[number]
                self._dispenser.done(pipeline, number)
        yield from self._again()

    def _again(self) -> Iterator[Command]:
        """Some positions were used, or have come back: who waits may be answered."""
        for take in list(self._waiting.values()):
            yield from self._answer(take)

    def _answer(self, take: Take) -> Iterator[Command]:
        """Now or, if there are no positions at present, later."""
        (stage, pipeline), num_taken = take.worker, self._num_taken(take)
        asked = take.worker, take.number, take.until
        ranges: Ranges = ()
        if take.number == num_taken or self._dispenser.has(pipeline, take.number):
            ranges = self._dispenser.take(pipeline, take.number, take.count, take.until)
        elif take.number < num_taken:
            self._counters["late"] += 1
            self._waiting.pop(asked, None)
            yield _nothing(take, why=f"chunk {take.number} of its pipeline was used already")
            return
        if ranges and take.number > self._used.get(take.worker, -1):
            self._users.setdefault(pipeline, {}).setdefault(take.number, set()).add(stage)
        if ranges or self._dispenser.is_over(pipeline, take.until):
            self._waiting.pop(asked, None)
            yield Dealt(take.worker, take.number, take.until, ranges)
        else:
            self._waiting.setdefault(asked, take)

    def _num_taken(self, take: Take) -> int:
        return self._dispenser.num_taken(take.worker.pipeline)


def _nothing(take: Take, *, why: str) -> Dealt:
    return Dealt(take.worker, take.number, take.until, (), why)
