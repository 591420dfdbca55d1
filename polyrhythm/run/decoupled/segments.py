"""Plan who sends which pieces of flat parameters to whom, when the replicas of a model change.

Each worker holds some ranges of the parameters, as their owner or as the buddy of their owner, and
wants others. All workers make the same plan from the same tables. Owners send before buddies do,
and of several holders the one that has sent least.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple


class Range(NamedTuple):
    """A piece of a parameter, in memory order."""

    parameter: int  # its index
    start: int
    stop: int


class SegmentTransfer(NamedTuple):
    """A piece that `receiver` gets from `source`; without a message if they are the same worker."""

    source: int
    receiver: int
    piece: Range


class TransferPlan(NamedTuple):
    """Transfers in an order that is the same on all workers, and what nobody holds."""

    transfers: list[SegmentTransfer]
    missing: list[Range]


Ranges = Sequence[Sequence[Range]]  # by worker


def plan_transfers(own: Ranges, copies: Ranges, wanted: Ranges) -> TransferPlan:
    """Give each worker what it wants; what it holds itself it takes from there.

    `own` and `copies` are what each worker holds as an owner and as a buddy. Each transfer lies in
    one range of its source and in one range that its receiver wants.
    """
    plan = _Planner(own, copies)
    for piece, receivers in plan.cut(wanted):
        for receiver in receivers:
            source = receiver if plan.is_holder(receiver, piece) else plan.choose_source(piece)
            plan.add(source, piece, [receiver])
    return TransferPlan(plan.transfers, list(plan.missing))


def plan_broadcast(
    own: Ranges, copies: Ranges, receivers: Sequence[int], sizes: Sequence[int]
) -> TransferPlan:
    """Give all `receivers` all parameters, which have these `sizes`; each piece has one source.

    So they get the same bits, whatever they hold.
    """
    plan = _Planner(own, copies)
    whole = [Range(index, 0, size) for index, size in enumerate(sizes) if size]
    for piece, _ in plan.cut([whole]):
        plan.add(plan.choose_source(piece), piece, receivers)
    return TransferPlan(plan.transfers, list(plan.missing))


class _Planner:
    def __init__(self, own: Ranges, copies: Ranges) -> None:
        # By parameter: owners first.
        self._held = [_by_index(own), _by_index(copies)]
        self._num_sent: defaultdict[int, int] = defaultdict(int)  # numbers, by worker
        self.transfers: list[SegmentTransfer] = []
        self.missing: dict[Range, None] = {}  # an ordered set

    def cut(self, wanted: Ranges) -> Iterator[tuple[Range, list[int]]]:
        """Cut what is wanted where any range begins or ends; yield pieces and who wants them."""
        for index, ranges in sorted(_by_index(wanted).items()):
            every = [*ranges, *(each for held in self._held for each in held.get(index, ()))]
            bounds = sorted({bound for _, start, stop in every for bound in (start, stop)})
            for start, stop in pairwise(bounds):
                if receivers := _covering(ranges, start, stop):
                    yield Range(index, start, stop), receivers

    def is_holder(self, worker: int, piece: Range) -> bool:
        return any(worker in self._holders(held, piece) for held in self._held)

    def choose_source(self, piece: Range) -> int | None:
        """Return the owner or else the buddy that has sent least; None if nobody holds it."""
        for held in self._held:
            if holders := self._holders(held, piece):
                return min(holders, key=lambda worker: (self._num_sent[worker], worker))
        return None

    def add(self, source: int | None, piece: Range, receivers: Iterable[int]) -> None:
        if source is None:
            self.missing[piece] = None
            return
        for receiver in receivers:
            self.transfers.append(SegmentTransfer(source, receiver, piece))
            if receiver != source:
                self._num_sent[source] += piece.stop - piece.start

    @staticmethod
    def _holders(held: "_ByIndex", piece: Range) -> list[int]:
        return _covering(held.get(piece.parameter, ()), piece.start, piece.stop)


_ByIndex = dict[int, list[tuple[int, int, int]]]  # workers with start and stop


def _by_index(ranges: Ranges) -> _ByIndex:
    found: _ByIndex = {}
    for worker, some in enumerate(ranges):
        for index, start, stop in some:
            found.setdefault(index, []).append((worker, start, stop))
    return found


def _covering(ranges: Iterable[tuple[int, int, int]], start: int, stop: int) -> list[int]:
    """Return the workers, each once, whose ranges contain this one."""
    covering = (worker for worker, first, last in ranges if first <= start and stop <= last)
    return list(dict.fromkeys(covering))
