"""The three platforms of section 6.1 in numbers, and what is known about their speed.

A device computes at the rate that was published for training of that kind on it, whatever the size
of a micro-batch. What a micro-batch costs beyond its samples is adding its gradients to the sum:
two reads and a write of each, at the speed of the device's memory.
"""

from dataclasses import dataclass

from polyrhythm.types import BytesPerSecond, Seconds

# Shoeybi et al., arXiv:1909.08053, section 5: 39 TFLOPS of a V100, 30 % of its peak, with GPT.
_FLOAT16_SHARE = 0.3
# NVIDIA DeepLearningExamples, ResNet-50 v1.5, V100 32 GB, float32: 356 images/s, of 24.5 GFLOP each
# (forward and backward), are 8.7 of 15.7 TFLOPS.
_FLOAT32_SHARE = 0.56


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    name: str
    float16_peak: float  # operations per second, by data sheet
    float32_peak: float
    memory_bandwidth: BytesPerSecond
    bandwidth: BytesPerSecond  # of the network, one direction
    latency: Seconds
    other_flows: float  # on a link, on average

    def rate(self, dtype: str) -> float:
        """Operations per second, in training."""
        if dtype == "float16":
            return _FLOAT16_SHARE * self.float16_peak
        return _FLOAT32_SHARE * self.float32_peak


# Each reason for preemption that section 6.1 names brings one other flow: the network is shared
# with production jobs (S1, M8s), the machine is shared with other workers (C1x, M8s).
C1X = Platform(
    name="C1x",
    float16_peak=125e12,
    float32_peak=15.7e12,
    memory_bandwidth=900e9,
    bandwidth=25e9 / 8,
    latency=50e-6,
    other_flows=1.0,
)
S1 = Platform(
    name="S1",
    float16_peak=130e12,
    float32_peak=16.4e12,
    memory_bandwidth=1134e9,
    bandwidth=100e9 / 8,
    latency=20e-6,
    other_flows=1.0,
)
M8S = Platform(
    name="M8s",
    float16_peak=125e12,
    float32_peak=15.7e12,
    memory_bandwidth=900e9,
    bandwidth=100e9 / 8,
    latency=20e-6,
    other_flows=2.0,
)
PLATFORMS = (C1X, S1, M8S)

BUSY_FLOWS = 3.0  # on a link of S1 when the network is busy (Rounds 3 and 5, and most of Fig. 10)
