"""The Trainer with stages and replicas that share one GPU has the losses of one process."""

import os
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from polyrhythm.errors import TrainingError
from polyrhythm.plan.options import Recompute
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.pipeline.partition import build_model
from polyrhythm.run.trainer.config import CheckpointConfig, DataConfig, DeviceConfig
from polyrhythm.run.trainer.sync_strategy import NoSync
from polyrhythm.run.trainer.trainer import Trainer
from tests.gloo.pipelines import run_single_process

pytestmark = pytest.mark.skipif(
    not torch.cuda.device_count(), reason="this machine has no CUDA device"
)

WIDTH, NUM_STEPS = 64, 8
LAYERS = {1: (7,), 2: (4, 3)}


def model() -> nn.Sequential:
    pairs = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*pairs, nn.Linear(WIDTH, 4))


def compiled() -> nn.Sequential:
    """Return the same model as compiled blocks of two layers, and the last one."""
    warnings.simplefilter("ignore")  # pytest turns those of torch's compiler into errors
    layers = list(model())
    blocks = [nn.Sequential(*layers[i : i + 2]) for i in range(0, 6, 2)]
    for block in blocks:
        block.compile()
    return nn.Sequential(*blocks, layers[6])


def losses(
    folder: Path,
    num_stages: int,
    num_pipelines: int,
    sync: str,
    backend: str = "auto",
    build: Callable[[], nn.Sequential] = model,
    layers_per_stage: tuple[int, ...] = (),
    recompute: Recompute = "auto",
) -> list[float]:
    """Return the loss of each global batch; the test's own process does not touch the GPU."""
    layers_per_stage = layers_per_stage or LAYERS[num_stages]
    plan = Plan(layers_per_stage=layers_per_stage, pipelines=(PipelinePlan(),) * num_pipelines)
    inputs = torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(0))

    def work(ctx: DistContext) -> None:
        os.environ |= {
            "NCCL_HOSTID": f"host{ctx.rank}",  # NCCL refuses two workers of a host on one GPU
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
        }
        with Trainer(
            build,
            mse_loss,
            partial(torch.optim.AdamW, lr=1e-3),
            TensorDataset(inputs, inputs[:, :4].tanh()),
            plan=plan,
            sync=sync,
            batch_size=32,
            microbatch_size=4,
            device=DeviceConfig("cuda", backend=backend, recompute=recompute),
            clip_grad_norm=0.5,
            run_dir=folder / "run",
            checkpoint=CheckpointConfig(every=5),  # a second one may be skipped: the disk is slow
        ) as trainer:
            steps = trainer.fit(max_steps=NUM_STEPS).steps
            assert next(trainer.model.parameters()).is_cuda
        own = [end.own for end in steps]
        found = [(each.loss, each.num_samples) for each in own if each.loss is not None]
        (folder / f"{ctx.rank}.pkl").write_bytes(pickle.dumps(found))

    folder.mkdir()
    with LocalJob(work, plan.num_workers, output_folder=folder / "logs") as job:
        assert job.wait(120), "not done in time"
    assert list((folder / "run" / "checkpoints").glob("step-*"))
    paths = sorted(folder.glob("*.pkl"))
    found: list[Any] = [each for p in paths if (each := pickle.loads(p.read_bytes()))]
    return [
        sum(loss * number for loss, number in step) / sum(number for _, number in step)
        for step in zip(*found, strict=True)
    ]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("num_stages", "num_pipelines", "sync", "backend"),
    [
        (2, 1, "auto", "gloo"),
        (1, 2, "decoupled", "gloo"),
        (2, 2, "all_reduce", "gloo"),
        (1, 2, "balanced", "gloo"),
        (2, 1, "auto", "nccl"),
        (1, 2, "decoupled", "nccl"),
        (2, 2, "decoupled", "nccl"),
        (2, 2, "all_reduce", "auto"),
    ],
)
def test_stages_and_replicas_on_one_gpu_match_single_process(
    tmp_path: Path, num_stages: int, num_pipelines: int, sync: str, backend: str
) -> None:
    expected = losses(tmp_path / "alone", 1, 1, "auto")
    assert len(expected) == NUM_STEPS
    actual = losses(tmp_path / "found", num_stages, num_pipelines, sync, backend)
    assert actual == pytest.approx(expected, rel=1e-5)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("sync", ["decoupled", "all_reduce"])
def test_compiled_layers_train_alike_on_two_replicas(tmp_path: Path, sync: str) -> None:
    """Weights are waited for before each block, outside of its graph."""
    expected = losses(tmp_path / "alone", 1, 1, "auto")
    actual = losses(tmp_path / "found", 1, 2, sync, build=compiled, layers_per_stage=(4,))
    assert actual == pytest.approx(expected, rel=1e-4)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("num_stages", "num_pipelines"), [(1, 1), (2, 2)])
def test_stages_that_recompute_have_the_same_losses(
    tmp_path: Path, num_stages: int, num_pipelines: int
) -> None:
    expected = losses(tmp_path / "alone", 1, 1, "auto")
    shape = num_stages, num_pipelines
    actual = losses(tmp_path / "found", *shape, "auto", recompute="always")
    assert actual == pytest.approx(expected, rel=1e-5)


@pytest.mark.timeout(120)
def test_a_checkpoint_that_was_copied_during_training_has_the_weights_of_its_step(
    tmp_path: Path,
) -> None:
    inputs = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(0))

    def made() -> Trainer:
        return Trainer(
            model,
            mse_loss,
            partial(torch.optim.AdamW, lr=1e-2),
            TensorDataset(inputs, inputs[:, :4].tanh()),
            batch_size=32,
            microbatch_size=4,
            device="cuda",
            run_dir=tmp_path / "run",
            checkpoint=CheckpointConfig(every=5),
        )

    def train() -> tuple[list[float], list[float]]:
        with made() as trainer:
            whole = list(trainer.fit(max_steps=NUM_STEPS, progress=False).losses)
        with made() as trainer:
            assert trainer.restore(tmp_path / "run" / "checkpoints" / "step-00000005") == 5
            rest = trainer.fit(max_steps=NUM_STEPS, progress=False, overwrite=True).losses
        return whole[5:], list(rest)

    expected, found = run_single_process(train, tmp_path)
    assert found == pytest.approx(expected, rel=1e-6)


class Hungry(nn.Module):
    """Asks for a pebibyte in the forward of its tenth micro-batch."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 10:
            torch.empty(2**50, dtype=torch.uint8, device=x.device)
        return x


@pytest.mark.timeout(120)
def test_running_out_of_memory_in_a_step_names_the_worker_and_what_it_holds(
    tmp_path: Path,
) -> None:
    inputs = torch.randn(128, WIDTH)

    def train() -> str:
        with (
            pytest.raises(TrainingError) as caught,
            Trainer(
                lambda: nn.Sequential(*model(), Hungry()),
                mse_loss,
                partial(torch.optim.AdamW, lr=1e-3),
                TensorDataset(inputs, inputs[:, :4]),
                batch_size=32,
                microbatch_size=4,
                device="cuda",
            ) as trainer,
        ):
            trainer.fit(max_steps=NUM_STEPS, progress=False)
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        return str(caught.value)

    error = run_single_process(train, tmp_path)
    assert "s0p0" in error
    assert "F1" in error, "the tenth micro-batch is the second one of the second step"


# Not pytest.importorskip: torchao's import uses the GPU, and this process forks.
@pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning")  # torchao's
@pytest.mark.skipif(find_spec("torchao") is None, reason="float8 needs torchao, which is optional")
@pytest.mark.timeout(120)
def test_float8_trains_about_as_bfloat16(tmp_path: Path) -> None:
    """Micro-batches of 4 rows, which the products of weight gradients pad to 16."""
    inputs = torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(0))

    def train(float8: bool) -> list[float]:
        with Trainer(
            model,
            mse_loss,
            partial(torch.optim.AdamW, lr=1e-3),
            TensorDataset(inputs, inputs[:, :4].tanh()),
            batch_size=32,
            microbatch_size=4,
            device=DeviceConfig("cuda", autocast=torch.bfloat16, float8=float8),
        ) as trainer:
            return list(trainer.fit(max_steps=NUM_STEPS, progress=False).losses)

    found = run_single_process(lambda: train(True), tmp_path)
    expected = run_single_process(lambda: train(False), tmp_path)
    assert found == pytest.approx(expected, rel=0.05)
    assert found != expected


def large_loss(output: Tensor, target: Tensor) -> Tensor:
    """So large that the first steps overflow in float16."""
    return 32 * mse_loss(output, target)


def float16_data() -> TensorDataset:
    """Gradients of the sixth batch overflow, too."""
    inputs = torch.randn(32 * NUM_STEPS, WIDTH, generator=torch.Generator().manual_seed(0))
    targets = inputs[:, :4].tanh()
    targets[5 * 32 : 6 * 32] *= 1000
    return TensorDataset(inputs, targets)


def float16_loop(fused: bool) -> tuple[list[float], list[float]]:
    """Return losses and scales of a plain loop with a GradScaler."""
    module, (inputs, targets) = build_model(model, 0).cuda(), float16_data().tensors
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=fused)
    scaler, found, scales = torch.amp.GradScaler("cuda"), [], []
    for step in range(NUM_STEPS):
        some = slice(32 * step, 32 * (step + 1))
        scales.append(scaler.get_scale())
        with torch.autocast("cuda", torch.float16):
            loss = large_loss(module(inputs[some].cuda()), targets[some].cuda())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, scales


def refuse_waits() -> None:
    """From now on, raise an error if the host waits for the GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode warns that it is a prototype
        torch.cuda.set_sync_debug_mode("error")


def float16_run(
    folder: Path, num_stages: int, num_pipelines: int, *, fused: bool, microbatch_size: int = 32
) -> list[list[tuple[float, float]]]:
    """Return, by rank, loss and scale of each step; if fused and alone, no update waits."""
    plan = Plan(layers_per_stage=LAYERS[num_stages], pipelines=(PipelinePlan(),) * num_pipelines)
    update, is_alone = NoSync.update, plan.num_workers == 1

    def update_without_waiting(self: NoSync, acknowledge: Callable[[], None]) -> None:
        refuse_waits()
        update(self, acknowledge)
        torch.cuda.set_sync_debug_mode("default")

    def work(ctx: DistContext) -> None:
        if fused and is_alone:
            NoSync.update = update_without_waiting  # type: ignore[method-assign]
        with Trainer(
            model,
            large_loss,
            partial(torch.optim.AdamW, lr=1e-3, fused=fused),
            float16_data(),
            plan=plan,
            batch_size=32,
            microbatch_size=microbatch_size,
            device=DeviceConfig("cuda", autocast=torch.float16),
            data=DataConfig(shuffle=False),
        ) as trainer:
            steps = trainer.fit(max_steps=NUM_STEPS, on_nan="stop").steps
        found = [(step.loss, step.loss_scale) for step in steps]
        (folder / f"{ctx.rank}.pkl").write_bytes(pickle.dumps(found))

    folder.mkdir()
    with LocalJob(work, plan.num_workers, output_folder=folder / "logs") as job:
        assert job.wait(120), "not done in time"
    return [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("*.pkl"))]


@pytest.mark.parametrize("fused", [False, True])
def test_float16_on_one_gpu_equals_the_plain_loop(tmp_path: Path, fused: bool) -> None:
    losses, scales = run_single_process(lambda: float16_loop(fused), tmp_path)
    assert len(set(scales)) >= 3, "steps are skipped"
    [found] = float16_run(tmp_path / "job", 1, 1, fused=fused)
    assert [scale for _, scale in found] == scales
    assert [loss for loss, _ in found] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize(("num_stages", "num_pipelines"), [(2, 1), (1, 2), (2, 2)])
def test_float16_skips_the_same_steps_on_stages_and_replicas(
    tmp_path: Path, num_stages: int, num_pipelines: int
) -> None:
    """Sums have another order: half a unit in the last place of float16, for some activations."""
    [alone] = float16_run(tmp_path / "alone", 1, 1, fused=True, microbatch_size=4)
    shape = num_stages, num_pipelines
    for found in float16_run(tmp_path / "job", *shape, fused=True, microbatch_size=4):
        assert [scale for _, scale in found] == [scale for _, scale in alone]
        losses = [loss for loss, _ in found]
        assert losses == pytest.approx([loss for loss, _ in alone], rel=4 * 2**-11)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_fused_optimizers_skip_a_step_that_is_not_finite_without_waiting(
    tmp_path: Path, clip: float | None
) -> None:
    """The host does not learn of it before the next step; the other steps change weights."""
    data = float16_data()
    data.tensors[1][2 * 32] = torch.inf  # of the third batch
    update = NoSync.update

    def work() -> list[float]:
        totals = list[float]()

        def update_without_waiting(self: NoSync, acknowledge: Callable[[], None]) -> None:
            refuse_waits()
            update(self, acknowledge)
            torch.cuda.set_sync_debug_mode("default")
            parameters = self._pipeline.module.parameters()
            totals.append(sum(p.double().abs().sum().item() for p in parameters))

        NoSync.update = update_without_waiting  # type: ignore[method-assign]
        with Trainer(
            model,
            large_loss,
            partial(torch.optim.AdamW, lr=1e-3, fused=True),
            data,
            batch_size=32,
            clip_grad_norm=clip,
            device="cuda",
            data=DataConfig(shuffle=False),
        ) as trainer:
            steps = trainer.fit(max_steps=4, on_nan="skip", progress=False).steps
        assert [step.is_finite for step in steps] == [True, True, False, True]
        return totals

    first, second, third, fourth = run_single_process(work, tmp_path)
    assert len({first, second, fourth}) == 3
    assert third == second
