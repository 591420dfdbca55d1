"""A bare pipeline divides sums by counts, and weighs auxiliary losses, on every stage."""

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import polyrhythm as pr
from polyrhythm.errors import ScheduleError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.partition import ModelPartition, Wiring
from polyrhythm.run.pipeline.pipeline import Pipeline
from tests.gloo.pipelines import (
    assert_close,
    gradients,
    merged,
    run_single_process,
    run_stages,
    step,
)

WIDTH, SIZES = 4, [3, 2, 2]  # of the micro-batches


def auxiliary_loss(hidden: Tensor) -> Tensor:
    return 0.5 * hidden.mean(0).square().sum()


class Dense(nn.Module):
    """A layer with an auxiliary loss; `reentrant`: how its activations are recomputed, if so."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.linear, self.reentrant, self.is_reference = nn.Linear(WIDTH, WIDTH), reentrant, False

    def compute(self, hidden: Tensor) -> Tensor:
        hidden = self.linear(hidden).tanh()
        return (
            hidden if self.is_reference else pr.add_auxiliary_loss(hidden, auxiliary_loss(hidden))
        )

    def forward(self, hidden: Tensor) -> Tensor:
        if self.reentrant is None or self.is_reference:
            return self.compute(hidden)
        hidden = hidden.requires_grad_()  # reentrant checkpoints need it
        result: Tensor = checkpoint(self.compute, hidden, use_reentrant=self.reentrant)
        return result


def build(*, reentrant: bool | None = None) -> nn.Sequential:
    """Return four layers; the first and the last share their weights."""
    torch.manual_seed(1)
    layers = [Dense(reentrant=reentrant) for _ in range(4)]
    layers[3].linear = layers[0].linear
    return nn.Sequential(*layers).double()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return inputs and targets; nan targets do not count: all of the second micro-batch."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(2, sum(SIZES), WIDTH, generator=generator, dtype=torch.float64)
    targets[3:5] = torch.nan
    targets[0, 1:] = torch.nan
    return inputs, targets


def sum_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    counted = ~target.isnan()
    return (output - target)[counted].square().sum(), counted.sum()


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.nan_to_num()).square().mean()


def reference(
    objective: Callable[[nn.Sequential, Tensor, Tensor, int], Tensor], *seeds: int
) -> dict[str, Tensor]:
    """Sum over all micro-batches of all batches; `objective` adds up the losses of one."""
    model = build()
    for layer in model:
        layer.is_reference = True  # type: ignore[assignment]
    for seed in seeds:
        inputs, targets = batch(seed)
        for some, their in zip(inputs.split(SIZES), targets.split(SIZES), strict=True):
            objective(model, some, their, int((~targets.isnan()).sum())).backward()
    return gradients(model)


def with_auxiliary_losses(
    model: nn.Sequential, inputs: Tensor, target: Tensor, total: int, *, by_sum: bool
) -> Tensor:
    auxiliary, hidden = torch.zeros((), dtype=torch.float64), inputs
    for layer in model:
        hidden = layer(hidden)
        auxiliary = auxiliary + auxiliary_loss(hidden)
    if not by_sum:
        return (mean(hidden, target) + auxiliary) * len(inputs) / sum(SIZES)
    loss, count = sum_and_count(hidden, target)
    return (loss + count * auxiliary) / total


def run_pipeline(
    ctx: DistContext, loss_fn: Any, *, seeds: tuple[int, ...] = (0,), **options: Any
) -> tuple[dict[str, Tensor], list[float]]:
    model = build(reentrant=options.pop("reentrant", None))
    options = {"n_microbatches": len(SIZES), "schedule": "1f1b", **options}
    with Pipeline.from_sequential(model, loss_fn=loss_fn, timeout=20.0, **options) as pipeline:
        losses: list[Tensor] = []
        for seed in seeds:
            inputs, targets = batch(seed)
            step(pipeline, inputs, targets, losses=losses)
        return gradients(pipeline.module), [loss.item() for loss in losses]


def losses_of(seed: int) -> list[float]:
    """Return the mean loss of each micro-batch, plus its auxiliary losses."""
    model, (inputs, targets) = build(), batch(seed)
    for layer in model:
        layer.is_reference = True  # type: ignore[assignment]
    found = []
    with torch.no_grad():
        for some, their in zip(inputs.split(SIZES), targets.split(SIZES), strict=True):
            hidden, auxiliary = some, 0.0
            for layer in model:
                hidden = layer(hidden)
                auxiliary += auxiliary_loss(hidden).item()
            loss, count = sum_and_count(hidden, their)
            found.append(float(loss / count if count else 0.0) + auxiliary)
    return found


def test_stages_divide_sums_by_counts_and_add_auxiliary_losses(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[Any]:
        return [
            run_pipeline(ctx, sum_and_count, seeds=(0, 1)),  # gradients of two steps are added
            run_pipeline(ctx, sum_and_count, scale_grads=False),
            *(run_pipeline(ctx, mean, reentrant=how) for how in (None, False, True)),
        ]

    by_rank = run_stages(3, work, tmp_path)
    found = [merged(rank[case][0] for rank in by_rank) for case in range(5)]
    by_sum = partial(with_auxiliary_losses, by_sum=True)
    by_mean = partial(with_auxiliary_losses, by_sum=False)
    calls = (by_sum, 0, 1), (by_sum, 0), (by_mean, 0)
    two_steps, one_step, means = run_single_process(
        lambda: [reference(*arguments) for arguments in calls], tmp_path
    )
    for case in found:  # the shared weights are on two stages
        assert torch.equal(case.pop("3.linear.weight"), case["0.linear.weight"])
        assert torch.equal(case.pop("3.linear.bias"), case["0.linear.bias"])
    assert_close(found[0], two_steps, tolerance=1e-12)
    assert by_rank[-1][0][1] == pytest.approx(losses_of(1), rel=1e-12)
    total = int((~batch()[1].isnan()).sum())
    summed = {name: gradient * total for name, gradient in one_step.items()}
    assert_close(found[1], summed, tolerance=1e-12)
    for case in found[2:]:
        assert_close(case, means, tolerance=1e-12)
    assert by_rank[-1][2][1] == by_rank[-1][3][1] == by_rank[-1][4][1]  # no value added twice


def untied(*, seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Dense(), Dense()).double()


def mean_gradients(microbatches: list[slice]) -> dict[str, Tensor]:
    """Return the gradients of the mean over all labels, with auxiliary losses, in one process."""
    model, (inputs, targets) = untied(), batch()
    for layer in model:
        layer.is_reference = True  # type: ignore[assignment]
    total, count = torch.zeros(()), 0
    for rows in microbatches:
        first = model[0](inputs[rows])
        second = model[1](first)
        loss, labels = sum_and_count(second, targets[rows])
        total = total + loss + labels * (auxiliary_loss(first) + auxiliary_loss(second))
        count += int(labels)
    (total / count).backward()
    return gradients(model)


def test_without_a_flush_a_batch_is_divided_by_its_own_labels(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> dict[str, Tensor]:
        options: dict[str, Any] = {"n_microbatches": 1, "flush": False, "schedule": "1f1b"}
        with Pipeline.from_sequential(
            untied(), loss_fn=sum_and_count, timeout=20.0, **options
        ) as pipeline:
            inputs, targets = batch()
            for rows in (slice(0, 3), slice(3, 5)):  # the second batch has no label
                step(pipeline, inputs[rows], targets[rows])
            for _ in pipeline.drain():
                pass  # gradients accumulate
            return gradients(pipeline.module)

    found = merged(run_stages(2, work, tmp_path))
    expected = run_single_process(partial(mean_gradients, [slice(0, 3)]), tmp_path)
    assert_close(found, expected, tolerance=1e-12)


def test_averaged_gradients_are_divided_by_the_labels_of_all_pipelines(tmp_path: Path) -> None:
    inputs, targets = batch()
    shares = slice(0, 5), slice(5, 7)

    def work(ctx: DistContext) -> dict[str, dict[str, Tensor]]:
        own_group = [dist.new_group([rank]) for rank in range(2)][ctx.rank]
        found = {}
        for kind in ("decoupled", "all_reduce"):
            model, options = untied(), {"process_group": own_group, "schedule": "1f1b"}
            pipeline = Pipeline(model, loss_fn=sum_and_count, n_microbatches=2, **options)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
            if kind == "decoupled":
                optimizer = closed = pr.DistributedOptimizer(optimizer, pipeline)
            else:
                closed = pr.GroupSync(pipeline, optimizer, kind, timeout=20.0)
            pipeline.step(inputs[shares[ctx.rank]], target=targets[shares[ctx.rank]])
            if kind == "all_reduce":
                with pytest.raises(ScheduleError, match="a second step before gradients"):
                    pipeline.step(inputs, target=targets)
                optimizer.zero_grad()
                pipeline.step(inputs[shares[ctx.rank]], target=targets[shares[ctx.rank]])
            optimizer.step()
            optimizer.zero_grad()
            closed.close()
            found[kind] = {k: v.clone() for k, v in model.state_dict().items()}
            model.load_state_dict(untied().state_dict())
            pipeline.step(inputs, target=targets)
            found[f"{kind}, closed"] = gradients(model)
        alone = untied()
        pipeline = Pipeline(alone, loss_fn=sum_and_count, n_microbatches=2, **options)
        pipeline.step(inputs, target=targets)
        return found | {"alone": gradients(alone)}

    microbatches = [slice(0, 3), slice(3, 5), slice(5, 6), slice(6, 7)]  # of both pipelines
    mean = run_single_process(partial(mean_gradients, microbatches), tmp_path)
    updated = {name: value - mean[name] for name, value in untied().state_dict().items()}
    for found in run_stages(2, work, tmp_path):
        for kind in ("decoupled", "all_reduce"):
            assert_close(found[kind], updated, tolerance=1e-12)
            # On its own again, a pipeline divides by its own labels.
            assert_close(found[f"{kind}, closed"], found["alone"], tolerance=1e-12)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # no in-place changes of its output
def test_shards_are_divided_by_the_labels_of_all_pipelines(tmp_path: Path) -> None:
    """FSDP2 averages gradients over pipelines, of which each counts only its own labels."""
    inputs, targets = batch()
    shares = slice(0, 5), slice(5, 7)

    def work(ctx: DistContext) -> list[dict[str, Tensor]]:
        own_group = [dist.new_group([rank]) for rank in range(2)][ctx.rank]
        mesh, found = init_device_mesh("cpu", (2,)), []
        for shard in (fully_shard, replicate):
            model = untied()
            for module in (model[0], model):  # the second has its parameters whole in a backward
                shard(module, mesh=mesh)
            options: dict[str, Any] = {"process_group": own_group, "schedule": "1f1b"}
            pipeline = Pipeline(model, loss_fn=sum_and_count, n_microbatches=2, **options)
            pipeline.eval(inputs)
            for _ in range(2):  # gradients of two steps are added
                pipeline.step(inputs[shares[ctx.rank]], target=targets[shares[ctx.rank]])
            found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
        return found

    microbatches = [slice(0, 3), slice(3, 5), slice(5, 6), slice(6, 7)]  # of both pipelines
    mean = run_single_process(partial(mean_gradients, microbatches), tmp_path)
    for by_shard in run_stages(2, work, tmp_path):
        for found in by_shard:
            assert_close(found, {name: 2 * value for name, value in mean.items()}, tolerance=1e-12)


def run_one_stage(work: Callable[[nn.Linear], Any], folder: Path) -> Any:
    return run_single_process(lambda: work(nn.Linear(2, 1, bias=False)), folder)


def test_unscaled_gradients_are_those_of_the_sum_in_every_mode(tmp_path: Path) -> None:
    def work(model: nn.Linear) -> list[Any]:
        found = []
        for flush, is_deferred in product((True, False), (True, False)):
            pipeline = Pipeline(
                *(model, 1, lambda output, target: (output.sum(), 10.0)),
                scale_grads=False,
                flush=flush,
                schedule="1f1b",
            )
            pipeline.defer_division(is_deferred)
            pipeline.step(torch.ones(2, 2), target=torch.ones(2, 1))
            found.append((model.weight.grad.tolist(), pipeline.pop_divisor(), pipeline.loss_counts))
            model.zero_grad()
        return found

    assert run_one_stage(work, tmp_path) == [([[2.0, 2.0]], None, [10.0])] * 4


@pytest.mark.parametrize("flush", [True, False])
def test_gradients_stay_in_their_memory(flush: bool, tmp_path: Path) -> None:
    def work(model: nn.Linear) -> tuple[bool, list[float], list[Any]]:
        pipeline = Pipeline(
            *(model, 1, lambda output, target: (output.sum(), output.numel())),
            flush=flush,
            schedule="1f1b",
        )
        flat = torch.ones(1, 2)
        model.weight.grad = flat
        pipeline.step(torch.ones(2, 2), target=torch.ones(2, 1))
        return model.weight.grad is flat, flat.tolist()[0], pipeline.loss_counts

    assert run_one_stage(work, tmp_path) == (True, [2.0, 2.0], [2.0])


def test_a_failed_step_leaves_the_gradients_of_earlier_ones(tmp_path: Path) -> None:
    def work(model: nn.Linear) -> list[list[float]]:
        calls = iter([False] * 3 + [True])  # the second backward of the second step

        def fail(gradient: Tensor) -> None:
            if next(calls):
                raise RuntimeError("out of memory")

        model.weight.register_hook(fail)
        pipeline = Pipeline(
            *(model, 2, lambda output, target: (output.sum(), output.numel())), schedule="1f1b"
        )
        pipeline.step(torch.ones(2, 2), target=torch.ones(2, 1))
        with pytest.raises(RuntimeError, match="out of memory"):
            pipeline.step(torch.full((2, 2), 3.0), target=torch.ones(2, 1))
        found: list[list[float]] = model.weight.grad.tolist()
        return found

    assert run_one_stage(work, tmp_path) == [[1.0, 1.0]]


class Sum(nn.Module):
    def forward(self, *hidden: Tensor) -> Tensor:
        return torch.stack(hidden).sum(0)


def test_auxiliary_losses_arrive_by_any_route(tmp_path: Path) -> None:
    """Two branches: stage 1 sends only to stage 3, past stage 2."""
    targets: list[dict[int, None]] = [{1: None, 2: None}, {3: None}, {3: None}, {}]

    def work(ctx: DistContext) -> Any:
        module = untied()[0] if ctx.rank < 3 else Sum()
        sources = tuple(s for s, sent in enumerate(targets) if ctx.rank in sent)
        part = ModelPartition(
            module=module, wiring=Wiring(sources=sources, targets=targets[ctx.rank])
        )
        losses: list[Tensor] = []
        with Pipeline(part, 1, mean, schedule="1f1b", timeout=20.0) as pipeline:
            step(pipeline, *batch(), losses=losses)
        return losses

    def single_process() -> Tensor:
        layer, (inputs, target) = untied()[0], batch()
        layer.is_reference = True
        first = layer(inputs)
        second = layer(first)
        auxiliary = auxiliary_loss(first) + 2 * auxiliary_loss(second)
        return (mean(2 * second, target) + auxiliary).detach()

    (found,) = run_stages(4, work, tmp_path)[-1]
    assert found.item() == pytest.approx(run_single_process(single_process, tmp_path).item())


def check_plain_torch() -> None:
    model, (inputs, _) = untied(), batch()
    output = model(inputs)
    output.sum().backward()
    found = gradients(model)
    model.zero_grad()
    for layer in model:
        layer.is_reference = True  # type: ignore[assignment]
    first = model[0](inputs)
    second = model[1](first)
    (second.sum() + auxiliary_loss(first) + auxiliary_loss(second)).backward()
    assert torch.equal(output, second)
    assert_close(found, gradients(model), tolerance=1e-12)


def test_an_auxiliary_loss_in_plain_torch_adds_its_gradient(tmp_path: Path) -> None:
    run_single_process(check_plain_torch, tmp_path)


def test_an_auxiliary_loss_that_is_no_scalar_tensor_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"add_auxiliary_loss\(float32\[7, 4\], float\)"):
        pr.add_auxiliary_loss(torch.zeros(7, 4), 0.5)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=r"int64\[3\], float32\[\]"):
        pr.add_auxiliary_loss(torch.arange(3), torch.tensor(0.5))
