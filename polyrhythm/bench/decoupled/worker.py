"""One process of the benchmark, on a host of the lab, doing what it is told."""

from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo  # before the fork: it takes a second
import torch.distributed as dist

from polyrhythm.bench.decoupled.collectives import measure_halves, message_rate
from polyrhythm.bench.decoupled.settings import DDP, OURS, HalvesPlan, Setting, Side
from polyrhythm.bench.decoupled.training import DEADLINE, Training
from polyrhythm.bench.decoupled.uplink import set_uplink
from polyrhythm.types import Bytes, BytesPerSecond

_PORT = 29500
# DDP and ours put buckets in order after the first step: from the third on, all are alike.
NUM_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make all sides of a setting. Answer: state of AdamW in bytes, by kind of side."""

    setting: Setting


@dataclass(frozen=True, slots=True)
class SetUplink:
    bandwidth: BytesPerSecond | None


@dataclass(frozen=True, slots=True)
class Run:
    """Answer: when each step ended."""

    side: Side
    num_steps: int


@dataclass(frozen=True, slots=True)
class Compare:
    """Answer: the largest difference of weights from the first DDP's, after as many steps."""


@dataclass(frozen=True, slots=True)
class MeasureRate:
    """Answer: bytes per second of a message of this size."""

    size: Bytes


@dataclass(frozen=True, slots=True)
class MeasureHalves:
    """Answer: rows."""

    plan: HalvesPlan


Order = Prepare | SetUplink | Run | Compare | MeasureRate | MeasureHalves


def work(rank: int, num_workers: int, master: str, orders: Connection) -> None:
    """Serve orders until there are no more."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{master}:{_PORT}",
        rank=rank,
        world_size=num_workers,
        timeout=timedelta(seconds=DEADLINE),
    )
    sides = _Sides()
    orders.send("here")
    while (order := orders.recv()) is not None:
        orders.send(sides.obey(order))
    sides.close()
    dist.barrier()
    dist.destroy_process_group()


class _Sides:
    """Those of the present setting."""

    def __init__(self) -> None:
        self._made: dict[Side, Training] = {}

    def obey(self, order: Order) -> Any:
        match order:
            case Prepare(setting):
                return self._prepare(setting)
            case SetUplink(bandwidth):
                return set_uplink(bandwidth)
            case Run(side, num_steps):
                dist.barrier()
                return self._made[side].run(num_steps)
            case Compare():
                return self._difference()
            case MeasureRate(size):
                return message_rate(size)
            case MeasureHalves(plan):
                return measure_halves(plan)

    def close(self) -> None:
        dist.barrier()
        for training in self._made.values():
            training.close()
        self._made.clear()

    def _prepare(self, setting: Setting) -> dict[str, Bytes]:
        self.close()
        for side in setting.sides:
            training = self._made[side] = Training(setting, side)
            training.run(NUM_WARM_UP, paced=False)
        return {kind: _adam_bytes(setting, kind) for kind in (DDP, OURS)}

    def _difference(self) -> float:
        compared = [t for side, t in self._made.items() if side.kind in (DDP, OURS)]
        return max(training.difference(compared[0]) for training in compared)


def _adam_bytes(setting: Setting, kind: str) -> Bytes:
    training = Training(setting, Side(kind, setting.layer_bytes), has_adam=True)
    training.run(1, paced=False)
    found = training.state_bytes()
    dist.barrier()
    training.close()
    return found
