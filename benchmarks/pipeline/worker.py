"""One stage of the benchmarked pipelines, on a host of the lab, doing what it is told.

The same stage (a sleep in place of compute) runs under torch's Schedule1F1B and under our pipeline:
what differs is the executor and the schedule.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo  # before the fork: it takes a second
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.types import Seconds

_DEADLINE: Seconds = 60.0
_PORT = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What every stage does: `backward` takes twice as long as `forward`."""

    num_microbatches: int
    num_floats: int  # of a message

    @property
    def message_bytes(self) -> int:
        return 4 * self.num_floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Run one step under a side; `anew`: make the side again first, as it is at the start."""

    side: str  # torch, auto, or a schedule of ours
    forward: Seconds
    anew: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    seconds: Seconds  # from the moment all were ready until all were done
    spec: str
    peak_in_flight: int


class _Sleep(torch.autograd.Function):
    """The compute of a stage that uses no core: forward and backward are sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: "SleepingStage") -> Tensor:
        ctx.stage = stage
        time.sleep(stage.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.stage.seconds)
        return gradients[0], None


class SleepingStage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seconds: Seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = _Sleep.apply(x * self.weight, self)  # type: ignore[no-untyped-call]
        return slept


def work(rank: int, num_stages: int, master: str, load: Load, orders: Connection) -> None:
    """Serve orders until there are no more."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{master}:{_PORT}",
        rank=rank,
        world_size=num_stages,
        timeout=timedelta(seconds=_DEADLINE),
    )
    sides = _Sides(load)
    orders.send("ready")
    while (order := orders.recv()) is not None:
        orders.send(sides.run(order))
    sides.close()
    dist.barrier()
    dist.destroy_process_group()


class _Sides:
    """Every side with a stage of its own, made when it is first asked for."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._made: dict[str, tuple[SleepingStage, Any]] = {}
        self._batch = torch.ones(load.num_microbatches, load.num_floats)

    def run(self, order: Order) -> Answer:
        stage, pipeline = self._side(order.side, anew=order.anew)
        stage.seconds = order.forward
        arguments = (self._batch,) if dist.get_rank() == 0 else ()
        last = dist.get_rank() == dist.get_world_size() - 1
        dist.barrier()
        start = time.perf_counter()
        pipeline.step(*arguments, target=self._batch if last else None, return_outputs=False)
        dist.barrier()
        seconds = time.perf_counter() - start
        if not isinstance(pipeline, Pipeline):
            return Answer(seconds=seconds, spec="torch", peak_in_flight=0)
        return Answer(
            seconds=seconds,
            spec=str(pipeline.last_spec),
            peak_in_flight=pipeline.peak_in_flight,
        )

    def close(self) -> None:
        for _, pipeline in self._made.values():
            if isinstance(pipeline, Pipeline):
                pipeline.close()

    def _side(self, name: str, *, anew: bool) -> tuple[SleepingStage, Any]:
        if anew and name in self._made and isinstance(self._made[name][1], Pipeline):
            self._made.pop(name)[1].close()
        if name not in self._made:
            stage = SleepingStage()
            make: Callable[[str, SleepingStage], Any] = (
                self._torch if name == "torch" else self._own
            )
            self._made[name] = stage, make(name, stage)
        return self._made[name]

    def _torch(self, name: str, stage: SleepingStage) -> Schedule1F1B:
        rank, num_stages = dist.get_rank(), dist.get_world_size()
        wrapped = PipelineStage(stage, rank, num_stages, torch.device("cpu"))
        return Schedule1F1B(wrapped, self._load.num_microbatches, loss_fn=_loss)

    def _own(self, name: str, stage: SleepingStage) -> Pipeline:
        return Pipeline(
            stage,
            loss_fn=_loss,
            num_microbatches=self._load.num_microbatches,
            schedule=name,
            timeout=_DEADLINE,
        )


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()
