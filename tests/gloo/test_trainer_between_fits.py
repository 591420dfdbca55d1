"""Between two fits the optimizer state stays sharded, and the model is the user's."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.decoupled import optimizer as decoupled
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
from polyrhythm.run.trainer.config import CheckpointConfig
from polyrhythm.run.trainer.trainer import Trainer
from tests.gloo.trainer_jobs import plan_of, run_job, samples, trainer
from tests.grids import long_except


def count_gathers() -> list[str]:
    """Record the calls that gather the whole optimizer state in this process."""
    calls: list[str] = []
    full_state = decoupled.full_state

    def counted(*args: Any) -> Any:
        calls.append(args[4])
        return full_state(*args)

    decoupled.full_state = counted
    return calls


def use_model(job: Trainer) -> None:
    """Do what users do with a model: copy it, compute a gradient, change its weights."""
    pickle.dumps(job.model)
    job.evaluate(samples())
    for parameter in job.model.parameters():
        parameter.square().sum().backward()
        assert parameter.grad is not None
        assert parameter.grad.norm() > 0
        parameter.grad = None
    with torch.no_grad():
        for name, parameter in job.model.named_parameters():
            if name == "0.weight" and job.worker.pipeline == 0:  # the others receive it
                parameter.mul_(0.5)
            elif name == "4.bias":
                parameter.data = parameter.data * 0.5


def train(num_stages: int, num_pipelines: int, run_dir: Path | None) -> list[float]:
    losses: list[float] = []
    with trainer(plan_of(num_stages, num_pipelines), run_dir=run_dir, sync="decoupled") as job:
        for end in (3, 6, 9):
            losses += job.fit(max_steps=end, progress=False).losses
            if end == 6 and run_dir is not None:
                job.save()
            use_model(job)
        if run_dir is not None:
            assert job.restore() == 6
            use_model(job)
            losses += job.fit(max_steps=9, progress=False).losses
    return losses


@pytest.mark.parametrize("num_stages", long_except([1, 2], 1))
def test_fits_with_a_kept_optimizer_equal_one_process(num_stages: int, tmp_path: Path) -> None:
    def work(_: DistContext | None) -> tuple[list[float], list[str]]:
        gathers = count_gathers()
        return train(num_stages, 2, tmp_path / "several"), gathers

    (expected,) = run_job(1, lambda _: train(1, 1, tmp_path / "one"), tmp_path)
    for losses, gathers in run_job(2 * num_stages, work, tmp_path):
        assert losses == pytest.approx(expected, abs=1e-5)
        assert gathers == ["async_state_dict()"], "of save() alone"


def test_every_fit_uses_the_same_optimizer(tmp_path: Path) -> None:
    def work(_: DistContext | None) -> bool:
        with trainer(plan_of(1, 2), sync="decoupled") as job:
            found = []
            for end in (2, 4):
                job.fit(max_steps=end, progress=False)
                found.append(job._progress.optimizer)
            hooks = [m._forward_pre_hooks for m in job.model.modules() if isinstance(m, nn.Module)]
            assert not any(hooks)
            return found[0] is found[1] and isinstance(found[0], DistributedOptimizer)

    assert run_job(2, work, tmp_path) == [True, True]


@pytest.mark.long
def test_buckets_are_tuned_over_several_fits(tmp_path: Path) -> None:
    """Evaluations and saves between steps change neither losses nor the course of the trials."""
    most = 400  # steps; how many the trials take depends on how steady the times of steps are

    def fit(num_stages: int, num_pipelines: int, total: int = 0) -> tuple[list[float], list[str]]:
        """Train `total` steps, or until the buckets are tuned."""
        plan, run_dir = plan_of(num_stages, num_pipelines), tmp_path / f"{num_pipelines}"
        config = CheckpointConfig(every=30)
        # With a schedule that changes, the trials would start again, and end after a few times.
        fixed = {"schedule": "1f1b", "sync": "decoupled"}
        with trainer(plan, run_dir=run_dir, checkpoint=config, **fixed) as job:
            losses, seen = list[float](), list[str]()

            def look(info: Any) -> None:
                owner = getattr(job.pipeline._flush_runner.accumulation_context, "__self__", None)
                if isinstance(owner, DistributedOptimizer):
                    seen.append(str(owner.candidate))

            for end in (10, *range(40, total or most, 35), *([total] if total else [])):
                found = job.fit(
                    max_steps=end, eval_dataset=samples(), eval_every=7, callbacks=[look]
                )
                losses += found.losses
                if getattr(job._progress.optimizer, "is_tuned", False):
                    break
        return losses, seen

    results = run_job(4, lambda _: fit(2, 2), tmp_path)
    num_steps = len(results[0][0])
    assert num_steps < most - 35, "the trials end"
    (expected,) = run_job(1, lambda _: fit(1, 1, num_steps), tmp_path)
    for losses, seen in results:
        assert losses == pytest.approx(expected[0], abs=1e-4)
        assert set(seen) == {"25 MB, decoupled", "25 MB, all_reduce"}
