"""An average in two halves: the means are made before it is committed, and come together after.

`scatter` makes this member's part of each bucket; then it may say Done. After the Commit, `gather`
brings the parts of all members together, while training goes on and waits for each bucket where it
needs it (`arriving.py`). Members that have everything say so to each other; until all have, nobody
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
from polyrhythm.run.average.arriving import Arriving
from polyrhythm.run.average.exchange import Kind, Messages, cut, post_gather, scatter, tag
from polyrhythm.run.average.pairs import Pairs, Peer
from polyrhythm.run.average.roll_call import roll_call
from polyrhythm.sync.mending import handovers
from polyrhythm.types import Seconds

_SILENT: Seconds = 15.0  # nobody is given up sooner; for as long a worker may be silent elsewhere
# Between two who are alive and notice that a third one is lost: one has a bucket to wait for first.
_PATIENCE: Seconds = 5.0


class Halves:
    """Of one average and one member, in the thread that averages; training waits for `arriving`."""

    def __init__(
        self, pairs: Pairs, members: Sequence[Peer], published: Tensor, *, number: int
    ) -> None:
        self.others = [peer for peer in members if peer != pairs.me]
        self._pairs, self._members, self._number = pairs, list(members), number
        self._published = published
        self._parts = cut(published.numel(), len(members), published.element_size(), BUCKET)
        self._slices = [part for owned in self._parts for part in owned]
        place, size = self._members.index(pairs.me), len(members)
        self._has = {
            number
            for number, part in enumerate(self._slices)
            if number % size == place or part.start == part.stop
        }
        self._num_there = 0  # buckets, from the first on
        self.arriving: Arriving

    def scatter(self, weights: Sequence[float], *, timeout: Seconds) -> Tensor:
        """The first half; the buffer that the second one fills. PeerError if somebody is lost."""
        value = scatter(
            self._pairs,
            self._members,
            weights,
            self._published,
            self._parts,
            number=self._number,
            timeout=timeout,
        )
        self.arriving = Arriving(value)
        return value

    def gather(self, deadline: Seconds, stopped: Callable[[], bool]) -> str | None:
        """The second half; why it had to be mended, if it had. `deadline`: as the first half's."""
        deadline, messages = max(deadline, _SILENT), Messages(self._pairs)
        try:
            self._advance()
            ends = time.monotonic() + deadline
            post_gather(
                messages, self._members, self.arriving.value, self._parts, number=self._number
            )
            self._land(messages.landing(ends))
            self._end(self.others, ends)
            return None
        except PeerError as error:
            self._break_off(messages)
            return self._mend(error, deadline, stopped)

    def _mend(self, error: PeerError, deadline: Seconds, stopped: Callable[[], bool]) -> str:
        members = self._members
        for turn in range(len(self._members)):
            name, told = f"{self._number}/{turn}", dict[Peer, str]()
            if not stopped():  # else nobody is to count on this one
                told = roll_call(
                    self._pairs.store,
                    name,
                    self._pairs.me,
                    members,
                    " ".join(map(str, sorted(self._has))),
                    patience=_PATIENCE,
                    stopped=stopped,
                )
            if stopped():
                raise error
            members = list(told)
            if self._pairs.me not in told or len(told) == 1:
                break
            if self._hand_on(name, told, deadline, stopped):
                return f"{error}; {len(members)} of {len(self._members)} have mended it"
        missing = [part for i, part in enumerate(self._slices) if i not in self._has]
        if missing:
            self.arriving.keep(self._published, missing)
        return f"{error}; kept own numbers for {len(missing)} of {len(self._slices)} parts"

    def _hand_on(
        self, name: str, told: dict[Peer, str], deadline: Seconds, stopped: Callable[[], bool]
    ) -> bool:
        """Whether all who are left have everything."""
        has = {peer.worker: {int(part) for part in text.split()} for peer, text in told.items()}
        planned = handovers(has, len(self._slices))
        if not planned:
            return True
        peers, messages = {peer.worker: peer for peer in told}, Messages(self._pairs)
        me, value = self._pairs.me, self.arriving.value
        others = [peer for peer in told if peer != me]
        try:
            self._pairs.connect(others, f"{name}/mend", deadline=_PATIENCE, stopped=stopped)
            if stopped():  # while the last pair was made, which nobody could break off
                self._break_off(messages)
                return False
            ends = time.monotonic() + deadline
            for part, source, takers, is_lost in planned:
                numbers = self._slices[part]
                part_tag = tag(Kind.GATHER, self._number, part)
                if source == me.worker:
                    if is_lost:
                        value[numbers] = self._published[numbers]
                        self._land([part])
                    for worker in takers:
                        messages.send(peers[worker], value[numbers], tag=part_tag)
                elif me.worker in takers:
                    messages.receive(peers[source], value[numbers], tag=part_tag, part=part)
            self._land(messages.landing(ends))
            self._end(others, ends)
            self._pairs.drop(peer.worker for peer in others)
        except PeerError:
            self._break_off(messages)
            return False
        return True

    def _land(self, parts: Iterable[int]) -> None:
        """Training hears of each bucket that is complete, and of all before it."""
        for part in parts:
            self._has.add(part)
            self._advance()

    def _advance(self) -> None:
        size = len(self._members)
        while self._num_there < len(self._parts):
            first = self._num_there * size
            if not self._has.issuperset(range(first, first + size)):
                return
            self.arriving.reach(self._parts[self._num_there][-1].stop)
            self._num_there += 1

    def _end(self, others: Sequence[Peer], ends: Seconds) -> None:
        """Until all others have everything, too."""
        messages, word = Messages(self._pairs), torch.zeros(1, dtype=torch.uint8)
        end_tag = tag(Kind.END, self._number)
        for peer in others:
            messages.receive(peer, torch.zeros_like(word), tag=end_tag)
            messages.send(peer, word, tag=end_tag)
        messages.wait_until(ends)
        # Before they said so, they were ready for our word: that is sent, too.
        self._pairs.release()

    def _break_off(self, messages: Messages) -> None:
        """So that all others notice, and no message comes any more; all do the same."""
        self._pairs.break_off(self.others)
        self._land(messages.landed())
        self._pairs.drop(peer.worker for peer in self.others)
