"""What the benchmark of decoupled all-reduce runs: settings, each with its sides.

The network of a setting follows from how long its all-gather is to take: by equation 4 of DeAR,
for all gradients at once, and a given latency.
"""

from dataclasses import dataclass, replace

from polyrhythm.cost.decoupled import Ring, StepTimes
from polyrhythm.run.decoupled.communicator import Mode
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

ALONE, DDP, FSDP2, OURS = "alone", "ddp", "fsdp2", "ours"
TUNED, NESTED = "tuned", "nested"  # ours, too: with a bucket found by itself; node by node
MIB: Bytes = 2**20
# A full TCP segment takes 1,500 bytes on the wire and carries 1,448.
OVERHEAD = 1500 / 1448
FIRST_GUESS: Bytes = 25 * MIB  # as DDP's


@dataclass(frozen=True, slots=True)
class Side:
    """`bucket`: of DDP, its cap. `mode`: of ours, where it is not what a bucket's size implies."""

    kind: str
    bucket: Bytes | None = None
    mode: Mode = "auto"

    @property
    def name(self) -> str:
        words = [self.kind]
        if self.bucket is not None:
            words.append(f"{self.bucket / MIB:g}")
        if self.mode == "all_reduce":
            words.append(self.mode)
        return " ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """`uplink`: what a host sends to other nodes shares one line; else each pair has its own."""

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
    budget: Seconds = 70.0  # on two cores, after which it comes to an end
    uplink: bool = False
    node_size: int = 1  # workers on a node; inside of it, links are fast

    @property
    def size(self) -> Bytes:
        return self.num_layers * self.layer_bytes

    @property
    def bandwidth(self) -> BytesPerSecond:
        """Of gradients: what the wire carries beside them is not counted."""
        rounds = self.num_workers - 1
        return rounds * self.size / self.num_workers / (self.all_gather - rounds * self.latency)

    def has(self, *kinds: str) -> bool:
        return set(kinds) <= {side.kind for side in self.sides}

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
    num_rounds: int
    num_steps: int = 1
    far: Seconds = 0.020

    def rivals(self, caps: tuple[Bytes, ...], buckets: tuple[Bytes, ...]) -> tuple[Setting, ...]:
        """Against DDP, which may have sizes that never win: which ones is not for us to say."""
        swept = [Side(DDP, cap) for cap in caps] + [Side(OURS, bucket) for bucket in buckets]
        sides = (Side(ALONE), *swept)
        # What tuning would find: where the backward is long, all of an all-reduce hides behind it.
        plain = [Side(OURS, bucket, "all_reduce") for bucket in buckets[:2]]
        far = replace(self._near("latency20_2", sides), latency=self.far)
        return (
            self._near("speed", (*sides, Side(FSDP2))),
            # Of a backward of three forwards (activations computed anew), the worst case.
            self._near("slow_backward", (*sides, *plain), backward=3.0, all_gather=1.5),
            far,
            replace(far, name="latency20_4", num_workers=4, uplink=True),
        )

    def tuned(self, sizes: tuple[Bytes, ...], plain: tuple[Bytes, ...]) -> Setting:
        """What tuning finds against a grid: of decoupled sizes, and of plain all-reduces."""
        grid = [Side(OURS, size) for size in (*sizes, FIRST_GUESS)]
        grid += [Side(OURS, size, "all_reduce") for size in plain]
        near = self._near("tuned", (Side(ALONE), Side(TUNED), *grid))
        return replace(near, budget=105.0)

    def nested(self, buckets: tuple[Bytes, ...]) -> Setting:
        """Two nodes of two, each worker with a line of its own to the other node.

        The lab has no line that two hosts share. Both workers of a node send the same at the same
        time, so that half of it each is much the same. With direct exchanges a worker sends half of
        its gradients over it, so that its gather takes two thirds of a ring's.
        """
        flat = [Side(OURS, bucket) for bucket in buckets]
        nested = [Side(NESTED, bucket, "hierarchical decoupled") for bucket in buckets]
        near = self._near("nested", (Side(ALONE), *flat, *nested), all_gather=3.0)
        return replace(near, num_workers=4, uplink=True, node_size=2, budget=25.0)

    def _near(
        self,
        name: str,
        sides: tuple[Side, ...],
        *,
        backward: float = 2.0,
        all_gather: float = 2.0,
    ) -> Setting:
        """Times in forwards."""
        return Setting(
            name=name,
            num_workers=2,
            forward=self.forward,
            backward=backward * self.forward,
            all_gather=all_gather * self.forward,
            latency=0.0005,
            sides=sides,
            num_rounds=self.num_rounds,
            num_steps=self.num_steps,
            num_layers=self.num_layers,
            layer_bytes=self.layer_bytes,
        )


_LAYER: Bytes = 3 * MIB // 8
_TINY = _Scale(forward=0.006, num_layers=4, layer_bytes=MIB // 16, num_rounds=1, far=0.002)
FULL_PLAN = Plan(
    settings=(
        *_Scale(forward=0.2, num_layers=20, layer_bytes=_LAYER, num_rounds=4).rivals(
            caps=(_LAYER, 2 * _LAYER, 4 * _LAYER, 8 * _LAYER, 25 * MIB),
            buckets=(_LAYER, 2 * _LAYER, 4 * _LAYER),
        ),
        # Of 5 MB in all, so that steps are short: with 8 MB, buckets are as with 25. Layers that a
        # MB and a MiB hold equally many of: a grid as fine as the tuner's sizes may be.
        _Scale(forward=0.1, num_layers=24, layer_bytes=200_000, num_rounds=4).tuned(
            sizes=(MIB, 2 * MIB, 4 * MIB), plain=(MIB, 4 * MIB)
        ),
        _Scale(forward=0.12, num_layers=20, layer_bytes=MIB // 8, num_rounds=3).nested(
            buckets=(MIB // 4, MIB // 2)
        ),
    ),
    halves=HalvesPlan(
        sizes=(65_536, 262_144, MIB, 8 * MIB),
        bandwidth=50e6,
        latency=0.0002,
        num_rounds=3,
    ),
)
QUICK_PLAN = Plan(
    settings=(
        *_TINY.rivals(caps=(MIB // 16,), buckets=(MIB // 16,)),
        _TINY.tuned(sizes=(), plain=(FIRST_GUESS,)),
        _TINY.nested(buckets=(MIB // 16,)),
    ),
    halves=HalvesPlan(sizes=(65_536, 262_144), bandwidth=50e6, latency=0.0002, num_rounds=1),
)
