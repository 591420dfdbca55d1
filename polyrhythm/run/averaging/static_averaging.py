"""Average models by a fixed rule: every worker computes its group itself, without a scheduler.

There is no Commit: the loss of a member ends the others' training with a PeerError, and their
weights are those before the average or after it.
"""

from polyrhythm.errors import PeerError
from polyrhythm.run.averaging.buffers import ReplicaState
from polyrhythm.run.averaging.exchange import all_reduce_mean
from polyrhythm.run.averaging.peer_connections import Peer
from polyrhythm.run.averaging.rendezvous import Rendezvous
from polyrhythm.sync.policies.static import NodeLayout
from polyrhythm.types import Worker


class StaticAveraging:
    def __init__(
        self, model: ReplicaState, rendezvous: Rendezvous, *, node: str, every: int
    ) -> None:
        self.num_steps = 0
        self._model, self._rendezvous, self._every = model, rendezvous, every
        self._layout = NodeLayout.of(rendezvous.gather_nodes(node))
        self._peers: dict[Worker, Peer] = {}  # cached: under static no worker restarts

    def step(self) -> None:
        self.num_steps += 1
        if self.num_steps % self._every == 0:
            number = self.num_steps // self._every - 1
            self._average(
                self._layout.members(self._rendezvous.me.worker, number), 2 * self.num_steps
            )

    def average_all(self) -> None:
        self._average(tuple(sorted(self._layout.workers)), 2 * self.num_steps + 1)

    def close(self, *, graceful: bool) -> None:
        self._rendezvous.connections.close()

    def _average(self, workers: tuple[Worker, ...], number: int) -> None:
        if len(workers) == 1:
            return
        connections, timeout = self._rendezvous.connections, self._rendezvous.timeout
        members = [self._peer(worker) for worker in workers]
        others = [peer for peer in members if peer != connections.me]
        weights, flat = [1 / len(members)] * len(members), self._model.flat()
        try:
            has_failed = self._rendezvous.has_failed
            connections.connect(others, str(number), timeout=timeout, should_stop=has_failed)
            flat.write(
                all_reduce_mean(
                    connections, members, weights, flat.read(), number=number, timeout=timeout
                )
            )
            connections.flush(timeout)  # there is no acknowledgement
        except PeerError as error:
            # Only the dead worker's peers see its loss; others see that those peers have ended.
            first = self._rendezvous.report_failure(error)
            if first.startswith(f"{connections.me.worker}: "):
                raise
            cause = f"{error.cause}; first error: {first}"
            raise PeerError(
                error.peer, action=error.action, waited=error.waited, cause=cause
            ) from None

    def _peer(self, worker: Worker) -> Peer:
        if worker not in self._peers:
            self._peers[worker] = self._rendezvous.peer(worker)
        return self._peers[worker]
