"""A connection per pair of workers, made when a group first needs it and kept for later groups.

A group exchanges over the pairs of its members. With one process group per group of workers, most
groups would have to be created first, which takes three times as long as the average itself
(`polyrhythm bench average`); with one process group for all workers, one lost worker would break
all connections. A pair breaks alone. A worker has at most as many pairs as peers.

Both sides must name the same connection: by the two workers, their incarnations (a restarted worker
has none of the old connections) and the group that first needed it; and when a group fails, all its
members drop all connections among them. Before the first exchange of a buffer size, both compare
it: gloo aborts a process that receives more than it expects.

When a connection breaks, gloo wakes a thread that waits for a message not yet started, but not one
that waits for a message in transfer, in either direction. So an empty message, which is never in
transfer, follows each message, and the receiver waits for the empty one. A sender does not wait; it
holds the tensor until the receiver is known to have it.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cache
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from polyrhythm.errors import PeerError, PolicyError
from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.comm.process_groups import abort
from polyrhythm.run.comm.store import JobStore, Members, StoreBackend
from polyrhythm.types import Bytes, Seconds, Worker

_HANDSHAKE_TIMEOUT: Seconds = 20.0  # of two peers that are both present
_PAIR = Members((0, 1))  # of a connection


class Peer(NamedTuple):
    """A worker in one of its incarnations."""

    worker: Worker
    incarnation: int


class Message(NamedTuple):
    """A send or receive in flight."""

    content: dist.Work
    end: dist.Work  # the empty message that follows

    def wait(self, timeout: timedelta) -> None:
        self.end.wait(timeout)
        self.content.wait(timeout)  # complete: messages keep their order


class _PeerConnection(NamedTuple):
    group: dist.ProcessGroup
    sizes: set[Bytes]  # that both have compared
    posted: list[Message]  # that the peer may not have received yet


class PeerConnections:
    """The connections of one worker; used by one thread, but any thread may call `abort`."""

    def __init__(self, store: Store, me: Peer) -> None:
        """`store`: a connection for this object alone; a wait for a key blocks all its users."""
        self.store, self.me = store, me
        self._by_peer: dict[Peer, _PeerConnection] = {}

    def connect(
        self,
        peers: Iterable[Peer],
        name: str,
        *,
        timeout: Seconds,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make the missing connections; each peer does so under the same name.

        All workers make pairs in one global order, which rules out a deadlock. Raises PeerError
        after `timeout`, or once `should_stop` returns True.
        """
        deadline = time.monotonic() + timeout
        missing = [tuple(sorted((self.me, peer))) for peer in peers if peer not in self._by_peer]
        for lower, upper in sorted(missing):
            other = upper if lower == self.me else lower
            pair_prefix = (
                f"{lower.worker}.{lower.incarnation}+{upper.worker}.{upper.incarnation}/{name}"
            )
            self._by_peer[other] = _PeerConnection(
                self._make_group(other, pair_prefix, deadline, should_stop), set(), []
            )

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
        for peer, message in messages:
            with peer_errors(peer.worker, "comparing sizes"):
                message.wait(timedelta(seconds=timeout))
        for peer in unchecked:
            if (other := int(peer_sizes[peer])) != size:
                raise PolicyError(
                    f"{self.me.worker} has {size:,} bytes to average, {peer.worker} has {other:,}",
                    expected="the same tensors in both",
                    fix='use state="local" if workers may skip their first optimizer step, and '
                    "freeze the same parameters in all workers",
                )
            self._by_peer[peer].sizes.add(size)

    def post(self, peer: Peer, tensor: Tensor, *, tag: int) -> None:
        """Send `tensor`, and hold it until `release` or until the connection is dropped."""
        self._by_peer[peer].posted.append(self.send(peer, tensor, tag=tag))

    def release(self) -> None:
        """Free the posted tensors; call once the receivers are known to have them."""
        for connection in self._by_peer.values():
            connection.posted.clear()

    def flush(self, timeout: Seconds) -> None:
        """Wait until all posted tensors are sent; for use without acknowledgements."""
        for peer, connection in self._by_peer.items():
            for message in connection.posted:
                with peer_errors(peer.worker, "sending"):
                    message.wait(timedelta(seconds=timeout))
        self.release()

    def send(self, peer: Peer, tensor: Tensor, *, tag: int) -> Message:
        """Send `tensor`; hold the returned message, since dropping it blocks the pair for good."""
        group, empty = self._by_peer[peer].group, tensor.new_empty(0)
        with peer_errors(peer.worker, "sending"):  # fails at once if the connection has closed
            works = [group.send([part], 1 - group.rank(), tag) for part in (tensor, empty)]
        return Message(*works)

    def receive(self, peer: Peer, tensor: Tensor, *, tag: int) -> Message:
        group, empty = self._by_peer[peer].group, tensor.new_empty(0)
        with peer_errors(peer.worker, "receiving"):
            works = [group.recv([part], 1 - group.rank(), tag) for part in (tensor, empty)]
        return Message(*works)

    def abort(self, peers: Sequence[Peer]) -> None:
        """Wake all threads that wait for these peers, on both sides; `drop` them afterwards."""
        for connection in [self._by_peer.get(peer) for peer in peers]:
            if connection is not None:
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

    def _make_group(
        self, other: Peer, pair_prefix: str, deadline: Seconds, should_stop: Callable[[], bool]
    ) -> dist.ProcessGroup:
        store, rank = PrefixStore(pair_prefix, self.store), int(other < self.me)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [_device(os.environ.get("GLOO_SOCKET_IFNAME", ""))]
        options._threads = 1  # they run collectives, which a pair does not use
        options._timeout = timedelta(seconds=_HANDSHAKE_TIMEOUT)
        with peer_errors(other.worker, "connecting"):  # the store may be gone as well
            self._rendezvous(store, rank, other, deadline, should_stop)
            return dist.ProcessGroupGloo(store, rank, 2, options)  # type: ignore[return-value]

    def _rendezvous(
        self,
        store: Store,
        rank: int,
        other: Peer,
        deadline: Seconds,
        should_stop: Callable[[], bool],
    ) -> None:
        """Wait until both peers are present, and agree: either both connect now, or neither.

        Gloo would wait for a peer that has stopped or died, and that wait cannot be aborted.
        """
        names, start = sorted([self.me, other]), time.monotonic()

        def check() -> None:
            if should_stop():
                raise self._lost_error(other, start, "the group was aborted")

        pair = JobStore(
            cast("StoreBackend", store),
            rank,
            timeout=deadline - start,
            name_of=lambda index: str(names[index].worker),
            check=check,
        )
        error: PeerError | None = None
        try:
            pair.barrier("connecting", _PAIR)
        except PeerError as lost:
            error = lost
        if not pair.set_once("whether both connect", error is None, _PAIR):
            raise error or self._lost_error(other, start, "it has aborted the group")

    def _lost_error(self, other: Peer, start: Seconds, cause: str) -> PeerError:
        waited = time.monotonic() - start
        return PeerError(str(other.worker), action="connecting", waited=waited, cause=cause)


@cache
def _device(interfaces: str) -> dist.ProcessGroupGloo.Device:
    """Return one listening socket and one thread for all pairs.

    torch.distributed reads the same environment variable.
    """
    if interfaces:
        return dist.ProcessGroupGloo.create_device(interface=interfaces.split(",")[0])
    return dist.ProcessGroupGloo.create_default_device()
