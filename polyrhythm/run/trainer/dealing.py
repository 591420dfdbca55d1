"""Who computes which samples: dealers that a loop asks at the start of each of its steps.

In lockstep each pipeline knows its share of a step. Otherwise pipelines take samples as they are
done with the last ones, so that fast ones get more, and each is used once.

Only the first stage of a pipeline asks; the others hear of it with the batch.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from polyrhythm.run.average.group_sync import GroupSync
from polyrhythm.run.data.prefetch import Guess, known
from polyrhythm.run.trainer.shares import Batches, Remaining, dealt
from polyrhythm.run.trainer.together import LOCKSTEP
from polyrhythm.sync.dispenser import Ranges, Supply
from polyrhythm.sync.foreseen import DECOUPLED


class Dealt(NamedTuple):
    """The samples of a pipeline in one of its steps."""

    step: int  # the global one that they belong to
    ranges: Ranges  # of positions
    weight: float  # what the mean loss over them counts in the gradient

    @property
    def num_samples(self) -> int:
        return sum(end - start for start, end in self.ranges)


class Steps:
    """Global steps one after the other, of samples that were not used before."""

    def __init__(self, batches: Batches, supply: Supply, end: int) -> None:
        """Until `end` steps are made, those before included."""
        self.batches = batches
        self._start, self._remaining, self._at_first = supply.num_used, Remaining(supply), supply
        self._num_made, self._first = 0, supply.num_used // batches.size
        self._num_steps = end - self._first

    @property
    def is_over(self) -> bool:
        return self._num_made >= self._num_steps

    def next(self, microbatches: range) -> Dealt | None:
        if self.is_over:
            return None
        ranges = self.peek(microbatches)
        self._num_made += 1
        return Dealt(self._first + self._num_made - 1, ranges, 1.0)

    def peek(self, microbatches: range) -> Ranges:
        """What `next` would deal."""
        if self.is_over:
            return ()
        start, end = self.batches.range_of(self._num_made, microbatches)
        return self._remaining.ranges(self._start + start, self._start + end)

    def supply(self) -> Supply:
        """When all of the steps that were begun are made."""
        used = self._start + self._num_made * self.batches.size
        left = self._remaining.ranges(used, used + self._at_first.next)
        pool = tuple((low, min(high, self._at_first.next)) for low, high in left)
        pool = tuple((low, high) for low, high in pool if low < high)
        return Supply(next=used + sum(high - low for low, high in pool), pool=pool)


class Dealer(Protocol):
    def next(self) -> Dealt | None:
        """The next samples of this pipeline; None when training is over."""

    def peek(self) -> Guess:
        """What `next` will most likely give after that, to be loaded ahead."""

    def used(self) -> None:
        """Those of the last ones have been learnt from."""

    def supply(self) -> Supply:
        """Which samples were used by now, for a checkpoint."""


class FixedShares:
    """Each pipeline has the same micro-batches of each step.

    Where gradients are averaged, a mean over pipelines: those with more samples count for more.
    """

    def __init__(
        self, steps: Steps, shares: Sequence[int], pipeline: int, *, averages_gradients: bool
    ) -> None:
        self._steps, self._microbatches = steps, dealt(shares)[pipeline]
        self._num_pipelines = len(shares)
        self._averages_gradients = averages_gradients

    def next(self) -> Dealt | None:
        found = self._steps.next(self._microbatches)
        if found is None or not self._averages_gradients:
            return found
        weight = found.num_samples * self._num_pipelines / self._steps.batches.size
        return found._replace(weight=weight)

    def peek(self) -> Guess:
        return self._steps.peek(self._microbatches)

    def used(self) -> None:
        """All know it."""

    def supply(self) -> Supply:
        return self._steps.supply()


class BalancedShares:
    """Shares follow the speed of pipelines; gradients count by micro-batches (`balanced`)."""

    def __init__(self, steps: Steps, sync: GroupSync) -> None:
        self._steps, self._sync = steps, sync
        self._microbatches = range(0)  # of the last step

    def next(self) -> Dealt | None:
        if self._steps.is_over:
            return None
        self._microbatches = self._sync.share(self._steps.batches.num_microbatches)
        found, batches = self._steps.next(self._microbatches), self._steps.batches
        if found is None:
            return None
        weight = found.num_samples * batches.num_microbatches / batches.size
        return found._replace(weight=weight)  # the last micro-batch may be smaller

    def peek(self) -> Guess:
        return self._steps.peek(self._microbatches)  # shares seldom change

    def used(self) -> None:
        """All know it."""

    def supply(self) -> Supply:
        return self._steps.supply()


class Dispensed:
    """Samples are dealt by the scheduler, on demand; asked for a chunk ahead of time."""

    def __init__(self, batches: Batches, sync: GroupSync, count: int) -> None:
        """`count`: samples of this pipeline in each of its steps."""
        self._batches, self._sync, self._count = batches, sync, count
        self._number = -1  # of the last chunk
        self._asked = deque([sync.take(0, count)])  # those after it

    def next(self) -> Dealt | None:
        ranges = self._asked[0].wait()
        if not ranges:
            return None
        self._ask()
        self._asked.popleft()
        self._number += 1
        step = max(end - 1 for _, end in ranges) // self._batches.size
        return Dealt(step, ranges, 1.0)

    def peek(self) -> Guess:
        return self._asked[0]

    def used(self) -> None:
        self._sync.used(self._number)
        if known(self._asked[0]):
            self._ask()  # not later, for the answer to be here when the next step begins

    def supply(self) -> Supply:
        return self._sync.supply()

    def _ask(self) -> None:
        """For the chunk after the one that is held for the next step, which is not empty."""
        if len(self._asked) == 1:
            self._asked.append(self._sync.take(self._number + 2, self._count))


def dealer_of(
    way: str,
    batches: Batches,
    shares: Sequence[int],
    pipeline: int,
    supply: Supply,
    end: int,
    line: GroupSync | None,
) -> Dealer:
    """For a way to keep together; `line` is the first stage's, which asks."""
    if line is not None and way not in LOCKSTEP:
        return Dispensed(batches, line, shares[pipeline] * batches.microbatch_size)
    steps = Steps(batches, supply, end)
    if line is not None and way == "balanced":
        return BalancedShares(steps, line)
    averages_gradients = way in (DECOUPLED, "all_reduce")
    return FixedShares(steps, shares, pipeline, averages_gradients=averages_gradients)
