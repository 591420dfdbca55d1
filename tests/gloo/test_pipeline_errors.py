"""A stage refuses invalid calls, and no other stage waits for its timeout.

The other stages lose a peer; the job reports the stage that refused, with its reason.
"""

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.functional import mse_loss

from polyrhythm.errors import ScheduleError, WorkerError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.pipeline import Pipeline
from tests.gloo.pipelines import random_batch, run_single_process, run_stages, stack_of, step

INPUTS, TARGET = random_batch(8, 8)
TIMEOUT = 40  # far more than any of these may take


def options(**changed: Any) -> dict[str, Any]:
    usual = {"loss_fn": mse_loss, "n_microbatches": 4, "schedule": "1f1b", "timeout": TIMEOUT}
    return {**usual, **changed}


def pipeline_of(ctx: DistContext, **changed: Any) -> Pipeline:
    return Pipeline(stack_of(3)[ctx.rank], **options(**changed))


def odd_loss(output: Tensor, target: Tensor) -> Any:
    return mse_loss(output, target, reduction="none")


class Returns(nn.Module):
    """A stage that applies a function to its output."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(8, 8), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.linear(x))


def returning(make: Callable[[Tensor], Any], at: int, ctx: DistContext) -> None:
    """Run three stages of which one returns an unusual output."""
    module = stack_of(3)[ctx.rank]
    if ctx.rank == at:
        torch.manual_seed(1)  # an earlier test may have left the state before a layer of `stack_of`
        module = Returns(make)
    step(Pipeline(module, **options()), INPUTS, TARGET)


def as_dtensor(x: Tensor) -> Tensor:
    return DTensor.from_local(x, init_device_mesh("cpu", (3,)), [Replicate()])


def raising(x: Tensor) -> Tensor:
    raise RuntimeError("no such luck")


def growing(x: Tensor, calls: list[int] = []) -> Tensor:  # noqa: B006  # counts the calls
    calls.append(1)
    return x if len(calls) < 3 else torch.cat([x, x])


def too_many_stages(ctx: DistContext) -> None:
    Pipeline.from_sequential(stack_of(2), **options())


def unknown_layers(ctx: DistContext) -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(stack_of(4)), "head": nn.Linear(8, 8)})
    Pipeline.from_layers(model, layers="model.block", epilogue=["head"], **options())


def small_batch(ctx: DistContext) -> None:
    step(pipeline_of(ctx), INPUTS[:3], TARGET[:3])


def much_metadata(ctx: DistContext) -> None:
    step(pipeline_of(ctx), INPUTS, TARGET, metadata=tuple(range(10_000, 11_400)))


def other_target(ctx: DistContext) -> None:
    step(pipeline_of(ctx), INPUTS, TARGET[:6])


def other_keyword(ctx: DistContext) -> None:
    keywords = {"gain": torch.ones(7, 1)} if ctx.rank == 1 else {}
    step(pipeline_of(ctx), INPUTS, TARGET, **keywords)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = stack_of(3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x if mask is None else x * mask)
        return x


def mask_on_first_stage(ctx: DistContext, *, by_name: bool) -> None:
    pipeline = Pipeline.from_layers(Masked(), layers="layers", **options())
    inputs, target, mask = INPUTS[:6], TARGET[:6], torch.ones(6, 1)
    step(pipeline, inputs, target)
    step(pipeline, inputs, target, mask=mask)
    if by_name and ctx.rank == 0:
        step(pipeline, inputs, target, mask=mask)
    else:
        step(pipeline, (inputs, mask), target)


def ragged_inputs(ctx: DistContext) -> None:
    step(pipeline_of(ctx), (INPUTS, INPUTS[:5]), TARGET)


def no_inputs(ctx: DistContext) -> None:
    step(pipeline_of(ctx), (), TARGET)


def vector_loss(ctx: DistContext) -> None:
    step(pipeline_of(ctx, loss_fn=odd_loss), INPUTS, TARGET)


def no_gradients(ctx: DistContext) -> None:
    with torch.no_grad():
        step(pipeline_of(ctx), INPUTS, TARGET)


def no_loss(ctx: DistContext) -> None:
    step(pipeline_of(ctx, loss_fn=None), INPUTS, TARGET)


def no_target(ctx: DistContext) -> None:
    step(pipeline_of(ctx), INPUTS, None)


def eval_in_the_middle(ctx: DistContext) -> None:
    pipeline = pipeline_of(ctx)
    if ctx.rank == 1:
        pipeline.eval()
    else:
        step(pipeline, INPUTS, TARGET)


def eval_at_first(ctx: DistContext) -> None:
    pipeline = pipeline_of(ctx)
    if ctx.rank == 0:
        pipeline.eval(INPUTS)
    else:
        step(pipeline, INPUTS, TARGET)


def two_limits(ctx: DistContext) -> None:
    step(pipeline_of(ctx, schedule="bounded:2,1"), INPUTS, TARGET)


def odd_size(ctx: DistContext) -> None:
    microbatches = {"n_microbatches": None, "microbatch_sizes": [2, 3], "schedule": "auto"}
    step(pipeline_of(ctx, **microbatches), INPUTS, TARGET)


def torch_stage_elsewhere(ctx: DistContext) -> None:
    stage = PipelineStage(stack_of(3)[0], (ctx.rank + 1) % 3, 3, torch.device("cpu"))
    Pipeline.from_torch_stage(stage, **options())


def thawed(ctx: DistContext) -> None:
    module = stack_of(3)[ctx.rank].requires_grad_(ctx.rank > 0)
    pipeline = Pipeline(module, **options())
    step(pipeline, INPUTS, TARGET)
    module.requires_grad_(True)
    step(pipeline, INPUTS, TARGET)


def all_frozen(ctx: DistContext) -> None:
    pipeline = Pipeline(stack_of(3)[ctx.rank].requires_grad_(False), **options())
    step(pipeline, INPUTS, TARGET)


# Name -> function of all ranks, rank that refuses (None: all), parts of its error.
CASES: dict[str, tuple[Callable[[DistContext], None], int | None, str]] = {
    "more stages than layers": (too_many_stages, None, "3 stages for 2 layers"),
    "unknown list of layers": (unknown_layers, None, "'model.block' does not exist.*blocks (4)"),
    "small batch": (small_batch, 0, "a batch of 3 for 4 micro-batches.*n_microbatches.*3"),
    "much metadata": (much_metadata, 0, "a batch header of 4220 bytes.*at most 4092 bytes"),
    "other target": (other_target, 2, "targets have 6 samples.*8"),
    "other keyword": (other_keyword, 1, "keyword arguments have 7 samples.*8"),
    "mask by name": (
        partial(mask_on_first_stage, by_name=True),
        None,
        "was not given mask.*pass mask by name in every process",
    ),
    "mask by place": (
        partial(mask_on_first_stage, by_name=False),
        None,
        "was not given mask.*pass mask by name in every process",
    ),
    "ragged inputs": (ragged_inputs, 0, "inputs have shapes (8, 8) and (5, 8)"),
    "no inputs": (no_inputs, 0, "the first stage.*without a tensor"),
    "a dict": (
        partial(returning, lambda x: {"hidden": x, "more": x}, 1),
        1,
        "stage 1 returned a dict with hidden, more",
    ),
    "nothing": (partial(returning, lambda x: None, 0), 0, "stage 0 returned a NoneType"),
    "no tensors": (partial(returning, lambda x: (), 1), 1, "stage 1 returned a tuple of nothing"),
    "not only tensors": (
        partial(returning, lambda x: (x, 3), 0),
        0,
        "stage 0 returned a tuple of Tensor, int",
    ),
    "a DTensor": (partial(returning, as_dtensor, 1), 1, "stage 1 returned a DTensor.*x.to_local()"),
    "a sparse tensor": (
        partial(returning, Tensor.to_sparse, 1),
        1,
        "stage 1 returned a torch.sparse_coo tensor.*x.to_dense()",
    ),
    "shapes of their own": (
        partial(returning, growing, 1),
        1,
        "stage 1 returned float32[4, 8].*float32[2",
    ),
    "an error inside": (partial(returning, raising, 1), 1, "RuntimeError: no such luck"),
    "vector loss": (vector_loss, 2, "the loss function returned (2, 8).*reduction='mean'"),
    "no_grad": (no_gradients, None, "step under torch.no_grad().*call eval()"),
    "no loss": (no_loss, None, "step without a loss_fn.*call eval()"),
    "no target": (no_target, 2, "step on the last stage without a target"),
    "eval in the middle": (eval_in_the_middle, 1, "eval on this stage, step on the first stage"),
    "eval at first": (eval_at_first, None, "step on this stage, eval on the first stage"),
    "two limits": (two_limits, None, "limits 2,1 for 3 stages"),
    "odd size": (odd_size, 0, "micro-batches of 3 for a batch of 8"),
    "torch stage elsewhere": (torch_stage_elsewhere, None, "a torch stage.*of 3 on process"),
    "all frozen": (all_frozen, 2, "no trained parameter of any stage"),
    "thawed": (thawed, 0, "layers of stage 0.*requires_grad"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CASES)
def test_refusing_stage_is_reported_without_hang(tmp_path: Path, name: str) -> None:
    work, rank, message = CASES[name]
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        run_stages(3, work, tmp_path)
    assert time.monotonic() - start < TIMEOUT, "a stage has waited for its timeout"
    assert rank in (None, caught.value.rank), caught.value
    reason = caught.value.reason.replace("\n", " ")
    position = 0
    for text in message.split(".*"):
        position = reason.find(text, position)
        assert position >= 0, f"{text!r} in {reason}"
    if name != "an error inside":
        assert reason.startswith("refused: ")
        assert " expected: " in reason
        assert " fix: " in reason


WRONG_OPTIONS = [
    ({"n_microbatches": None}, "n_microbatches=None, microbatch_sizes=None", "one of the two"),
    ({"microbatch_sizes": [2]}, r"n_microbatches=4, microbatch_sizes=\[2\]", "one of the two"),
    ({"n_microbatches": 0}, "0 samples or micro-batches", "1 or more"),
    ({"n_microbatches": None, "microbatch_sizes": [2, 0]}, "0 samples or", "1 or more"),
    (
        {"n_microbatches": None, "microbatch_sizes": [2, 4]},
        "2 micro-batch sizes for the schedule 1f1b",
        "schedule='auto'",
    ),
    ({"memory_limit": "1GiB"}, "a memory limit of 1GiB with the schedule 1f1b", "schedule='auto'"),
    ({"schedule": "2f2b"}, "schedule '2f2b'", "kfkb:2"),
    ({"schedule": "bounded:1,2"}, "stage 0 may hold 1, stage 1 2", "never increase"),
]


@pytest.mark.parametrize(("changed", "wrong", "expected"), WRONG_OPTIONS)
def test_invalid_options_are_refused(changed: dict[str, Any], wrong: str, expected: str) -> None:
    with pytest.raises(ScheduleError, match=wrong) as caught:
        Pipeline(stack_of(1), **options(**changed))
    assert expected in str(caught.value)


@pytest.mark.parametrize("make", [Pipeline, Pipeline.from_sequential])
@pytest.mark.parametrize(
    ("old", "new"),
    [("num_microbatches", "n_microbatches"), ("group", "process_group"), ("deadline", "timeout")],
)
def test_old_names_of_arguments_give_the_new_names(
    make: Callable[..., Pipeline], old: str, new: str
) -> None:
    with pytest.raises(TypeError, match=f"{old}= is now {new}="):
        make(stack_of(1), **options(**{old: None}))


class FailsOnce:
    """A loss that raises in one micro-batch of the second batch."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 6:
            raise ValueError("an odd sample")
        return mse_loss(output, target)


def test_step_after_a_caught_error_is_refused_on_all_stages(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[str]:
        errors = []
        with pipeline_of(ctx, loss_fn=FailsOnce()) as pipeline:
            for number in range(4):
                try:
                    step(pipeline, INPUTS + number, TARGET)
                    errors.append("")
                except Exception as error:  # as a script that skips bad batches
                    errors.append(f"{type(error).__name__}: {error}")
        return errors

    start = time.monotonic()
    found = run_stages(3, work, tmp_path)
    assert time.monotonic() - start < TIMEOUT, "a stage has waited for its timeout"
    for stage, errors in enumerate(found):
        assert not errors[0]
        kind = "ValueError: an odd sample" if stage == 2 else "PeerError: lost"
        assert errors[1].startswith(kind)
        for refused in errors[2:]:
            assert refused.startswith("ScheduleError: step after a failed step")
            assert "an odd sample" in refused if stage == 2 else "lost s" in refused
            assert "create a new Pipeline" in refused


def test_single_stage_continues_after_a_caught_error(tmp_path: Path) -> None:
    def work() -> list[float]:
        found, losses = list[float](), list[Tensor]()
        pipeline = Pipeline(stack_of(1), **options(loss_fn=FailsOnce()))
        for number in range(3):
            with contextlib.suppress(ValueError):
                step(pipeline, INPUTS + number, TARGET, losses=losses)
            found.append(sum(loss.item() for loss in losses) / 4)
        return found

    module = stack_of(1).requires_grad_(False)
    expected = [mse_loss(module(INPUTS + number), TARGET).item() for number in (0, 0, 2)]
    assert run_single_process(work, tmp_path) == pytest.approx(expected)
