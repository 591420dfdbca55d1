"""What the benchmark of decoupled all-reduce runs: settings, each with its sides.

The network of a setting follows from how long its all-gather is to take: by equation 4 of DeAR,
for all gradients at once, and a given latency.
"""

from dataclasses import dataclass, replace

from polyrhythm.cost.decoupled import Ring, StepTimes
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

ALONE, DDP, FSDP2, OURS = "alone", "ddp", "fsdp2", "ours"
MIB: Bytes = 2**20
# A full TCP segment takes 1,500 bytes on the wire and carries 1,448.
OVERHEAD = 1500 / 1448


@dataclass(frozen=True, slots=True)
class Side:
    """`bucket`: of DDP, its cap."""

    kind: str
    bucket: Bytes | None = None

    @property
    def name(self) -> str:
        return self.kind if self.bucket is None else f"{self.kind} {self.bucket / MIB:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """`uplink`: what a host sends to all others shares one line; else each pair has its own."""

    name: str
    num_workers: int
    forward: Seconds
    backward: Seconds
    all_gather: Seconds
    latency: Seconds  # one way
    sides: tuple[Side, ...]
    num_rounds: int  # of sides, and of messages for the bandwidth before them
    num_steps: int  # of a side in a round, that count
    num_layers: int
    layer_bytes: Bytes
    uplink: bool = False

    @property
    def size(self) -> Bytes:
        return self.num_layers * self.layer_bytes

    @property
    def bandwidth(self) -> BytesPerSecond:
        """Of gradients: what the wire carries beside them is not counted."""
        rounds = self.num_workers - 1
        return rounds * self.size / self.num_workers / (self.all_gather - rounds * self.latency)

    def times(self, compute: Seconds, bandwidth: BytesPerSecond) -> StepTimes:
        """Of a forward and backward of one worker, and a bandwidth, as they were measured."""
        ring = Ring(latency=self.latency, bandwidth=bandwidth)
        longer = compute / (self.forward + self.backward)  # no sleep ends in time
        return StepTimes(
            forward=longer * self.forward,
            backward=longer * self.backward,
            reduce_scatter=ring.reduce_scatter(self.size, self.num_workers),
            all_gather=ring.all_gather(self.size, self.num_workers),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvesPlan:
    """Of the paper's Figure 5."""

    sizes: tuple[Bytes, ...]
    bandwidth: BytesPerSecond
    latency: Seconds
    num_rounds: int  # one more goes before them, which does not count


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    settings: tuple[Setting, ...]
    halves: HalvesPlan

    @property
    def worker_counts(self) -> list[int]:
        return sorted({setting.num_workers for setting in self.settings})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """How long and how large everything is."""

    forward: Seconds
    num_layers: int
    layer_bytes: Bytes
    buckets: tuple[int, ...]  # in layers
    num_rounds: int
    num_steps: int

    def settings(self) -> tuple[Setting, ...]:
        return (
            self._near("speed", backward=2.0, all_gather=2.0, others=(Side(FSDP2),)),
            # Of a backward of three forwards (activations computed anew), the worst case.
            self._near("slow_backward", backward=3.0, all_gather=1.5),
            self._far("latency20_2", num_workers=2),
            self._far("latency20_4", num_workers=4),
        )

    def _near(
        self, name: str, *, backward: float, all_gather: float, others: tuple[Side, ...] = ()
    ) -> Setting:
        """Times in forwards."""
        return Setting(
            name=name,
            num_workers=2,
            forward=self.forward,
            backward=backward * self.forward,
            all_gather=all_gather * self.forward,
            latency=0.0005,
            sides=(*self._sides(), *others),
            num_rounds=self.num_rounds,
            num_steps=self.num_steps,
            num_layers=self.num_layers,
            layer_bytes=self.layer_bytes,
        )

    def _far(self, name: str, *, num_workers: int) -> Setting:
        near = self._near(name, backward=2.0, all_gather=2.0)
        return replace(near, num_workers=num_workers, latency=0.020, uplink=num_workers > 2)

    def _sides(self) -> list[Side]:
        swept = [Side(kind, n * self.layer_bytes) for n in self.buckets for kind in (DDP, OURS)]
        return [Side(ALONE), *swept]


FULL_PLAN = Plan(
    settings=_Scale(
        forward=0.24,
        num_layers=20,
        layer_bytes=MIB // 2,
        buckets=(1, 2, 4, 8, 50),
        num_rounds=3,
        num_steps=2,
    ).settings(),
    halves=HalvesPlan(
        sizes=(65_536, 262_144, MIB, 4 * MIB, 16 * MIB),
        bandwidth=50e6,
        latency=0.0002,
        num_rounds=5,
    ),
)
QUICK_PLAN = Plan(
    settings=_Scale(
        forward=0.04,
        num_layers=4,
        layer_bytes=MIB // 8,
        buckets=(1,),
        num_rounds=1,
        num_steps=1,
    ).settings(),
    halves=HalvesPlan(sizes=(65_536, 262_144), bandwidth=50e6, latency=0.0002, num_rounds=1),
)
