"""What was measured of a setting: steps of its sides, round by round, and what they amount to."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.decoupled.settings import ALONE, Setting
from polyrhythm.cost.decoupled import Ring, StepTimes
from polyrhythm.sync.fusion.layers import LayerTimes, by_bytes
from polyrhythm.sync.fusion.timeline import dear
from polyrhythm.sync.fusion.tuner import BucketCandidate
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

_STOLEN = 0.04  # of all cores' time: more of it, and a step that sleeps takes visibly longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Steps of one side in one round."""

    setting: str
    side: str
    kind: str
    round: int
    seconds: Seconds  # of a step
    wire_bytes: float  # that all workers together sent in a step, headers counted
    stolen: float  # share of the cores' time that the machine's host gave to others meanwhile
    trouble: str | None  # why the emulated network was no good meanwhile, if it was not

    @property
    def doubt(self) -> str | None:
        """Why not to trust it; None if it can be."""
        if self.stolen > _STOLEN:
            return f"the host took {self.stolen:.0%} of the cores' time"
        return self.trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What tuning settled on, and after how many trials."""

    found: BucketCandidate
    num_trials: int

    @classmethod
    def of(cls, candidates: Sequence[BucketCandidate], first: BucketCandidate) -> "Tuned":
        """From the candidate after each step until it was tuned; all trials have as many steps.

        The second one tries something else, so that the first change tells how many.
        """
        num_steps = next(
            (n for n, candidate in enumerate(candidates, 1) if candidate != first), len(candidates)
        )
        return cls(found=candidates[-1], num_trials=round(len(candidates) / num_steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    setting: Setting
    rows: tuple[Row, ...]
    goodput: BytesPerSecond  # of a plain message
    state: float  # of AdamW, ours over DDP's, on the worker that has most
    difference: float  # of weights between sides, after the first round
    tuned: Tuned | None = None  # of a setting with a side that tunes itself

    @property
    def times(self) -> StepTimes:
        """For the paper's bounds."""
        return self.setting.times(self.seconds(ALONE), self.goodput)

    def layered(self, bucket: Bytes) -> Seconds:
        """The bound of a decoupled step whose layers wait for their own buckets.

        Without latency: messages that are on their way together share it.
        """
        setting, times = self.setting, self.times
        layer = LayerTimes(
            size=setting.layer_bytes,
            forward=times.forward / setting.num_layers,
            backward=times.backward / setting.num_layers,
        )
        layers = [layer] * setting.num_layers
        buckets = by_bytes([layer.size] * setting.num_layers, bucket)
        ring = Ring(latency=0.0, bandwidth=self.goodput)
        return dear(layers, buckets, ring, setting.num_workers).seconds

    def best(self, kind: str) -> str:
        """The side of this kind that takes least: the median over rounds, of those in all."""
        rows = [row for row in self.rows if row.kind == kind]
        last = max(row.round for row in rows)
        return min((row.side for row in rows if row.round == last), key=self.seconds)

    def seconds(self, side: str) -> Seconds:
        return statistics.median(r.seconds for r in self.rows if r.side == side)

    def wire_bytes(self, side: str) -> float:
        return statistics.median(r.wire_bytes for r in self.rows if r.side == side)

    def ratio(self, kind: str, to: str) -> float:
        """How many times longer the best of a kind takes: the median over rounds of both."""
        return self.side_ratio(self.best(kind), self.best(to))

    def side_ratio(self, side: str, to: str) -> float:
        one, other = ({r.round: r.seconds for r in self.rows if r.side == s} for s in (side, to))
        return statistics.median(one[n] / other[n] for n in one.keys() & other.keys())


def goodput(
    sizes: tuple[Bytes, Bytes],
    small: Sequence[Seconds],
    large: Sequence[Seconds],
    *,
    most: BytesPerSecond,
) -> BytesPerSecond:
    """Of messages of two sizes: what one takes whatever its size is not counted.

    By the fastest of each: noise only adds, and TCP finds the bandwidth by and by. Never more than
    there is, which noise in the small ones would give.
    """
    longer = min(large) - min(small)
    rate = (sizes[1] - sizes[0]) / longer if longer > 0 else math.inf
    return min(rate, most)
