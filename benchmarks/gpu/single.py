"""One process: the Trainer against a plain loop, and a Pipeline against gradient accumulation."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import polyrhythm as pr
from benchmarks.gpu.alternate import BlockTimer, Side, alternate, milliseconds, ratio
from benchmarks.gpu.model import DEVICE, TINY, RandomTokens, Size, adamw, autocast, gpt, loss_fn
from polyrhythm.run.comm.launch import DistContext

_SAVE_EVERY = 100  # steps; a block has as many, so that each has one save
# The first save, which pins memory for all copies, is in the warm-up. That of a block comes ten
# steps after its start: at its end it would be written while the other side computes.
_WARM_UP = {"plain": 20, "trainer": 2 * _SAVE_EVERY - 11}


def measure(
    name: str, size: Size, *, compiled: bool = False, num_rounds: int = 3, quick: bool
) -> dict[str, float]:
    """Return the Trainer's speed against a plain loop's, with a run folder and saves."""
    block, warm_up = _SAVE_EVERY, _WARM_UP
    if quick:
        size, block, warm_up, num_rounds = TINY, 5, dict.fromkeys(_WARM_UP, 5), 2

    def plain(ctx: DistContext, timer: BlockTimer, num_steps: int) -> None:
        _plain(gpt(size, compiled=compiled), size, timer, num_steps)

    def ours(ctx: DistContext, timer: BlockTimer, num_steps: int) -> None:
        model = gpt(size, compiled=compiled).cpu()  # as users build it
        model[0].register_forward_pre_hook(timer)
        with trainer(size, model, num_steps, folder) as made:
            made.fit(max_steps=num_steps, progress=False)

    sides: dict[str, Side] = {"plain": plain, "trainer": ours}
    with tempfile.TemporaryDirectory() as folder:  # not in a side, which is killed in the end
        rounds = alternate(sides, block=block, num_rounds=num_rounds, warm_up=warm_up)
    return {name: ratio(rounds, "plain", "trainer"), **milliseconds(rounds, name)}


def _plain(model: nn.Module, size: Size, timer: BlockTimer, num_steps: int) -> None:
    optimizer = adamw(model.named_parameters())
    data = RandomTokens(size, size.batch * num_steps)
    for tokens, target in DataLoader(data, size.batch, pin_memory=True):
        timer()
        inputs, labels = (t.to(DEVICE, non_blocking=True) for t in (tokens, target))
        with autocast():
            loss = loss_fn(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def trainer(size: Size, model: nn.Module, num_steps: int, folder: str) -> pr.Trainer:
    """Make the Trainer of one process, with a run folder and a save every 100 steps."""
    return pr.Trainer(
        model,
        loss_fn,
        adamw,
        RandomTokens(size, size.batch * num_steps),
        batch_size=size.batch,
        microbatch_size=size.batch,
        device=pr.DeviceConfig(DEVICE, autocast=torch.bfloat16),
        data=pr.DataConfig(shuffle=False),
        run_dir=Path(folder) / "run",
        checkpoint=pr.CheckpointConfig(every=_SAVE_EVERY, keep_last=1),
    )


_NUM_MICROBATCHES = 8
_MICROBATCH = 8  # sequences: with 4 the host that launches kernels is slower than the GPU


def measure_pipeline(size: Size, *, quick: bool) -> dict[str, float]:
    """Return the speed of a Pipeline of one stage against a loop that accumulates gradients."""
    if quick:
        size = TINY

    def accumulation(ctx: DistContext, timer: BlockTimer, num_steps: int) -> None:
        model, optimizer, inputs, target = _accumulated(size)
        for _ in range(num_steps):
            timer()
            for x, y in zip(
                inputs.chunk(_NUM_MICROBATCHES), target.chunk(_NUM_MICROBATCHES), strict=True
            ):
                with autocast():
                    loss = loss_fn(model(x), y) / _NUM_MICROBATCHES
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    def pipeline(ctx: DistContext, timer: BlockTimer, num_steps: int) -> None:
        model, optimizer, inputs, target = _accumulated(size)
        with pr.Pipeline(
            model, _NUM_MICROBATCHES, loss_fn, process_group=None, device=DEVICE
        ) as ours:
            for _ in range(num_steps):
                timer()
                with autocast():
                    ours.step(inputs, target=target, return_outputs=False)
                optimizer.step()
                optimizer.zero_grad()

    sides: dict[str, Side] = {"accumulation": accumulation, "pipeline": pipeline}
    block, num_rounds = (2, 2) if quick else (4, 4)
    rounds = alternate(sides, block=block, num_rounds=num_rounds, warm_up=block)
    name = "pipeline_1stage"
    return {name: ratio(rounds, "accumulation", "pipeline"), **milliseconds(rounds, name)}


def _accumulated(
    size: Size,
) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    model = gpt(size)
    optimizer = adamw(model.named_parameters())
    generator = torch.Generator().manual_seed(2)
    shape = _NUM_MICROBATCHES * _MICROBATCH, size.context + 1
    tokens = torch.randint(size.vocabulary, shape, generator=generator).to(DEVICE)
    return model, optimizer, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
