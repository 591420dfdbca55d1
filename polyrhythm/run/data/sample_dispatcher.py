"""Samples dispatched at run time: a pipeline acquires its next ones when it is ready for them.

    sync = pr.GroupSync(model, optimizer, "adaptive", sampler_state=pr.SamplerState(limit=50_000))
    samples = pr.SampleDispatcher(sync)
    for number in itertools.count():
        ranges = samples.acquire(number, count=64).wait()
        if not ranges:
            break
        ...  # train on these positions
        samples.acknowledge(number)
        sync.step()

Fast pipelines get more samples, and each sample is used once. The coordinator of a GroupSync hands
them out (`sync/dispatch.py`); those of a lost pipeline go to another one.
"""

from polyrhythm.errors import PolicyError
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.coordinator.client import SampleFuture
from polyrhythm.sync.dispatch import Ranges, SamplerState
from polyrhythm.sync.protocol import MAX_CHUNK_SIZE, MAX_POSITION


class SampleDispatcher:
    """The samples of one worker; in a pipeline of several stages, usually of the first stage."""

    def __init__(self, sync: GroupSync) -> None:
        """`sync` was made with a `sampler_state`, which must be equal in all processes."""
        self._sync = sync
        sync.sample_client()  # raises if it has no samples

    def acquire(self, number: int, count: int, until: int | None = None) -> SampleFuture[Ranges]:
        """Request the next `count` sample positions to train on, and return a future at once.

        `wait()` of the future returns ranges (start, end): fewer positions at the limit of the
        sampler state or before `until`, and none if all of those are used. Request chunk k + 1
        before computing chunk k, to hide the round trip. The answer is late only while other
        pipelines hold the last positions; so acknowledge chunk k before waiting.

        Chunks are numbered from 0. All processes of a pipeline that request a number get the same
        chunk; after an empty chunk, request the same number again with another `until`.
        """
        client = self._sync.sample_client()
        is_possible = 1 <= count <= MAX_CHUNK_SIZE and 0 <= (until or 0) <= MAX_POSITION
        if not (is_possible and 0 <= number <= client.num_requested):
            raise PolicyError(
                f"{self._sync.worker} asks for {count} positions before {until}, as chunk {number}",
                expected=f"at least one position, and chunks in order: 0 to {client.num_requested}",
                fix=f"ask for chunk {client.num_requested} next",
            )
        return client.acquire(number, count, until, self._sync.timeout)

    def acknowledge(self, number: int) -> None:
        """Report that all chunks up to `number` are used; call after optimizer.step().

        Each process that acquired a chunk calls this, before `GroupSync.step`. Chunks that a
        pipeline has not acknowledged when it dies or closes go to another pipeline.
        """
        self._sync.sample_client().acknowledge(number)

    def sampler_state(self, *, last_batch: int | None = None) -> SamplerState:
        """Return which positions are used so far: for a checkpoint, and to resume from it.

        `last_batch`: a batch size; hand out nothing after the current batch of that size.
        """
        return self._sync.sample_client().query_progress(self._sync.timeout, last_batch).wait()
