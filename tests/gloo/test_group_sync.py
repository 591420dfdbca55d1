"""Group averaging in a plain loop, with every policy: keeps the mean, reduces the divergence."""

import time
from pathlib import Path

import pytest
import torch

from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.comm.launch import DistContext
from tests.gloo.replicas import TIMEOUT, Point, run_replicas, target_of, train
from tests.grids import long_except

MODEL_POLICIES = ["static", "random", "smart", "partial_reduce", "adaptive", "age", "pairwise"]
OPTIONS = {"partial_reduce": {"group_size": 2, "timeout": 0.5}}


def options_of(policy: str) -> dict[str, object]:
    return OPTIONS.get(policy, {})


@pytest.mark.parametrize("policy", long_except(MODEL_POLICIES, 0, 3, 5))
def test_averaging_preserves_mean_and_reduces_divergence(policy: str, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[torch.Tensor, torch.Tensor]:
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with GroupSync(
            model, optimizer, policy, options=options_of(policy), timeout=TIMEOUT
        ) as sync:
            model.weight.data = target_of(ctx.rank)
            for _ in range(12):
                time.sleep(0.02)  # a step, so that a late start does not make a straggler
                sync.step()
            before = model.weight.detach().clone()
            sync.average_all()
            return before, model.weight.detach().clone()

    found = run_replicas(4, work, tmp_path)
    start = torch.stack([target_of(rank) for rank in range(4)])
    after = torch.stack([before for before, _ in found])
    assert (after - after.mean(0)).norm() < 0.9 * (start - start.mean(0)).norm()
    for _, averaged in found:
        torch.testing.assert_close(averaged, start.mean(0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("policy", long_except(["all_reduce", *MODEL_POLICIES], 0, 3, 5))
def test_workers_converge_to_mean_of_targets(policy: str, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> torch.Tensor:
        with train(ctx, 40, policy, options=options_of(policy), lr=0.1) as sync:
            sync.average_all()
            return sync._model.module.weight.detach().clone()

    found = run_replicas(4, work, tmp_path)
    assert all(torch.equal(weight, found[0]) for weight in found)
    targets = torch.stack([target_of(rank) for rank in range(4)])
    distance = (targets - targets.mean(0)).norm(dim=1).mean()  # without averaging
    assert (found[0] - targets.mean(0)).norm() < 0.25 * distance
