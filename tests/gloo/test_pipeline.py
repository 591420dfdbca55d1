"""A pipeline is called like torch's schedules, and schedule changes do not change the result.

Every stage is a real process.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss

from polyrhythm.cost.memory import peak_in_flight
from polyrhythm.errors import WorkerError
from polyrhythm.events import read_run, worker_log
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.pipeline.runners import FlushRunner
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.types import Op, Worker
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
    microbatches = {} if "microbatch_sizes" in options else {"n_microbatches": 4}
    return Pipeline(module, **{"loss_fn": mse_loss, "timeout": 20, **microbatches, **options})


def train(
    pp_schedule: Any, model_part: nn.Module, *, has_first_stage: bool, has_last_stage: bool
) -> dict[str, Any]:
    """Train as torchtitan's trainer and validator call a schedule, torch's or ours."""
    optimizer = torch.optim.SGD(model_part.parameters(), lr=0.1, momentum=0.9)
    results: dict[str, Any] = {"losses": [], "outputs": []}
    for number, (inputs, labels) in enumerate(BATCHES):
        optimizer.zero_grad()
        targets, losses = (labels, []) if has_last_stage else (None, None)
        options = {"target": targets, "losses": losses, "return_outputs": number == 0}
        args = (inputs,) if has_first_stage else ()
        outputs = pp_schedule.step(*args, **options)
        results["gradients"] = gradients(model_part)  # torch's eval divides the gradients
        optimizer.step()
        results["outputs"].append(outputs)
        if has_last_stage:
            results["losses"].append(torch.stack(losses))
        with torch.no_grad():
            results["outputs"].append(pp_schedule.eval(*args, target=targets, losses=losses))
        if has_last_stage:
            results["losses"].append(torch.stack(losses))
    return results


@pytest.mark.timeout(60)
def test_training_loop_for_torch_schedules_runs_unchanged(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[dict[str, Any]]:
        roles = {"has_first_stage": ctx.rank == 0, "has_last_stage": ctx.rank == 2}
        results = []
        for origin in ("torch", "ours", "ours, from a torch stage"):
            module = stack_of(3)[ctx.rank]
            stage = PipelineStage(module, ctx.rank, 3, torch.device("cpu"))
            if origin == "torch":
                schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=mse_loss)
            elif origin == "ours":
                schedule = pipeline_of(module, schedule="1f1b")
            else:
                schedule = Pipeline.from_torch_stage(
                    stage, loss_fn=mse_loss, n_microbatches=4, schedule="kfkb:2"
                )
            results.append(train(schedule, module, **roles))
        return results

    for number, stage in enumerate(run_stages(3, work, tmp_path)):
        reference, *others = stage
        for actual in others:
            assert_close(actual["gradients"], reference["gradients"])
            torch.testing.assert_close(actual["losses"], reference["losses"], rtol=0, atol=1e-6)
            torch.testing.assert_close(actual["outputs"], reference["outputs"], rtol=0, atol=1e-6)
        assert len(reference["losses"]) == (12 if number == 2 else 0)
        assert [output is None for output in reference["outputs"][:4]] == (
            [False, False, True, False] if number == 2 else [True] * 4
        )


def test_eval_keeps_the_times_of_training_for_the_tuner() -> None:
    inputs, target = random_batch(8, 8, seed=1)
    with Pipeline(stack_of(2), 4, mse_loss, schedule="auto", memory_limit=2**40) as pipeline:
        tuner = cast(FlushRunner, pipeline._runner).autotuner
        assert tuner is not None, "the schedule is tuned"

        def measured() -> list[int]:
            return [sum(len(s.durations[op]) for s in tuner._samples.values()) for op in Op]

        for _ in range(3):
            pipeline.step(inputs, target=target)
        before = measured()
        pipeline.eval(inputs, target=target)
        pipeline.step(inputs, target=target)
        assert measured() == [number + 4 for number in before]


@pytest.mark.timeout(60)
def test_eval_changes_neither_gradients_nor_schedule(tmp_path: Path) -> None:
    """`eval` runs the whole model, with a loss if it has a target, for batches of any size."""
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
        results: dict[str, Any] = {}
        for evaluates in (False, True):
            module = stack_of(3)[ctx.rank]
            with pipeline_of(module, schedule="bounded:3,2,1") as pipeline:
                for batch in BATCHES[:3]:
                    if evaluates:
                        results["eval"] = evaluate(pipeline)
                    step(pipeline, *batch)
                assert pipeline.num_steps == 3
                results[f"schedule {evaluates}"] = str(pipeline.spec)
                results[f"peak {evaluates}"] = pipeline.peak_in_flight
                results[f"gradients {evaluates}"] = gradients(module)
                if evaluates:
                    evaluate(pipeline)
                    assert_equal(gradients(module), results["gradients True"])
        return results

    def single_process() -> list[Any]:
        model = stack_of(3)
        inputs, target = odd
        output = model(inputs).detach()
        sizes = [2, 2, 2, 1]
        parts = zip(output.split(sizes), target.split(sizes), strict=True)
        return [output, output, [mse_loss(part, expected_part) for part, expected_part in parts]]

    expected = run_single_process(single_process, tmp_path)
    stages = run_stages(3, work, tmp_path)
    for stage in stages:
        assert stage["schedule True"] == stage["schedule False"]
        assert stage["peak True"] == stage["peak False"]
        assert_equal(stage["gradients True"], stage["gradients False"])
    assert [stage["eval"] for stage in stages[:2]] == [[None, None, []]] * 2
    torch.testing.assert_close(stages[2]["eval"], expected, rtol=0, atol=1e-6)


@pytest.mark.timeout(60)
def test_evaluations_leave_no_timings(tmp_path: Path) -> None:
    """A process that only evaluates never reads them."""

    def single_process() -> int:
        inputs, _ = random_batch(500, 8)
        pipeline = pipeline_of(stack_of(1), n_microbatches=500)
        pipeline.eval(inputs)
        return len(pipeline._executor.stage.durations())

    assert run_single_process(single_process, tmp_path) == 0


SCHEDULES = ("1f1b", "gpipe", "kfkb:2", "kfkb:3", "bounded:4,3,1", "bounded:1,1,1")


@pytest.mark.timeout(60)
def test_schedule_change_between_steps_is_bit_exact(tmp_path: Path) -> None:
    """Under each schedule a stage also has exactly the schedule's peak in flight."""

    def work(ctx: DistContext) -> list[dict[str, Any]]:
        states = []
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
            states.append(dict(module.state_dict()))
        return states

    for same, changed in run_stages(3, work, tmp_path):
        assert_equal(changed, same)


@pytest.mark.timeout(60)
def test_clock_offsets_for_the_log_are_known_in_every_step(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[list[str]]:
        neighbours = []
        with pipeline_of(stack_of(2)[ctx.rank], schedule="auto", log=tmp_path / "run") as pipeline:
            for batch in BATCHES[:3]:
                step(pipeline, *batch)
                neighbours.append(list(pipeline._executor.clock_offsets))
        return neighbours

    assert run_stages(2, work, tmp_path) == [[["s1p0"]] * 3, [["s0p0"]] * 3]


@pytest.mark.timeout(60)
def test_microbatch_sizes_give_the_same_training(tmp_path: Path) -> None:
    """The tuner tries each size, then continues with the best, whichever that is."""

    def work(ctx: DistContext) -> list[dict[str, Any]]:
        results = []
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
            results.append({"state": dict(module.state_dict()), "used": used})
        return results

    stages = run_stages(3, work, tmp_path)
    for same, changed in stages:
        assert_close(changed["state"], same["state"], 1e-5)
    same, changed = stages[-1]
    assert same["used"] == [4] * 12
    assert changed["used"][0] == 4
    assert set(changed["used"]) == {4, 2, 8, 1}


@pytest.mark.timeout(60)
def test_auto_schedule_is_tuned_by_training_alone(tmp_path: Path) -> None:
    """More evaluations than steps, whose forwards have no backward."""

    def work(ctx: DistContext) -> bool:
        with pipeline_of(stack_of(2)[ctx.rank], schedule="auto", tune_every=1) as pipeline:
            for inputs, target in BATCHES[:3]:
                for _ in range(4):
                    if ctx.rank == 0:
                        pipeline.eval(inputs)
                    else:
                        pipeline.eval(target=target)
                step(pipeline, inputs, target)
        return True

    assert run_stages(2, work, tmp_path) == [True, True]


def autotuned(ctx: DistContext, folder: Path, **options: Any) -> dict[str, Any]:
    """Run and log some steps of schedule="auto"; check the peak in flight of its choices."""
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
    return {"schedules": specs, "gradients": gradients(module)}


@pytest.mark.timeout(60)
def test_auto_schedule_is_equal_on_all_stages_and_logged(tmp_path: Path) -> None:
    folders = {limit: tmp_path / (limit or "no limit") for limit in (None, "1GiB")}

    def work(ctx: DistContext) -> dict[str, Any]:
        results = {
            limit or "none": autotuned(ctx, folder, memory_limit=limit)
            for limit, folder in folders.items()
        }
        with pipeline_of(module := stack_of(3)[ctx.rank], schedule="1f1b") as pipeline:
            for batch in BATCHES:
                step(pipeline, *batch)
        return {**results, "1f1b": gradients(module)}

    stages = run_stages(3, work, tmp_path)
    for stage in stages:
        for limit in ("none", "1GiB"):
            assert stage[limit]["schedules"] == stages[0][limit]["schedules"]
            assert stage[limit]["schedules"][0] == "1f1b"
            assert_equal(stage[limit]["gradients"], stage["1f1b"])
    for folder in folders.values():
        plans = [event for event in read_run(folder) if event.kind == "plan"]
        for worker in (Worker(stage, 0) for stage in range(3)):
            worker_plans = [plan for plan in plans if plan.worker == worker]
            assert [(plan.step, plan.name) for plan in worker_plans] == [
                (plan.step, plan.name) for plan in plans if plan.worker == Worker(0, 0)
            ]
            assert (
                worker_plans[0].step == 1
            )  # then every two steps, or less often if steps are short
            assert all(
                following.step - plan.step >= 2 for plan, following in pairwise(worker_plans)
            )
            assert all(
                plan.why and plan.why.startswith(("predicted", "holds")) for plan in worker_plans
            )
            assert all(plan.values["microbatches"] == 4 for plan in worker_plans)
            assert all(plan.values["predicted"] > 0 for plan in worker_plans)


@pytest.mark.timeout(60)
def test_memory_limit_error_names_least_requirement(tmp_path: Path) -> None:
    """Stage 1 has too little memory; its weights alone take 288 of 4 * 288 bytes."""

    def work(ctx: DistContext) -> None:
        limit = 2000 if ctx.rank == 1 else "1MiB"
        with pipeline_of(
            stack_of(3)[ctx.rank], microbatch_sizes=[4, 2], memory_limit=limit
        ) as pipeline:
            for batch in BATCHES:
                step(pipeline, *batch)

    with pytest.raises(WorkerError) as caught:
        run_stages(3, work, tmp_path)
    reason = caught.value.reason
    assert reason.startswith("refused: stage 1 needs "), reason
    assert "micro-batch of 2 " in reason
    assert "2000B" in reason
    assert "weights 288" in reason
    assert "fix: move layers from stage 1" in reason


@pytest.mark.timeout(60)
def test_pipeline_works_after_unequal_new_group_calls(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[int]:
        if ctx.rank < 2:  # for example tensor parallelism on some stages
            dist.new_group([0, 1], use_local_synchronization=True)
        num_steps = []
        for _ in range(2):
            with pipeline_of(stack_of(3)[ctx.rank], n_microbatches=4) as pipeline:
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
            n_microbatches=num_microbatches,
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
