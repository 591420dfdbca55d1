"""A Trainer gives the result of one process on the whole batch, whatever the labels and the plan.

Every job runs all cases one after the other: starting processes takes longer than training.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import polyrhythm as pr
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.trainer.config import DataConfig
from polyrhythm.run.trainer.trainer import Trainer
from tests.gloo.pipelines import assert_close, merged, run_single_process, run_stages
from tests.grids import long_except

VOCABULARY, LENGTH, WIDTH = 11, 6, 8
BATCH, MICROBATCH, STEPS, CLIP = 12, 2, 3, 0.2
WEIGHTS = torch.linspace(0.1, 2.0, VOCABULARY, dtype=torch.float64)
LAYERS = {1: (4,), 2: (2, 2)}


def dataset() -> TensorDataset:
    """Return tokens and labels; some micro-batches have no label, the others unequal numbers."""
    generator = torch.Generator().manual_seed(5)
    shape = BATCH * STEPS, LENGTH
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    labels = torch.randint(VOCABULARY, shape, generator=generator)
    kept = torch.randint(LENGTH + 1, shape[:1], generator=generator)
    kept[[0, 1, -2, -1]] = 0  # the first and the last micro-batch of all
    kept[: BATCH // 2] //= 3  # in the first step the pipelines have unequal numbers
    labels[torch.arange(LENGTH) >= kept[:, None]] = -100
    return TensorDataset(tokens, labels)


class Router(nn.Module):
    """A layer with the load balancing loss of a mixture of experts."""

    def __init__(self, *, with_loss: bool) -> None:
        super().__init__()
        self.gate, self.dense = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, WIDTH)
        self.with_loss = with_loss

    def auxiliary_loss(self, hidden: Tensor) -> Tensor:
        return 0.3 * self.gate(hidden).softmax(-1).mean((0, 1)).square().sum()

    def forward(self, hidden: Tensor) -> Tensor:
        loss = self.auxiliary_loss(hidden)
        hidden = self.dense(hidden).tanh()
        return pr.add_auxiliary_loss(hidden, loss) if self.with_loss else hidden


def build(*, with_loss: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        Router(with_loss=with_loss),
        Router(with_loss=with_loss),
        nn.Linear(WIDTH, VOCABULARY),
    ).double()


def padded(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.transpose(1, 2), labels, weight=WEIGHTS)


def causal(logits: Tensor, labels: Tensor) -> Tensor:
    return padded(logits[:, :-1], labels[:, 1:])


def sum_and_count(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()


def whole_batch(
    loss_fn: Callable[..., Any], model: nn.Sequential, tokens: Tensor, labels: Tensor
) -> Tensor:
    returned = loss_fn(model(tokens), labels)
    return returned[0] / returned[1] if isinstance(returned, tuple) else returned


def with_auxiliary_losses(
    loss_fn: Callable[..., Any], model: nn.Sequential, tokens: Tensor, labels: Tensor
) -> Tensor:
    """Add the auxiliary losses by hand, weighted as the labels of their micro-batch are."""
    total = whole_batch(loss_fn, model, tokens, labels)
    for some, their in zip(tokens.split(MICROBATCH), labels.split(MICROBATCH), strict=True):
        weight, hidden = (their != -100).sum() / (labels != -100).sum().double(), model[0](some)
        for router in (model[1], model[2]):
            total = total + weight * router.auxiliary_loss(hidden)
            hidden = router(hidden)
    return total


def reference(
    loss_fn: Callable[..., Any], *, with_loss: bool
) -> tuple[list[float], dict[str, Tensor], float]:
    """Train one process on whole batches; return losses, weights, and the loss after training."""
    model, objective = build(with_loss=False), with_auxiliary_losses if with_loss else whole_batch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    tokens, labels = dataset().tensors
    losses = []
    for rows in torch.arange(BATCH * STEPS).split(BATCH):
        loss = objective(loss_fn, model, tokens[rows], labels[rows])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        after = whole_batch(loss_fn, model, tokens, labels).item()
    return losses, model.state_dict(), after


def train(
    loss_fn: Callable[..., Any],
    plan: Plan,
    sync: str,
    *,
    with_loss: bool = False,
    steps: int = STEPS,
) -> tuple[list[tuple[float | None, float]], dict[str, Tensor], float]:
    trainer = Trainer(
        lambda: build(with_loss=with_loss),
        loss_fn,
        partial(torch.optim.SGD, lr=0.5, momentum=0.9),
        dataset(),
        batch_size=BATCH,
        microbatch_size=MICROBATCH,
        plan=plan,
        sync=sync,
        clip_grad_norm=CLIP,
        data=DataConfig(shuffle=False),
        timeout=30.0,
    )
    with trainer:
        result = trainer.fit(max_steps=steps)
        losses = [(step.own.loss, step.own.num_labels) for step in result.steps]
        for found, step in zip(result.losses, result.steps, strict=True):
            assert step.loss == found or (step.loss is None and math.isnan(found))
        return losses, trainer.model.state_dict(), trainer.evaluate(dataset())


def run_cases(
    num_stages: int, num_pipelines: int, cases: Sequence[tuple[Any, ...]], folder: Path
) -> list[list[Any]]:
    """Return by case and rank: losses, weights and the loss after training."""
    plan = Plan(
        layers_per_stage=LAYERS[num_stages],
        pipelines=(PipelinePlan(schedule="1f1b"),) * num_pipelines,
    )

    def work(ctx: DistContext | None = None) -> list[Any]:
        return [
            train(loss_fn, plan, sync, with_loss=with_loss) for loss_fn, sync, with_loss in cases
        ]

    if plan.num_workers == 1:
        found = [run_single_process(work, folder)]
    else:
        found = run_stages(plan.num_workers, work, folder)
    return [list(by_rank) for by_rank in zip(*found, strict=True)]


PLANS = {  # with more pipelines, every mode that averages gradients
    (1, 1): [padded, weighted, causal, sum_and_count],
    (2, 1): [padded, weighted, sum_and_count],
    (1, 2): [padded, causal, sum_and_count],
    (2, 2): [padded],
}


@pytest.mark.parametrize(("num_stages", "num_pipelines"), long_except(list(PLANS), 3))
def test_every_plan_equals_one_process_on_the_whole_batch(
    num_stages: int, num_pipelines: int, tmp_path: Path
) -> None:
    modes = ["decoupled"] if num_pipelines == 1 else ["decoupled", "all_reduce", "balanced"]
    losses = PLANS[num_stages, num_pipelines]
    cases = [
        *((loss_fn, "decoupled", False) for loss_fn in losses),
        *((losses[-1], mode, False) for mode in modes[1:]),
        *((padded, mode, True) for mode in modes[:2]),
    ]
    found = run_cases(num_stages, num_pipelines, cases, tmp_path)
    expected = run_single_process(
        lambda: [reference(loss_fn, with_loss=with_loss) for loss_fn, _, with_loss in cases],
        tmp_path,
    )
    for case, by_rank, (expected_losses, weights, after) in zip(
        cases, found, expected, strict=True
    ):
        for _, _, evaluated in by_rank:
            assert evaluated == pytest.approx(after, rel=1e-9), case
        for pipeline in range(num_pipelines):
            ranks = by_rank[pipeline * num_stages : (pipeline + 1) * num_stages]
            assert_close(merged(state for _, state, _ in ranks), weights, tolerance=1e-8)
        last_stages = [losses for losses, _, _ in by_rank[num_stages - 1 :: num_stages]]
        found_losses = [
            sum((loss or 0.0) * labels for loss, labels in step) / sum(labels for _, labels in step)
            for step in zip(*last_stages, strict=True)
        ]
        assert found_losses == pytest.approx(expected_losses, rel=1e-9), case


def test_models_are_averaged_after_steps_on_the_labels_of_each_pipeline(tmp_path: Path) -> None:
    plan = Plan(layers_per_stage=LAYERS[1], pipelines=(PipelinePlan(schedule="1f1b"),) * 2)
    found = run_stages(2, lambda _: train(padded, plan, "static", steps=1)[1], tmp_path)

    def own_step(rows: slice) -> dict[str, Tensor]:
        model, (tokens, labels) = build(with_loss=False), dataset().tensors
        whole_batch(padded, model, tokens[rows], labels[rows]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        return model.state_dict()

    shares = slice(0, BATCH // 2), slice(BATCH // 2, BATCH)
    first, second = run_single_process(lambda: list(map(own_step, shares)), tmp_path)
    for weights in found:
        mean = {name: (first[name] + second[name]) / 2 for name in first}
        assert_close(weights, mean, tolerance=1e-8)
