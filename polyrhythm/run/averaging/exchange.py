"""Exchange buffers in a group: a connection per pair of workers, a partial all-reduce over them.

A connection is made when a group first needs it, and kept for later groups. With one process group
per group of workers, most groups would have to be created first, which takes three times as long as
the average itself (`polyrhythm bench average`); with one process group for all workers, one lost
worker would break all connections. A pair breaks alone, and a worker has at most one per peer.

Both sides must name the same connection: by the two workers, their incarnations (a restarted worker
has none of the old connections) and the group that first needed it. A connection that one side
drops is closed, which the other side notices when it uses it. Before the first exchange of a buffer
size, both compare it: gloo aborts a process that receives more than it expects.

When a connection breaks, gloo wakes a thread that waits for a message not yet started, but not one
that waits for a message in transfer, in either direction. So an empty message, which is never in
transfer, follows each message, and the receiver waits for the empty one. A sender does not wait; it
holds the tensor until the receiver is known to have it. Two workers with GPUs have two sockets, and
a large message travels half in each.

The weighted mean of a buffer takes two direct exchanges. Each member owns one shard of the buffer.
First every member sends each owner its shard, and the owner sums them (`reduce_scatter`); then each
owner sends its mean to all (`post_all_gather`). That moves as many bytes as a ring, with two
messages in sequence instead of 2(g-1). A buffer so small that the number of messages matters, not
their size, has one owner, the first member. All members get the same bits, since each shard is
summed by one member. The input buffer is not modified. Two members between which a link is broken
own nothing: they exchange messages with the owners alone, so no message needs that link.

A round that is aborted leaves the connections as they are. Messages in flight cannot be withdrawn,
so each member posts the rest of its messages, empty, and receives for all that the others may have
sent (`PeerConnections.cancel`); then nobody waits. What does not arrive soon shows a broken link if
the round was late; else it may be a large message in transfer, and the pair connects again.

Other work may run between reduce-scatter and all-gather. Then the buffer is split into buckets, and
each member owns a shard of each: the first bucket uses all links and arrives first.

Half-precision numbers are summed in single precision and rounded once. Every product and every sum
is rounded separately, so that a mean does not depend on the bucket boundaries.
"""

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from polyrhythm.cost.sync import SMALL
from polyrhythm.errors import LaunchError, PeerError, PolicyError, peer_errors, short_cause
from polyrhythm.run.comm.epoch import current_epoch
from polyrhythm.run.comm.process_groups import (
    INTERFACES,
    NUM_SOCKETS,
    abort,
    gloo_device,
    split_message,
)
from polyrhythm.run.comm.reduce_scatter import HALF_PRECISION, DirectExchange
from polyrhythm.types import Bytes, Seconds, Worker

Pair = tuple[Worker, Worker]
ShardSlices = list[list[slice]]  # per bucket, the shard of each member

_ABORTED, _SIZE_BYTES = "the group was aborted", 8
_MIN_TIMEOUT: Seconds = 0.001  # for gloo, 0 means no limit
_SUM_BLOCK = 2**17  # numbers
# That a tag can distinguish; a tag is below 2**30.
_NUM_GROUPS, _NUM_BUCKETS = 2**12, 2**16 // NUM_SOCKETS
# For messages of an aborted round to leave the connections of healthy peers.
DRAIN_TIMEOUT: Seconds = 0.5
_HANDSHAKE_TIMEOUT: Seconds = 5.0  # of two peers that are both present, for each socket
_POLL: Seconds = 0.001  # of a peer's keys, initially; doubled up to _LONGEST_POLL
_LONGEST_POLL: Seconds = 0.02
_SOCKETS = "sockets"  # key for how many a peer can use; the others are the numbers of sockets
_PAIR_KEYS = tuple(  # all that connecting leaves in the store
    f"{what}/{rank}" for what in (_SOCKETS, *range(NUM_SOCKETS)) for rank in range(2)
)


class Peer(NamedTuple):
    """A worker in one of its incarnations."""

    worker: Worker
    incarnation: int


@dataclass(slots=True)
class Message:
    """A send or receive in flight, in parts: see `split_message`."""

    contents: list[dist.Work] = field(default_factory=list)
    ends: list[dist.Work] = field(default_factory=list)  # the empty messages that follow the parts

    def wait(self, timeout: timedelta) -> None:
        """Wait for what is still in flight."""
        _wait_for(self.ends, timeout)
        self.wait_for_contents(timeout)  # complete: messages keep their order

    def wait_for_contents(self, timeout: timedelta) -> None:
        _wait_for(self.contents, timeout)


def _wait_for(works: list[dist.Work], timeout: timedelta) -> None:
    """Wait for works in flight, and forget them: a second wait for one would not end."""
    deadline = time.monotonic() + timeout.total_seconds()
    while works:
        left = max(deadline - time.monotonic(), _MIN_TIMEOUT)
        works[0].wait(timedelta(seconds=left))
        del works[0]


class RoundShape(NamedTuple):
    """What determines all messages of one round, equal in its members."""

    members: Sequence[Peer]
    shards: "ShardSlices"
    element_bytes: Bytes
    number: int
    gathers: bool  # the all-gather belongs to the round

    def messages(self, sender: Peer, receiver: Peer) -> dict[int, Bytes]:
        """Return the sizes of the messages between two members by tag, without that of SIZE."""
        indices = self.members.index(sender), self.members.index(receiver)
        owners = {MessageKind.REDUCE_SCATTER: indices[1]}  # of the shard that is sent
        if self.gathers:
            owners[MessageKind.ALL_GATHER] = indices[0]
        return {
            tag(kind, self.number, bucket): (part.stop - part.start) * self.element_bytes
            for kind, owner in owners.items()
            for bucket, shards in enumerate(self.shards)
            if (part := shards[owner]).stop > part.start
        }

    @property
    def size(self) -> Bytes:
        """Size of the buffer."""
        return self.shards[-1][-1].stop * self.element_bytes


@dataclass(slots=True)
class _PeerConnection:
    group: dist.ProcessGroup
    num_sockets: int
    sizes: set[Bytes] = field(default_factory=set)  # that both have compared
    posted: list[Message] = field(default_factory=list)  # that the peer may not have received yet
    # Of the current round: what this worker receives, and the sizes of what is not posted, by tag.
    received: list[Message] = field(default_factory=list)
    unsent: dict[int, Bytes] = field(default_factory=dict)
    unreceived: dict[int, Bytes] = field(default_factory=dict)
    is_closed: bool = False  # by this worker
    has_failed: bool = False
    is_slow: bool = False  # it has failed by a timeout, in a round that was cancelled early

    def send(self, tensor: Tensor, tag: int, message: Message) -> None:
        """Post a message; of a `meta` tensor empty ones, which fit in any receive."""
        to, empty = 1 - self.group.rank(), torch.empty(0, dtype=torch.uint8)
        for part, own_tag in split_message(tensor, tag, self.num_sockets):
            contents = empty if part.is_meta else part
            message.contents.append(self.group.send([contents], to, own_tag))
            message.ends.append(self.group.send([empty], to, own_tag))

    def receive(self, tensor: Tensor, tag: int, message: Message) -> None:
        sender, empty = 1 - self.group.rank(), torch.empty(0, dtype=torch.uint8)
        for part, own_tag in split_message(tensor, tag, self.num_sockets):
            message.contents.append(self.group.recv([part], sender, own_tag))
            message.ends.append(self.group.recv([empty], sender, own_tag))

    def cancel(self) -> None:
        """Post the rest of the round: empty messages, and receives whose contents are dropped.

        The peer waits for the former, and may have sent what the latter receive.
        """
        try:
            for tag, size in self.unsent.items():
                self.posted.append(Message())
                self.send(torch.empty(size, dtype=torch.uint8, device="meta"), tag, self.posted[-1])
            for tag, size in self.unreceived.items():
                self.received.append(Message())
                self.receive(torch.empty(size, dtype=torch.uint8), tag, self.received[-1])
        except RuntimeError:
            self.has_failed = True  # the peer has closed it
        self.unsent, self.unreceived = {}, {}

    def drain(self, deadline: Seconds, *, is_late: bool) -> bool:
        """Wait until all messages of the round have arrived; return whether they have."""
        try:
            for message in (*self.received, *self.posted):
                message.wait(timedelta(seconds=max(deadline - time.monotonic(), _MIN_TIMEOUT)))
        except RuntimeError:
            if not self.has_failed:
                self.is_slow = not is_late and time.monotonic() >= deadline
            self.has_failed = True
        self.sizes.clear()  # the peer may not have compared the last one
        return not self.has_failed

    def end_round(self) -> None:
        self.posted.clear()
        self.received.clear()


class PeerConnections:
    """The connections of one worker; used by one thread.

    Any may call `abort`, `cancel`, `lose` and `post`.
    """

    def __init__(self, store: Store, me: Peer, *, num_sockets: int = 1) -> None:
        """`store`: a connection for this object alone; a wait for a key blocks all its users.

        A pair has `num_sockets`, or those of the peer if these are fewer; NUM_SOCKETS at most.
        """
        self.store, self.me, self._num_sockets = store, me, num_sockets
        self._by_peer: dict[Peer, _PeerConnection] = {}
        self._old_keys: list[tuple[set[Worker], list[str]]] = []  # and who may still read them
        self._lost: set[Worker] = set()  # whose connection has failed: see `pop_lost`
        self._slow: set[Worker] = set()  # likewise, by a timeout that may have been too short
        self._lock = threading.Lock()  # of the messages of a round
        self._in_round: list[Peer] = []  # the others in the round, if it can be cancelled
        self._is_cancelled, self._number = False, -1
        self._is_late = False  # the round was cancelled after its timeout
        self._waited_for: Peer | None = None  # by the thread that uses this object

    def connect(
        self,
        peers: Iterable[Peer],
        name: str,
        *,
        timeout: Seconds,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make the missing connections; each peer does so under the same name.

        All at once: the workers wait for the peers, and for their addresses, in the store, and each
        handshake has a thread. Raises PeerError after `timeout`, when a peer that is present does
        not shake hands, or once `should_stop` returns True; connections that are made stay.
        """
        missing = sorted(peer for peer in peers if peer not in self._by_peer)
        if not missing:
            return
        connecting = _Connecting(self.store, self.me, missing, name, should_stop)
        for other in missing:
            if self.me < other:
                self.delete_later([other.worker], connecting.keys_of(other))
        try:
            connecting.run(self._num_sockets, timeout)
        finally:
            self._lost.update(peer.worker for peer in connecting.lost)
            for peer, group in connecting.made.items():
                num_sockets = len(group.options._devices)  # type: ignore[attr-defined]  # no stub
                self._by_peer[peer] = _PeerConnection(group, num_sockets)

    def begin(self, shape: RoundShape, others: Iterable[Peer]) -> None:
        """Begin a round that `cancel` can end, with all peers that are connected."""
        with self._lock:
            self._is_late = False
            self._in_round = [peer for peer in others if peer in self._by_peer]
            self._is_cancelled, self._number = False, shape.number
            for peer in self._in_round:
                connection = self._by_peer[peer]
                connection.unsent = shape.messages(self.me, peer)
                connection.unreceived = shape.messages(peer, self.me)
                if shape.size not in connection.sizes:
                    size_tag = tag(MessageKind.SIZE, shape.number)
                    connection.unsent[size_tag] = connection.unreceived[size_tag] = _SIZE_BYTES

    def cancel(self, *, is_late: bool = False) -> None:
        """Cancel the round on both sides of each connection, which can be used again after `drain`.

        All members of the group do this. Each posts all that it has not posted yet, so that nobody
        waits for a member that has also cancelled the round; what arrives then is no average. If it
        `is_late`, healthy connections have passed their messages: what is missing then was lost.
        """
        with self._lock:
            self._is_late |= is_late
            if self._in_round and not self._is_cancelled:
                self._is_cancelled = True
                for peer in self._in_round:
                    self._by_peer[peer].cancel()

    def end_wait(self, number: int) -> None:
        """Wake the thread that waits for a peer in this round, which was cancelled long ago."""
        peer = self._waited_for
        connection = None if peer is None else self._by_peer.get(peer)
        if number == self._number and self._is_cancelled and connection is not None:
            if not connection.has_failed:
                connection.is_slow = not self._is_late
            abort(connection.group)

    def drain(self) -> None:
        """Cancel the round; drop the connections that it has not left within DRAIN_TIMEOUT."""
        self.cancel()
        deadline = time.monotonic() + DRAIN_TIMEOUT
        for peer in self._in_round:
            connection = self._by_peer[peer]
            if connection.drain(deadline, is_late=self._is_late):
                connection.end_round()
            else:
                if not connection.is_closed:
                    (self._slow if connection.is_slow else self._lost).add(peer.worker)
                abort(connection.group)
        with self._lock:
            for peer in self._in_round:
                if self._by_peer[peer].has_failed:
                    del self._by_peer[peer]
            self._in_round, self._is_cancelled = [], False

    def pop_lost(self) -> tuple[Worker, ...]:
        """Return the workers whose connections have failed, not by `abort`, since the last call."""
        failed = {
            peer.worker
            for peer in self._in_round
            if (pair := self._by_peer[peer]).has_failed and not (pair.is_closed or pair.is_slow)
        }
        lost, self._lost = tuple(sorted(self._lost | failed)), set()
        return lost

    def pop_slow(self) -> tuple[Worker, ...]:
        """Return the workers whose messages had not all arrived in time, since the last call."""
        slow, self._slow = tuple(sorted(self._slow)), set()
        return slow

    def lose(self, workers: Collection[Worker]) -> None:
        """Let the connections of the current round with these workers fail: they answer no more."""
        with self._lock:
            peers = [peer for peer in self._in_round if peer.worker in workers]
            lost = [self._by_peer[peer] for peer in peers if peer in self._by_peer]
            for connection in lost:
                connection.has_failed = True
        for connection in lost:
            abort(connection.group)

    def wait(self, peer: Peer, message: Message, deadline: Seconds) -> None:
        """Wait for a message of a peer; raises PeerError."""
        self._waited_for = peer
        try:
            message.wait(timedelta(seconds=max(deadline - time.monotonic(), _MIN_TIMEOUT)))
        except RuntimeError:
            self._by_peer[peer].has_failed = True
            raise
        finally:
            self._waited_for = None
        if self._is_cancelled:
            raise RuntimeError(_ABORTED)

    def delete_later(self, readers: Iterable[Worker], keys: list[str]) -> None:
        """Delete keys of the store once each reader has committed a later group with this worker.

        Before that it may still read them.
        """
        self._old_keys.append(({*readers} - {self.me.worker}, keys))

    def commit(self, members: Iterable[Worker]) -> None:
        """Free what was kept for members of a group: all of them are done with it."""
        self.release()
        if self._old_keys:
            committed, waiting = set(members), []
            for readers, keys in self._old_keys:
                if left := readers - committed:
                    waiting.append((left, keys))
                    continue
                with peer_errors("the store", "deleting keys"):
                    for key in keys:
                        self.store.delete_key(key)
            self._old_keys = waiting

    def check_sizes(
        self, peers: Iterable[Peer], size: Bytes, *, tag: int, timeout: Seconds
    ) -> None:
        """Compare `size` with peers that have not compared it before; PolicyError if it differs."""
        unchecked = [peer for peer in peers if size not in self._by_peer[peer].sizes]
        own_size, peer_sizes = (
            torch.tensor([size]),
            {peer: torch.zeros(1, dtype=torch.int64) for peer in unchecked},
        )
        messages = [(peer, self.receive(peer, peer_sizes[peer], tag=tag)) for peer in unchecked]
        for peer in unchecked:
            self.post(peer, own_size, tag=tag)
        deadline = time.monotonic() + timeout
        for peer, message in messages:
            with peer_errors(peer.worker, "comparing sizes"):
                self.wait(peer, message, deadline)
        for peer in unchecked:
            other = int(peer_sizes[peer])
            if other == 0:  # as `cancel` sends no number
                waited, cause = timeout - (deadline - time.monotonic()), "it has aborted the group"
                action = "comparing sizes"
                raise PeerError(str(peer.worker), action=action, waited=waited, cause=cause)
            if other != size:
                raise PolicyError(
                    f"{self.me.worker} has {size:,} bytes to average, {peer.worker} has {other:,}",
                    expected="the same tensors in both",
                    fix='use state="local" if workers may skip their first optimizer step, and '
                    "freeze the same parameters in all workers",
                )
            self._by_peer[peer].sizes.add(size)

    def post(self, peer: Peer, tensor: Tensor, *, tag: int) -> None:
        """Send `tensor`, and hold it until `release` or until the connection is dropped."""
        message = Message()
        with self._lock:
            self._by_peer[peer].posted.append(message)
            self._send(peer, tensor, tag, message)

    def release(self) -> None:
        """Free the posted tensors; call once the receivers are known to have them."""
        with self._lock:
            self._in_round = []
            for peer, connection in list(self._by_peer.items()):
                connection.end_round()
                if connection.has_failed:  # since its last message
                    del self._by_peer[peer]

    def flush(self, timeout: Seconds) -> None:
        """Wait until all posted tensors are sent; for use without acknowledgements."""
        for peer, connection in self._by_peer.items():
            for message in connection.posted:
                with peer_errors(peer.worker, "sending"):
                    message.wait(timedelta(seconds=timeout))
        self.release()

    def send(self, peer: Peer, tensor: Tensor, *, tag: int) -> Message:
        """Send `tensor`; hold the returned message, since dropping it blocks the pair for good."""
        message = Message()
        with self._lock:
            try:
                self._send(peer, tensor, tag, message)
            except PeerError:
                self._by_peer[peer].posted.append(message)  # a part may be on its way
                raise
        return message

    def _send(self, peer: Peer, tensor: Tensor, tag: int, message: Message) -> None:
        with peer_errors(peer.worker, "sending"):  # fails at once if the connection has closed
            if self._is_cancelled:
                raise RuntimeError(_ABORTED)
            connection = self._by_peer[peer]
            connection.unsent.pop(tag, None)
            try:
                connection.send(tensor, tag, message)
            except RuntimeError:
                connection.has_failed = True
                raise

    def receive(self, peer: Peer, tensor: Tensor, *, tag: int) -> Message:
        message = Message()
        with self._lock, peer_errors(peer.worker, "receiving"):
            if self._is_cancelled:
                raise RuntimeError(_ABORTED)
            connection = self._by_peer[peer]
            if connection.unreceived.pop(tag, None) is not None:
                connection.received.append(message)
            try:
                connection.receive(tensor, tag, message)
            except RuntimeError:
                connection.has_failed = True
                connection.posted.append(message)  # another part may be on its way
                raise
        return message

    def abort(self, peers: Sequence[Peer]) -> None:
        """Wake all threads that wait for these peers, on both sides; `drop` them afterwards."""
        for connection in [self._by_peer.get(peer) for peer in peers]:
            if connection is not None:
                connection.is_closed = True
                abort(connection.group)

    def abort_all(self) -> None:
        self.abort(list(self._by_peer))

    def drop(self, workers: Iterable[Worker]) -> None:
        """Forget the connections to these workers, in any incarnation."""
        dropped = set(workers)
        self._by_peer = {
            p: connection for p, connection in self._by_peer.items() if p.worker not in dropped
        }

    def close(self) -> None:
        self._by_peer.clear()


class _Connecting:
    """One call of `connect`: the rendezvous with all missing peers, then a handshake with each.

    Gloo would wait for a peer that has stopped or died, and that wait cannot be ended. So nobody
    calls it before all peers are present, and it waits in a thread, which is left alone if it takes
    too long: it ends by itself after the timeout of a handshake.
    """

    def __init__(
        self,
        store: Store,
        me: Peer,
        peers: list[Peer],
        name: str,
        should_stop: Callable[[], bool],
    ) -> None:
        self._store, self._me, self._peers = store, me, peers
        self._name, self._should_stop = name, should_stop
        self._start = time.monotonic()
        self.made: dict[Peer, dist.ProcessGroup] = {}
        self.lost: list[Peer] = []  # present, but without a handshake

    def keys_of(self, other: Peer) -> list[str]:
        """Return all keys that the connection to a peer leaves in the store."""
        return [f"{self._prefix(other)}/{key}" for key in _PAIR_KEYS]

    def run(self, num_sockets: int, timeout: Seconds) -> None:
        """Make the groups; raises PeerError if one is missing."""
        deadline = self._start + timeout
        try:
            with peer_errors("the store", "connecting"):
                own = dict.fromkeys(self._peers, str(num_sockets).encode())
                found = self._exchange(own, _SOCKETS, deadline)
                nums = {peer: min(num_sockets, int(found[peer])) for peer in self._peers}
                started = {
                    peer: _Handshake(self._store_rank(peer), num) for peer, num in nums.items()
                }
                for socket in range(max(nums.values())):
                    own = {
                        p: self._address(p, started[p], socket) for p in nums if nums[p] > socket
                    }
                    for peer, address in self._exchange(own, socket, deadline).items():
                        started[peer].set_peer_address(socket, address)
        except (PeerError, LaunchError):
            self._give_up()
            raise
        self._wait_for(started)

    def _address(self, peer: Peer, handshake: "_Handshake", socket: int) -> bytes:
        try:
            with peer_errors(peer.worker, "connecting"):
                return handshake.address(socket)
        except PeerError:
            self.lost.append(peer)
            raise

    def _store_rank(self, other: Peer) -> int:
        return int(other < self._me)

    def _prefix(self, other: Peer) -> str:
        lower, upper = sorted((self._me, other))
        return f"{lower.worker}.{lower.incarnation}+{upper.worker}.{upper.incarnation}/{self._name}"

    def _exchange(
        self, own: dict[Peer, bytes], what: object, deadline: Seconds
    ) -> dict[Peer, bytes]:
        """Publish a value for each peer, and return theirs."""
        self._set({f"{self._prefix(p)}/{what}/{self._store_rank(p)}": v for p, v in own.items()})
        keys = {peer: f"{self._prefix(peer)}/{what}/{1 - self._store_rank(peer)}" for peer in own}
        pause, epoch = _POLL, current_epoch()
        while not self._store.check(list(keys.values())):
            epoch.check()
            if self._should_stop():
                raise self._error(self._peers, _ABORTED)
            if time.monotonic() > deadline:
                absent = [peer for peer, key in keys.items() if not self._store.check([key])]
                raise self._error(absent, "no answer")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)
        found = dict(zip(keys, self._store.multi_get(list(keys.values())), strict=True))
        if gone := [peer for peer, value in found.items() if not value]:
            raise self._error(gone, "it has aborted the group")
        return found

    def _give_up(self) -> None:
        """Tell the peers that wait for this worker that it has aborted the group."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._set(
                {
                    f"{self._prefix(peer)}/{what}/{self._store_rank(peer)}": b""
                    for peer in self._peers
                    for what in (_SOCKETS, *range(NUM_SOCKETS))
                }
            )

    def _set(self, values: dict[str, bytes]) -> None:
        store: Any = self._store  # its stub lacks multi_set, and says text for bytes
        store.multi_set(list(values), list(values.values()))

    def _wait_for(self, started: dict[Peer, "_Handshake"]) -> None:
        """Wait for all handshakes; those of healthy peers end soon, also in an aborted group."""
        error: PeerError | None = None
        deadline, is_stopping = time.monotonic() + _HANDSHAKE_TIMEOUT, False
        for peer, handshake in started.items():
            while not handshake.is_over() and time.monotonic() < deadline:
                if not is_stopping and self._should_stop():
                    is_stopping = True
                    deadline = min(deadline, time.monotonic() + DRAIN_TIMEOUT)
            try:
                with peer_errors(peer.worker, "connecting"):
                    self.made[peer] = handshake.result()
            except PeerError as lost:
                self.lost.append(peer)
                error = error or lost
        if error is not None:
            raise self._error(self.lost, error.cause)

    def _error(self, peers: Sequence[Peer], cause: str) -> PeerError:
        waited = time.monotonic() - self._start
        names = ", ".join(str(peer.worker) for peer in peers)
        return PeerError(names, action="connecting", waited=waited, cause=cause)


_handshakes: WeakSet[Future[dist.ProcessGroup]] = WeakSet()  # of this process


@atexit.register
def _wait_for_handshakes() -> None:
    """Wait for threads that were left alone: one that ends during the exit would abort it."""
    wait(list(_handshakes), _HANDSHAKE_TIMEOUT + DRAIN_TIMEOUT)


class _Handshake:
    """The connection to one peer, made in a thread: gloo's wait for it cannot be ended."""

    def __init__(self, rank: int, num_sockets: int) -> None:
        self._rank, self._store = rank, cast(Any, dist).HashStore()  # not in torch's stubs
        self._store.set_timeout(timedelta(seconds=_HANDSHAKE_TIMEOUT))
        self._num_sockets, self._made = num_sockets, Future[dist.ProcessGroup]()
        _handshakes.add(self._made)
        threading.Thread(target=self._run, name="handshake", daemon=True).start()

    def address(self, socket: int) -> bytes:
        """Wait until gloo has an address for a peer's socket: after those before are connected."""
        address: bytes = self._store.get(f"{socket}/{self._rank}")
        if not address:  # it has failed
            self._made.result()
        return address

    def set_peer_address(self, socket: int, address: bytes) -> None:
        self._store.set(f"{socket}/{1 - self._rank}", address)

    def is_over(self) -> bool:
        """Wait a moment; return whether the handshake is over, successful or not."""
        return bool(wait([self._made], _LONGEST_POLL).done)

    def result(self) -> dist.ProcessGroup:
        if not self._made.done():
            raise RuntimeError("it does not answer")
        return self._made.result()

    def _run(self) -> None:
        try:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._threads = 1  # they run collectives, which a pair does not use
            options._timeout = timedelta(seconds=_HANDSHAKE_TIMEOUT)
            interfaces = os.environ.get(INTERFACES, "")
            options._devices = [_device(interfaces, number) for number in range(self._num_sockets)]
            made: Any = dist.ProcessGroupGloo(self._store, self._rank, 2, options)
            current_epoch().add(made)
            self._made.set_result(made)
        except Exception as error:
            self._made.set_exception(error)
            for number in range(self._num_sockets):  # wakes `address`
                self._store.set(f"{number}/{self._rank}", b"")


@cache
def _device(interfaces: str, number: int) -> dist.ProcessGroupGloo.Device:
    """Return the device with this number, which all pairs share. Raises LaunchError."""
    try:
        return gloo_device(interfaces, number)
    except RuntimeError as error:
        raise LaunchError(
            f"{INTERFACES}={interfaces!r}: {short_cause(error)}",
            expected="network interfaces of this machine, with commas between them",
            fix="set it to one with an address; `ip address` lists them",
        ) from None


class MessageKind(IntEnum):
    """The part of an exchange that a message belongs to."""

    REDUCE_SCATTER = 0
    ALL_GATHER = 1
    END = 2
    SIZE = 3


def tag(kind: MessageKind, number: int, bucket: int = 0) -> int:
    """Return the first tag of a message: order is kept per tag; groups have different tags."""
    group = kind * _NUM_GROUPS + number % _NUM_GROUPS
    return NUM_SOCKETS * (group * _NUM_BUCKETS + bucket % _NUM_BUCKETS)


def shard_slices(
    num: int,
    size: int,
    element_bytes: Bytes,
    bucket: Bytes | None = None,
    owners: Sequence[int] | None = None,
) -> ShardSlices:
    """Split `num` numbers into buckets of `bucket` bytes (None: one), each into `size` shards.

    Those of members that are not among `owners` are empty.

    The first bucket is the remainder: training waits for it, so it is the smallest.
    """
    bucket_size = max(num if bucket is None else bucket // element_bytes, 1)
    stops = sorted(range(num, 0, -bucket_size))
    return [shard_bucket(*pair, size, element_bytes, owners) for pair in pairwise([0, *stops])]


def all_reduce_mean(
    connections: PeerConnections,
    members: Sequence[Peer],
    weights: Sequence[float],
    flat: Tensor,
    *,
    number: int,  # of the group
    timeout: Seconds,
    apart: Collection[Pair] = (),  # members between which nothing is sent
) -> Tensor:
    """Return the weighted mean of the members' `flat`; raises PeerError if a member is lost.

    Two members whose buffers differ in size both raise PolicyError. Sends may still be in flight:
    the connections hold their tensors until `PeerConnections.release`.
    """
    owning = owners(members, apart)
    shards = shard_slices(flat.numel(), len(members), flat.element_size(), owners=owning)
    result = reduce_scatter(
        connections, members, weights, flat, shards, number=number, timeout=timeout, apart=apart
    )
    messages = PostedMessages(connections)
    post_all_gather(messages, members, result, shards, number=number)
    messages.wait_until(time.monotonic() + timeout)
    return result


def reduce_scatter(
    connections: PeerConnections,
    members: Sequence[Peer],
    weights: Sequence[float],
    flat: Tensor,
    shards: ShardSlices,
    *,
    number: int,
    timeout: Seconds,
    apart: Collection[Pair] = (),
) -> Tensor:
    """Return a buffer with the mean in this member's shards, uninitialised elsewhere."""
    index = members.index(connections.me)
    exchange, others = (
        DirectExchange(members, index),
        direct_peers(members, connections.me, apart),
    )
    size_tag = tag(MessageKind.SIZE, number)
    connections.check_sizes(others, flat.nbytes, tag=size_tag, timeout=timeout)
    in_flight: deque[tuple[slice, list[Tensor], PostedMessages]] = deque()
    for bucket, owned in enumerate(shards):
        own, messages = flat[owned[index]], PostedMessages(connections)
        rows = [own if peer == connections.me else torch.empty_like(own) for peer in members]
        bucket_tag = tag(MessageKind.REDUCE_SCATTER, number, bucket)
        exchange.receive(messages, [rows[i] for i in exchange.others], tag=bucket_tag)
        exchange.send(messages, [flat[owned[i]] for i in exchange.others], tag=bucket_tag)
        in_flight.append((owned[index], rows, messages))
    result = torch.empty_like(flat, pin_memory=flat.is_pinned())
    deadline = time.monotonic() + timeout
    while in_flight:
        shard, rows, messages = in_flight.popleft()
        messages.wait_until(deadline)
        weighted_sum(rows, weights, result[shard])
    return result


def post_all_gather(
    messages: "PostedMessages",
    members: Sequence[Peer],
    result: Tensor,
    shards: ShardSlices,
    *,
    number: int,
) -> None:
    """Post all messages of the all-gather, bucket by bucket; each shard has its own number."""
    index, size = members.index(messages.me), len(members)
    exchange = DirectExchange(members, index)
    for bucket, owned in enumerate(shards):
        bucket_tag = tag(MessageKind.ALL_GATHER, number, bucket)
        into = [result[owned[i]] for i in exchange.others]
        exchange.receive(messages, into, tag=bucket_tag, first_shard=bucket * size)
        exchange.send(messages, [result[owned[index]]] * (size - 1), tag=bucket_tag)


class PostedMessages:
    """Messages posted at once; received ones are waited for in order, each once.

    Empty tensors are not sent.
    """

    def __init__(self, connections: PeerConnections) -> None:
        self.me, self._connections = connections.me, connections
        self._received: deque[tuple[Peer, Message, int]] = deque()

    def receive(self, peer: Peer, into: Tensor, *, tag: int, shard: int = -1) -> None:
        if into.numel():
            message = self._connections.receive(peer, _as_bytes(into), tag=tag)
            self._received.append((peer, message, shard))

    def send(self, peer: Peer, tensor: Tensor, *, tag: int) -> None:
        if tensor.numel():
            self._connections.post(peer, _as_bytes(tensor), tag=tag)

    def wait_until(self, deadline: Seconds) -> None:
        for _ in self.iter_received(deadline):
            pass

    def iter_received(self, deadline: Seconds) -> Iterator[int]:
        """Yield the number of each received shard; raises PeerError if a peer is lost."""
        while self._received:
            peer, message, shard = self._received.popleft()
            with peer_errors(peer.worker, "averaging"):
                self._connections.wait(peer, message, deadline)
            yield shard

    def iter_completed(self) -> Iterator[int]:
        """Yield the shards that had arrived before all connections were aborted."""
        while self._received:
            _, message, shard = self._received.popleft()
            try:
                message.wait_for_contents(timedelta(seconds=_MIN_TIMEOUT))
            except RuntimeError:  # still in flight
                continue
            yield shard


def shard_bucket(
    start: int, stop: int, size: int, element_bytes: Bytes, owners: Sequence[int] | None = None
) -> list[slice]:
    """Return the shard of each member; the first owner owns all of a small bucket."""
    num, owning = stop - start, range(size) if owners is None else owners
    if num * element_bytes <= SMALL:
        owning = owning[:1]
    ends = [start + num * sum(i < end for i in owning) // len(owning) for end in range(size + 1)]
    return [slice(first, end) for first, end in pairwise(ends)]


def direct_peers(members: Sequence[Peer], me: Peer, apart: Collection[Pair]) -> list[Peer]:
    """Return the members that this one exchanges messages with."""
    without = {worker for pair in apart if me.worker in pair for worker in pair} | {me.worker}
    return [peer for peer in members if peer.worker not in without]


def owners(members: Sequence[Peer], apart: Collection[Pair]) -> list[int] | None:
    """Return the indices of the members that own a shard, those without a broken link.

    Others exchange messages with owners alone. None: all own a shard.
    """
    without = {worker for pair in apart for worker in pair}
    owning = [i for i, peer in enumerate(members) if peer.worker not in without]
    return owning if apart else None


def weighted_sum(rows: Sequence[Tensor], weights: Sequence[float], into: Tensor) -> None:
    """Sum in the order of members, so that the result does not depend on the owner.

    With equal weights numbers are summed first: a sum beyond the largest float is infinite then.
    """
    is_half = into.dtype in HALF_PRECISION
    has_equal_weights = len(set(weights)) == 1  # one product in place of one per row
    # By blocks: what is allocated for a product stays in the cache.
    for block, *parts in zip(*(row.split(_SUM_BLOCK) for row in (into, *rows)), strict=True):
        total = torch.empty_like(block, dtype=torch.float32) if is_half else block
        if has_equal_weights and len(parts) > 1:
            torch.add(parts[0].to(total.dtype), parts[1].to(total.dtype), out=total)
            for part in parts[2:]:
                total += part.to(total.dtype)
            total *= weights[0]
        else:
            torch.mul(parts[0].to(total.dtype), weights[0], out=total)
            for part, weight in zip(parts[1:], weights[1:], strict=True):
                total += part.to(total.dtype) * weight
        if is_half:
            block.copy_(total)


def _as_bytes(tensor: Tensor) -> Tensor:
    """View as bytes, so that gloo needs no support for the dtype."""
    return tensor.view(torch.uint8)
