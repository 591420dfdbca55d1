"""The dispatch handler: answers requests for positions, and ensures that every position is used.

All stages of a pipeline that need to know its chunks request them; a chunk is used when all stages
that requested it have acknowledged it. When a worker is lost, the unused chunks of its pipeline
return to the pool.

If no position is left but other pipelines have outstanding ones, the answer is deferred: if one of
those pipelines is lost, its positions are dispatched again. So an empty answer means that the
updates of all positions are done, even if a worker dies in the last moment. Updates that are lost
with their pipeline before an average has them do not count: their positions are unused in the state
at the end. Meanwhile no group waits for the deferred pipeline: the pipelines with the last
positions may need to average first.

Source: none; SDPipe and Prague end with the first lost worker.
"""

from collections import Counter
from collections.abc import Iterator

from polyrhythm.sync.dispatch import Ranges, SampleLedger
from polyrhythm.sync.members import Membership, MemberState, MemberStatus
from polyrhythm.sync.protocol import (
    Acknowledge,
    Acquire,
    Acquired,
    Command,
    QueryProgress,
    SampleProgress,
)
from polyrhythm.sync.snapshot import register_state
from polyrhythm.types import Worker

_RequestKey = tuple[Worker, int, int | None]  # worker, chunk, `until`


class DispatchHandler:
    def __init__(
        self, dispatcher: SampleLedger, membership: Membership, counters: Counter[str]
    ) -> None:
        self._dispatcher, self._membership, self._counters = dispatcher, membership, counters
        # By pipeline and chunk: the stages that have requested and not yet acknowledged it.
        self._users: dict[int, dict[int, set[int]]] = {}
        self._acknowledged: dict[Worker, int] = {}  # the last chunk of each worker
        self._waiting: dict[_RequestKey, Acquire] = {}  # deferred, in order of arrival

    def handle(self, event: Acquire | Acknowledge | QueryProgress) -> Iterator[Command]:
        """Handle an event of an alive worker; yield the answers to it and to other workers."""
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
        """Yield workers of pipelines that have used all their chunks and wait for more."""
        for pipeline in {worker.pipeline for worker, _, _ in self._waiting}:
            if not self._users.get(pipeline):
                yield from (stage[pipeline] for stage in self._membership.stages)

    def publish(self, worker: Worker) -> None:
        """A worker is ready to average: the first stage of a pipeline counts its samples."""
        if worker.stage == 0:
            self._dispatcher.publish(worker.pipeline)

    def commit(self, worker: Worker) -> None:
        """An average of this worker's last published model is committed."""
        if worker.stage == 0:
            self._dispatcher.commit(worker.pipeline)

    def reset_pipeline(self, pipeline: int, why: str) -> Iterator[Command]:
        """End the incarnation of a pipeline; answer its deferred requests with `why`."""
        self._dispatcher.release(pipeline)
        self._users.pop(pipeline, None)
        for worker in [worker for worker in self._acknowledged if worker.pipeline == pipeline]:
            del self._acknowledged[worker]
        for key, request in list(self._waiting.items()):
            if request.worker.pipeline == pipeline:
                del self._waiting[key]
                if self._membership.members[request.worker].status is MemberStatus.ACTIVE:
                    yield _no_samples(request, why=why)
        yield from self._retry_waiting()

    def leave(self, member: MemberState, why: str) -> Iterator[Command]:
        """Remove a worker; when its whole pipeline is gone, return the unused chunks."""
        pipeline = self._membership.pipeline(member)
        if all(other.status is not MemberStatus.ACTIVE for other in pipeline):
            yield from self.reset_pipeline(member.worker.pipeline, why)
        else:
            for key in [key for key in self._waiting if key[0] == member.worker]:
                del self._waiting[key]

    def _acquire(self, request: Acquire) -> Iterator[Command]:
        """Yield at most one answer; a repeated request gets the same answer."""
        member, num_acquired = self._membership.members[request.worker], self._num_acquired(request)
        if not member.is_active:
            missing = self._membership.missing(member)
            yield _no_samples(request, why=f"its pipeline is incomplete: {missing}")
        elif request.number > num_acquired and not self._previous_is_waiting(request):
            why = f"it requests chunk {request.number}; its pipeline has acquired {num_acquired}"
            yield _no_samples(request, why=why)
        else:
            yield from self._answer(request)

    def _previous_is_waiting(self, request: Acquire) -> bool:
        """Whether the request for the previous chunk is deferred, or no positions are left."""
        before = request.worker, request.number - 1, request.until
        pipeline = request.worker.pipeline
        return before in self._waiting or self._dispatcher.is_exhausted(pipeline, request.until)

    def _acknowledge(self, ack: Acknowledge) -> Iterator[Command]:
        """Mark chunks as used by a stage; ignore duplicates."""
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
        """Answer deferred requests, after positions were used or returned."""
        for request in list(self._waiting.values()):
            yield from self._answer(request)

    def _answer(self, request: Acquire) -> Iterator[Command]:
        """Answer a request, or defer it if no positions are available now."""
        (stage, pipeline), num_acquired = request.worker, self._num_acquired(request)
        number, until, dispatcher = request.number, request.until, self._dispatcher
        key = request.worker, number, until
        ranges: Ranges = ()
        if number == num_acquired or dispatcher.is_outstanding(pipeline, number):
            ranges = dispatcher.acquire(pipeline, number, request.count, until)
        elif number < num_acquired:
            self._counters["late"] += 1
            self._waiting.pop(key, None)
            yield _no_samples(request, why=f"chunk {number} of its pipeline was used already")
            return
        if ranges and number > self._acknowledged.get(request.worker, -1):
            self._users.setdefault(pipeline, {}).setdefault(number, set()).add(stage)
        if ranges or dispatcher.is_exhausted(pipeline, until):
            self._waiting.pop(key, None)
            yield Acquired(request.worker, number, until, ranges)
        else:
            self._waiting.setdefault(key, request)

    def _num_acquired(self, request: Acquire) -> int:
        return self._dispatcher.num_acquired(request.worker.pipeline)


def _no_samples(request: Acquire, *, why: str) -> Acquired:
    return Acquired(request.worker, request.number, request.until, (), why)


register_state(DispatchHandler)
