"""Losses weighted by labels on a GPU: the result of one process, without waiting for the GPU."""

import pickle
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import polyrhythm as pr
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.pipeline.batch import HostCopy, mean_loss
from polyrhythm.run.pipeline.loss import LossFunction
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.trainer.config import DataConfig
from polyrhythm.run.trainer.trainer import Trainer

pytestmark = pytest.mark.skipif(
    not torch.cuda.device_count(), reason="this machine has no CUDA device"
)

CLASSES, BATCH, MICROBATCH = 7, 12, 2


class Layer(nn.Module):
    def __init__(self, *, with_loss: bool) -> None:
        super().__init__()
        self.linear, self.with_loss = nn.Linear(CLASSES, CLASSES), with_loss

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.linear(hidden).tanh()
        return pr.add_auxiliary_loss(hidden, hidden.mean().square()) if self.with_loss else hidden


def model(*, with_loss: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(with_loss=with_loss), Layer(with_loss=with_loss)).double()


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    labels[[0, 1, 3, 7, 8]] = -100  # all of the first micro-batch
    inputs = torch.randn(BATCH, CLASSES, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, labels)


def expected(folder: Path, *, with_loss: bool) -> tuple[float, dict[str, Tensor]]:
    """Return loss and weights of one step on the CPU; a process with autograd must not fork."""
    path = folder / "expected.pkl"

    def work(ctx: DistContext) -> None:
        path.write_bytes(pickle.dumps(one_step(with_loss=with_loss)))

    with LocalJob(work, 1, output_folder=folder) as job:
        assert job.wait(60), "not done in time"
    found: tuple[float, dict[str, Tensor]] = pickle.loads(path.read_bytes())
    return found


def one_step(*, with_loss: bool) -> tuple[float, dict[str, Tensor]]:
    whole, (inputs, labels) = model(), dataset().tensors
    total = torch.zeros(())
    for some, their in zip(inputs.split(MICROBATCH), labels.split(MICROBATCH), strict=True):
        first = whole[0](some)
        output, count = whole[1](first), (their != -100).sum()
        total = total + cross_entropy(output, their, reduction="sum")
        if with_loss:
            total = total + count * (first.mean().square() + output.mean().square())
    loss = total / (labels != -100).sum()
    loss.backward()
    torch.optim.SGD(whole.parameters(), lr=1.0).step()
    return loss.item(), whole.state_dict()


def train(folder: Path, num_stages: int, num_pipelines: int, cases: list[tuple[str, bool]]) -> Any:
    layers = {1: (2,), 2: (1, 1)}[num_stages]
    plan = Plan(layers_per_stage=layers, pipelines=(PipelinePlan(schedule="1f1b"),) * num_pipelines)

    def work(ctx: DistContext) -> None:
        found = []
        for sync, with_loss in cases:
            with Trainer(
                partial(model, with_loss=with_loss),
                cross_entropy,
                partial(torch.optim.SGD, lr=1.0),
                dataset(),
                plan=plan,
                sync=sync,
                batch_size=BATCH,
                microbatch_size=MICROBATCH,
                device="cuda",
                data=DataConfig(shuffle=False),
            ) as trainer:
                (step,) = trainer.fit(max_steps=1).steps
                weights = {k: v.cpu() for k, v in trainer.model.state_dict().items()}
                found.append((step.loss, weights))
        (folder / f"{ctx.rank}.pkl").write_bytes(pickle.dumps(found))

    folder.mkdir()
    with LocalJob(work, plan.num_workers, output_folder=folder / "logs") as job:
        assert job.wait(120), "not done in time"
    found = [pickle.loads((folder / f"{r}.pkl").read_bytes()) for r in range(plan.num_workers)]
    return list(zip(*found, strict=True))


@pytest.mark.parametrize(("num_stages", "num_pipelines"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_trainer_on_a_gpu_equals_one_process(
    num_stages: int, num_pipelines: int, tmp_path: Path
) -> None:
    modes = ["decoupled", "all_reduce", "balanced"][: 1 if num_pipelines == 1 else 3]
    cases = [(mode, with_loss) for mode in modes for with_loss in (False, True)]
    found = train(tmp_path / "job", num_stages, num_pipelines, cases)
    for (_, with_loss), by_rank in zip(cases, found, strict=True):
        loss, weights = expected(tmp_path, with_loss=with_loss)
        for number, (_, state) in enumerate(by_rank):
            for name, value in state.items():
                assert name in weights, number
                torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-7)
        if num_pipelines == 1:
            assert by_rank[-1][0] == pytest.approx(loss, rel=1e-9)


def sum_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return cross_entropy(output, target, reduction="sum"), (target != -100).sum()


def several_means(output: Tensor, target: Tensor) -> Tensor:
    """Return a mean over labels of which all micro-batches have equally many: no warning."""
    first, second = target.clamp(min=0), target.abs() % CLASSES
    return cross_entropy(output, first) + cross_entropy(output, second)


def by_hand(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target, reduction="sum") / (target != -100).sum()


@pytest.mark.parametrize(
    "kind", ["sum and count", "cross-entropy", "several", "no flush", "by hand", "nccl"]
)
def test_counting_labels_does_not_wait_for_the_gpu(kind: str, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> None:
        if kind == "nccl":
            store = dist.FileStore(str(tmp_path / "store"), 1)
            dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
        module = model(with_loss=True).cuda()
        inputs, labels = (tensor.cuda() for tensor in dataset().tensors)
        loss_fn: Any = sum_and_count
        means = {"cross-entropy": cross_entropy, "several": several_means, "by hand": by_hand}
        if kind in means:
            loss_fn = LossFunction(means[kind], counts_labels=True)
        flush = kind != "no flush"
        number = BATCH // MICROBATCH if flush else 1
        pipeline = Pipeline(
            module, loss_fn=loss_fn, n_microbatches=number, schedule="1f1b", flush=flush
        )
        optimizer: Any = torch.optim.SGD(module.parameters(), lr=1.0)
        if kind == "nccl":
            optimizer = pr.DistributedOptimizer(optimizer, pipeline, process_group=dist.group.WORLD)
        else:  # the first call measures activations
            pipeline.step(inputs, target=labels, return_outputs=False)
            optimizer.zero_grad()
        warnings.simplefilter("ignore")  # the mode warns that it is a prototype
        waits = kind in ("nccl", "by hand")
        torch.cuda.set_sync_debug_mode("default" if waits else "error")
        losses: list[Tensor] = []
        pipeline.step(inputs, target=labels, return_outputs=False, losses=losses)
        torch.cuda.set_sync_debug_mode("default")
        if not flush:  # gradients would be nan, if anything was divided by a count of 0
            pipeline.step(inputs[:2], target=labels[:2], return_outputs=False)
        if kind == "sum and count":
            torch.cuda.set_sync_debug_mode("error")
            numbers = HostCopy((*losses, *pipeline.loss_counts))
            torch.cuda.set_sync_debug_mode("default")
            counts = [float(count) for count in pipeline.loss_counts]
            total = sum(float(loss) * n for loss, n in zip(losses, counts, strict=True))
            assert mean_loss(numbers.read()) == pytest.approx(total / sum(counts))
        optimizer.step()
        weights = {k: v.cpu() for k, v in module.state_dict().items()}
        (tmp_path / "weights.pkl").write_bytes(pickle.dumps(weights))
        pipeline.close()

    with LocalJob(work, 1, output_folder=tmp_path / "logs") as job:
        assert job.wait(120), "not done in time"
    found = pickle.loads((tmp_path / "weights.pkl").read_bytes())
    _, weights = expected(tmp_path, with_loss=True)
    for name, value in weights.items():
        if kind in ("several", "no flush"):  # another loss, other auxiliary losses
            assert found[name].isfinite().all()
            continue
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)
