"""Pairs: a connection between two workers, made when a group first needs it and kept for the next.

A group exchanges over the pairs of its members. With a process group for each group of workers
instead, most groups would have to be made first, which takes three times as long as the average
itself (`polyrhythm bench average`); with one process group for all workers, one lost worker would
break the connections of everybody. A pair breaks alone. There are at most as many as a worker has
peers.

Both sides have to agree on which connection is meant: it is named after the two, their lives (one
that starts anew has none of the old connections) and the group that first needed it; and when a
group fails, all its members drop all connections among them. Before they exchange buffers of some
size for the first time, they compare it: gloo ends a process that gets more than it expects.

When a connection breaks, gloo wakes whoever waits for a message that has not begun, and leaves
waiting who waits for one that is half way, in or out. So an empty message, which has no half,
follows each: whoever receives waits for that. And what is sent is not waited for, but kept until
its receiver is known to have it.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from polyrhythm.errors import PeerError, PolicyError
from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.comm.process_groups import abort
from polyrhythm.types import Bytes, Seconds, Worker

_POLL: Seconds = 0.002  # at first; doubled up to the next one
_LONGEST_POLL: Seconds = 0.05
_HANDSHAKE: Seconds = 20.0  # of two that are both here
_CONNECT_DECISION = "fate"  # the key of what both do: "on" or "off"


class Peer(NamedTuple):
    """A worker in one of its lives."""

    worker: Worker
    incarnation: int


class Message(NamedTuple):
    """On its way, one way or the other."""

    content: dist.Work
    end: dist.Work  # the empty one behind it

    def wait(self, timeout: timedelta) -> None:
        self.end.wait(timeout)
        self.content.wait(timeout)  # is there: messages keep their order


class _PeerConnection(NamedTuple):
    group: dist.ProcessGroup
    sizes: set[Bytes]  # that both have had
    posted: list[Message]  # that the other one may not have yet


class PeerConnections:
    """Of one worker; `connect` and what follows are called by one thread, `abort` by any."""

    def __init__(self, store: Store, me: Peer) -> None:
        self.me = me
        # A connection of its own: one that waits for a key holds up whoever shares it.
        self.store = store.clone()  # type: ignore[attr-defined]
        self._by_peer: dict[Peer, _PeerConnection] = {}

    def connect(
        self,
        peers: Iterable[Peer],
        name: str,
        *,
        timeout: Seconds,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make what is missing, together with the peers, who do so under the same name.

        All make their pairs in one order, so that nobody waits in a circle. Raises PeerError after
        `timeout`, or as soon as `should_stop` says so.
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
        """With those who have not had that size before; PolicyError if theirs is another."""
        new = [peer for peer in peers if size not in self._by_peer[peer].sizes]
        ours, theirs = (
            torch.tensor([size]),
            {peer: torch.zeros(1, dtype=torch.int64) for peer in new},
        )
        messages = [(peer, self.receive(peer, theirs[peer], tag=tag)) for peer in new]
        for peer in new:
            self.post(peer, ours, tag=tag)
        for peer, message in messages:
            with peer_errors(peer.worker, "comparing sizes"):
                message.wait(timedelta(seconds=timeout))
        for peer in new:
            if (other := int(theirs[peer])) != size:
                raise PolicyError(
                    f"{self.me.worker} has {size:,} bytes to average, {peer.worker} has {other:,}",
                    expected="the same tensors in both",
                    fix='average no optimizer state (state="local") if workers may skip their '
                    "first step of the optimizer, and freeze the same parameters everywhere",
                )
            self._by_peer[peer].sizes.add(size)

    def post(self, peer: Peer, tensor: Tensor, *, tag: int) -> None:
        """Send it, and keep it until `release`, or until the connection is dropped."""
        self._by_peer[peer].posted.append(self.send(peer, tensor, tag=tag))

    def release(self) -> None:
        """All that was posted has been received: somebody has said so."""
        for connection in self._by_peer.values():
            connection.posted.clear()

    def flush(self, timeout: Seconds) -> None:
        """Until all that was posted is sent, where nobody says that it has been received."""
        for peer, connection in self._by_peer.items():
            for message in connection.posted:
                with peer_errors(peer.worker, "sending"):
                    message.wait(timedelta(seconds=timeout))
        self.release()

    def send(self, peer: Peer, tensor: Tensor, *, tag: int) -> Message:
        """To be waited for, or kept: a pair stops for good at one that nobody holds any more."""
        group, nothing = self._by_peer[peer].group, tensor.new_empty(0)
        with peer_errors(peer.worker, "sending"):  # fails at once if the connection has closed
            works = [group.send([each], 1 - group.rank(), tag) for each in (tensor, nothing)]
        return Message(*works)

    def receive(self, peer: Peer, tensor: Tensor, *, tag: int) -> Message:
        group, nothing = self._by_peer[peer].group, tensor.new_empty(0)
        with peer_errors(peer.worker, "receiving"):
            works = [group.recv([each], 1 - group.rank(), tag) for each in (tensor, nothing)]
        return Message(*works)

    def abort(self, peers: Sequence[Peer]) -> None:
        """Wake whoever waits for these peers, here and there; then `drop` them."""
        for connection in [self._by_peer.get(peer) for peer in peers]:
            if connection is not None:
                abort(connection.group)

    def abort_all(self) -> None:
        self.abort(list(self._by_peer))

    def drop(self, workers: Iterable[Worker]) -> None:
        """Forget the connections to these, in whatever life."""
        gone = set(workers)
        self._by_peer = {
            p: connection for p, connection in self._by_peer.items() if p.worker not in gone
        }

    def close(self) -> None:
        self._by_peer.clear()

    def _make_group(
        self, other: Peer, pair_prefix: str, deadline: Seconds, should_stop: Callable[[], bool]
    ) -> dist.ProcessGroup:
        store, mine = PrefixStore(pair_prefix, self.store), int(other < self.me)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [_device(os.environ.get("GLOO_SOCKET_IFNAME", ""))]
        options._threads = 1  # of those that run collectives, which a pair does not
        options._timeout = timedelta(seconds=_HANDSHAKE)
        with peer_errors(other.worker, "connecting"):  # the store may be gone, too
            self._rendezvous(store, mine, other, deadline, should_stop)
            return dist.ProcessGroupGloo(store, mine, 2, options)  # type: ignore[return-value]

    def _rendezvous(
        self,
        store: Store,
        mine: int,
        other: Peer,
        deadline: Seconds,
        should_stop: Callable[[], bool],
    ) -> None:
        """Wait until both are here, and agree: either both connect now, or neither does.

        Gloo would wait for a peer that has given up, or is gone, and could not be told to stop.
        """
        store.set(f"here{mine}", "")
        began, pause = time.monotonic(), _POLL
        while not store.check([f"here{1 - mine}"]):
            if should_stop() or time.monotonic() >= deadline:
                cause = "the group was given up" if should_stop() else "it did not come"
                if store.compare_set(_CONNECT_DECISION, "", "off") == b"off":
                    raise self._lost_error(other, began, cause)
                return  # it has come just now, and waits for us
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)
        if store.compare_set(_CONNECT_DECISION, "", "on") != b"on":
            raise self._lost_error(other, began, "it has given up the group")

    def _lost_error(self, other: Peer, began: Seconds, cause: str) -> PeerError:
        waited = time.monotonic() - began
        return PeerError(str(other.worker), action="connecting", waited=waited, cause=cause)


@cache
def _device(interfaces: str) -> dist.ProcessGroupGloo.Device:
    """One listening socket and one thread for all pairs; torch reads the same variable."""
    if interfaces:
        return dist.ProcessGroupGloo.create_device(interface=interfaces.split(",")[0])
    return dist.ProcessGroupGloo.create_default_device()
