"""Stages in real processes, and single-process references in a process of their own.

A parent in which autograd has run must not fork: everything that computes runs in a child, and
what it returns comes back through a file.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.types import Seconds

STAGE_TIMEOUT: Seconds = 30.0


def run_stages(
    num_stages: int, work: Callable[[DistContext], Any], folder: Path, *, timeout: Seconds = 80
) -> list[Any]:
    """What `work` returns in each of so many processes, which have joined one job."""

    def joined(ctx: DistContext) -> None:
        with ctx.process_group(STAGE_TIMEOUT):
            found = work(ctx)
        torch.save(found, folder / f"found{ctx.rank}.pt")

    with LocalJob(joined, num_stages, output_folder=folder) as job:
        assert job.wait(timeout), "not done in time"
    return [torch.load(folder / f"found{rank}.pt") for rank in range(num_stages)]


def run_single_process(work: Callable[[], Any], folder: Path, *, timeout: Seconds = 80) -> Any:
    """What `work` returns in one process that belongs to no job."""
    path = folder / "alone.pt"

    with LocalJob(lambda ctx: torch.save(work(), path), 1, output_folder=folder) as job:
        assert job.wait(timeout), "not done in time"
    return torch.load(path)


def stack_of(
    num_layers: int, *, width: int = 8, seed: int = 3, dropout: float = 0.0
) -> nn.Sequential:
    """Layers that take and give `width` numbers per sample, the same in every process."""
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_layers)]
    if dropout:
        for layer in layers:
            layer.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


def random_batch(*shape: int, seed: int = 11) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one shape."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def step(pipeline: Pipeline, inputs: Any, target: Any, **more: Any) -> Any:
    """As every stage's process calls it: inputs on the first stage, targets on the last."""
    args = () if not pipeline.is_first else inputs if isinstance(inputs, tuple) else (inputs,)
    return pipeline.step(*args, target=target if pipeline.is_last else None, **more)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    found = module.named_parameters()
    return {name: p.grad.clone() for name, p in found if p.grad is not None}


def merged(stages: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Of all stages as of the whole model; of a name on several stages, all must be equal."""
    whole: dict[str, Tensor] = {}
    for stage in stages:
        for name, value in stage.items():
            assert name not in whole or torch.equal(whole[name], value), name
            whole[name] = value
    return whole


def assert_close(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-6
) -> None:
    assert ours.keys() == theirs.keys()
    assert ours, "something was compared"
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_equal(ours: Any, theirs: Any) -> None:
    """To the bit, for whatever nests tensors and numbers."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
