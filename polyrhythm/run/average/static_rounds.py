"""Average models by a fixed rule: every worker computes its group itself, and asks nobody.

There is no scheduler, so nobody commits: a member that is lost ends the others' training with a
PeerError, and weights are those before the average or after it.
"""

from polyrhythm.errors import PeerError
from polyrhythm.run.average.exchange import mean
from polyrhythm.run.average.flat import Model
from polyrhythm.run.average.meeting import Meeting
from polyrhythm.run.average.pairs import Peer
from polyrhythm.sync.static import Layout
from polyrhythm.types import Worker


class StaticRounds:
    def __init__(self, model: Model, meeting: Meeting, *, node: str, every: int) -> None:
        self.num_steps = 0
        self._model, self._meeting, self._every = model, meeting, every
        self._layout = Layout.of(meeting.nodes(node))
        self._peers: dict[Worker, Peer] = {}  # nobody has another life: to ask once is enough

    def step(self) -> None:
        self.num_steps += 1
        if self.num_steps % self._every == 0:
            number = self.num_steps // self._every - 1
            self._average(self._layout.members(self._meeting.me.worker, number), 2 * self.num_steps)

    def consolidate(self) -> None:
        self._average(tuple(sorted(self._layout.workers)), 2 * self.num_steps + 1)

    def close(self, *, in_order: bool) -> None:
        self._meeting.pairs.close()

    def _average(self, workers: tuple[Worker, ...], number: int) -> None:
        if len(workers) == 1:
            return
        pairs, timeout = self._meeting.pairs, self._meeting.timeout
        members = [self._peer(worker) for worker in workers]
        others = [peer for peer in members if peer != pairs.me]
        weights, flat = [1 / len(members)] * len(members), self._model.flat()
        try:
            has_failed = self._meeting.has_failed
            pairs.connect(others, str(number), deadline=timeout, stopped=has_failed)
            flat.write(mean(pairs, members, weights, flat.read(), number=number, timeout=timeout))
            pairs.settle(timeout)  # nobody says that it has been received
        except PeerError as error:
            # Those who see it die are told by gloo; the others only that these have ended.
            first = self._meeting.give_up(error)
            if first.startswith(f"{pairs.me.worker}: "):
                raise
            cause = f"{error.cause}; first of all, {first}"
            raise PeerError(
                error.peer, action=error.action, waited=error.waited, cause=cause
            ) from None

    def _peer(self, worker: Worker) -> Peer:
        if worker not in self._peers:
            self._peers[worker] = self._meeting.peer(worker)
        return self._peers[worker]
