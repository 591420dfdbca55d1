"""Two stages on one GPU over NCCL: our 1F1B against torch's, in float32 (TF32 products)."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import polyrhythm as pr
from benchmarks.gpu.alternate import (
    BlockTimer,
    Side,
    alternate,
    loss_difference,
    milliseconds,
    ratio,
)
from benchmarks.gpu.model import DEVICE, TINY, Size, gpt, loss_fn
from benchmarks.gpu.ranks import NCCL, TIMEOUT, use_nccl
from polyrhythm.run.comm.launch import DistContext

MAX_LOSS_DIFFERENCE = 1e-5  # relative, of two sides that compute the same in float32
_NUM_MICROBATCHES, _MICROBATCH = 8, 4

Step = Callable[[list[torch.Tensor]], None]  # adds the losses of its micro-batches to a list


def measure(size: Size, *, quick: bool) -> dict[str, float]:
    if quick:
        size = TINY

    def torchs(ctx: DistContext, timer: BlockTimer, num_steps: int) -> None:
        _torch(size, ctx, timer, num_steps)

    def ours(ctx: DistContext, timer: BlockTimer, num_steps: int) -> None:
        _ours(size, ctx, timer, num_steps)

    sides: dict[str, Side] = {"torch": torchs, "ours": ours}
    block, num_rounds = (2, 1) if quick else (4, 3)
    rounds = alternate(sides, num_ranks=2, block=block, num_rounds=num_rounds, warm_up=block)
    difference = loss_difference(rounds.losses["torch"], rounds.losses["ours"])
    check_equal("nccl_pipeline", difference)
    return {
        "nccl_pipeline": ratio(rounds, "torch", "ours"),
        "nccl_pipeline_loss_difference": difference,
        **milliseconds(rounds, "nccl_pipeline"),
    }


def check_equal(name: str, difference: float) -> None:
    if difference > MAX_LOSS_DIFFERENCE:
        raise RuntimeError(
            f"{name}: losses differ by {difference:.2g}, more than {MAX_LOSS_DIFFERENCE:g}"
        )


def use_float32(ctx: DistContext) -> None:
    """Compute in float32 with products in TF32, so that losses of two sides can be compared."""
    use_nccl(ctx)
    torch.set_float32_matmul_precision("high")


def half_of(layers: nn.Sequential, stage: int) -> nn.Sequential:
    """Return the layers of the first or the second of two stages."""
    half = len(layers) // 2
    return nn.Sequential(*list(layers)[:half] if stage == 0 else list(layers)[half:])


def _batch(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    shape = _NUM_MICROBATCHES * _MICROBATCH, size.context + 1
    tokens = torch.randint(size.vocabulary, shape, generator=generator).to(DEVICE)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _torch(size: Size, ctx: DistContext, timer: BlockTimer, num_steps: int) -> None:
    use_float32(ctx)
    with ctx.process_group(TIMEOUT, backend=NCCL):
        module = half_of(gpt(size), ctx.rank)
        inputs, target = _batch(size)
        hidden = torch.zeros(_MICROBATCH, size.context, size.width, device=DEVICE)
        example = inputs[:_MICROBATCH] if ctx.rank == 0 else hidden
        stage = PipelineStage(module, ctx.rank, 2, DEVICE, input_args=(example,))
        schedule = Schedule1F1B(stage, _NUM_MICROBATCHES, loss_fn=loss_fn)

        def step(losses: list[torch.Tensor]) -> None:
            if ctx.rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=target, losses=losses, return_outputs=False)

        _train(module, step, timer, num_steps)


def _ours(size: Size, ctx: DistContext, timer: BlockTimer, num_steps: int) -> None:
    use_float32(ctx)
    with ctx.process_group(TIMEOUT, backend=NCCL):
        module = half_of(gpt(size), ctx.rank)
        inputs, target = _batch(size)
        with pr.Pipeline(
            module, _NUM_MICROBATCHES, loss_fn, schedule="1f1b", timeout=TIMEOUT
        ) as pipeline:

            def step(losses: list[torch.Tensor]) -> None:
                arguments = (inputs,) if pipeline.is_first else ()
                pipeline.step(*arguments, target=target, losses=losses, return_outputs=False)

            _train(module, step, timer, num_steps)


def _train(module: nn.Module, step: Step, timer: BlockTimer, num_steps: int) -> None:
    # Not Adam: its first steps move each weight by the rate, whatever the size of its gradient, so
    # that rounding in attention's backward, which adds in no fixed order, changes the next losses.
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, fused=True)
    for _ in range(num_steps):
        timer()
        losses = list[torch.Tensor]()
        step(losses)
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            timer.add_loss(torch.stack(losses).mean())
