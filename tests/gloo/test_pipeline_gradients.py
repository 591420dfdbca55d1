"""The gradients of a pipeline equal those of one process for all kinds of batches and stages."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.batch import sizes_by_number
from polyrhythm.run.pipeline.pipeline import Pipeline
from tests.gloo.pipelines import (
    assert_close,
    assert_equal,
    gradients,
    merged,
    random_batch,
    run_single_process,
    run_stages,
    stack_of,
    step,
)

NUM_STAGES = 3


class Whole(nn.Module):
    """All stages in one process; `named` has the keyword arguments by stage."""

    def __init__(self, *stages: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, *args: Any, named: dict[int, dict[str, Any]]) -> Any:
        for number, stage in enumerate(self.stages):
            returned = stage(*args, **named.get(number, {}))
            args = returned if isinstance(returned, tuple) else (returned,)
        return returned


def plain() -> Whole:
    return Whole(*stack_of(NUM_STAGES))


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, gain: Tensor | float = 1.0, negate: bool = False) -> Tensor:
        return self.linear(x) * gain * (-1 if negate else 1)


def with_gains() -> Whole:
    torch.manual_seed(4)
    return Whole(*(Gain() for _ in range(NUM_STAGES)))


class Several(nn.Module):
    """Takes and returns a state, an index per sample, a mask, and the input again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(8, 8), nn.Embedding(5, 8)

    def forward(self, x: Tensor, which: Tensor, mask: Tensor, first: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(self.linear(x) + self.table(which) + first)
        return torch.where(mask, y, x), which, ~mask, first


def with_tuples() -> Whole:
    torch.manual_seed(5)
    return Whole(*(Several() for _ in range(NUM_STAGES)))


def tuple_batch() -> tuple[Any, Any]:
    inputs, target = random_batch(6, 8)  # not 8 samples: indices could be those of 8 columns
    return (inputs, torch.arange(6) % 5, inputs > 0, inputs * 2), target


def first_of(outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return mse_loss(outputs[0], target)


def frozen(*stages: int) -> Whole:
    """Freeze `stages`; check that stages before the first trained one get no gradients."""
    model = plain()
    for number, stage in enumerate(model.stages):
        needs_grad = not set(range(number)) <= set(stages)
        stage.register_forward_pre_hook(partial(check_input, needs_grad))
        stage.requires_grad_(number not in stages)
    return model


def check_input(needs_grad: bool, stage: nn.Module, args: tuple[Tensor, ...]) -> None:
    assert args[0].requires_grad == needs_grad


def partly_frozen() -> Whole:
    """Train one layer on each stage, on the first stage its last; freeze all others."""
    model = Whole(*(stack_of(3, seed=stage) for stage in range(NUM_STAGES)))
    model.requires_grad_(False)
    for stage, trained in ((0, 2), (1, 0), (2, 1)):
        model.stages[stage][trained].requires_grad_(True)
    return model


def tokens(length: int) -> tuple[Tensor, Tensor]:
    inputs, target = random_batch(6, length, 8, seed=length)
    return inputs, target


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and batches, whose gradients accumulate."""

    build: Callable[[], Whole] = plain
    batches: Callable[[], list[tuple[Any, Any]]] = lambda: [random_batch(8, 8)]
    named: Callable[[], dict[int, dict[str, Any]]] = dict  # keyword arguments per stage
    loss_fn: Callable[[Any, Tensor], Tensor] = mse_loss
    num_microbatches: int = 4
    scale_grads: bool = True
    around: Callable[[int], AbstractContextManager[Any]] = lambda number: nullcontext()
    sizes: list[int] | None = None  # the reference runs pieces of these sizes; None: the whole


def autocast(is_enabled: Callable[[int], bool]) -> Callable[[int], AbstractContextManager[Any]]:
    return lambda number: torch.autocast("cpu", torch.bfloat16, enabled=is_enabled(number))


CASES = {
    "plain": Case(),
    "fewer micro-batches than stages": Case(num_microbatches=2),
    "one micro-batch": Case(num_microbatches=1),
    "10 samples in 4": Case(batches=lambda: [random_batch(10, 8)]),
    "several outputs": Case(
        build=with_tuples, batches=lambda: [tuple_batch(), tuple_batch()], loss_fn=first_of
    ),
    "keyword arguments": Case(
        build=with_gains,
        batches=lambda: [random_batch(6, 8)],
        named=lambda: {
            0: {"negate": True},
            1: {"gain": torch.linspace(0.5, 2, 6)[:, None]},
            2: {"gain": 3.0, "negate": True},
        },
    ),
    "first frozen": Case(build=partial(frozen, 0)),
    "middle frozen": Case(build=partial(frozen, 1)),
    "all but the last frozen": Case(build=partial(frozen, 0, 1)),
    "all but the first frozen": Case(build=partial(frozen, 1, 2)),
    "partly frozen": Case(build=partly_frozen),
    "two batches": Case(batches=lambda: [random_batch(8, 8), random_batch(8, 8, seed=12)]),
    "batches of 8, 5 and 8": Case(
        batches=lambda: [random_batch(8, 8), random_batch(5, 8), random_batch(8, 8, seed=1)]
    ),
    "lengths vary": Case(batches=lambda: [tokens(length) for length in (4, 7, 2, 4)]),
    "gradients of the sum": Case(
        scale_grads=False, batches=lambda: [random_batch(10, 8)], sizes=[3, 3, 2, 2]
    ),
    "bf16 autocast": Case(around=autocast(lambda number: True), sizes=[2, 2, 2, 2]),
    "bf16 autocast for the second batch": Case(  # all batches have equal shapes
        around=autocast(lambda number: number == 1),
        batches=lambda: [random_batch(8, 8)] * 3,
        sizes=[2, 2, 2, 2],
    ),
}


def in_one_process(case: Case) -> dict[str, Any]:
    model, named = case.build(), case.named()
    loss_sum, outputs = 0.0, []
    for number, (inputs, target) in enumerate(case.batches()):
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        sizes = case.sizes or [len(target)]
        split = partial(torch.split, split_size_or_sections=sizes)
        with case.around(number):
            for *piece, piece_target in zip(*map(split, (*args, target)), strict=True):
                outputs.append(model(*piece, named=named))
                loss = case.loss_fn(outputs[-1], piece_target)
                share = len(piece_target) / len(target)
                (loss * (share if case.scale_grads else 1)).backward()
                loss_sum += loss.item() * share
    return {"gradients": gradients(model), "loss": loss_sum, "outputs": joined(outputs)}


def in_stages(case: Case, stage: int | None) -> dict[str, Any]:
    """Run one of three stages, or the whole model as one stage if `stage` is None."""
    model, named = case.build(), case.named()
    module = model if stage is None else model.stages[stage]
    keywords = {"named": named} if stage is None else named.get(stage, {})
    losses: list[Tensor] = []
    loss_sum, outputs = 0.0, []
    with Pipeline(
        module,
        loss_fn=case.loss_fn,
        n_microbatches=case.num_microbatches,
        scale_grads=case.scale_grads,
        schedule="1f1b",
        timeout=20,
    ) as pipeline:
        for number, (inputs, target) in enumerate(case.batches()):
            with case.around(number):
                outputs.append(step(pipeline, inputs, target, losses=losses, **keywords))
            sizes = sizes_by_number(len(target), case.num_microbatches)
            assert len(losses) == (case.num_microbatches if pipeline.is_last else 0)
            for loss, size in zip(losses, sizes, strict=False):
                loss_sum += loss.item() * size / len(target)
    # Only the parameters of this stage may have gradients.
    actual = gradients(model)
    assert stage is None or all(name.startswith(f"stages.{stage}.") for name in actual)
    return {
        "gradients": actual,
        "loss": loss_sum,
        "outputs": joined(outputs) if pipeline.is_last else outputs,
    }


def joined(outputs: list[Any]) -> list[list[Tensor]]:
    """Concatenate the outputs of all batches, for each position in a tuple."""
    tuples = [output if isinstance(output, tuple) else (output,) for output in outputs]
    return [[row for part in parts for row in part.detach()] for parts in zip(*tuples, strict=True)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("cases")

    def single_process() -> dict[str, Any]:
        return {
            "one process": {name: in_one_process(case) for name, case in CASES.items()},
            "one stage": {name: in_stages(case, None) for name, case in CASES.items()},
        }

    def work(ctx: DistContext) -> dict[str, Any]:
        return {name: in_stages(case, ctx.rank) for name, case in CASES.items()}

    return {
        **run_single_process(single_process, folder),
        "stages": run_stages(NUM_STAGES, work, folder),
    }


@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", CASES)
def test_gradients_losses_and_outputs_match_single_process(
    found: dict[str, Any], name: str
) -> None:
    expected = found["one process"][name]
    *earlier, last = stages = [stage[name] for stage in found["stages"]]
    assert all(set(stage["outputs"]) == {None} and stage["loss"] == 0 for stage in earlier)
    merged_gradients = {"gradients": merged(stage["gradients"] for stage in stages)}
    for actual in ({**last, **merged_gradients}, found["one stage"][name]):
        assert_close(actual["gradients"], expected["gradients"])
        assert actual["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        torch.testing.assert_close(actual["outputs"], expected["outputs"], rtol=0, atol=1e-6)


class Recomputed(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=False)


SCHEDULES = ("1f1b", "gpipe", "kfkb:2", "bounded:3,2,2")


def dropping() -> Whole:
    return Whole(*(stack_of(2, seed=stage, dropout=0.4) for stage in range(NUM_STAGES)))


def with_dropout(stage: int, schedule: str, *, recompute: bool) -> dict[str, Tensor]:
    model = dropping()
    module = model.stages[stage]
    torch.manual_seed(100 + stage)
    with Pipeline(
        Recomputed(module) if recompute else module,
        loss_fn=mse_loss,
        n_microbatches=4,
        schedule=schedule,
        timeout=20,
    ) as pipeline:
        for seed in range(2):
            step(pipeline, *random_batch(10, 8, seed=seed))
    return gradients(model)


def with_dropout_in_one_process() -> dict[str, Tensor]:
    """Draw random numbers per stage, in the order of its micro-batches."""
    model = dropping()
    generators = [torch.manual_seed(100 + stage).get_state() for stage in range(NUM_STAGES)]
    for seed in range(2):
        inputs, target = random_batch(10, 8, seed=seed)
        sizes = [3, 3, 2, 2]
        for x, piece_target in zip(inputs.split(sizes), target.split(sizes), strict=True):
            for number, stage in enumerate(model.stages):
                torch.set_rng_state(generators[number])
                x = stage(x)
                generators[number] = torch.get_rng_state()
            (mse_loss(x, piece_target) * len(piece_target) / 10).backward()
    return gradients(model)


@pytest.mark.timeout(90)
def test_dropout_is_equal_under_schedules_and_recomputation(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[dict[str, Tensor]]:
        return [
            with_dropout(ctx.rank, schedule, recompute=recompute)
            for recompute in (False, True)
            for schedule in SCHEDULES
        ]

    expected = run_single_process(with_dropout_in_one_process, tmp_path)
    reference, *others = map(merged, zip(*run_stages(NUM_STAGES, work, tmp_path), strict=True))
    assert_close(reference, expected)
    for other in others:
        assert_equal(other, reference)


@pytest.mark.timeout(60)
def test_inputs_may_require_grad(tmp_path: Path) -> None:
    inputs, target = random_batch(8, 8)

    def make_batch(number: int) -> Tensor:
        """Return batches of one shape, of which the second requires gradients."""
        return nn.Parameter(inputs.clone()) if number == 1 else inputs

    def work(ctx: DistContext) -> dict[str, Tensor]:
        model = plain()
        model.stages[0].requires_grad_(False)
        batches = [make_batch(number) for number in range(3)]
        with Pipeline(
            model.stages[ctx.rank],
            loss_fn=mse_loss,
            n_microbatches=4,
            schedule="1f1b",
            timeout=20,
        ) as pipeline:
            for batch in batches:
                step(pipeline, batch, target)
        actual = gradients(model)
        return {**actual, "inputs": batches[1].grad} if pipeline.is_first else actual

    def single_process() -> dict[str, Tensor]:
        model = plain()
        model.stages[0].requires_grad_(False)
        batches = [make_batch(number) for number in range(3)]
        for batch in batches:
            mse_loss(model(batch, named={}), target).backward()
        return {**gradients(model), "inputs": batches[1].grad}

    expected = run_single_process(single_process, tmp_path)
    assert_close(merged(run_stages(NUM_STAGES, work, tmp_path)), expected)
