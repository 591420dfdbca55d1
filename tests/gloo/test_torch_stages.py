"""A pipeline takes the stages and arguments of torch.distributed.pipelining's schedules.

Every stage is a real process; results are compared with one process, and with torch's.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    pipe_split,
    pipeline,
)
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn.functional import linear, mse_loss

from polyrhythm.errors import ScheduleError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.partition import NamedInputs, torch_stage_of
from polyrhythm.run.pipeline.pipeline import Pipeline
from tests.gloo.pipelines import (
    assert_close,
    assert_equal,
    gradients,
    random_batch,
    run_single_process,
    run_stages,
    stack_of,
    step,
)

CPU = torch.device("cpu")
INPUTS, TARGET = random_batch(12, 8, seed=1)


class SkipModel(nn.Module):
    """Stage 2 takes an input of the model, and outputs of both others.

    Two stages use one layer, and two one weight. If `parallel`, stage 1 does not need stage 0.
    """

    def __init__(self, parallel: bool = False) -> None:
        super().__init__()
        self.parallel = parallel
        torch.manual_seed(5)
        self.embed, self.norm, self.middle, self.head = (nn.Linear(8, 8) for _ in range(4))
        self.head.weight = self.embed.weight

    def forward(self, scale: Tensor, x: Tensor, shift: Tensor) -> Tensor:
        hidden = self.embed(shift) + x
        skipped = torch.tanh(hidden)
        pipe_split()
        middle = self.middle(self.norm(scale if self.parallel else hidden))
        pipe_split()
        return self.head(self.norm(middle) * scale + skipped + hidden)


ARGUMENTS = {
    name: random_batch(12, 8, seed=seed)[0] for seed, name in enumerate(("scale", "x", "shift"), 2)
}
# As torch names them: stage 1 has `norm`, stage 2 its copy.
TIED = [{0: "embed.weight", 2: "head.weight"}] + [
    {1: f"norm.{name}", 2: f"norm@1.{name}"} for name in ("weight", "bias")
]


def traced(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, while it traces
        return pipeline(model, tuple(value[:3] for value in ARGUMENTS.values()))


@pytest.mark.timeout(90)
def test_traced_stages_with_skips_and_shared_layers_match_one_process(tmp_path: Path) -> None:
    """Arguments bind by the model's signature, and a later stage takes one by keyword."""

    def work(ctx: DistContext) -> dict[str, Any]:
        if ctx.rank == 0:
            unordered = traced(SkipModel(parallel=True)).build_stage(0, CPU)
            with pytest.raises(ScheduleError, match="in the order submod_pp_1, submod_pp_0"):
                Pipeline(unordered, 4, mse_loss)
        pipe = traced(SkipModel())
        stage = pipe.build_stage(ctx.rank, CPU)
        with pytest.raises(ScheduleError, match=r"fix: pass tied=pipe.replicated_params"):
            Pipeline(stage, 4, mse_loss)
        args = tuple(ARGUMENTS.values()) if ctx.rank == 0 else ()
        keywords = {"scale": ARGUMENTS["scale"]} if ctx.rank == 2 else {}
        target = TARGET if ctx.rank == 2 else None
        tied = pipe.replicated_params
        options = {"tied": tied, "schedule": "kfkb:2", "timeout": 20}
        by_sample = TensorChunkSpec(0), TensorChunkSpec(0)  # as many columns as samples
        with Pipeline(stage, 4, mse_loss, *by_sample, **options) as ours:
            outputs = ours.eval(*args, **keywords)
            ours.step(*args, target=target, **keywords)
        return {"outputs": outputs, "gradients": gradients(stage.submod)}

    def single_process() -> dict[str, Any]:
        model = SkipModel()
        output = model(**ARGUMENTS)
        mse_loss(output, TARGET).backward()
        return {"outputs": output.detach(), "gradients": gradients(model)}

    expected = run_single_process(single_process, tmp_path)
    *_, last = stages = run_stages(3, work, tmp_path)
    torch.testing.assert_close(last["outputs"], expected["outputs"], rtol=0, atol=1e-6)
    found = [stage["gradients"] for stage in stages]
    for tie in TIED:
        (first, name), (second, other) = tie.items()
        assert_equal(found[second].pop(other), found[first][name])
    merged = {name: value for stage in found for name, value in stage.items()}
    assert_close(merged, expected["gradients"])


def test_inputs_of_a_traced_stage_bind_by_name() -> None:
    first = NamedInputs(received=(), of_model=("scale", "x"), taken=("x",))
    later = NamedInputs(received=("tanh",), of_model=("scale", "x"), taken=("scale", "tanh"))
    assert first.bind([1, 2], {}, 0) == first.bind([], {"x": 2}, 0) == {"x": 2}
    assert later.bind([3], {"scale": 1, "x": 2}, 1) == {"scale": 1, "tanh": 3}
    for bind, message in (
        (lambda: first.bind([1], {}, 0), "stage 0 needs the model's input x"),
        (lambda: later.bind([3], {}, 1), r"fix: call step\(scale=...\) on this stage"),
        (lambda: first.bind([1, 2, 3], {}, 0), "with 3 arguments"),
        (lambda: later.bind([3], {"tanh": 4}, 1), "with the keyword tanh"),
    ):
        with pytest.raises(ScheduleError, match=message):
            bind()


class DeferredLinear(nn.Linear):
    """A layer whose weight gets its gradient only from the function that `dw_builder` returns."""

    def __init__(self) -> None:
        super().__init__(8, 8, bias=False)
        self.pending: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        output = linear(x, self.weight.detach())
        if output.requires_grad:
            output.register_hook(lambda gradient: self.pending.append((x.detach(), gradient)))
        return output

    def dw_builder(self) -> Callable[[], None]:
        x, gradient = self.pending.pop()  # torch also runs a backward to learn shapes

        def add_gradient() -> None:
            added = gradient.T @ x
            self.weight.grad = added if self.weight.grad is None else self.weight.grad + added

        return add_gradient


@pytest.mark.timeout(60)
def test_signature_and_dw_builder_are_those_of_torch(tmp_path: Path) -> None:
    """The same positional arguments train, and without a loss run forward only."""

    def work(ctx: DistContext) -> list[dict[str, Any]]:
        args, found = ((INPUTS,) if ctx.rank == 0 else ()), []
        target = TARGET if ctx.rank == 1 else None
        for made in (Schedule1F1B, Pipeline, ScheduleGPipe, Pipeline.from_torch_stage):
            torch.manual_seed(ctx.rank)
            deferred = DeferredLinear()
            module = nn.Sequential(nn.Linear(8, 8), deferred)
            stage = PipelineStage(module, ctx.rank, 2, CPU, dw_builder=deferred.dw_builder)
            losses: list[Tensor] = []
            made(stage, 4, mse_loss).step(*args, target=target, losses=losses)
            found.append({**gradients(module), "losses": [x.detach() for x in losses]})
            assert found[-1].keys() == {"0.weight", "0.bias", "1.weight", "losses"}
            outputs = made(stage, 4).step(*args)  # torch's also divides the gradients
            found[-1]["outputs"] = None if outputs is None else outputs.detach()
        with pytest.raises(ScheduleError, match=r"dw_builder of stage . with flush=False"):
            Pipeline([stage], 1, mse_loss, flush=False, schedule="1f1b")
        with pytest.raises(ScheduleError, match=r"dw_builder of stage . with averages"):
            Pipeline([stage], 1, mse_loss).set_accumulation_context(torch.no_grad)
        return found

    for stage in run_stages(2, work, tmp_path):
        for other in stage[1:]:
            torch.testing.assert_close(other, stage[0], rtol=0, atol=1e-6)


@pytest.mark.timeout(60)
def test_stages_that_would_run_differently_are_refused(tmp_path: Path) -> None:
    class OwnForward(PipelineStage):
        def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward_one_chunk(*args, **kwargs)

    def work(ctx: DistContext) -> None:
        stages = [PipelineStage(stack_of(1), index, 4, CPU) for index in (ctx.rank, ctx.rank + 2)]
        with pytest.raises(ScheduleError, match="2 stages in one process") as caught:
            Pipeline(stages, 4, mse_loss)
        assert caught.match("interleaved and V schedules are not implemented")
        with pytest.raises(
            ScheduleError, match=f"stage {ctx.rank} of 4 on process {ctx.rank} of 2"
        ):
            Pipeline(stages[:1], 4, mse_loss)
        with pytest.raises(ScheduleError, match=r"OwnForward\.forward_one_chunk"):
            Pipeline(OwnForward(stack_of(1), ctx.rank, 2, CPU), 4, mse_loss)
        with pytest.raises(ScheduleError, match="it is the second argument, before loss_fn"):
            Pipeline(stack_of(1), mse_loss, 4)
        with pytest.raises(ScheduleError, match=r"a loss_fn.*no loss_fn"):
            Pipeline(stack_of(1), 4, mse_loss if ctx.rank == 0 else None, timeout=20)

    run_stages(2, work, tmp_path)
    assert torch_stage_of(nn.Linear(1, 1)) is None


@pytest.mark.timeout(60)
def test_tied_parameters_of_hand_split_stages_are_summed(tmp_path: Path) -> None:
    """As everywhere, each copy has the sum; the list of ties is checked on all stages."""

    def tied_model() -> nn.Sequential:
        model = stack_of(4)
        model[3][0].weight = model[0][0].weight
        return model

    def work(ctx: DistContext) -> dict[str, Tensor]:
        for name, is_warned in (("embed", False), ("head", True)):
            torch.manual_seed(9)  # the same values on both stages, as of a tied model
            layer = nn.Sequential(OrderedDict({name if ctx.rank else "embed": nn.Linear(8, 8)}))
            with warnings.catch_warnings(record=True, action="always") as caught:
                Pipeline(layer, 4, mse_loss, timeout=20).close()
            assert len(caught) == 2 * is_warned * ctx.rank  # of weight and bias
            assert all("tied=[{0: 'embed." in str(warning.message) for warning in caught)
        own = slice(0, 2) if ctx.rank == 0 else slice(2, 4)
        stage = PipelineStage(tied_model()[own], ctx.rank, 2, CPU)
        tie = {0: "0.0.weight", 1: "3.0.weight"}
        for wrong, message in (
            ({0: "0.0.weight"}, "two or more of 2 stages"),
            ({0: "0.0.weight", 5: "3.0.weight"}, "two or more of 2 stages"),
            ({0: "0.weight", 1: "3.weight"}, "nearest names: ..0.weight"),
            ({0: "0.0.weight", 1: "3.0.bias"}, r"0.0.weight is float32\[8, 8\] on one stage"),
        ):
            with pytest.raises(ScheduleError, match=message):
                Pipeline(stage, 4, mse_loss, tied=[wrong], timeout=20)
        with pytest.raises(ScheduleError, match="tied= with a model that is split here"):
            Pipeline.from_sequential(
                tied_model(), n_microbatches=4, loss_fn=mse_loss, tied=[tie], timeout=20
            )
        with Pipeline(stage, 4, mse_loss, tied=[tie], timeout=20) as ours:
            step(ours, INPUTS, TARGET)
            assert (len(ours.tied), len(ours.tied_not_owned)) == (1, ctx.rank)
        return gradients(stage.submod)

    def single_process() -> dict[str, Tensor]:
        model = tied_model()
        mse_loss(model(INPUTS), TARGET).backward()
        return gradients(model)

    expected = run_single_process(single_process, tmp_path)
    first, last = run_stages(2, work, tmp_path)
    assert_equal(last.pop("3.0.weight"), first["0.0.weight"])
    assert_close({**first, **last}, expected)
