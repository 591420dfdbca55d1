"""Averages of gradients equal those of one process with the whole batch, however it is split."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from polyrhythm.errors import PolicyError
from polyrhythm.run.averaging import strategies
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.comm.launch import DistContext
from tests.gloo.pipelines import random_batch, run_single_process, stack_of
from tests.gloo.replicas import TIMEOUT, run_replicas

NUM, BATCH, STEPS = 3, 12, 4


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def single_process() -> torch.Tensor:
    """Train one process on the whole batch."""
    model = stack_of(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        inputs, target = random_batch(BATCH, 8, seed=step)
        optimizer.zero_grad()
        (model(inputs) - target).square().mean().backward()
        optimizer.step()
    return weights(model)


def test_all_reduce_equals_single_process_training(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> torch.Tensor:
        model = stack_of(2, seed=3 + ctx.rank)  # all start with the weights of the first
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with GroupSync(model, optimizer, "all_reduce", timeout=TIMEOUT) as sync:
            for step in range(STEPS):
                batch = random_batch(BATCH, 8, seed=step)
                inputs, target = (t.chunk(NUM)[ctx.rank] for t in batch)
                optimizer.zero_grad()
                (model(inputs) - target).square().mean().backward()
                optimizer.step()
                sync.step()
            assert sync.num_steps == STEPS
        return weights(model)

    found = run_replicas(NUM, work, tmp_path)
    assert all(torch.equal(w, found[0]) for w in found)
    torch.testing.assert_close(
        found[0], run_single_process(single_process, tmp_path), atol=1e-6, rtol=1e-5
    )


def test_balanced_shares_follow_speed_and_give_full_batch_gradient(tmp_path: Path) -> None:
    """One worker is six times slower, by its clock; each sample is a micro-batch."""

    def work(ctx: DistContext) -> tuple[torch.Tensor, list[list[int]]]:
        model = stack_of(2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        shares, now = [], 0.0
        strategies.time = SimpleNamespace(perf_counter=lambda: now)
        with GroupSync(model, optimizer, "balanced", timeout=TIMEOUT) as sync:
            for step in range(STEPS):
                inputs, target = random_batch(BATCH, 8, seed=step)
                optimizer.zero_grad()
                shares.append(sync.share(BATCH))
                for m in shares[-1]:
                    (model(inputs[m]) - target[m]).square().mean().backward()
                    now += 0.12 if ctx.rank == 0 else 0.02
                optimizer.step()
                sync.step()
        return weights(model), [list(share) for share in shares]

    found = run_replicas(NUM, work, tmp_path)
    for step in range(STEPS):
        assigned = [m for _, shares in found for m in shares[step]]
        assert sorted(assigned) == list(range(BATCH)), "not each micro-batch once"
    assert [len(shares[0]) for _, shares in found] == [4, 4, 4]
    assert len(found[0][1][-1]) == 1, "the slow worker has more than the minimum"
    torch.testing.assert_close(
        found[0][0], run_single_process(single_process, tmp_path), atol=1e-6, rtol=1e-5
    )


class Branches(nn.Module):
    """Three parameters: used by all workers, by the first worker only, and by none."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.first, self.unused = (nn.Parameter(torch.ones(2)) for _ in range(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_missing_gradients_are_averaged_or_stay_none(dtype: torch.dtype, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[object]:
        model = Branches().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with GroupSync(model, optimizer, "all_reduce", timeout=TIMEOUT):
            loss = (ctx.rank + 1) * model.all.sum()
            if ctx.rank == 0:
                loss = loss + 4 * model.first.sum()
            loss.backward()
            optimizer.step()
        gradients = (model.all.grad, model.first.grad, model.unused.grad)
        return [None if g is None else g.tolist() for g in gradients]

    assert run_replicas(2, work, tmp_path) == [[[1.5, 1.5], [2.0, 2.0], None]] * 2


def test_share_is_required_by_balanced_only(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[str]:
        model, reasons = nn.Linear(2, 2), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with GroupSync(model, optimizer, "age", timeout=TIMEOUT) as sync:
            with pytest.raises(PolicyError) as caught:
                sync.share(4)
            reasons.append(caught.value.wrong)
        with GroupSync(model, optimizer, "balanced", timeout=TIMEOUT, name="second"):
            model(torch.ones(2)).sum().backward()
            with pytest.raises(PolicyError) as caught:
                optimizer.step()
            reasons.append(caught.value.wrong)
        return reasons

    expected = ["share() under age", "a step under balanced without share()"]
    assert run_replicas(2, work, tmp_path) == [expected] * 2


@pytest.mark.parametrize("policy", ["all_reduce", "balanced"])
def test_average_gradients_allows_clipping_and_skipped_steps(policy: str, tmp_path: Path) -> None:
    """As with a GradScaler: all workers skip the same step, since all have the same mean."""

    def work(ctx: DistContext) -> tuple[float, list[float]]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        norms = []
        with GroupSync(model, optimizer, policy, timeout=TIMEOUT) as sync:
            for step in range(3):
                if policy == "balanced":
                    sync.share(2)
                model.weight.grad = torch.full((1, 1), -1.0 - 2 * ctx.rank)
                if step == 1 and ctx.rank == 1:
                    model.weight.grad[:] = torch.inf
                sync.average_gradients()
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.5).item())
                if norms[-1] < torch.inf:
                    optimizer.step()
                sync.step()
        return model.weight.item(), norms

    expected = pytest.approx(2 * 1.5, rel=1e-4), [2.0, torch.inf, 2.0]
    for found in run_replicas(2, work, tmp_path):
        assert found == expected


def test_last_balanced_worker_computes_whole_batch(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[int]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = GroupSync(model, optimizer, "balanced", timeout=TIMEOUT)
        counts = []
        for step in range(4):
            counts.append(len(sync.share(8)))
            model(torch.ones(1, 1)).backward()
            optimizer.step()
            if step == 1 and ctx.rank == 1:
                break
        sync.close()
        return counts

    found = run_replicas(2, work, tmp_path)
    assert found[0][0] == found[1][0] == 4
    assert found[0][-1] == 8
