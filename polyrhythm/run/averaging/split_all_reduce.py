"""An average in two halves: the means are made before it is committed, and come together after.

`reduce_scatter` makes this member's shard of each bucket; then it may say Done. After the Commit, `all_gather`
brings the parts of all members together, while training goes on and waits for each bucket where it
needs it (`streaming_buffer.py`). Members that have everything say so to each other; until all have, nobody
is through.

If a member is lost meanwhile, all who are left notice, since whoever does breaks off its
connections to the others. They call the roll, and hand on what each is missing (`sync/mending.py`);
should another one be lost on the way, once more. In the end they are exact copies. Whoever comes
too late to that, or is the only one, keeps its own numbers for what it is missing.
"""

import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from polyrhythm.cost.sync import BUCKET
from polyrhythm.errors import PeerError
from polyrhythm.run.averaging.exchange import (
    MessageKind,
    PostedMessages,
    post_all_gather,
    reduce_scatter,
    shard_slices,
    tag,
)
from polyrhythm.run.averaging.peer_connections import Peer, PeerConnections
from polyrhythm.run.averaging.streaming import StreamingBuffer
from polyrhythm.run.averaging.survivors import agree_on_survivors
from polyrhythm.sync.repair import plan_transfers
from polyrhythm.types import Seconds

_MIN_TIMEOUT: Seconds = (
    15.0  # nobody is given up sooner; for as long a worker may be silent elsewhere
)
# Between two who are alive and notice that a third one is lost: one has a bucket to wait for first.
_PEER_TIMEOUT: Seconds = 5.0


class SplitAllReduce:
    """Of one average and one member, in the thread that averages; training waits for `streaming_buffer`."""

    def __init__(
        self,
        connections: PeerConnections,
        members: Sequence[Peer],
        published: Tensor,
        *,
        number: int,
    ) -> None:
        self.others = [peer for peer in members if peer != connections.me]
        self._connections, self._members, self._number = connections, list(members), number
        self._published = published
        self._shards = shard_slices(
            published.numel(), len(members), published.element_size(), BUCKET
        )
        self._slices = [shard for owned in self._shards for shard in owned]
        place, size = self._members.index(connections.me), len(members)
        self._has = {
            number
            for number, shard in enumerate(self._slices)
            if number % size == place or shard.start == shard.stop
        }
        self._num_complete = 0  # buckets, from the first on
        self.streaming_buffer: StreamingBuffer

    def reduce_scatter(self, weights: Sequence[float], *, timeout: Seconds) -> Tensor:
        """The first half; the buffer that the second one fills. PeerError if somebody is lost."""
        value = reduce_scatter(
            self._connections,
            self._members,
            weights,
            self._published,
            self._shards,
            number=self._number,
            timeout=timeout,
        )
        self.streaming_buffer = StreamingBuffer(value)
        return value

    def all_gather(self, timeout: Seconds, should_stop: Callable[[], bool]) -> str | None:
        """The second half; why it had to be mended, if it had. `timeout`: as the first half's."""
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
        members = self._members
        for attempt in range(len(self._members)):
            name, reports = f"{self._number}/{attempt}", dict[Peer, str]()
            if not should_stop():  # else nobody is to count on this one
                reports = agree_on_survivors(
                    self._connections.store,
                    name,
                    self._connections.me,
                    members,
                    " ".join(map(str, sorted(self._has))),
                    timeout=_PEER_TIMEOUT,
                    should_stop=should_stop,
                )
            if should_stop():
                raise error
            members = list(reports)
            if self._connections.me not in reports or len(reports) == 1:
                break
            if self._transfer_parts(name, reports, timeout, should_stop):
                return f"{error}; {len(members)} of {len(self._members)} have mended it"
        missing = [shard for i, shard in enumerate(self._slices) if i not in self._has]
        if missing:
            self.streaming_buffer.keep_own(self._published, missing)
        return f"{error}; kept own numbers for {len(missing)} of {len(self._slices)} parts"

    def _transfer_parts(
        self, name: str, reports: dict[Peer, str], timeout: Seconds, should_stop: Callable[[], bool]
    ) -> bool:
        """Whether all who are left have everything."""
        has = {
            peer.worker: {int(shard) for shard in text.split()} for peer, text in reports.items()
        }
        planned = plan_transfers(has, len(self._slices))
        if not planned:
            return True
        peers, messages = {peer.worker: peer for peer in reports}, PostedMessages(self._connections)
        me, value = self._connections.me, self.streaming_buffer.value
        others = [peer for peer in reports if peer != me]
        try:
            self._connections.connect(
                others, f"{name}/mend", timeout=_PEER_TIMEOUT, should_stop=should_stop
            )
            if should_stop():  # while the last pair was made, which nobody could break off
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
        """Training hears of each bucket that is complete, and of all before it."""
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
        """Until all others have everything, too."""
        messages, message = PostedMessages(self._connections), torch.zeros(1, dtype=torch.uint8)
        end_tag = tag(MessageKind.END, self._number)
        for peer in others:
            messages.receive(peer, torch.zeros_like(message), tag=end_tag)
            messages.send(peer, message, tag=end_tag)
        messages.wait_until(deadline)
        # Before they said so, they were ready for our word: that is sent, too.
        self._connections.release()

    def _abort_connections(self, messages: PostedMessages) -> None:
        """So that all others notice, and no message comes any more; all do the same."""
        self._connections.abort(self.others)
        self._mark_received(messages.iter_completed())
        self._connections.drop(peer.worker for peer in self.others)
