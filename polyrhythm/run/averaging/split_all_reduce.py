"""All-reduces by buckets: of a buffer that is still being filled, or split at the Commit.

`BucketedAllReduce` averages gradients while backward computes them: it sends each bucket of a
`FillingBuffer` as soon as training has filled it. The mean is valid at the Commit as a whole.

`SplitAllReduce` runs its reduce-scatter before the Commit and its all-gather after it.
`reduce_scatter` computes this member's shard of each bucket; then the member may send Done. After
the Commit, `all_gather` collects the shards of all members while training continues and waits for
each bucket where it needs it (`StreamingBuffer`). A member that has everything sends END to the
others, and returns when it has received END from all.

If a member is lost during the all-gather, all survivors notice, since each aborts its connections
to the others. They agree on the survivors and transfer the missing shards (`sync/repair.py`); if
another member is lost, they do so again. In the end they are exact copies. A member that is too
late for the agreement, or the only survivor, keeps its own numbers for the missing shards.
"""

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyrhythm.cost.sync import BUCKET
from polyrhythm.errors import PeerError, peer_errors
from polyrhythm.run.averaging.exchange import (
    MessageKind,
    Pair,
    Peer,
    PeerConnections,
    PostedMessages,
    ShardSlices,
    direct_peers,
    owners,
    post_all_gather,
    reduce_scatter,
    shard_bucket,
    shard_slices,
    tag,
    weighted_sum,
)
from polyrhythm.run.comm.reduce_scatter import DirectExchange, pinned_size
from polyrhythm.run.comm.store import JobStore, Members, prefixed
from polyrhythm.sync.repair import plan_transfers
from polyrhythm.types import Bytes, Seconds

# Writes the mean of one shard: its bucket, its numbers, the others' addends by member, all weights.
SumShard = Callable[[int, slice, Mapping[int, Tensor], Sequence[float]], None]

_MIN_TIMEOUT: Seconds = 15.0  # as the coordinator's heartbeat timeout
# Between two survivors that notice a loss: one may first have to wait for a bucket.
_PEER_TIMEOUT: Seconds = 5.0
_SURVIVORS = "survivors"  # prefix of the agreement's keys
_POLL: Seconds = 0.002  # of the survivors' reports, initially; doubled up to _LONGEST_POLL
_LONGEST_POLL: Seconds = 0.05


@dataclass(slots=True)
class BucketMemory:
    """The buffers of a bucketed all-reduce, kept between steps; one average at a time uses them.

    All are pinned if `flat` is.
    """

    flat: Tensor  # the published numbers, which the mean never overwrites
    buckets: list[slice]
    mean: Tensor = field(init=False)
    _received: Tensor = field(init=False)  # addends of this worker's shards

    def __post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Replace what a failed exchange has used: messages may still arrive there."""
        self.mean = torch.empty_like(self.flat, pin_memory=self.flat.is_pinned())
        self._received = self.flat.new_empty(0)

    def received(self, num_rows: int, num: int) -> Tensor:
        """Return memory for `num` addends from each of `num_rows` workers."""
        if self._received.shape != (num_rows, num):
            self._received = torch.empty(
                (num_rows, num),
                dtype=self.flat.dtype,
                device="cpu",
                pin_memory=self.flat.is_pinned(),
            )
        return self._received

    @property
    def pinned_bytes(self) -> Bytes:
        """Size of the pinned memory, as torch rounds it up."""
        buffers = (self.flat, self.mean, self._received) if self.flat.is_pinned() else ()
        return sum(pinned_size(buffer.nbytes) for buffer in buffers)


class FillingBuffer:
    """A buffer that training fills bucket by bucket while it is averaged: one object per step.

    The counterpart of StreamingBuffer on the sending side. The last number of the buffer marks that
    another one is not finite: it is 0 or 1, and its mean is above 0 if any worker has set it.
    """

    def __init__(
        self,
        memory: BucketMemory,
        on_mean: Callable[[int], None],
        sum_shard: SumShard | None = None,
    ) -> None:
        """`on_mean` is called in the averager's thread with each bucket of the mean.

        `sum_shard` sums this worker's shards there, of all buckets but the last; None: on the CPU.
        """
        self.memory, self.on_mean, self.sum_shard = memory, on_mean, sum_shard
        self.changed = threading.Condition()
        self.filled_at: Seconds = math.inf  # when the last bucket was filled
        self._filled: dict[int, tuple[torch.cuda.Event | None, Tensor | None]] = {}
        self._finite: dict[int, bool] = {}  # of the buckets that were checked
        self._error: Exception | None = None

    def mark_filled(
        self, bucket: int, copied: torch.cuda.Event | None = None, total: Tensor | None = None
    ) -> None:
        """Mark a bucket as filled once `copied` is over; `total`: its sum, copied with it."""
        with self.changed:
            self._filled[bucket] = copied, total
            if len(self._filled) == len(self.memory.buckets):
                self.filled_at = time.perf_counter()
            self.changed.notify_all()

    def wait(self, bucket: int, deadline: Seconds, should_stop: Callable[[], bool]) -> None:
        """Wait until a bucket can be sent; raises the error of `fail`, or PeerError."""
        start = time.monotonic()
        with self.changed:
            self.changed.wait_for(
                lambda: bucket in self._filled or self._error or should_stop(),
                max(deadline - start, 0.0),
            )
            if self._error is not None:
                raise self._error
            if bucket not in self._filled:
                cause = "the group was aborted" if should_stop() else "backward has not filled it"
                waited = time.monotonic() - start
                raise PeerError("this worker", action="averaging", waited=waited, cause=cause)
            copied, _ = self._filled[bucket]
        if copied is not None:
            copied.synchronize()

    def wake(self) -> None:
        """Let threads that wait look at their `should_stop` again."""
        with self.changed:
            self.changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Make current and later waits raise `error`: the buffer will not be complete."""
        with self.changed:
            self._error = self._error or error
            self.changed.notify_all()

    def is_bucket_finite(self, bucket: int) -> bool:
        """Check a bucket that can be sent, once; a look at the sum is enough if it is finite."""
        if bucket not in self._finite:
            flat, (_, total) = self.memory.flat[self.memory.buckets[bucket]], self._filled[bucket]
            total = flat.sum() if total is None else total
            self._finite[bucket] = bool(total.isfinite()) or bool(flat.isfinite().all())
        return self._finite[bucket]

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are finite, once all buckets can be sent."""
        return all(map(self.is_bucket_finite, range(len(self.memory.buckets))))


def bucket_shards(
    memory: BucketMemory, members: Sequence[Peer], apart: Collection[Pair]
) -> ShardSlices:
    """Return the shards of each bucket."""
    element_bytes, owning = memory.flat.element_size(), owners(members, apart)
    return [
        shard_bucket(bucket.start, bucket.stop, len(members), element_bytes, owning)
        for bucket in memory.buckets
    ]


class BucketedAllReduce:
    """One member's side of the all-reduce of a FillingBuffer; runs in the averager's thread.

    A second thread sends the buckets as training fills them; this one sums each bucket that has
    arrived, and gathers it while the next ones are on their way.
    """

    def __init__(
        self,
        connections: PeerConnections,
        members: Sequence[Peer],
        buffer: FillingBuffer,
        *,
        number: int,
        timeout: Seconds,
        should_stop: Callable[[], bool],
        apart: Collection[Pair] = (),
    ) -> None:
        self._connections, self._buffer, self._memory = connections, buffer, buffer.memory
        self._number, self._timeout, self._should_stop = number, timeout, should_stop
        self._others = direct_peers(members, connections.me, apart)
        self._index = members.index(connections.me)
        self._exchange = DirectExchange(members, self._index)
        self._shards = bucket_shards(self._memory, members, apart)
        self._start, self._deadline = time.perf_counter(), time.monotonic() + timeout
        self._num_sent, self._has_ended = 0, False
        self._error: Exception | None = None  # of the thread that sends
        self._ends: list[Seconds] = []  # when the mean of each bucket had arrived

    def run(self, weights: Sequence[float]) -> Tensor:
        """Return the weighted mean; raises PeerError if a member is lost, or the buffer fails."""
        size_tag, size = tag(MessageKind.SIZE, self._number), self._memory.flat.nbytes
        self._connections.check_sizes(self._others, size, tag=size_tag, timeout=self._timeout)
        sender = threading.Thread(target=self._send, name="gradient sender", daemon=True)
        sender.start()
        try:
            self._reduce(weights)
        except PeerError:
            self._memory.renew()
            if self._error is not None:  # the cause
                raise self._error from None
            raise
        finally:
            self._has_ended = True
            self._buffer.wake()
            sender.join()
        return self._memory.mean

    @property
    def duration(self) -> Seconds:
        """How long the exchange takes if it starts when the whole buffer is filled.

        Estimated from the part that had not arrived when this worker filled its last bucket.
        """
        start = max(self._start, self._buffer.filled_at)
        ends = zip(self._memory.buckets, self._ends, strict=True)
        rest = sum(bucket.stop - bucket.start for bucket, end in ends if end > start)
        scale = self._memory.flat.numel() / rest
        return min(scale * (self._ends[-1] - start), self._ends[-1] - self._start)

    def _send(self) -> None:
        """Send each bucket once it is filled; the last one says whether all are finite."""
        flat, buffer, last = self._memory.flat, self._buffer, len(self._shards) - 1
        try:
            for bucket, owned in enumerate(self._shards):
                buffer.wait(bucket, self._deadline, self._stops)
                if bucket == last and not buffer.is_finite:
                    flat[-1] = 1.0
                shards = [flat[owned[i]] for i in self._exchange.others]
                messages = PostedMessages(self._connections)
                scatter_tag = tag(MessageKind.REDUCE_SCATTER, self._number, bucket)
                self._exchange.send(messages, shards, tag=scatter_tag)
                with buffer.changed:
                    self._num_sent += 1
                    buffer.changed.notify_all()
                buffer.is_bucket_finite(bucket)  # while it is on its way
        except Exception as error:
            self._error = error
            buffer.wake()
            # The other thread notices a lost peer itself; the links to healthy ones stay.
            others = [str(peer.worker) for peer in self._others]
            is_lost = isinstance(error, PeerError) and error.peer in others
            if not is_lost and not self._stops():  # else the whole group cancels the round
                self._connections.abort(self._others)  # wakes the other thread, and the members

    def _reduce(self, weights: Sequence[float]) -> None:
        """Sum and gather the buckets in order; a bucket is gathered while the next is summed."""
        posted = self._post_receives()
        for bucket, (addends, scattered, gathered) in enumerate(posted):
            self._wait_until_sent(bucket)
            scattered.wait_until(self._deadline)
            self._sum_shard(bucket, addends, weights)
            own = self._memory.mean[self._shards[bucket][self._index]]
            gather_tag = tag(MessageKind.ALL_GATHER, self._number, bucket)
            self._exchange.send(gathered, [own] * len(self._exchange.others), tag=gather_tag)
            if bucket > 0:
                self._finish(bucket - 1, posted[bucket - 1][2])
        self._finish(len(posted) - 1, posted[-1][2])

    def _sum_shard(
        self, bucket: int, addends: Mapping[int, Tensor], weights: Sequence[float]
    ) -> None:
        """Write the mean of this worker's shard."""
        shard, sum_shard = self._shards[bucket][self._index], self._buffer.sum_shard
        if sum_shard is not None and bucket < len(self._shards) - 1:
            sum_shard(bucket, shard, addends, weights)
        else:
            own = self._memory.flat[shard]
            rows = [addends.get(member, own) for member in range(len(weights))]
            weighted_sum(rows, weights, self._memory.mean[shard])

    def _finish(self, bucket: int, gathered: PostedMessages) -> None:
        gathered.wait_until(self._deadline)
        self._ends.append(time.perf_counter())
        self._buffer.on_mean(bucket)

    def _wait_until_sent(self, bucket: int) -> None:
        with self._buffer.changed:
            self._buffer.changed.wait_for(  # the sending thread has a deadline
                lambda: self._num_sent > bucket or self._error is not None
            )
        if self._error is not None:
            raise self._error

    def _post_receives(self) -> list[tuple[dict[int, Tensor], PostedMessages, PostedMessages]]:
        """Post all receives; return per bucket the addends by member, and both phases' messages."""
        mean, others = self._memory.mean, self._exchange.others
        own = [owned[self._index] for owned in self._shards]
        sizes = [shard.stop - shard.start for shard in own]
        received = self._memory.received(len(others), sum(sizes)).split(sizes, dim=1)
        posted = []
        for bucket, (owned, into) in enumerate(zip(self._shards, received, strict=True)):
            scattered, gathered = (PostedMessages(self._connections) for _ in range(2))
            scatter_tag, gather_tag = (
                tag(kind, self._number, bucket)
                for kind in (MessageKind.REDUCE_SCATTER, MessageKind.ALL_GATHER)
            )
            self._exchange.receive(scattered, into, tag=scatter_tag)
            self._exchange.receive(gathered, [mean[owned[i]] for i in others], tag=gather_tag)
            posted.append((dict(zip(others, into, strict=True)), scattered, gathered))
        return posted

    def _stops(self) -> bool:
        return self._has_ended or self._should_stop()


def split_shards(
    published: Tensor, members: Sequence[Peer], apart: Collection[Pair]
) -> ShardSlices:
    """Return the shards of each bucket."""
    element_bytes, owning = published.element_size(), owners(members, apart)
    return shard_slices(published.numel(), len(members), element_bytes, BUCKET, owning)


class SplitAllReduce:
    """One member's side of a split all-reduce; runs in the averager's thread.

    Training waits for `streaming_buffer`.
    """

    def __init__(
        self,
        connections: PeerConnections,
        members: Sequence[Peer],
        published: Tensor,
        *,
        number: int,
        apart: Collection[Pair] = (),
    ) -> None:
        self.others = direct_peers(members, connections.me, apart)
        self._connections, self._members, self._number = connections, list(members), number
        self._published, self._apart = published, apart
        self._shards = split_shards(published, members, apart)
        self._slices = [shard for owned in self._shards for shard in owned]
        index, size = self._members.index(connections.me), len(members)
        self._has = {
            number
            for number, shard in enumerate(self._slices)
            if number % size == index or shard.start == shard.stop
        }
        self._num_complete = 0  # buckets, from the first on
        self.streaming_buffer: StreamingBuffer

    def reduce_scatter(self, weights: Sequence[float], *, timeout: Seconds) -> Tensor:
        """Return the buffer that `all_gather` fills; raises PeerError if a member is lost."""
        value = reduce_scatter(
            self._connections,
            self._members,
            weights,
            self._published,
            self._shards,
            number=self._number,
            timeout=timeout,
            apart=self._apart,
        )
        self.streaming_buffer = StreamingBuffer(value)
        return value

    def all_gather(self, timeout: Seconds, should_stop: Callable[[], bool]) -> str | None:
        """Fill the buffer within the group's `timeout`; return why it was repaired, or None."""
        timeout, messages = max(timeout, _MIN_TIMEOUT), PostedMessages(self._connections)
        try:
            self._advance()
            deadline = time.monotonic() + timeout
            post_all_gather(
                messages,
                self._members,
                self.streaming_buffer.value,
                self._shards,
                number=self._number,
            )
            self._mark_received(messages.iter_received(deadline))
            self._wait_for_others(self.others, deadline)
            return None
        except PeerError as error:
            self._abort_connections(messages)
            return self._repair(error, timeout, should_stop)

    def _repair(self, error: PeerError, timeout: Seconds, should_stop: Callable[[], bool]) -> str:
        index = self._members.index(self._connections.me)
        backend = prefixed(_SURVIVORS, self._connections.store)
        store = JobStore(backend, index, timeout=_PEER_TIMEOUT)
        members = Members(tuple(range(len(self._members))))
        for attempt in range(len(self._members)):
            name, reports = f"{self._number}/{attempt}", dict[int, list[int]]()
            if not should_stop():  # a stopping member must not count as a survivor
                reports = agree_on_survivors(
                    store, name, sorted(self._has), members, should_stop=should_stop
                )
            if should_stop():
                raise error
            self._delete_later(f"{members.epoch}/{name}", index, list(reports))
            members = Members(tuple(reports))
            if index not in reports or len(reports) == 1:
                break
            if self._transfer_shards(name, reports, timeout, should_stop):
                return f"{error}; {len(reports)} of {len(self._members)} members repaired it"
        missing = [shard for i, shard in enumerate(self._slices) if i not in self._has]
        if missing:
            self.streaming_buffer.restore_missing(self._published, missing)
        return f"{error}; kept own numbers for {len(missing)} of {len(self._slices)} shards"

    def _delete_later(self, name: str, index: int, survivors: list[int]) -> None:
        """Delete the report of this member, and as the first survivor the decision, when read.

        A member that comes later finds nothing, and is its only survivor: it is not among these.
        """
        keys = [f"{_SURVIVORS}/{name}/{index}"]
        keys += [f"{_SURVIVORS}/{name}"] * (survivors[0] == index)
        self._connections.delete_later((self._members[i].worker for i in survivors), keys)

    def _transfer_shards(
        self,
        name: str,
        reports: dict[int, list[int]],
        timeout: Seconds,
        should_stop: Callable[[], bool],
    ) -> bool:
        """Transfer missing shards; return whether all survivors have everything."""
        survivors = {self._members[index]: set(shards) for index, shards in reports.items()}
        has = {peer.worker: shards for peer, shards in survivors.items()}
        planned = plan_transfers(has, len(self._slices))
        if not planned:
            return True
        messages = PostedMessages(self._connections)
        peers = {peer.worker: peer for peer in survivors}
        me, value = self._connections.me, self.streaming_buffer.value
        others = [peer for peer in survivors if peer != me]
        try:
            self._connections.connect(
                others, f"{name}/repair", timeout=_PEER_TIMEOUT, should_stop=should_stop
            )
            if should_stop():  # set while the last connection was made, which cannot be aborted
                self._abort_connections(messages)
                return False
            deadline = time.monotonic() + timeout
            for shard, source, receivers, is_lost in planned:
                numbers = self._slices[shard]
                shard_tag = tag(MessageKind.ALL_GATHER, self._number, shard)
                if source == me.worker:
                    if is_lost:
                        value[numbers] = self._published[numbers]
                        self._mark_received([shard])
                    for worker in receivers:
                        messages.send(peers[worker], value[numbers], tag=shard_tag)
                elif me.worker in receivers:
                    messages.receive(peers[source], value[numbers], tag=shard_tag, shard=shard)
            self._mark_received(messages.iter_received(deadline))
            self._wait_for_others(others, deadline)
            self._connections.drop(peer.worker for peer in others)
        except PeerError:
            self._abort_connections(messages)
            return False
        return True

    def _mark_received(self, shards: Iterable[int]) -> None:
        """Record received shards, and let training use the complete leading buckets."""
        for shard in shards:
            self._has.add(shard)
            self._advance()

    def _advance(self) -> None:
        size = len(self._members)
        while self._num_complete < len(self._shards):
            first = self._num_complete * size
            if not self._has.issuperset(range(first, first + size)):
                return
            self.streaming_buffer.mark_filled(self._shards[self._num_complete][-1].stop)
            self._num_complete += 1

    def _wait_for_others(self, others: Sequence[Peer], deadline: Seconds) -> None:
        """Exchange END with all others: then every member has everything."""
        messages, message = PostedMessages(self._connections), torch.zeros(1, dtype=torch.uint8)
        end_tag = tag(MessageKind.END, self._number)
        for peer in others:
            messages.receive(peer, torch.zeros_like(message), tag=end_tag)
            messages.send(peer, message, tag=end_tag)
        messages.wait_until(deadline)
        # Each peer posted its receive before it sent END, so our END has been sent as well.
        self._connections.release()

    def _abort_connections(self, messages: PostedMessages) -> None:
        """Abort all connections, so that every member notices and no message arrives later."""
        self._connections.abort(self.others)
        self._mark_received(messages.iter_completed())
        self._connections.drop(peer.worker for peer in self.others)


class StreamingBuffer:
    """A mean that arrives bucket by bucket, in a separate buffer, while training continues.

    One thread fills the buffer from the front, another waits for as much of it as it needs. Weights
    are written only from this buffer, so they never come from an average that is not committed.
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._num_filled = 0  # elements, from the front
        self._is_used = False
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def wait(self, num: int, timeout: Seconds) -> None:
        """Wait for the first `num` elements; raises the error of `fail`, or PeerError."""
        start = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._num_filled >= num or self._error, timeout)
            if self._num_filled < num:
                raise self._error or PeerError(
                    "another worker",
                    action="all-gathering an average",
                    waited=time.monotonic() - start,
                    cause="it is alive but has not sent its shard",
                )
            self._is_used = True

    def mark_filled(self, num: int) -> None:
        """Mark the first `num` elements as valid."""
        with self._changed:
            self._num_filled = num
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Make current and later waits raise `error`."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def restore_missing(self, own: Tensor, missing: Iterable[slice]) -> None:
        """Fill `missing` with the numbers from before the average.

        If training has used none of the average yet, undo all of it instead.
        """
        with self._changed:
            for shard in missing if self._is_used else [slice(None)]:
                self.value[shard] = own[shard]
        self.mark_filled(self.value.numel())


def agree_on_survivors(
    store: JobStore,
    name: str,
    report: list[int],
    members: Members,
    *,
    should_stop: Callable[[], bool],
) -> dict[int, list[int]]:
    """Return the report of each survivor, equal for all callers; empty if `should_stop`.

    The first member that has seen all reports, or has waited for the store's timeout, decides who
    the survivors are; a member that reports later is not among them. The store decides, not the
    members' connections, some of which are broken: if another worker were lost meanwhile, the rest
    would disagree on whether its report had arrived.
    """
    deadline, pause = time.monotonic() + store.timeout, _POLL

    def arrived() -> list[int]:
        return [index for index in members.ranks if store.is_published(name, index, members)]

    with peer_errors("the store", "agreeing on survivors"):
        store.publish(name, report, members)
        while store.peek(name, members) is None and len(arrived()) < len(members.ranks):
            if should_stop():  # do not decide for the others
                return {}
            if time.monotonic() >= deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)
        survivors = store.set_once(name, arrived(), members)
        return {index: store.receive(name, index, members) for index in survivors}
