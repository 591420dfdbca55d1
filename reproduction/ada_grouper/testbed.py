"""The three platforms of section 6.1, and links that other jobs use, too.

A device computes at the published rate for training of that kind, whatever the size of a
micro-batch. Besides its samples, a micro-batch costs adding its gradients to the sum: two reads and
a write of each, at the bandwidth of the device's memory.

On each direction of each link other flows come and go independently: they arrive at random, stay
for an exponentially distributed time, and share the link fairly. With n other flows a message has
1 / (1 + n) of the bandwidth. n is Poisson distributed, so a short message takes 1 + mean times as
long as on an unshared link, on average.
"""

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace

from polyrhythm.errors import DescriptionError
from polyrhythm.types import BytesPerSecond, Seconds

# Shoeybi et al., arXiv:1909.08053, section 5: 39 TFLOPS of a V100, 30 % of its peak, with GPT.
# NVIDIA DeepLearningExamples, ResNet-50 v1.5, V100 32 GB, float32: 356 images/s, of 24.5 GFLOP each
# (forward and backward), are 8.7 of 15.7 TFLOPS.
_SHARES = {"float16": 0.3, "float32": 0.56}  # of the peak
FLOW_SECONDS: Seconds = 1.0  # that another flow lasts, on average


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    name: str
    peaks: Mapping[str, float]  # operations per second by dtype, by data sheet
    memory_bandwidth: BytesPerSecond
    bandwidth: BytesPerSecond  # of the network, one direction
    latency: Seconds
    other_flows: float  # on a link, on average

    def rate(self, dtype: str) -> float:
        """Operations per second that training reaches."""
        return _SHARES[dtype] * self.peaks[dtype]


# Each reason for preemption that section 6.1 names brings one other flow: the network is shared
# with production jobs (S1, M8s), the machine is shared with other workers (C1x, M8s).
C1X = Platform(
    name="C1x",
    peaks={"float16": 125e12, "float32": 15.7e12},
    memory_bandwidth=900e9,
    bandwidth=25e9 / 8,
    latency=50e-6,
    other_flows=1.0,
)
S1 = Platform(
    name="S1",
    peaks={"float16": 130e12, "float32": 16.4e12},
    memory_bandwidth=1134e9,
    bandwidth=100e9 / 8,
    latency=20e-6,
    other_flows=1.0,
)
M8S = replace(C1X, name="M8s", bandwidth=100e9 / 8, latency=20e-6, other_flows=2.0)
PLATFORMS = (C1X, S1, M8S)

BUSY_FLOWS = 3.0  # on a link of S1 when the network is busy (Rounds 3 and 5, and most of Fig. 10)


class OtherFlows:
    """Other flows on one direction of one link; the seed fixes them."""

    def __init__(self, mean: float, *, seed: str, lasting: Seconds = FLOW_SECONDS) -> None:
        if not (mean >= 0 and lasting > 0):
            raise DescriptionError(
                f"{mean:g} flows of {lasting:g} s",
                expected="0 or more flows, of more than 0 s",
                fix="use 0 flows for an unshared link",
            )
        self._mean, self._lasting = mean, lasting
        self._draw = random.Random(seed)
        self._num_flows = self._poisson()
        self._changes: list[Seconds] = [0.0]  # times at which a flow comes or goes
        self._served: list[Seconds] = [0.0]  # until each change, in seconds of an unshared link
        self._shares = [1 / (1 + self._num_flows)]

    def arrival(self, start: Seconds, unshared: Seconds) -> Seconds:
        """When a message arrives that leaves at `start` and takes `unshared` without others."""
        while self._changes[-1] <= start:
            self._extend()
        last = bisect_right(self._changes, start) - 1
        served = self._served[last] + (start - self._changes[last]) * self._shares[last]
        while self._served[-1] < served + unshared:
            self._extend()
        last = max(last, bisect_left(self._served, served + unshared) - 1)
        left = served + unshared - self._served[last]
        return max(start, self._changes[last] + left / self._shares[last])

    def _extend(self) -> None:
        """Append the next change."""
        if self._mean == 0:
            self._changes.append(2 * self._changes[-1] + self._lasting)  # the share stays 1
        else:
            weight = self._mean + self._num_flows
            self._changes.append(self._changes[-1] + self._draw.expovariate(weight / self._lasting))
            self._num_flows += 1 if self._draw.random() * weight < self._mean else -1
        passed = (self._changes[-1] - self._changes[-2]) * self._shares[-1]
        self._served.append(self._served[-1] + passed)
        self._shares.append(1 / (1 + self._num_flows))

    def _poisson(self) -> int:
        """Draw the number of flows at the start, by Knuth's product of uniform numbers."""
        count, product = 0, self._draw.random()
        while product > math.exp(-self._mean):
            count, product = count + 1, product * self._draw.random()
        return count
