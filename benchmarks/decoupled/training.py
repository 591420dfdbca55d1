"""One side of the benchmark in one process: the same layers under DDP, FSDP2 or decoupled."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.decoupled.layers import Layers
from benchmarks.decoupled.settings import DDP, FSDP2, MIB, NESTED, OURS, TUNED, Setting, Side
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
from polyrhythm.sync.fusion.tuner import BucketCandidate
from polyrhythm.types import Bytes, Seconds

DEADLINE: Seconds = 60.0  # of any wait for another process


class Training:
    """Made by all workers together. `has_adam`: AdamW in place of SGD with momentum."""

    def __init__(self, setting: Setting, side: Side, *, has_adam: bool = False) -> None:
        self.side, self._setting = side, setting
        self.layers = Layers(setting.num_layers, setting.layer_bytes, dist.get_rank())
        self._model: nn.Module = self.layers
        if side.kind == DDP:
            assert side.bucket is not None, "DDP has a cap"
            cap = side.bucket / MIB
            self._model = DistributedDataParallel(self.layers, bucket_cap_mb=cap)
        elif side.kind == FSDP2:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in self.layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=False)
            fully_shard(self.layers, mesh=mesh, reshard_after_forward=False)
        self.optimizer = _optimizer(self.layers.parameters(), has_adam=has_adam)
        if side.kind in (OURS, NESTED, TUNED):
            self.optimizer = DistributedOptimizer(
                self.optimizer,
                self.layers,
                side.bucket or "auto",
                mode=side.mode,
                node=f"node {dist.get_rank() // setting.node_size}",
                timeout=DEADLINE,
            )

    def run(self, num_steps: int, *, paced: bool = True) -> list[Seconds]:
        """When each step ended, of time.monotonic(); all that was sent has arrived afterwards."""
        if paced:
            self.layers.set_pace(self._setting.forward, self._setting.backward)
        else:
            self.layers.set_pace(0.0, 0.0)
        ends = []
        for _ in range(num_steps):
            self._step()
            ends.append(time.monotonic())
        if isinstance(self.optimizer, DistributedOptimizer):
            self.optimizer.synchronize()
        return ends

    def tune(self) -> list[BucketCandidate]:
        """What the optimizer has changed to, or has not, after each step until it is tuned."""
        assert isinstance(self.optimizer, DistributedOptimizer), "no other tunes itself"
        self.layers.set_pace(self._setting.forward, self._setting.backward)
        candidates = []
        while not self.optimizer.is_tuned:
            self._step()
            candidates.append(self.optimizer.candidate)
        self.optimizer.synchronize()
        return candidates

    def _step(self) -> None:
        self._model(torch.ones(4, requires_grad=True)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def difference(self, other: "Training") -> float:
        """The largest between two weights."""
        pairs = zip(self.layers.parameters(), other.layers.parameters(), strict=True)
        return max((mine - its).abs().max().item() for mine, its in pairs)

    def state_bytes(self) -> Bytes:
        """Of the optimizer, on this worker."""
        states: Iterable[Mapping[str, Any]] = self.optimizer.state.values()
        return sum(v.nbytes for of in states for v in of.values() if isinstance(v, Tensor))

    def close(self) -> None:
        """When all workers are done: until then they may need what this one has sent."""
        if isinstance(self.optimizer, DistributedOptimizer):
            self.optimizer.close()


def _optimizer(parameters: Iterable[nn.Parameter], *, has_adam: bool) -> Optimizer:
    if has_adam:
        return AdamW(parameters, lr=1e-3)
    return SGD(parameters, lr=0.01, momentum=0.9)
