"""What other jobs leave of a link: a share that changes while messages travel.

Other flows come and go on each direction of each link, independently of each other: they arrive at
random, stay for a time that is exponentially distributed, and all flows there are share the link
fairly. With n others a message has 1 / (1 + n) of the bandwidth; n is Poisson distributed, so that
a short message takes 1 + mean times as long as alone, on average.
"""

import math
import random
from bisect import bisect_left, bisect_right

from polyrhythm.errors import DescriptionError
from polyrhythm.types import Seconds

FLOW_SECONDS: Seconds = 1.0  # that another flow lasts, on average


class OtherFlows:
    """One direction of one link; the same seed is the same story."""

    def __init__(self, mean: float, *, seed: str, lasting: Seconds = FLOW_SECONDS) -> None:
        if not (mean >= 0 and lasting > 0):
            raise DescriptionError(
                f"{mean:g} flows of {lasting:g} s",
                expected="0 or more flows, of more than 0 s",
                fix="use 0 flows for a link of one's own",
            )
        self._mean, self._lasting = mean, lasting
        self._draw = random.Random(seed)
        self._num_flows = self._poisson()
        self._changes: list[Seconds] = [0.0]
        self._served: list[Seconds] = [0.0]  # up to each change, of a link of one's own
        self._shares = [1 / (1 + self._num_flows)]

    def arrival(self, begin: Seconds, alone: Seconds) -> Seconds:
        """When a message has passed that begins then and takes `alone` on a link of its own."""
        while self._changes[-1] <= begin:
            self._go_on()
        last = bisect_right(self._changes, begin) - 1
        passed = self._served[last] + (begin - self._changes[last]) * self._shares[last]
        while self._served[-1] < passed + alone:
            self._go_on()
        last = max(last, bisect_left(self._served, passed + alone) - 1)
        left = passed + alone - self._served[last]
        return max(begin, self._changes[last] + left / self._shares[last])

    def _go_on(self) -> None:
        """To the next flow that comes or goes."""
        if self._mean == 0:
            self._changes.append(2 * self._changes[-1] + self._lasting)  # nothing changes, ever
        else:
            weight = self._mean + self._num_flows
            self._changes.append(self._changes[-1] + self._draw.expovariate(weight / self._lasting))
            self._num_flows += 1 if self._draw.random() * weight < self._mean else -1
        passed = (self._changes[-1] - self._changes[-2]) * self._shares[-1]
        self._served.append(self._served[-1] + passed)
        self._shares.append(1 / (1 + self._num_flows))

    def _poisson(self) -> int:
        """How many flows there are to begin with, by Knuth's product of uniform numbers."""
        count, product = 0, self._draw.random()
        while product > math.exp(-self._mean):
            count, product = count + 1, product * self._draw.random()
        return count
