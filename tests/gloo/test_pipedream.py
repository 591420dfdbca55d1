"""A pipeline without a flush uses the weight versions that its limits prescribe."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.errors import WorkerError
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.pipeline.pipeline import Pipeline

NUM_STAGES, NUM_STEPS, WIDTH = 3, 9, 6


def stage_module(stage: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(stage)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def data(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    size = 4 if step % 4 else 3  # batches of two shapes in flight at once
    shape = (size, WIDTH)
    return torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def run_stage(ctx: DistContext, schedule: str, folder: Path, *, averages: bool = False) -> None:
    """Train one stage; save its weights after every update."""
    with ctx.process_group(30):
        module = stage_module(ctx.rank)
        optimizer = optimizer_of(module)
        pipeline = Pipeline(
            module,
            loss_fn=functional.mse_loss,
            n_microbatches=1,
            schedule=schedule,
            flush=False,
            timeout=20,
        )
        history, losses, peak_weight_versions = [], [], 0

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()
            if averages:  # with a replica whose weights are all zero
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.mul_(0.5)
            history.append([p.detach().clone() for p in module.parameters()])

        with pipeline:
            for step in range(NUM_STEPS):
                inputs, target = data(step)
                arguments = (inputs,) if pipeline.is_first else ()
                step_losses: list[Tensor] = []
                pipeline.step(*arguments, target=target, losses=step_losses, return_outputs=False)
                losses += step_losses
                peak_weight_versions = max(peak_weight_versions, pipeline.peak_weight_versions)
                if pipeline.has_gradients:
                    update()
            for _ in pipeline.drain():
                update()
        torch.save((history, losses, peak_weight_versions), folder / f"{ctx.rank}.pt")


def emulate(limits: tuple[int, ...], folder: Path, *, averages: bool) -> None:
    """Train with the same semantics in one process: the limits give the weight versions."""
    modules = [stage_module(stage) for stage in range(NUM_STAGES)]
    optimizers = [optimizer_of(module) for module in modules]
    histories = [[[p.detach().clone() for p in module.parameters()]] for module in modules]
    losses = []
    for step in range(NUM_STEPS):
        inputs, target = data(step)
        x, weights = inputs, []
        for stage, module in enumerate(modules):
            # The backward of step i - limit made the last update before forward i.
            version = histories[stage][max(0, step - limits[stage] + 1)]
            weights.append([w.clone().requires_grad_() for w in version])
            names = [name for name, _ in module.named_parameters()]
            x = torch.func.functional_call(module, dict(zip(names, weights[-1], strict=True)), x)
        loss = functional.mse_loss(x, target)
        loss.backward()
        losses.append(loss.detach())
        for stage, module in enumerate(modules):
            for parameter, weight in zip(module.parameters(), weights[stage], strict=True):
                parameter.grad = weight.grad
            optimizers[stage].step()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(0.5 if averages else 1.0)
            histories[stage].append([p.detach().clone() for p in module.parameters()])
    torch.save((histories, losses), folder / "emulated.pt")


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("schedule", "limits", "averages"),
    [("1f1b", (3, 2, 1), False), ("bounded:5,3,2", (5, 3, 2), False), ("1f1b", (3, 2, 1), True)],
)
def test_pipedream_updates_equal_single_process_emulation(
    tmp_path: Path, schedule: str, limits: tuple[int, ...], averages: bool
) -> None:
    with LocalJob(
        lambda ctx: run_stage(ctx, schedule, tmp_path, averages=averages),
        NUM_STAGES,
        output_folder=tmp_path,
    ) as job:
        assert job.wait(60)
    with LocalJob(
        lambda ctx: emulate(limits, tmp_path, averages=averages), 1, output_folder=tmp_path
    ) as job:
        assert job.wait(60)
    histories, expected_losses = torch.load(tmp_path / "emulated.pt")
    for stage in range(NUM_STAGES):
        history, losses, peak_weight_versions = torch.load(tmp_path / f"{stage}.pt")
        assert len(history) == NUM_STEPS, "one update per mini-batch"
        for actual, expected in zip(history, histories[stage][1:], strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
        assert peak_weight_versions == (limits[stage] if limits[stage] > 1 else 0)
    torch.testing.assert_close(losses, expected_losses, rtol=0, atol=1e-6)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "gpipe", "n_microbatches": 1}, "gpipe without a flush"),
        ({"schedule": "1f1b", "n_microbatches": 4}, "n_microbatches=1"),
    ],
)
def test_schedules_without_pipedream_form_are_refused(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    def work(ctx: DistContext) -> None:
        Pipeline(stage_module(0), loss_fn=functional.mse_loss, flush=False, **options)

    with (
        pytest.raises(WorkerError, match=message),
        LocalJob(work, 1, output_folder=tmp_path) as job,
    ):
        job.wait(40)
