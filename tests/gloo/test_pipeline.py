"""A pipeline is called as torch's schedules are, and changes its plan without changing the result.

Real processes: a stage each.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss

from polyrhythm.cost.memory import peak_in_flight
from polyrhythm.errors import WorkerError
from polyrhythm.events import EventLog, read_run, worker_log
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.pipeline.stage import MAX_TIMINGS
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import Worker
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

BATCHES = [random_batch(8, 8, seed=seed) for seed in range(6)]


def pipeline_of(module: nn.Module, **options: Any) -> Pipeline:
    microbatches = {} if "microbatch_sizes" in options else {"num_microbatches": 4}
    return Pipeline(module, **{"loss_fn": mse_loss, "timeout": 20, **microbatches, **options})


def train(
    pp_schedule: Any, model_part: nn.Module, *, has_first_stage: bool, has_last_stage: bool
) -> dict[str, Any]:
    """As torchtitan's trainer and validator call a schedule; nothing here knows whose it is."""
    optimizer = torch.optim.SGD(model_part.parameters(), lr=0.1, momentum=0.9)
    found: dict[str, Any] = {"losses": [], "outputs": []}
    for number, (inputs, labels) in enumerate(BATCHES):
        optimizer.zero_grad()
        targets, losses = (labels, []) if has_last_stage else (None, None)
        how = {"target": targets, "losses": losses, "return_outputs": number == 0}
        args = (inputs,) if has_first_stage else ()
        outputs = pp_schedule.step(*args, **how)
        found["gradients"] = gradients(model_part)  # torch's eval divides those it finds
        optimizer.step()
        found["outputs"].append(outputs)
        if has_last_stage:
            found["losses"].append(torch.stack(losses))
        with torch.no_grad():
            found["outputs"].append(pp_schedule.eval(*args, target=targets, losses=losses))
        if has_last_stage:
            found["losses"].append(torch.stack(losses))
    return found


@pytest.mark.timeout(60)
def test_training_loop_for_torch_schedules_runs_unchanged(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[dict[str, Any]]:
        ends = {"has_first_stage": ctx.rank == 0, "has_last_stage": ctx.rank == 2}
        found = []
        for whose in ("torch", "ours", "ours, from a torch stage"):
            module = stack_of(3)[ctx.rank]
            stage = PipelineStage(module, ctx.rank, 3, torch.device("cpu"))
            if whose == "torch":
                schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=mse_loss)
            elif whose == "ours":
                schedule = pipeline_of(module, schedule="1f1b")
            else:
                schedule = Pipeline.from_torch_stage(
                    stage, loss_fn=mse_loss, num_microbatches=4, schedule="kfkb:2"
                )
            found.append(train(schedule, module, **ends))
        return found

    for number, stage in enumerate(run_stages(3, work, tmp_path)):
        theirs, *ours = stage
        for one in ours:
            assert_close(one["gradients"], theirs["gradients"])
            torch.testing.assert_close(one["losses"], theirs["losses"], rtol=0, atol=1e-6)
            torch.testing.assert_close(one["outputs"], theirs["outputs"], rtol=0, atol=1e-6)
        assert len(theirs["losses"]) == (12 if number == 2 else 0)
        assert [output is None for output in theirs["outputs"][:4]] == (
            [False, False, True, False] if number == 2 else [True] * 4
        )


@pytest.mark.timeout(60)
def test_eval_changes_neither_gradients_nor_schedule(tmp_path: Path) -> None:
    """It runs the whole model, with a loss where it has a target, for batches of any size."""
    odd = random_batch(7, 8, seed=20)

    def evaluate(pipeline: Pipeline) -> list[Any]:
        losses: list[Tensor] = []
        inputs, target = odd
        args = (inputs,) if pipeline.is_first else ()
        with_loss = pipeline.eval(*args, target=target, losses=losses)
        without = pipeline.eval(*args)
        assert len(losses) == (4 if pipeline.is_last else 0)
        assert not any(tensor.requires_grad for tensor in losses)
        return [with_loss, without, losses]

    def work(ctx: DistContext) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for evaluates in (False, True):
            module = stack_of(3)[ctx.rank]
            with pipeline_of(module, schedule="bounded:3,2,1") as pipeline:
                for batch in BATCHES[:3]:
                    if evaluates:
                        found["eval"] = evaluate(pipeline)
                    step(pipeline, *batch)
                assert pipeline.num_steps == 3
                found[f"recipe {evaluates}"] = str(pipeline.spec)
                found[f"peak {evaluates}"] = pipeline.peak_in_flight
                found[f"gradients {evaluates}"] = gradients(module)
                if evaluates:
                    evaluate(pipeline)
                    assert_equal(gradients(module), found["gradients True"])
        return found

    def single_process() -> list[Any]:
        model = stack_of(3)
        inputs, target = odd
        output = model(inputs).detach()
        sizes = [2, 2, 2, 1]
        parts = zip(output.split(sizes), target.split(sizes), strict=True)
        return [output, output, [mse_loss(part, wanted) for part, wanted in parts]]

    expected = run_single_process(single_process, tmp_path)
    stages = run_stages(3, work, tmp_path)
    for stage in stages:
        assert stage["recipe True"] == stage["recipe False"]
        assert stage["peak True"] == stage["peak False"]
        assert_equal(stage["gradients True"], stage["gradients False"])
    assert [stage["eval"] for stage in stages[:2]] == [[None, None, []]] * 2
    torch.testing.assert_close(stages[2]["eval"], expected, rtol=0, atol=1e-6)


@pytest.mark.timeout(60)
def test_unread_timings_are_bounded(tmp_path: Path) -> None:
    """As in a process that only evaluates."""

    def single_process() -> int:
        inputs, _ = random_batch(500, 8)
        pipeline = pipeline_of(stack_of(1), num_microbatches=500)
        for _ in range(10):
            pipeline.eval(inputs)
        return len(pipeline._compute.durations())

    assert run_single_process(single_process, tmp_path) == MAX_TIMINGS < 5000


SCHEDULES = ("1f1b", "gpipe", "kfkb:2", "kfkb:3", "bounded:4,3,1", "bounded:1,1,1")


@pytest.mark.timeout(60)
def test_schedule_change_between_steps_is_bit_exact(tmp_path: Path) -> None:
    """And under each of them a stage holds no more than the schedule says."""

    def work(ctx: DistContext) -> list[dict[str, Any]]:
        found = []
        for changes in (False, True):
            module = stack_of(3)[ctx.rank]
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            with pipeline_of(module, schedule="1f1b") as pipeline:
                for number, batch in enumerate(BATCHES):
                    if changes:
                        pipeline.spec = ScheduleSpec.parse(SCHEDULES[number])
                    step(pipeline, *batch)
                    assert pipeline.last_spec == pipeline.spec
                    built = pipeline.spec.build(num_stages=3, num_microbatches=4)
                    assert pipeline.peak_in_flight == peak_in_flight(built[ctx.rank])
                    optimizer.step()
                    optimizer.zero_grad()
            found.append(dict(module.state_dict()))
        return found

    for same, changed in run_stages(3, work, tmp_path):
        assert_equal(changed, same)


@pytest.mark.timeout(60)
def test_microbatch_sizes_give_the_same_training(tmp_path: Path) -> None:
    """The tuner tries each size for a step, then goes on with the best, whichever that is."""

    def work(ctx: DistContext) -> list[dict[str, Any]]:
        found = []
        for sizes in ([2], [2, 4, 1, 8]):
            module = stack_of(3)[ctx.rank]
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            used = []
            with pipeline_of(module, microbatch_sizes=sizes, tune_every=1) as pipeline:
                for batch in BATCHES * 2:  # each size runs twice at first
                    losses: list[Tensor] = []
                    step(pipeline, *batch, losses=losses)
                    used.append(len(losses))
                    optimizer.step()
                    optimizer.zero_grad()
            found.append({"state": dict(module.state_dict()), "used": used})
        return found

    stages = run_stages(3, work, tmp_path)
    for same, changed in stages:
        assert_close(changed["state"], same["state"], 1e-5)
    same, changed = stages[-1]
    assert same["used"] == [4] * 12
    assert changed["used"][0] == 4
    assert set(changed["used"]) == {4, 2, 8, 1}


def autotuned(ctx: DistContext, folder: Path, **options: Any) -> dict[str, Any]:
    """Some steps of schedule="auto", recorded; the peaks are those of what it chose."""
    worker = Worker(ctx.rank, 0)
    module = stack_of(3)[ctx.rank]
    with (
        EventLog(worker_log(folder, worker), worker) as log,
        pipeline_of(module, tune_every=2, log=log, **options) as pipeline,
    ):
        specs = []
        for batch in BATCHES:
            step(pipeline, *batch)
            specs.append(str(pipeline.last_spec))
            built = pipeline.last_spec.build(num_stages=3, num_microbatches=4)
            assert pipeline.peak_in_flight == peak_in_flight(built[ctx.rank])
    return {"recipes": specs, "gradients": gradients(module)}


@pytest.mark.timeout(60)
def test_auto_schedule_is_equal_on_all_stages_and_logged(tmp_path: Path) -> None:
    folders = {limit: tmp_path / (limit or "no limit") for limit in (None, "1GiB")}

    def work(ctx: DistContext) -> dict[str, Any]:
        found = {
            limit or "none": autotuned(ctx, folder, memory_limit=limit)
            for limit, folder in folders.items()
        }
        with pipeline_of(module := stack_of(3)[ctx.rank], schedule="1f1b") as pipeline:
            for batch in BATCHES:
                step(pipeline, *batch)
        return {**found, "1f1b": gradients(module)}

    stages = run_stages(3, work, tmp_path)
    for stage in stages:
        for limit in ("none", "1GiB"):
            assert stage[limit]["recipes"] == stages[0][limit]["recipes"]
            assert stage[limit]["recipes"][0] == "1f1b"
            assert_equal(stage[limit]["gradients"], stage["1f1b"])
    for folder in folders.values():
        plans = [event for event in read_run(folder) if event.kind == "plan"]
        for worker in (Worker(stage, 0) for stage in range(3)):
            mine = [plan for plan in plans if plan.worker == worker]
            assert [(plan.step, plan.name) for plan in mine] == [
                (plan.step, plan.name) for plan in plans if plan.worker == Worker(0, 0)
            ]
            assert mine[0].step == 1  # and then every two steps, or less often if they are short
            assert all(later.step - plan.step >= 2 for plan, later in pairwise(mine))
            assert all(plan.why and plan.why.startswith(("predicted", "holds")) for plan in mine)
            assert all(plan.values["microbatches"] == 4 for plan in mine)
            assert all(plan.values["predicted"] > 0 for plan in mine)


@pytest.mark.timeout(60)
def test_memory_limit_error_names_least_requirement(tmp_path: Path) -> None:
    """Stage 1 is short of memory; its weights alone take 288 of 4 * 288 bytes."""

    def work(ctx: DistContext) -> None:
        limit = 2000 if ctx.rank == 1 else "1MiB"
        with pipeline_of(
            stack_of(3)[ctx.rank], microbatch_sizes=[4, 2], memory_limit=limit
        ) as pipeline:
            for batch in BATCHES:
                step(pipeline, *batch)

    with pytest.raises(WorkerError) as caught:
        run_stages(3, work, tmp_path)
    says = caught.value.reason
    assert says.startswith("refused: stage 1 needs "), says
    assert "for one micro-batch of 2 in flight, and has 2" in says
    assert "weights 288" in says
    assert "fix: move layers from stage 1" in says


@pytest.mark.timeout(60)
def test_pipeline_works_after_unequal_new_group_calls(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[int]:
        if ctx.rank < 2:  # tensor parallelism on some stages, say
            dist.new_group([0, 1], use_local_synchronization=True)
        num_steps = []
        for _ in range(2):
            with pipeline_of(stack_of(3)[ctx.rank], num_microbatches=4) as pipeline:
                step(pipeline, *BATCHES[0])
                num_steps.append(pipeline.num_steps)
        return num_steps

    assert run_stages(3, work, tmp_path) == [[1, 1]] * 3


@pytest.mark.timeout(60)
@pytest.mark.parametrize("flush", [True, False])
def test_metadata_of_first_stage_reaches_all_stages(tmp_path: Path, flush: bool) -> None:
    def work(ctx: DistContext) -> list[tuple[int, ...]]:
        schedule, num_microbatches = ("1f1b", 2) if flush else ("bounded:4,2", 1)
        pipeline = Pipeline(
            nn.Linear(8, 8),
            loss_fn=mse_loss,
            num_microbatches=num_microbatches,
            schedule=schedule,
            flush=flush,
            timeout=20,
        )
        received: list[tuple[int, ...]] = []

        def target(metadata: tuple[int, ...]) -> Tensor:
            received.append(metadata)
            return torch.full((4, 8), float(sum(metadata)))

        with pipeline:
            for number in range(3):
                if pipeline.is_first:
                    pipeline.step(torch.ones(4, 8), metadata=(number, 7))
                    received.append(pipeline.metadata)
                else:
                    losses: list[Tensor] = []
                    pipeline.step(target=target, losses=losses)
            for _ in pipeline.drain():
                pass
        return received

    expected = [(number, 7) for number in range(3)]
    assert run_stages(2, work, tmp_path) == [expected, expected]
