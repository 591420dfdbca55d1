"""Run stages in real processes, and single-process references in a process of their own.

A parent in which autograd has run must not fork: everything that computes runs in a child, which
returns its result through a file.
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
    """Run `work` in `num_stages` processes of one job; return the results by rank."""

    def joined(ctx: DistContext) -> None:
        with ctx.process_group(STAGE_TIMEOUT):
            result = work(ctx)
        torch.save(result, folder / f"result{ctx.rank}.pt")

    with LocalJob(joined, num_stages, output_folder=folder) as job:
        assert job.wait(timeout), "not done in time"
    return [torch.load(folder / f"result{rank}.pt") for rank in range(num_stages)]


def run_single_process(work: Callable[[], Any], folder: Path, *, timeout: Seconds = 80) -> Any:
    """Run `work` in one process that belongs to no job; return its result."""
    path = folder / "single_process.pt"

    with LocalJob(lambda ctx: torch.save(work(), path), 1, output_folder=folder) as job:
        assert job.wait(timeout), "not done in time"
    return torch.load(path)


def stack_of(
    num_layers: int, *, width: int = 8, seed: int = 3, dropout: float = 0.0
) -> nn.Sequential:
    """Build layers with `width` inputs and outputs, the same in every process."""
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_layers)]
    if dropout:
        for layer in layers:
            layer.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


def random_batch(*shape: int, seed: int = 11) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of one shape."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def step(pipeline: Pipeline, inputs: Any, target: Any, **more: Any) -> Any:
    """Call `step` as every stage does: inputs on the first stage, targets on the last."""
    args = () if not pipeline.is_first else inputs if isinstance(inputs, tuple) else (inputs,)
    return pipeline.step(*args, target=target if pipeline.is_last else None, **more)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    parameters = module.named_parameters()
    return {name: p.grad.clone() for name, p in parameters if p.grad is not None}


def merged(stages: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Merge the stages' values; those of a name on several stages must be bit-identical."""
    result: dict[str, Tensor] = {}
    for stage in stages:
        for name, value in stage.items():
            assert name not in result or torch.equal(result[name], value), name
            result[name] = value
    return result


def assert_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6
) -> None:
    assert actual.keys() == expected.keys()
    assert actual, "nothing to compare"
    for name, value in expected.items():
        message = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(actual[name], value, rtol=0, atol=tolerance, msg=message)


def assert_equal(actual: Any, expected: Any) -> None:
    """Compare nested tensors and numbers bit by bit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
