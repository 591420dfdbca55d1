"""The settings of the benchmark of decoupled all-reduce, each with its sides.

The bandwidth of a setting follows from the time that its all-gather must take, by equation 4 of
DeAR for all gradients at once and a given latency.
"""

from dataclasses import dataclass, replace

from polyrhythm.run.decoupled.checks import Mode
from polyrhythm.types import Bytes, BytesPerSecond, Seconds
from reproduction.dear.ring import Ring, StepTimes

NO_SYNC, DDP, FSDP2, OURS = "alone", "ddp", "fsdp2", "ours"
# Ours, too: with a tuned bucket; inside each node first; with copies of shards at buddies.
TUNED, HIERARCHICAL, BUDDIES = "tuned", "nested", "buddies"
MIB: Bytes = 2**20
FIRST_GUESS: Bytes = 25 * MIB  # as DDP's


@dataclass(frozen=True, slots=True)
class DecoupledSide:
    """`bucket`: DDP's cap, or ours. `mode`: ours, if the bucket's size does not imply it."""

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
class DecoupledSetting:
    """`uplink`: what a host sends to other nodes shares one line; else each pair has its own."""

    name: str
    num_workers: int
    forward: Seconds
    backward: Seconds
    all_gather: Seconds
    latency: Seconds  # one way
    sides: tuple[DecoupledSide, ...]
    num_rounds: int  # of sides; also messages that measure the bandwidth
    num_layers: int
    layer_bytes: Bytes
    budget: Seconds = 70.0  # on two cores
    uplink: bool = False
    node_size: int = 1  # workers on a node; inside of it, links are fast

    @property
    def size(self) -> Bytes:
        return self.num_layers * self.layer_bytes

    @property
    def bandwidth(self) -> BytesPerSecond:
        """Bytes of gradients per second, without headers."""
        rounds = self.num_workers - 1
        return rounds * self.size / self.num_workers / (self.all_gather - rounds * self.latency)

    def has(self, *kinds: str) -> bool:
        return set(kinds) <= {side.kind for side in self.sides}

    def times(self, compute: Seconds, bandwidth: BytesPerSecond) -> StepTimes:
        """Return the step's parts for a measured `compute` (one worker's) and `bandwidth`."""
        ring = Ring(latency=self.latency, bandwidth=bandwidth)
        longer = compute / (self.forward + self.backward)  # sleeps end slightly late
        return StepTimes(
            forward=longer * self.forward,
            backward=longer * self.backward,
            reduce_scatter=ring.reduce_scatter(self.size, self.num_workers),
            all_gather=ring.all_gather(self.size, self.num_workers),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSetting:
    """The settings of the paper's Figure 5."""

    sizes: tuple[Bytes, ...]
    bandwidth: BytesPerSecond
    latency: Seconds
    num_rounds: int  # a warm-up round goes before them


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledSuite:
    settings: tuple[DecoupledSetting, ...]
    collectives: CollectiveSetting


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """Makes settings of one duration and size."""

    forward: Seconds
    num_layers: int
    layer_bytes: Bytes
    num_rounds: int
    far: Seconds = 0.020

    def baselines(
        self, caps: tuple[Bytes, ...], buckets: tuple[Bytes, ...]
    ) -> tuple[DecoupledSetting, ...]:
        """Return settings against DDP and FSDP2; DDP's caps include some that never win."""
        swept = [DecoupledSide(DDP, cap) for cap in caps] + [
            DecoupledSide(OURS, bucket) for bucket in buckets
        ]
        sides = (DecoupledSide(NO_SYNC), *swept)
        # As tuning would choose: behind a long backward, all of an all-reduce hides.
        plain = [DecoupledSide(OURS, bucket, "all_reduce") for bucket in buckets[:2]]
        far = replace(self._near("latency20_2", sides), latency=self.far)
        return (
            self._near("speed", (*sides, DecoupledSide(FSDP2))),
            # A backward of three forwards (activation checkpointing) is the worst case.
            self._near("slow_backward", (*sides, *plain), backward=3.0, all_gather=1.5),
            far,
            replace(far, name="latency20_4", num_workers=4, uplink=True),
        )

    def tuned(self, sizes: tuple[Bytes, ...], plain: tuple[Bytes, ...]) -> DecoupledSetting:
        """Return the tuned bucket against a grid of decoupled sizes and plain all-reduces."""
        grid = [DecoupledSide(OURS, size) for size in (*sizes, FIRST_GUESS)]
        grid += [DecoupledSide(OURS, size, "all_reduce") for size in plain]
        near = self._near("tuned", (DecoupledSide(NO_SYNC), DecoupledSide(TUNED), *grid))
        return replace(near, budget=105.0)

    def hierarchical(self, buckets: tuple[Bytes, ...]) -> DecoupledSetting:
        """Return two nodes of two workers, each with a line of its own to the other node.

        The lab has no line that two hosts share. Both workers of a node send the same at the same
        time, so half of the line for each is equivalent. With direct exchanges a worker sends half
        of its gradients over it: its all-gather takes two thirds of a ring's.
        """
        flat = [DecoupledSide(OURS, bucket) for bucket in buckets]
        nodes = [DecoupledSide(HIERARCHICAL, bucket, "hierarchical") for bucket in buckets]
        near = self._near("nested", (DecoupledSide(NO_SYNC), *flat, *nodes), all_gather=3.0)
        return replace(near, num_workers=4, uplink=True, node_size=2, budget=25.0)

    def _near(
        self,
        name: str,
        sides: tuple[DecoupledSide, ...],
        *,
        backward: float = 2.0,
        all_gather: float = 2.0,
    ) -> DecoupledSetting:
        """Return a setting with a short link; times are in forwards."""
        return DecoupledSetting(
            name=name,
            num_workers=2,
            forward=self.forward,
            backward=backward * self.forward,
            all_gather=all_gather * self.forward,
            latency=0.0005,
            sides=sides,
            num_rounds=self.num_rounds,
            num_layers=self.num_layers,
            layer_bytes=self.layer_bytes,
        )


_LAYER: Bytes = 3 * MIB // 8
_TINY = _Scale(forward=0.006, num_layers=4, layer_bytes=MIB // 16, num_rounds=1, far=0.002)
FULL_SUITE = DecoupledSuite(
    settings=(
        *_Scale(forward=0.2, num_layers=20, layer_bytes=_LAYER, num_rounds=4).baselines(
            caps=(_LAYER, 2 * _LAYER, 4 * _LAYER, 8 * _LAYER, 25 * MIB),
            buckets=(_LAYER, 2 * _LAYER, 4 * _LAYER),
        ),
        # 5 MB in all keep steps short: with 8 MB, buckets are as with 25. A MB and a MiB hold the
        # same number of these layers, so the grid is as fine as the tuner's sizes.
        _Scale(forward=0.1, num_layers=24, layer_bytes=200_000, num_rounds=4).tuned(
            sizes=(MIB, 2 * MIB, 4 * MIB), plain=(MIB, 4 * MIB)
        ),
        _Scale(forward=0.12, num_layers=20, layer_bytes=MIB // 8, num_rounds=3).hierarchical(
            buckets=(MIB // 4, MIB // 2)
        ),
    ),
    collectives=CollectiveSetting(
        sizes=(65_536, 262_144, MIB, 8 * MIB), bandwidth=50e6, latency=0.0002, num_rounds=3
    ),
)
QUICK_SUITE = DecoupledSuite(
    settings=(
        *_TINY.baselines(caps=(MIB // 16,), buckets=(MIB // 16,)),
        _TINY.tuned(sizes=(), plain=(FIRST_GUESS,)),
        _TINY.hierarchical(buckets=(MIB // 16,)),
    ),
    collectives=CollectiveSetting(
        sizes=(65_536, 262_144), bandwidth=50e6, latency=0.0002, num_rounds=1
    ),
)
