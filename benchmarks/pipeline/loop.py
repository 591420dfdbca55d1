"""What the executor costs: one stage, real compute, against a plain gradient-accumulation loop."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from polyrhythm.errors import LaunchError
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.types import Seconds

_NUM_MICROBATCHES, _MICROBATCH_SIZE, _WIDTH = 8, 16, 256
_PATIENCE: Seconds = 60.0


def plain_loop(num_rounds: int) -> float:
    """Time of the plain loop by time of the pipeline: the median over rounds, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "ratio"

        def work(
            ctx: DistContext,
        ) -> None:  # in a process of its own: this one must stay able to fork
            found.write_text(repr(_compare(num_rounds)))

        with LocalJob(work, 1, output_folder=Path(folder)) as job:
            if not job.wait(_PATIENCE):
                raise LaunchError(
                    f"{num_rounds} rounds took more than {_PATIENCE:g} s",
                    expected="a few seconds on an idle core",
                    fix="run the benchmark while the machine has nothing else to do",
                )
        return float(found.read_text())


def _compare(num_rounds: int) -> float:
    torch.set_num_threads(1)
    model = _model()
    pipeline = Pipeline(model, loss_fn=functional.mse_loss, num_microbatches=_NUM_MICROBATCHES)
    inputs = torch.randn(_NUM_MICROBATCHES * _MICROBATCH_SIZE, _WIDTH)
    target = torch.randn_like(inputs)

    def ours() -> None:
        pipeline.step(inputs, target=target, return_outputs=False)

    def plain() -> None:
        for x, y in zip(
            inputs.chunk(_NUM_MICROBATCHES), target.chunk(_NUM_MICROBATCHES), strict=True
        ):
            torch.autograd.backward(functional.mse_loss(model(x), y) / _NUM_MICROBATCHES)

    sides = (plain, ours)
    for side in sides:
        _timed(side, model)
    ratios = []
    for number in range(num_rounds):
        first, second = sides if number % 2 else sides[::-1]
        times = {first: _timed(first, model), second: _timed(second, model)}
        ratios.append(times[plain] / times[ours])
    return statistics.median(ratios)


def _timed(side: Callable[[], None], model: nn.Module) -> Seconds:
    start = time.perf_counter()
    for _ in range(3):
        side()
        model.zero_grad()
    return time.perf_counter() - start


def _model() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)]
    return nn.Sequential(*layers)
