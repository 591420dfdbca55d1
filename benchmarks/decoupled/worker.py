"""One worker of the benchmark: the same emulated layers under DDP, FSDP2 or DistributedOptimizer.

Layers have real weights and gradients. The weights that a forward saw and the rank go into the
gradient: a side that computes with weights that have not arrived yet, or averages wrongly, ends
with other weights.
"""

import ipaddress
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo  # before the fork: it takes a second
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from benchmarks.decoupled.collectives import message_time, time_collectives
from benchmarks.decoupled.settings import (
    BUDDIES,
    DDP,
    FSDP2,
    HIERARCHICAL,
    MIB,
    OURS,
    TUNED,
    DecoupledSetting,
    DecoupledSide,
)
from benchmarks.harness.compute import EmulatedCompute, EmulatedLayer
from benchmarks.harness.pool import TIMEOUT, PoolWorker
from polyrhythm.errors import LabError
from polyrhythm.lab.namespace import DEVICE
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
from polyrhythm.sync.fusion.tuner import BucketCandidate
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

# DDP and ours order their buckets after the first step: from the third on, all steps are alike.
_NUM_WARM_UP = 2
_EQUAL = (
    DDP,
    OURS,
    HIERARCHICAL,
    BUDDIES,
)  # kinds with equal weights after the same number of steps

_QUEUE, _LINE = 0x10000, 0x10001  # 1: and 1:1; traffic that no filter sends to 1:1 is not limited
_BURST = 70_000  # bytes: a packet of 64 KB passes in one piece
_IPV4 = 0x0800
_TARGET = 16  # offset of the target address in a header


def work(worker: PoolWorker) -> None:
    torch.set_num_threads(1)
    with worker.process_group():
        sides = _Sides()
        worker.serve(sides)
        sides.close()


class _Sides:
    """The sides of the present setting; the driver calls the public methods."""

    time_collectives = staticmethod(time_collectives)

    def __init__(self) -> None:
        self._made: dict[DecoupledSide, DecoupledTraining] = {}

    def prepare(self, setting: DecoupledSetting) -> dict[str, Bytes]:
        """Make all sides of a setting; return the bytes of AdamW's state by kind of side."""
        self.close()
        for side in setting.sides:
            training = self._made[side] = DecoupledTraining(setting, side)
            if side.kind != TUNED:  # its tuner would count the time of these steps
                training.run(_NUM_WARM_UP, emulated=False)
        return {kind: _adam_bytes(setting, kind) for kind in (DDP, OURS)}

    def set_uplink(
        self, bandwidth: BytesPerSecond | None, targets: Sequence[Sequence[str]]
    ) -> None:
        """Share one line among all that this host sends to its `targets`; None removes the line.

        The lab gives each pair of hosts a line of its own: a worker that sends to three others at
        the same time would have three times the bandwidth of one in a ring, which sends to its
        neighbour alone. With an uplink both have the same, as in the paper's equations.
        """
        from pyroute2 import IPRoute, NetlinkError  # type: ignore[import-untyped]

        with IPRoute() as netlink:
            (device,) = netlink.link_lookup(ifname=DEVICE)
            if any(q.get_attr("TCA_KIND") == "htb" for q in netlink.get_qdiscs(device)):
                netlink.tc("del", "htb", device, _QUEUE)
            if bandwidth is None:
                return
            limits = {"rate": round(bandwidth), "burst": _BURST, "cburst": _BURST}
            try:
                netlink.tc("add", "htb", device, _QUEUE, default=0)
                netlink.tc("add-class", "htb", device, _LINE, parent=_QUEUE, **limits)
                for target in targets[dist.get_rank()]:
                    key = f"{int(ipaddress.IPv4Address(target)):#010x}/0xffffffff+{_TARGET}"
                    to_line = {"protocol": _IPV4, "prio": 1, "target": _LINE, "keys": [key]}
                    netlink.tc("add-filter", "u32", device, parent=_QUEUE, **to_line)
            except NetlinkError as error:
                raise LabError(
                    f"limiting what a host sends: {error}",
                    expected="a kernel with hierarchical token buckets and the u32 classifier",
                    fix="modprobe sch_htb cls_u32, as root",
                ) from None

    def run(self, side: DecoupledSide, num_steps: int) -> list[Seconds]:
        """Return when each step ended."""
        dist.barrier()
        return self._made[side].run(num_steps)

    def tune(self, side: DecoupledSide) -> list[BucketCandidate]:
        """Train until the optimizer is tuned; return its candidate after each step."""
        dist.barrier()
        return self._made[side].tune()

    def max_difference(self) -> float:
        """Return the largest difference of weights from those of the first side."""
        compared = [t for side, t in self._made.items() if side.kind in _EQUAL]
        return max(training.difference(compared[0]) for training in compared)

    def time_messages(
        self, sizes: Sequence[Bytes], num_messages: int, latency: Seconds
    ) -> list[list[Seconds]]:
        return [[message_time(size, latency) for _ in range(num_messages)] for size in sizes]

    def close(self) -> None:
        dist.barrier()
        for training in self._made.values():
            training.close()
        self._made.clear()


class _Layer(EmulatedLayer):
    def gradient_fn(self, weight: Tensor) -> Callable[[], Tensor | None]:
        seen, version, scale = weight.square().mean(), weight._version, 1 + 0.1 * dist.get_rank()

        def gradient() -> Tensor:
            assert weight._version == version, "nothing writes weights from forward to backward"
            return weight * scale + seen

        return gradient


class DecoupledTraining:
    """One side in one process; all workers make it together."""

    def __init__(
        self, setting: DecoupledSetting, side: DecoupledSide, *, has_adam: bool = False
    ) -> None:
        """`has_adam`: AdamW in place of SGD with momentum."""
        self._setting, self._compute = setting, EmulatedCompute(start=0.0)
        self._layers = nn.Sequential(
            *(
                _Layer(torch.linspace(-1.0, 1.0, setting.layer_bytes // 4), self._compute)
                for _ in range(setting.num_layers)
            )
        )
        self._model: nn.Module = self._layers
        if side.kind == DDP:
            assert side.bucket is not None, "DDP has a cap"
            cap = side.bucket / MIB
            self._model = DistributedDataParallel(self._layers, bucket_cap_mb=cap)
        elif side.kind == FSDP2:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for module in (*self._layers, self._layers):
                fully_shard(module, mesh=mesh, reshard_after_forward=False)
        parameters = self._layers.parameters()
        self._optimizer: torch.optim.Optimizer = (
            AdamW(parameters, lr=1e-3) if has_adam else SGD(parameters, lr=0.01, momentum=0.9)
        )
        if side.kind in (OURS, HIERARCHICAL, TUNED, BUDDIES):
            self._optimizer = DistributedOptimizer(
                self._optimizer,
                self._layers,
                side.bucket or "auto",
                mode=side.mode,
                node=f"node {dist.get_rank() // setting.node_size}",
                buddy=side.kind == BUDDIES,
                timeout=TIMEOUT,
            )

    def run(self, num_steps: int, *, emulated: bool = True) -> list[Seconds]:
        """Return when each step ended, on time.monotonic(); afterwards no message is in flight."""
        self._emulate(1 if emulated else 0)
        ends = []
        for _ in range(num_steps):
            self._step()
            ends.append(time.monotonic())
        if isinstance(self._optimizer, DistributedOptimizer):
            self._optimizer.synchronize()
        return ends

    def tune(self) -> list[BucketCandidate]:
        """Return the optimizer's candidate after each step until it is tuned."""
        assert isinstance(self._optimizer, DistributedOptimizer), "no other optimizer is tuned"
        self._emulate(1)
        candidates = []
        while not self._optimizer.is_tuned:
            self._step()
            candidates.append(self._optimizer.candidate)
        self._optimizer.synchronize()
        return candidates

    def _emulate(self, scale: float) -> None:
        """Set the compute of a layer to its share of the setting's, times `scale`."""
        share = scale / len(self._layers)
        self._compute.forward = share * self._setting.forward
        self._compute.backward = share * self._setting.backward

    def _step(self) -> None:
        self._model(torch.ones(4, requires_grad=True)).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def difference(self, other: "DecoupledTraining") -> float:
        """Return the largest difference between two weights."""
        pairs = zip(self._layers.parameters(), other._layers.parameters(), strict=True)
        return max((mine - its).abs().max().item() for mine, its in pairs)

    def state_bytes(self) -> Bytes:
        """Return the size of this worker's optimizer state."""
        states: Iterable[Mapping[str, Any]] = self._optimizer.state.values()
        return sum(v.nbytes for of in states for v in of.values() if isinstance(v, Tensor))

    def close(self) -> None:
        """Call this when all workers are done: until then they may need messages of this one."""
        if isinstance(self._optimizer, DistributedOptimizer):
            self._optimizer.close()


def _adam_bytes(setting: DecoupledSetting, kind: str) -> Bytes:
    side = DecoupledSide(kind, setting.layer_bytes)
    training = DecoupledTraining(setting, side, has_adam=True)
    training.run(1, emulated=False)
    found = training.state_bytes()
    dist.barrier()
    training.close()
    return found
