"""DistributedOptimizer needs no more memory in its first steps than later, and few operations."""

import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyrhythm.run.comm.launch import DistContext
from polyrhythm.sync.fusion.tuner import BucketCandidate, BucketMode
from tests.gloo.decoupled import close_to, wrap_optimizer
from tests.gloo.pipelines import run_stages

NUM_LAYERS, SIZE, LAYER_BYTES = 16, 128, 4 * 128 * 128
BUCKET = 2 * LAYER_BYTES
SLACK = 50_000  # of activations and small tensors


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations of this thread have made and nobody has freed."""

    def __init__(self, *existing: Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()
        for tensor in existing:
            self._add(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if type(leaf) in (Tensor, nn.Parameter):
                self._add(leaf)
        return result

    def pop_peak(self) -> int:
        peak, self.peak = self.peak, self.now
        return peak

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._known and nbytes:
            self._known.add(key)
            self.now += nbytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, key, nbytes)

    def _remove(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


class CountOps(TorchDispatchMode):
    """Counts the operations of this thread that launch a kernel on a GPU."""

    num_ops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_view = func.is_view or func is torch.ops.aten.detach.default
        self.num_ops += not is_view
        return func(*args, **(kwargs or {}))


class Reversed(nn.Sequential):
    """Calls its layers in the reverse order of their registration."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return Reversed(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(NUM_LAYERS)))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.001, foreach=False)


def run_steps(model: nn.Module, optimizer: Any, num_steps: int) -> None:
    for _ in range(num_steps):
        model(torch.ones(1, SIZE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_first_step_needs_no_more_memory_than_the_tenth(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[int]:
        model = layers()
        with LiveBytes(*model.parameters()) as live:
            optimizer = wrap_optimizer(model, adam(model), bucket_bytes=BUCKET)
            peaks = []
            for _ in range(10):
                run_steps(model, optimizer, 1)
                peaks.append(live.pop_peak())
        optimizer.close()
        return peaks

    whole = NUM_LAYERS * LAYER_BYTES
    for peaks in run_stages(2, work, tmp_path):
        assert peaks[0] <= 1.05 * peaks[9]
        # Weights, gradients, half of Adam's two states, received halves, Adam's own temporaries.
        assert peaks[9] <= 3.5 * whole + 2 * BUCKET + SLACK


def test_restored_state_is_sharded_by_the_first_step(tmp_path: Path) -> None:
    """The optimizer has stepped before; its state is freed parameter by parameter."""

    def work(ctx: DistContext) -> tuple[bool, float]:
        model, reference = layers(), layers()
        inner, plain = adam(model), adam(reference)
        for each, its_optimizer in ((model, inner), (reference, plain)):
            run_steps(each, its_optimizer, 2)
        with LiveBytes(
            *model.parameters(), *(v for s in inner.state.values() for v in s.values())
        ) as live:
            before = live.now
            optimizer = wrap_optimizer(model, inner, bucket_bytes=BUCKET)
            run_steps(model, optimizer, 2)
            added = live.pop_peak() - before
        run_steps(reference, plain, 2)
        same = close_to(model.state_dict(), reference.state_dict())
        optimizer.close()
        return same, added / (NUM_LAYERS * LAYER_BYTES)

    for same, added in run_stages(2, work, tmp_path):
        assert same
        assert added <= 1.5 + 4 * BUCKET / (NUM_LAYERS * LAYER_BYTES)  # gradients, and received


def test_change_of_buckets_needs_memory_for_one_more(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[bool, list[int]]:
        model, reference = layers(), layers()
        with LiveBytes(*model.parameters()) as live:
            optimizer = wrap_optimizer(model, adam(model), bucket_bytes=BUCKET)
            run_steps(model, optimizer, 3)
            steady, added = live.pop_peak(), []
            for size in (3 * LAYER_BYTES, BUCKET):
                optimizer._change_buckets(BucketCandidate(size, BucketMode.DECOUPLED))
                added.append(live.pop_peak() - steady)
                run_steps(model, optimizer, 1)
                live.pop_peak()
        run_steps(reference, adam(reference), 5)
        same = close_to(model.state_dict(), reference.state_dict())
        optimizer.close()
        return same, added

    for same, added in run_stages(2, work, tmp_path):
        assert same
        # Both states of a whole bucket, and shards of another size.
        assert max(added) <= 2 * 3 * LAYER_BYTES + 2 * BUCKET + SLACK


def test_hooks_launch_at_most_one_operation_per_gradient(tmp_path: Path) -> None:
    """Small gradients are copied together, and nothing else is done for each."""

    def count(model: nn.Module) -> int:
        loss = model(torch.ones(1, 4)).sum()
        with CountOps() as counted:
            loss.backward()
        return counted.num_ops

    def work(ctx: DistContext) -> tuple[int, int]:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(100)))
        without = count(model)
        model.zero_grad()
        optimizer = wrap_optimizer(model, bucket_bytes=25_000_000)
        for _ in range(2):
            with_hooks = count(model)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return without, with_hooks

    for without, with_hooks in run_stages(2, work, tmp_path):
        assert with_hooks - without <= 10, "for 200 gradients"


def test_buckets_follow_the_first_forward(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[list[int]]:
        model = layers()
        optimizer = wrap_optimizer(model, adam(model), bucket_bytes=BUCKET)
        run_steps(model, optimizer, 1)
        found = [list(bucket.parameters) for bucket in optimizer._gradient_sync.buckets]
        optimizer.close()
        return found

    expected = [[i, i - 1] for i in range(NUM_LAYERS - 1, 0, -2)]
    assert run_stages(2, work, tmp_path) == [expected] * 2
