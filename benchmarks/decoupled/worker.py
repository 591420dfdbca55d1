"""One process of the benchmark, on a host of the lab, doing what it is told."""

from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo  # before the fork: it takes a second
import torch.distributed as dist

from benchmarks.decoupled.collectives import measure_halves, message_time
from benchmarks.decoupled.settings import DDP, NESTED, OURS, TUNED, HalvesPlan, Setting, Side
from benchmarks.decoupled.training import DEADLINE, Training
from benchmarks.decoupled.uplink import set_uplink
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

_PORT = 29500
# DDP and ours put buckets in order after the first step: from the third on, all are alike.
NUM_WARM_UP = 2
_EQUAL = (DDP, OURS, NESTED)  # whose weights are the same after as many steps


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make all sides of a setting. Answer: state of AdamW in bytes, by kind of side."""

    setting: Setting


@dataclass(frozen=True, slots=True)
class SetUplink:
    """For what goes to the addresses of its own rank."""

    bandwidth: BytesPerSecond | None
    targets: tuple[tuple[str, ...], ...]  # by rank


@dataclass(frozen=True, slots=True)
class Run:
    """Answer: when each step ended."""

    side: Side
    num_steps: int


@dataclass(frozen=True, slots=True)
class Tune:
    """Train until the optimizer is tuned. Answer: its candidate after each step."""

    side: Side


@dataclass(frozen=True, slots=True)
class Compare:
    """Answer: the largest difference of weights from the first side's, after as many steps."""


@dataclass(frozen=True, slots=True)
class TimeMessages:
    """Answer: seconds of so many messages of each size."""

    sizes: tuple[Bytes, ...]
    num_messages: int
    latency: Seconds


@dataclass(frozen=True, slots=True)
class MeasureHalves:
    """Answer: rows."""

    plan: HalvesPlan


Order = Prepare | SetUplink | Run | Tune | Compare | TimeMessages | MeasureHalves


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
            case SetUplink(bandwidth, targets):
                return set_uplink(bandwidth, targets[dist.get_rank()])
            case Run(side, num_steps):
                dist.barrier()
                return self._made[side].run(num_steps)
            case Tune(side):
                dist.barrier()
                return self._made[side].tune()
            case Compare():
                return self._difference()
            case TimeMessages(sizes, num_messages, latency):
                return [
                    [message_time(size, latency) for _ in range(num_messages)] for size in sizes
                ]
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
            if side.kind != TUNED:  # which would take the time of these steps for its own
                training.run(NUM_WARM_UP, paced=False)
        return {kind: _adam_bytes(setting, kind) for kind in (DDP, OURS)}

    def _difference(self) -> float:
        compared = [t for side, t in self._made.items() if side.kind in _EQUAL]
        return max(training.difference(compared[0]) for training in compared)


def _adam_bytes(setting: Setting, kind: str) -> Bytes:
    training = Training(setting, Side(kind, setting.layer_bytes), has_adam=True)
    training.run(1, paced=False)
    found = training.state_bytes()
    dist.barrier()
    training.close()
    return found
