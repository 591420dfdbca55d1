"""What averaging over two replicas costs: transfers that are not hidden, hooks, and memory.

Both replicas share one GPU and average over gloo, staged in pinned memory.

`overlap`, the share of the transfer time that is hidden behind compute, is
(compute + transfer - step) / transfer, within 0 and 1:
- compute: a step of an equal model without averaging, which updates all its weights;
- transfer: the same exchange alone, with the same buckets in both directions. Gradients are given
  to the hooks at once, without a backward; the update of this rank's shard is part of it, which
  takes some milliseconds;
- step: a step with both.
In all three both ranks run at the same time: the GPU that they share slows all alike. The batch is
the smallest of a few at which compute takes 1.75 times as long as the transfer. Shorter compute
could not hide the transfer: a third of it, the forward, has to hide the all-gather, which is half
of the transfer. Nothing can hide the embedding, whose gradient comes last and whose weights are
needed first: it is 8 % of a model of 14 layers.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

import polyrhythm as pr
from benchmarks.gpu.model import DEVICE, TINY, RandomTokens, Size, adamw, autocast, gpt, loss_fn
from benchmarks.gpu.ranks import GLOO, TIMEOUT, run_ranks
from benchmarks.gpu.replicas import MEGABYTE, decoupled
from polyrhythm.describe.measure import finish
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.types import Bytes, Seconds

_BUCKET_MB = 25
_OVERLAP_BUCKET_MB, _OVERLAP_LAYERS = 50, 14
_BATCHES = (48, 60, 72)  # sequences of a rank; two ranks with 72 need an estimated 125 GB
_LONGER = 1.75  # compute, than the transfer


def measure_overlap(size: Size, *, quick: bool) -> dict[str, float]:
    """Return the hidden share of the transfer, and the three times that it follows from."""
    batches, num_rounds = ((2,), 1) if quick else (_BATCHES, 3)
    size = TINY if quick else replace(size, layers=_OVERLAP_LAYERS)

    def work(ctx: DistContext) -> dict[str, float]:
        with ctx.process_group(TIMEOUT, backend=GLOO):
            return _Overlap(size).measure(batches, num_rounds)

    first, *_ = run_ranks(work, timeout=200.0)
    return first


class _Overlap:
    """Three kinds of steps of one rank; `data` is set to the batch."""

    def __init__(self, size: Size) -> None:
        self._size = size
        self._alone = gpt(size)
        self._own_optimizer = adamw(self._alone.named_parameters())
        self._model = gpt(size)
        _, optimizer = decoupled(_OVERLAP_BUCKET_MB)(self._model)
        assert isinstance(optimizer, pr.DistributedOptimizer), "it is one"
        self._optimizer = optimizer
        # In the order of the forward, which need not be that of the optimizer's groups.
        self._parameters = dict(self._model.named_parameters())
        self._gradients = {name: torch.zeros_like(p) for name, p in self._parameters.items()}
        self._data: tuple[Tensor, Tensor]

    def measure(self, batches: tuple[int, ...], num_rounds: int) -> dict[str, float]:
        self._use_batch(batches[0])
        for _ in range(2):
            self._step()  # makes the buckets
        transfer = min(_time(self._exchange) for _ in range(3))
        for batch in batches:
            self._use_batch(batch)
            compute = min(_time(self._compute) for _ in range(3))
            if compute > _LONGER * transfer:
                break
        kinds = {"compute": self._compute, "transfer": self._exchange, "step": self._step}
        times: dict[str, list[Seconds]] = {name: [] for name in kinds}
        for number in range(num_rounds):
            names = list(kinds) if number % 2 == 0 else list(kinds)[::-1]
            for name in names:
                times[name].append(_time(kinds[name], 3))
        self._optimizer.close()
        compute, transfer, step = (statistics.median(times[name]) for name in kinds)
        return {
            "overlap": hidden_share(compute, transfer, step),
            "overlap_batch": float(batch),
            **{f"overlap_{name}_ms": 1e3 * statistics.median(times[name]) for name in kinds},
        }

    def _use_batch(self, batch: int) -> None:
        tokens = [RandomTokens(self._size, batch)[i] for i in range(batch)]
        inputs, target = (torch.stack(t).to(DEVICE) for t in zip(*tokens, strict=True))
        self._data = inputs, target
        torch.cuda.empty_cache()  # of another size

    def _backward(self, model: nn.Module) -> None:
        inputs, target = self._data
        with autocast():
            loss = loss_fn(model(inputs), target)
        loss.backward()  # type: ignore[no-untyped-call]

    def _compute(self) -> None:
        self._backward(self._alone)
        self._own_optimizer.step()
        self._own_optimizer.zero_grad()

    def _step(self) -> None:
        self._backward(self._model)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _exchange(self) -> None:
        self._optimizer.synchronize()  # weights of a step before, if it was another kind
        sync, names = self._optimizer._gradient_sync, self._optimizer.parameter_names
        for name, parameter in reversed(self._parameters.items()):
            parameter.grad = self._gradients[name]
            sync.hook_of(names.index(name))(parameter)
        self._optimizer.step()
        self._optimizer.synchronize()
        self._optimizer.zero_grad()


def hidden_share(compute: Seconds, transfer: Seconds, step: Seconds) -> float:
    """Return the share of the transfer that does not make a step longer."""
    return min(1.0, max(0.0, (compute + transfer - step) / transfer))


def _time(action: Callable[[], None], num_runs: int = 1) -> Seconds:
    """Return the time of one of `num_runs`, of the slower rank; all ranks call this together.

    An earlier one is not counted: transfers that it leaves in flight are waited for in the next, as
    the next but one waits for those of the last.
    """
    dist.barrier()
    action()
    finish(DEVICE)
    start = time.perf_counter()
    for _ in range(num_runs):
        action()
    finish(DEVICE)
    elapsed = torch.tensor((time.perf_counter() - start) / num_runs, dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item()


_NUM_LAYERS, _WIDTH = 500, 16  # a weight and a bias each


def measure_hooks(*, quick: bool) -> dict[str, float]:
    """Return the host's time of a backward with hooks minus without, per parameter."""
    num_rounds, num_layers = (2, 10) if quick else (40, _NUM_LAYERS)

    def work(ctx: DistContext) -> dict[str, float]:
        with ctx.process_group(TIMEOUT, backend=GLOO):
            return _time_hooks(num_layers, num_rounds)

    first, *_ = run_ranks(work)
    return first


def _time_hooks(num_layers: int, num_rounds: int) -> dict[str, float]:
    def stack() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(num_layers))).to(DEVICE)

    plain, wrapped = stack(), stack()
    optimizer = pr.DistributedOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=0.0),
        wrapped,
        _BUCKET_MB * MEGABYTE,
        timeout=TIMEOUT,
    )
    x = torch.ones(_WIDTH, _WIDTH, device=DEVICE)

    def backward(model: nn.Module) -> Seconds:
        loss = model(x).sum()
        finish(DEVICE)
        start = time.perf_counter()
        loss.backward()
        elapsed = time.perf_counter() - start
        finish(DEVICE)
        return elapsed

    times: dict[str, list[Seconds]] = {"plain": [], "hooks": []}
    for _ in range(num_rounds + 5):  # the first make the buckets, and warm up
        times["plain"].append(backward(plain))
        plain.zero_grad()
        dist.barrier()  # the other rank's messages arrive during a backward alike
        times["hooks"].append(backward(wrapped))
        optimizer.step()
        optimizer.synchronize()
        optimizer.zero_grad()
    optimizer.close()
    medians = {name: statistics.median(some[5:]) for name, some in times.items()}
    return {
        "hook_us": 1e6 * (medians["hooks"] - medians["plain"]) / (2 * num_layers),
        **{f"hook_backward_{name}_ms": 1e3 * value for name, value in medians.items()},
    }


def measure_first_step(size: Size, *, quick: bool) -> dict[str, float]:
    """Return the peak memory of step 1, which makes the buckets, over that of step 10."""
    if quick:
        size = TINY
    size = replace(size, batch=4)

    def work(ctx: DistContext) -> dict[str, float]:
        with ctx.process_group(TIMEOUT, backend=GLOO):
            return _peaks(size)

    found = run_ranks(work)
    peaks = {name: max(each[name] for each in found) for name in found[0]}
    return {"step1_peak": peaks["step1_peak_mb"] / peaks["step10_peak_mb"], **peaks}


def _peaks(size: Size) -> dict[str, float]:
    model = gpt(size)
    _, optimizer = decoupled(_BUCKET_MB)(model)
    data = RandomTokens(size, size.batch)
    inputs, target = (
        torch.stack(t).to(DEVICE) for t in zip(*(data[i] for i in range(size.batch)), strict=True)
    )
    peaks = list[Bytes]()
    for _ in range(10):
        torch.cuda.reset_peak_memory_stats()
        with autocast():
            loss = loss_fn(model(inputs), target)
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        optimizer.step()
        optimizer.zero_grad()
        finish(DEVICE)
        peaks.append(torch.cuda.max_memory_allocated())
    assert isinstance(optimizer, pr.DistributedOptimizer), "it is one"
    optimizer.close()
    return {"step1_peak_mb": peaks[0] / 1e6, "step10_peak_mb": peaks[-1] / 1e6}
