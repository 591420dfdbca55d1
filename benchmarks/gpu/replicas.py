"""Two replicas that share one GPU: the Trainer and DistributedOptimizer against DDP.

DDP has several bucket sizes, of which the fastest counts. The small model is trained by the
Trainer, which tunes its buckets during the warm-up. With the large one a step takes most of a
second and tuning would take most of the time: DistributedOptimizer has the same bucket sizes as DDP
in the same loop, and the fastest of each side count.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import polyrhythm as pr
from benchmarks.gpu.alternate import (
    BlockTimer,
    Rounds,
    Side,
    alternate,
    loss_difference,
    milliseconds,
    ratio,
)
from benchmarks.gpu.model import DEVICE, TINY, RandomTokens, Size, adamw, autocast, gpt, loss_fn
from benchmarks.gpu.ranks import GLOO, NCCL, TIMEOUT, use_nccl
from benchmarks.gpu.stages import check_equal, use_float32
from polyrhythm.run.comm.launch import DistContext

MEGABYTE = 2**20
_NUM_TUNED = 125  # steps until the Trainer has chosen its buckets: 10 trials of 12 at most
_SHORT_WARM_UP = 10  # where nothing is tuned
_BUCKETS = (1, 5, 25, 100)  # MB, of DDP

Wrap = Callable[[nn.Module], tuple[nn.Module, Optimizer]]


def measure_gloo_trainer(size: Size, *, quick: bool) -> dict[str, float]:
    """Return DDP's time at its best bucket size over the Trainer's, in two sync modes."""
    buckets = _BUCKETS[2:] if quick else _BUCKETS
    if quick:
        size = TINY
    sides: dict[str, Side] = {f"ddp_{mb}": partial(_loop, size, GLOO, ddp(mb)) for mb in buckets}
    warm_up = dict.fromkeys(sides, 2 if quick else _SHORT_WARM_UP)
    for mode in ("decoupled", "all_reduce"):
        sides[mode] = partial(_trainer, size, mode)
        tuned = _NUM_TUNED if mode == "decoupled" else _SHORT_WARM_UP
        warm_up[mode] = 2 if quick else tuned
    rounds = alternate(sides, num_ranks=2, block=5, num_rounds=1 if quick else 5, warm_up=warm_up)
    best = _fastest(rounds, "ddp")
    found = milliseconds(rounds, "gloo_30m")
    for mode in ("decoupled", "all_reduce"):
        found[f"gloo_{mode}_30m"] = ratio(rounds, best, mode)
        difference = loss_difference(rounds.losses[best], rounds.losses[mode])
        found[f"gloo_{mode}_30m_loss_difference"] = difference
    return found


def measure_gloo_loop(size: Size, *, quick: bool) -> dict[str, float]:
    """Return DDP's time at its best bucket size over DistributedOptimizer's at its best."""
    if quick:
        size = TINY
    sides: dict[str, Side] = {}
    for mb in (25, 100):
        sides[f"ddp_{mb}"] = partial(_loop, size, GLOO, ddp(mb))
        sides[f"decoupled_{mb}"] = partial(_loop, size, GLOO, decoupled(mb))
    rounds = alternate(sides, num_ranks=2, block=3, num_rounds=1 if quick else 2, warm_up=2)
    best, ours = _fastest(rounds, "ddp"), _fastest(rounds, "decoupled")
    return {
        "gloo_decoupled_350m": ratio(rounds, best, ours),
        "gloo_decoupled_350m_loss_difference": loss_difference(
            rounds.losses[best], rounds.losses[ours]
        ),
        **milliseconds(rounds, "gloo_350m"),
    }


def measure_nccl(size: Size, *, quick: bool) -> dict[str, float]:
    """Return DDP's time over DistributedOptimizer's over NCCL, each at its best bucket size.

    Both compute in float32 and have the same data: with two replicas a mean has one rounding,
    whatever the order, so that losses are equal but for kernels whose sums have no fixed order.
    """
    if quick:
        size = TINY
    sides: dict[str, Side] = {}
    for mb in (25, 100):
        sides[f"ddp_{mb}"] = partial(_loop, size, NCCL, ddp(mb))
        sides[f"decoupled_{mb}"] = partial(_loop, size, NCCL, decoupled(mb))
    rounds = alternate(sides, num_ranks=2, block=3, num_rounds=1 if quick else 2, warm_up=2)
    name = "nccl_decoupled_350m"
    best, ours = _fastest(rounds, "ddp"), _fastest(rounds, "decoupled")
    difference = loss_difference(rounds.losses[best], rounds.losses[ours])
    check_equal(name, difference)
    return {
        name: ratio(rounds, best, ours),
        f"{name}_loss_difference": difference,
        **milliseconds(rounds, "nccl_350m"),
    }


def measure_copies(size: Size, *, quick: bool) -> dict[str, float]:
    """Return the time of a step without copies of shards over that with them, over NCCL."""
    if quick:
        size = TINY
    sides: dict[str, Side] = {
        name: partial(_loop, size, NCCL, decoupled(25, buddy=buddy))
        for name, buddy in (("without", False), ("copies", True))
    }
    rounds = alternate(sides, num_ranks=2, block=3, num_rounds=1 if quick else 2, warm_up=2)
    return {
        "nccl_copies_350m": ratio(rounds, "without", "copies"),
        **milliseconds(rounds, "nccl_copies_350m"),
    }


def _fastest(rounds: Rounds, prefix: str) -> str:
    medians = {name: statistics.median(times) for name, times in rounds.times.items()}
    return min((name for name in medians if name.startswith(prefix)), key=medians.__getitem__)


def ddp(bucket_mb: int) -> Wrap:
    def wrap(model: nn.Module) -> tuple[nn.Module, Optimizer]:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
        return wrapped, adamw(wrapped.named_parameters())

    return wrap


def decoupled(bucket_mb: int, *, buddy: bool = False) -> Wrap:
    def wrap(model: nn.Module) -> tuple[nn.Module, Optimizer]:
        optimizer = pr.DistributedOptimizer(
            adamw(model.named_parameters()),
            model,
            bucket_bytes=bucket_mb * MEGABYTE,
            buddy=buddy,
            timeout=TIMEOUT,
        )
        return model, optimizer

    return wrap


def _loop(
    size: Size, backend: str, wrap: Wrap, ctx: DistContext, timer: BlockTimer, num_steps: int
) -> None:
    """Train in a plain loop: under autocast over gloo, in float32 over NCCL."""
    use_float32(ctx) if backend == NCCL else use_nccl(ctx)
    with ctx.process_group(TIMEOUT, backend=backend):
        model, optimizer = wrap(gpt(size))
        data = RandomTokens(size, size.batch * num_steps)
        for step in range(num_steps):
            timer()
            inputs, target = _share(data, size, step, ctx)
            if backend == NCCL:
                loss = loss_fn(model(inputs), target)
            else:
                with autocast():
                    loss = loss_fn(model(inputs), target)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            timer.add_loss(loss)


def _share(data: RandomTokens, size: Size, step: int, ctx: DistContext) -> tuple[Tensor, Tensor]:
    """Return this rank's half of a batch, as the Trainer divides it."""
    share = size.batch // 2
    first = step * size.batch + ctx.rank * share
    samples = [data[i] for i in range(first, first + share)]
    inputs, target = (
        torch.stack(t).pin_memory().to(DEVICE, non_blocking=True)
        for t in zip(*samples, strict=True)
    )
    return inputs, target


def _trainer(size: Size, sync: str, ctx: DistContext, timer: BlockTimer, num_steps: int) -> None:
    torch.cuda.set_device(DEVICE)
    model = gpt(size).cpu()  # as users build it
    model[0].register_forward_pre_hook(timer)

    def keep_loss(info: pr.StepInfo) -> None:
        assert info.own.loss is not None, "all tokens are labels"
        timer.add_loss(info.own.loss)

    with pr.Trainer(
        model,
        loss_fn,
        adamw,
        RandomTokens(size, size.batch * num_steps),
        batch_size=size.batch,
        microbatch_size=size.batch // 2,
        sync=sync,
        device=pr.DeviceConfig(DEVICE, autocast=torch.bfloat16, backend="gloo"),
        data=pr.DataConfig(shuffle=False),
        timeout=TIMEOUT,
    ) as trainer:
        trainer.fit(max_steps=num_steps, progress=False, callbacks=[keep_loss])
