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

from polyrhythm.sync.dispatch import Ranges, SampleDispatcher
from polyrhythm.sync.members import MemberState, MemberStatus
from polyrhythm.sync.membership import Membership
from polyrhythm.sync.protocol import (
    Acknowledge,
    Acquire,
    Acquired,
    Command,
    QueryProgress,
    SampleProgress,
)
from polyrhythm.types import Worker

_RequestKey = tuple[Worker, int, int | None]  # who, for which chunk, before which position


class DispatchHandler:
    def __init__(
        self, dispatcher: SampleDispatcher, membership: Membership, counters: Counter[str]
    ) -> None:
        self._dispatcher, self._membership, self._counters = dispatcher, membership, counters
        # By pipeline and chunk: the stages that have asked for it, and not used it yet.
        self._users: dict[int, dict[int, set[int]]] = {}
        self._acknowledged: dict[Worker, int] = {}  # the last chunk of each
        self._waiting: dict[_RequestKey, Acquire] = {}  # in the order in which they came

    def handle(self, event: Acquire | Acknowledge | QueryProgress) -> Iterator[Command]:
        """What a worker that takes part says, and what it, or another one, is answered."""
        if isinstance(event, Acquire):
            yield from self._acquire(event)
        elif isinstance(event, Acknowledge):
            yield from self._acknowledge(event)
        else:
            if event.batch is not None:
                self._dispatcher.end_after_batch(event.batch)
                yield from self._retry_waiting()
            yield SampleProgress(event.worker, event.number, self._dispatcher.state())

    def idle(self) -> Iterator[MemberState]:
        """Those whose pipelines have used all they had, and wait for more, if there will be any."""
        for pipeline in {worker.pipeline for worker, _, _ in self._waiting}:
            if not self._users.get(pipeline):
                yield from (stage[pipeline] for stage in self._membership.stages)

    def reset_pipeline(self, pipeline: int, why: str) -> Iterator[Command]:
        """A life of a pipeline is over: those who wait for its chunks are told why."""
        self._dispatcher.release(pipeline)
        self._users.pop(pipeline, None)
        for worker in [worker for worker in self._acknowledged if worker.pipeline == pipeline]:
            del self._acknowledged[worker]
        for key, request in list(self._waiting.items()):
            if request.worker.pipeline == pipeline:
                del self._waiting[key]
                if self._membership.members[request.worker].status is MemberStatus.ALIVE:
                    yield _no_samples(request, why=why)
        yield from self._retry_waiting()

    def leave(self, member: MemberState, why: str) -> Iterator[Command]:
        """A worker has finished; when all of its pipeline have, what they did not use goes back."""
        pipeline = self._membership.pipeline(member)
        if all(other.status is not MemberStatus.ALIVE for other in pipeline):
            yield from self.reset_pipeline(member.worker.pipeline, why)
        else:
            for key in [key for key in self._waiting if key[0] == member.worker]:
                del self._waiting[key]

    def _acquire(self, request: Acquire) -> Iterator[Command]:
        """At most one answer; what was asked for before is answered as before."""
        member, num_acquired = self._membership.members[request.worker], self._num_acquired(request)
        if not member.is_active:
            missing = self._membership.missing(member)
            yield _no_samples(request, why=f"its pipeline is not whole: {missing}")
        elif request.number > num_acquired and not self._previous_is_waiting(request):
            why = f"it asks for chunk {request.number}, and its pipeline has taken {num_acquired}"
            yield _no_samples(request, why=why)
        else:
            yield from self._answer(request)

    def _previous_is_waiting(self, request: Acquire) -> bool:
        """Or there is none any more."""
        before = request.worker, request.number - 1, request.until
        pipeline = request.worker.pipeline
        return before in self._waiting or self._dispatcher.is_exhausted(pipeline, request.until)

    def _acknowledge(self, ack: Acknowledge) -> Iterator[Command]:
        """Once more is harmless."""
        stage, pipeline = ack.worker
        users = self._users.get(pipeline, {})
        chunks = [n for n, stages in users.items() if n <= ack.number and stage in stages]
        if not chunks:
            self._counters["late"] += 1
            return
        self._acknowledged[ack.worker] = max(chunks)
        for number in chunks:
            users[number].remove(stage)
            if not users[number]:
                del users[number]
                self._dispatcher.acknowledge(pipeline, number)
        yield from self._retry_waiting()

    def _retry_waiting(self) -> Iterator[Command]:
        """Some positions were used, or have come back: who waits may be answered."""
        for request in list(self._waiting.values()):
            yield from self._answer(request)

    def _answer(self, request: Acquire) -> Iterator[Command]:
        """Now or, if there are no positions at present, later."""
        (stage, pipeline), num_acquired = request.worker, self._num_acquired(request)
        key = request.worker, request.number, request.until
        ranges: Ranges = ()
        if request.number == num_acquired or self._dispatcher.is_outstanding(
            pipeline, request.number
        ):
            ranges = self._dispatcher.acquire(
                pipeline, request.number, request.count, request.until
            )
        elif request.number < num_acquired:
            self._counters["late"] += 1
            self._waiting.pop(key, None)
            yield _no_samples(
                request, why=f"chunk {request.number} of its pipeline was used already"
            )
            return
        if ranges and request.number > self._acknowledged.get(request.worker, -1):
            self._users.setdefault(pipeline, {}).setdefault(request.number, set()).add(stage)
        if ranges or self._dispatcher.is_exhausted(pipeline, request.until):
            self._waiting.pop(key, None)
            yield Acquired(request.worker, request.number, request.until, ranges)
        else:
            self._waiting.setdefault(key, request)

    def _num_acquired(self, request: Acquire) -> int:
        return self._dispatcher.num_acquired(request.worker.pipeline)


def _no_samples(request: Acquire, *, why: str) -> Acquired:
    return Acquired(request.worker, request.number, request.until, (), why)
