"""What copies of shards at buddies cost: steps of `decoupled` with them / without, in the lab.

Four replicas on hosts of the lab, each with one line for all that it sends. Its bandwidth follows
from the size of the model and from how long the exchange must take, so that the ratio of compute to
communication does not depend on the machine. Both sides are in the same processes and take turns.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.decoupled.rounds import DecoupledPool, MeasuredSetting, cluster, measure
from benchmarks.decoupled.settings import (
    BUDDIES,
    MIB,
    NO_SYNC,
    OURS,
    DecoupledSetting,
    DecoupledSide,
)
from polyrhythm.lab.lab import Lab
from polyrhythm.types import Bytes, Seconds

_NUM_REPLICAS = 4
NETWORK_BOUND, COMPUTE_BOUND = "network-bound", "compute = 2 x communication"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuddyCost:
    """Steps of one setting: medians over rounds."""

    setting: str
    alone: Seconds  # without communication
    without: Seconds
    buddies: Seconds
    ratio: float  # of steps with and without copies, by rounds
    traffic: float  # the same of all bytes sent
    doubts: tuple[str, ...] = ()  # why it cannot be trusted


def buddy_costs(*, quick: bool) -> dict[str, BuddyCost]:
    """Measure both settings, by name."""
    with Lab(cluster(_NUM_REPLICAS)) as lab, DecoupledPool(lab) as pool:
        return {setting.name: _cost(pool, setting) for setting in settings(quick=quick)}


def settings(*, quick: bool) -> tuple[DecoupledSetting, ...]:
    """Return the settings: little compute, and twice as much compute as communication."""
    exchange = 0.02 if quick else 0.6
    return (
        _setting(NETWORK_BOUND, exchange / 20, exchange, quick=quick),
        _setting(COMPUTE_BOUND, 2 * exchange / 1.5, exchange / 1.5, quick=quick),
    )


def _setting(name: str, compute: Seconds, exchange: Seconds, *, quick: bool) -> DecoupledSetting:
    """`exchange`: of a reduce-scatter and an all-gather of all buckets."""
    num_layers, layer_bytes = (4, MIB // 16) if quick else (20, MIB // 8)
    bucket: Bytes = 2 * layer_bytes
    return DecoupledSetting(
        name=name,
        num_workers=_NUM_REPLICAS,
        forward=compute / 3,
        backward=2 * compute / 3,
        all_gather=exchange / 2,
        latency=0.0005,
        sides=(DecoupledSide(NO_SYNC), DecoupledSide(OURS, bucket), DecoupledSide(BUDDIES, bucket)),
        num_rounds=1 if quick else 5,
        num_layers=num_layers,
        layer_bytes=layer_bytes,
        uplink=True,
    )


def _cost(pool: DecoupledPool, setting: DecoupledSetting) -> BuddyCost:
    found = measure(pool, setting)
    names: Mapping[str, str] = {side.kind: side.name for side in setting.sides}
    return BuddyCost(
        setting=setting.name,
        alone=found.seconds(names[NO_SYNC]),
        without=found.seconds(names[OURS]),
        buddies=found.seconds(names[BUDDIES]),
        ratio=found.ratio(BUDDIES, OURS),
        traffic=found.wire_bytes(names[BUDDIES]) / found.wire_bytes(names[OURS]),
        doubts=doubts_of(found),
    )


def doubts_of(found: MeasuredSetting) -> tuple[str, ...]:
    """Return why the steps of a setting cannot be trusted, or are not those of equal training."""
    doubts = [row.doubt for row in found.rows if row.doubt is not None]
    if found.difference != 0:  # nan, too
        doubts.append(f"weights with and without copies differ by {found.difference:g}")
    return tuple(doubts)
