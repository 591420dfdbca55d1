"""The Trainer in float16: the steps of a plain loop with a GradScaler, on all stages and replicas.

The loop has the same micro-batches as the Trainer, so that both round to float16 at the same
places. What differs between one process and several is the order of sums in float32, which are
exact while the numbers of float16 in a sum are of similar size. Where a sum differs, by 1e-7, that
may round a single activation or gradient differently, by 2**-11; losses are means over many.
"""

import logging
import math
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from polyrhythm.errors import LaunchError, ScheduleError, TrainingError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.loss import add_auxiliary_loss
from polyrhythm.run.pipeline.partition import build_model
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.trainer.config import DataConfig, DeviceConfig
from polyrhythm.run.trainer.sync_strategy import skips_marked_steps
from polyrhythm.run.trainer.trainer import Trainer
from tests.gloo.pipelines import run_stages
from tests.gloo.trainer_jobs import BATCH, LAYERS, NUM_SAMPLES, plan_of, run_job
from tests.grids import long_except

STEPS = 10
FLOAT16 = DeviceConfig("cpu", autocast=torch.float16)
ROUNDING = 2**-11  # of float16, relative
MARK = 7.0  # an input whose gradients are not finite


class Marked(nn.Linear):
    """A layer whose own gradients are infinite for marked samples; those of later ones are not."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        if hidden.requires_grad and bool((x == MARK).any()):
            hidden.register_hook(lambda gradient: gradient * torch.inf)
        return hidden


def model() -> nn.Sequential:
    return nn.Sequential(Marked(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def samples(marked: int | None = None) -> TensorDataset:
    """Gradients of the seventh batch, with large targets, overflow at the scale of the sixth."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, 8, generator=generator)
    targets = torch.tanh(inputs[:, :4]) + inputs[:, 4:]
    targets[6 * BATCH : 7 * BATCH] *= 100
    if marked is not None:
        inputs[marked, 0] = MARK
    return TensorDataset(inputs, targets)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """So large that the first steps overflow."""
    return 64 * mse_loss(output, target)


def decay(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step / 5))


def float16_trainer(num_stages: int, num_pipelines: int, **more: Any) -> Trainer:
    options: dict[str, Any] = {
        "model": model,
        "optimizer_fn": partial(torch.optim.AdamW, lr=1e-2),
        "dataset": samples(),
        "loss_fn": loss_fn,
        "batch_size": BATCH,
        "microbatch_size": 2,
        "lr_schedule": decay,
        "device": FLOAT16,
        "data": DataConfig(shuffle=False),
        "timeout": 30.0,
    }
    return Trainer(plan=plan_of(num_stages, num_pipelines), **options | more)


def plain_loop(
    *, microbatch_size: int = 2, clip: float | None = None, fused: bool = False
) -> tuple[list[float], list[float], list[float], list[float], dict[str, Tensor]]:
    """Return losses, scales, learning rates, gradient norms and weights of torch's own loop."""
    module, (inputs, targets) = build_model(model, 0), samples().tensors
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=fused)
    scheduler, scaler = decay(optimizer), torch.amp.GradScaler("cpu")
    losses, scales, rates, norms = [], [], [], []
    for step in range(STEPS):
        chosen = torch.arange(step * BATCH, (step + 1) * BATCH) % NUM_SAMPLES
        scales.append(scaler.get_scale())
        rates.append(optimizer.param_groups[0]["lr"])
        losses.append(0.0)
        for some in chosen.split(microbatch_size):
            with torch.autocast("cpu", torch.float16):
                loss = loss_fn(module(inputs[some]), targets[some])
            losses[-1] += loss.item() * len(some) / BATCH
            scaler.scale(loss * (len(some) / BATCH)).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(module.parameters(), torch.inf if clip is None else clip)
        norms.append(norm.item() if norm.isfinite() else torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with warnings.catch_warnings():  # the first update was skipped
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            scheduler.step()
    return losses, scales, rates, norms, module.state_dict()


def fit(folder: Path, num_stages: int, num_pipelines: int, **more: Any) -> list[Any]:
    """Return, by rank, what `plain_loop` does, of the Trainer."""

    def work(ctx: DistContext | None) -> Any:
        with float16_trainer(num_stages, num_pipelines, **more) as made:
            steps = made.fit(max_steps=STEPS, on_nan="stop", progress=False).steps
            norms = [s.grad_norm if math.isfinite(s.grad_norm) else torch.inf for s in steps]
            columns = [[s.loss, s.loss_scale, s.learning_rate] for s in steps]
            return *map(list, zip(*columns, strict=True)), norms, made.model.state_dict()

    return run_job(num_stages * num_pipelines, work, folder)


def num_skipped(scales: list[float]) -> int:
    return sum(after < before for before, after in pairwise(scales))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("microbatch_size", [2, BATCH])
def test_one_process_equals_the_plain_loop(
    tmp_path: Path, microbatch_size: int, fused: bool
) -> None:
    losses, scales, rates, norms, weights = plain_loop(microbatch_size=microbatch_size, fused=fused)
    assert num_skipped(scales[:5]) >= 2
    assert num_skipped(scales[6:8]) == 1
    assert scales[5] == scales[6]
    [found] = fit(
        tmp_path,
        *(1, 1),
        microbatch_size=microbatch_size,
        optimizer_fn=partial(torch.optim.AdamW, lr=1e-2, fused=fused),
    )
    assert found[1:3] == (scales, rates), "also in skipped steps"
    assert found[3] == pytest.approx(norms, rel=ROUNDING), "unscaled; inf in skipped steps"
    if microbatch_size == BATCH:
        assert found[0] == losses
        torch.testing.assert_close(found[4], weights, atol=0, rtol=0)
    else:  # sums of gradients have another order
        assert found[0] == pytest.approx(losses, rel=ROUNDING)


def test_gradients_are_clipped_after_they_are_unscaled(tmp_path: Path) -> None:
    losses, scales, _, norms, weights = plain_loop(clip=0.5)
    [found] = fit(tmp_path, 1, 1, clip_grad_norm=0.5)
    assert found[1] == scales
    assert found[0] == pytest.approx(losses, rel=ROUNDING)
    assert found[3] == pytest.approx(norms, rel=ROUNDING)
    torch.testing.assert_close(found[4], weights, atol=1e-4, rtol=0)


SHAPES: list[tuple[int, int, str, float | None, bool]] = [
    (2, 1, "decoupled", None, False),
    (1, 2, "decoupled", None, False),
    (1, 2, "decoupled", None, True),
    (2, 2, "decoupled", 0.5, False),
    (2, 2, "decoupled", None, True),
    (2, 2, "all_reduce", None, False),
    (2, 2, "all_reduce", 0.5, True),
    (1, 2, "balanced", 0.5, False),
    (2, 2, "balanced", None, False),
]


@pytest.mark.parametrize(
    ("num_stages", "num_pipelines", "sync", "clip", "fused"), long_except(SHAPES, 0, 3, 7)
)
def test_stages_and_replicas_equal_the_plain_loop(
    tmp_path: Path, num_stages: int, num_pipelines: int, sync: str, clip: float | None, fused: bool
) -> None:
    losses, scales, rates, norms, weights = plain_loop(clip=clip)
    found = fit(
        tmp_path,
        *(num_stages, num_pipelines),
        sync=sync,
        clip_grad_norm=clip,
        optimizer_fn=partial(torch.optim.AdamW, lr=1e-2, fused=fused),
    )
    for own_losses, own_scales, own_rates, own_norms, state in found:
        assert own_scales == scales, "the same steps are skipped"
        assert own_rates == pytest.approx(rates)
        assert own_losses == pytest.approx(losses, rel=ROUNDING)
        assert own_norms == pytest.approx(norms, rel=ROUNDING)
        for name, weight in state.items():
            torch.testing.assert_close(weight, weights[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("sync", "clip"), [("decoupled", None), ("decoupled", 0.5), ("all_reduce", None)]
)
def test_overflow_on_one_stage_of_one_replica_is_skipped_by_all(
    tmp_path: Path, sync: str, clip: float | None
) -> None:
    """Step 3 has it on the first stage; nobody warns, or stops for it."""
    marked = 3 * BATCH + BATCH // 2 + 1  # of the second pipeline

    def work(ctx: DistContext | None) -> Any:
        records = list[logging.LogRecord]()
        handler = logging.Handler(logging.WARNING)
        handler.emit = records.append  # type: ignore[method-assign]
        logging.getLogger("polyrhythm").addHandler(handler)
        weights = list[Tensor]()
        with float16_trainer(
            *(2, 2),
            sync=sync,
            clip_grad_norm=clip,
            dataset=samples(marked),
            loss_fn=mse_loss,
        ) as made:
            for last in (3, 4, 5):
                steps = made.fit(max_steps=last, on_nan="stop", progress=False).steps
                weights.append(torch.cat([p.detach().flatten() for p in made.model.parameters()]))
            skipped = torch.equal(weights[0], weights[1])
            return skipped, torch.equal(weights[1], weights[2]), steps[-1].loss_scale, len(records)

    assert run_job(4, work, tmp_path) == [(True, False, 2.0**15, 0)] * 4


@pytest.mark.parametrize("sync", long_except(["adaptive", "age", "local", "static"], 0))
def test_in_groups_the_stages_of_a_pipeline_have_its_scale(tmp_path: Path, sync: str) -> None:
    def work(ctx: DistContext | None) -> Any:
        with float16_trainer(2, 2, sync=sync, dataset=samples(marked=1)) as made:
            steps = made.fit(max_steps=2 * STEPS, on_nan="stop", progress=False).steps
            scaler = made._progress.scaler
            assert scaler is not None
            finite = all(p.isfinite().all() for p in made.model.parameters())
            own = [] if sync == "static" else [(s.step, s.loss_scale) for s in steps]
            return own, scaler.state_dict(), finite

    found = run_job(4, work, tmp_path)
    assert all(finite for _, _, finite in found)
    assert found[0][:2] == found[1][:2]
    assert found[2][:2] == found[3][:2]


def state_after(
    folder: Path, num_stages: int, num_pipelines: int, *ends: int, **more: Any
) -> list[Any]:
    """Train up to each of `ends` by a new Trainer, and return scales, scaler state and weights."""

    def work(ctx: DistContext | None) -> Any:
        scales = list[float | None]()
        for end in ends:
            with float16_trainer(num_stages, num_pipelines, run_dir=folder / "run", **more) as made:
                made.restore()
                steps = made.fit(max_steps=end, progress=False).steps
                scales += [step.loss_scale for step in steps]
                made.save()
                scaler = made._progress.scaler
                state = None if scaler is None else scaler.state_dict()
        return scales, state, made.model.state_dict()

    return run_job(num_stages * num_pipelines, work, folder)


@pytest.mark.parametrize(("num_stages", "num_pipelines"), long_except([(1, 1), (2, 2)], 0, 1))
def test_a_restored_run_equals_one_without_a_break(
    tmp_path: Path, num_stages: int, num_pipelines: int
) -> None:
    shape = num_stages, num_pipelines
    whole = state_after(tmp_path / "whole", *shape, STEPS)
    parts = state_after(tmp_path / "parts", *shape, STEPS // 2, STEPS)
    for (scales, state, weights), found in zip(whole, parts, strict=True):
        assert found[:2] == (scales, state)
        assert state["_growth_tracker"] == STEPS - 1 - 6, "since the step that overflowed"
        torch.testing.assert_close(found[2], weights, atol=0, rtol=0)


@pytest.mark.long
def test_scale_is_restored_into_another_plan(tmp_path: Path) -> None:
    whole = state_after(tmp_path / "whole", 1, 1, STEPS)[0]
    first = state_after(tmp_path / "parts", 2, 2, STEPS // 2)
    for scales, state, _ in state_after(tmp_path / "parts", 2, 1, STEPS):
        assert first[0][0] + scales == whole[0]
        assert state == whole[1]


def test_a_checkpoint_without_a_scale_starts_with_the_default(tmp_path: Path) -> None:
    without = DeviceConfig("cpu", autocast=torch.bfloat16)
    state_after(tmp_path, 1, 1, 2, device=without)
    with float16_trainer(1, 1, run_dir=tmp_path / "run") as made:
        made.restore()
        steps = made.fit(max_steps=3, progress=False).steps
        assert [step.loss_scale for step in steps] == [2.0**16]
        made.save()
    with float16_trainer(1, 1, run_dir=tmp_path / "run", device=without) as made:
        assert made.restore() == 3
        assert made.fit(max_steps=4, progress=False).steps[0].loss_scale is None


@pytest.mark.parametrize("before", [False, True])
def test_a_restored_run_has_the_implementation_of_its_own_optimizer(
    tmp_path: Path, before: bool
) -> None:
    """A scaler lets fused optimizers skip a step, and others need not know of it."""
    for fused, end in ((before, 3), (not before, 8)):
        optimizer_fn = partial(torch.optim.AdamW, lr=1e-2, fused=fused)
        with float16_trainer(
            1, 1, run_dir=tmp_path, optimizer_fn=optimizer_fn, lr_schedule=None
        ) as made:
            assert made.restore() == (0 if fused == before else 3)
            (group,) = made._progress.optimizer.param_groups
            assert bool(group["fused"]) == fused
            made.fit(max_steps=end, progress=False)
            made.save()


@pytest.mark.long
@pytest.mark.parametrize("num_pipelines", long_except([1, 2], 1))
def test_fused_sgd_has_no_momentum_after_skipped_first_steps(
    tmp_path: Path, num_pipelines: int
) -> None:
    """torch allocates the momentum in the first step, and a skipped step leaves it as it is."""

    def work(ctx: DistContext | None, fused: bool) -> Any:
        freed = [torch.full((size,), 7.0) for size in range(1, 260) for _ in range(20)]
        del freed  # the next allocations contain these numbers
        optimizer_fn = partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=fused)
        with float16_trainer(1, num_pipelines, optimizer_fn=optimizer_fn) as made:
            steps = made.fit(max_steps=STEPS, progress=False).steps
            assert not math.isfinite(steps[0].grad_norm), "skipped"
            return [step.loss for step in steps]

    fused, plain = (
        run_job(num_pipelines, partial(work, fused=fused), tmp_path / str(fused))[0]
        for fused in (True, False)
    )
    assert fused == pytest.approx(plain, rel=ROUNDING)


class OldContract(torch.optim.AdamW):
    """Takes the scaler itself, as apex does, and not the mark of a step to skip."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
        del self.found_inf
        return super().step(closure)


class NoScaling(torch.optim.SGD):
    _step_supports_amp_scaling = False


@pytest.mark.parametrize(
    ("make", "skips"),
    [
        (partial(torch.optim.Adam, fused=True), True),
        (partial(torch.optim.AdamW, fused=True), True),
        (partial(torch.optim.SGD, lr=0.1, fused=True), True),
        (torch.optim.AdamW, False),
        (OldContract, False),
        (partial(NoScaling, lr=0.1), False),
    ],
)
def test_optimizers_that_skip_a_step_by_themselves(make: Any, skips: bool) -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = make([weight])
    assert skips_marked_steps(optimizer) == skips
    if skips:
        weight.grad, optimizer.found_inf = torch.full_like(weight, torch.nan), torch.ones(())
        optimizer.step()
        assert weight.tolist() == [1.0] * 4
        optimizer.param_groups[0]["fused"] = None
        assert not skips_marked_steps(optimizer), "one group is not fused"


def test_fused_sgd_with_dampening_is_refused() -> None:
    """Its first momentum is not dampened: it cannot start with zeros."""
    options = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1}
    with (
        float16_trainer(1, 1, optimizer_fn=partial(torch.optim.SGD, fused=True, **options)) as made,
        pytest.raises(LaunchError, match=r"fused SGD with momentum=0\.9 and dampening=0\.1"),
    ):
        made.fit(max_steps=1, progress=False)
    with float16_trainer(1, 1, optimizer_fn=partial(torch.optim.SGD, **options)) as made:
        made.fit(max_steps=1, progress=False)


def test_a_loss_that_is_not_finite_still_stops() -> None:
    def poisoned(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target) * torch.nan

    with float16_trainer(1, 1, loss_fn=poisoned) as made, pytest.raises(TrainingError) as caught:
        made.fit(max_steps=3, on_nan="stop", progress=False)
    assert "step 0: the loss of pipeline 0 is nan" in caught.value.wrong


def test_a_scale_that_keeps_falling_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    inputs, targets = samples().tensors
    inputs[:, 0] = MARK
    with float16_trainer(1, 1, dataset=TensorDataset(inputs, targets)) as made:
        before = [p.clone() for p in made.model.parameters()]
        made.fit(max_steps=20, on_nan="stop", progress=False)
        for parameter, previous in zip(made.model.parameters(), before, strict=True):
            assert torch.equal(parameter, previous)
    [warned] = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warned.startswith("step 17: the loss scale has fallen to 0.5")


class Penalty(nn.Module):
    """Adds an auxiliary loss to the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return add_auxiliary_loss(x, x.float().square().mean())


def with_penalty() -> nn.Sequential:
    layers = list(model())
    return nn.Sequential(layers[0], Penalty(), *layers[2:])


@pytest.mark.long
@pytest.mark.parametrize("num_stages", [1, 2])
def test_auxiliary_losses_are_scaled_on_every_stage(tmp_path: Path, num_stages: int) -> None:
    def work(ctx: DistContext | None, device: DeviceConfig) -> list[tuple[float | None, float]]:
        with float16_trainer(
            num_stages, 1, model=with_penalty, loss_fn=mse_loss, device=device
        ) as made:
            steps = made.fit(max_steps=3, progress=False).steps
            return [(step.loss, step.grad_norm) for step in steps]

    found = run_job(num_stages, partial(work, device=FLOAT16), tmp_path)
    exact = work(None, DeviceConfig("cpu")) if num_stages == 1 else None
    if exact is None:
        exact = run_job(num_stages, partial(work, device=DeviceConfig("cpu")), tmp_path)[0]
    for steps in found:
        for step, expected in zip(steps, exact, strict=True):
            assert step == pytest.approx(expected, rel=4e-3)


def test_frozen_stage_trains_in_float16(tmp_path: Path) -> None:
    def frozen() -> nn.Sequential:
        made = model()
        made[0].requires_grad_(False)
        return made

    def work(ctx: DistContext | None) -> Any:
        with float16_trainer(2, 1, model=frozen) as made:
            steps = made.fit(max_steps=STEPS, progress=False).steps
            return [step.loss_scale for step in steps], steps[0].loss, steps[-1].loss

    first, second = run_job(2, work, tmp_path)
    assert first == second
    assert first[0][0] > first[0][-1]


def test_parameters_that_the_optimizer_omits_are_not_in_the_norm(tmp_path: Path) -> None:
    """Nobody unscales their gradients, which would stay infinite after the first overflow."""

    def some(named: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for name, p in named if not name.startswith("2.")], lr=1e-2)

    def work(ctx: DistContext | None) -> list[float]:
        with float16_trainer(2, 1, optimizer_fn=some, clip_grad_norm=0.5) as made:
            steps = made.fit(max_steps=STEPS, progress=False).steps
            return [step.grad_norm for step in steps]

    for norms in run_job(2, work, tmp_path):
        assert not math.isfinite(norms[0])
        assert 0 < norms[5] < 1e4


def test_half_parameters_are_refused() -> None:
    with pytest.raises(LaunchError) as caught:
        float16_trainer(1, 1, model=lambda: model().half())
    assert "0.weight in float16: attempting to unscale FP16 gradients" in caught.value.wrong
    assert "omit model.half()" in caught.value.fix


def test_bfloat16_is_refused_on_gpus_that_emulate_it() -> None:
    bfloat16 = DeviceConfig(autocast=torch.bfloat16)
    with pytest.raises(LaunchError) as caught:
        bfloat16.check_capability((7, 0), "Tesla V100 of s0p1")
    assert "torch.bfloat16 on Tesla V100 of s0p1 of compute capability 7.0" in caught.value.wrong
    assert "autocast=torch.float16" in caught.value.fix
    bfloat16.check_capability((8, 0), "A100")
    FLOAT16.check_capability((7, 0), "Tesla V100")
    DeviceConfig().check_capability((7, 0), "Tesla V100")


def test_pipeline_alone_takes_the_scale_of_a_grad_scaler(tmp_path: Path) -> None:
    losses, scales, *_ = plain_loop()

    def work(ctx: DistContext) -> Any:
        inputs, targets = samples().tensors
        found, used = [], []
        with Pipeline.from_sequential(
            build_model(model, 0),
            layers_per_stage=LAYERS[2],
            n_microbatches=BATCH // 2,
            loss_fn=loss_fn,
            schedule="1f1b",
        ) as pipeline:
            optimizer = torch.optim.AdamW(pipeline.module.parameters(), lr=1e-2)
            scheduler = decay(optimizer)
            scaler = ShardedGradScaler("cpu", process_group=dist.group.WORLD)
            for step in range(STEPS):
                chosen = torch.arange(step * BATCH, (step + 1) * BATCH) % NUM_SAMPLES
                scale, own = scaler.scale(torch.ones(())), list[Tensor]()
                pipeline.set_loss_scale(scale)
                with torch.autocast("cpu", torch.float16):
                    if pipeline.is_first:
                        pipeline.step(inputs[chosen])
                    else:
                        pipeline.step(target=targets[chosen], losses=own)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                    scheduler.step()
                used.append(scale.item())
                found.append(torch.stack(own).mean().item() if own else None)
        return found, used

    (_, first), (found, second) = run_stages(2, work, tmp_path)
    assert first == second == scales
    assert found == pytest.approx(losses, rel=ROUNDING)


def test_pipeline_without_a_flush_refuses_a_scale(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        with Pipeline.from_sequential(
            model(), layers_per_stage=LAYERS[2], n_microbatches=1, loss_fn=loss_fn, flush=False
        ) as pipeline:
            with pytest.raises(ScheduleError) as caught:
                pipeline.set_loss_scale(torch.ones(()))
            return caught.value.wrong

    assert run_stages(2, work, tmp_path) == ["a loss scale without a flush"] * 2
