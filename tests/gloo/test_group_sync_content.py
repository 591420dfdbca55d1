"""What is averaged, and when it is applied: statistics, optimizer state, overlap, outer steps."""

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.averaging.reduced_variance import ReducedVarianceAdamW
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.sync.policies.local import OuterNesterov
from tests.gloo.replicas import TIMEOUT, Point, run_replicas, target_of, train


def full_group(num: int) -> dict[str, object]:
    """Return options of `age` with which all workers form one group."""
    return {"window": float("inf"), "group_size": num}


def test_running_statistics_are_averaged_but_not_counts(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[list[float], list[float], int]:
        model = nn.BatchNorm1d(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with GroupSync(model, optimizer, "age", options=full_group(2), timeout=TIMEOUT) as sync:
            for _ in range(1 + ctx.rank):
                model(torch.tensor([[0.0], [10.0 * (ctx.rank + 1)]])).sum().backward()
            before = model.running_mean.tolist()
            optimizer.step()
            sync.step()
        return before, model.running_mean.tolist(), int(model.num_batches_tracked)

    (first, mean, count), (second, other_mean, other_count) = run_replicas(2, work, tmp_path)
    assert mean == other_mean == [pytest.approx((first[0] + second[0]) / 2)]
    assert first != second
    assert (count, other_count) == (1, 2)


@pytest.mark.parametrize("state", ["local", "average"])
def test_momentum_is_averaged_only_with_state_average(state: str, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> torch.Tensor:
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        options = full_group(2)
        with GroupSync(
            model, optimizer, "age", options=options, state=state, timeout=TIMEOUT
        ) as sync:
            model(target_of(ctx.rank)).backward()
            optimizer.step()
            sync.step()
        return optimizer.state[model.weight]["momentum_buffer"].clone()

    first, second = run_replicas(2, work, tmp_path)
    assert torch.equal(first, second) == (state == "average")
    torch.testing.assert_close((first + second) / 2, -(target_of(0) + target_of(1)) / 2)


def test_overlap_applies_average_one_step_later(tmp_path: Path) -> None:
    """Steps are +1 for the first worker and +3 for the second, whatever the weights."""

    def work(ctx: DistContext) -> list[float]:
        model, seen = Point(size=1), []
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with GroupSync(
            model, optimizer, "age", options=full_group(2), overlap=True, timeout=TIMEOUT
        ) as sync:
            for _ in range(3):
                model.weight.grad = torch.tensor([-1.0 - 2 * ctx.rank])
                optimizer.step()
                sync.step()
                seen.append(model.weight.item())
            sync.average_all()
            seen.append(model.weight.item())
        return seen

    # The mean of 1 and 3 arrives at the second step: 1 + 1 + (2 - 1), 3 + 3 + (2 - 3). Then the
    # mean of 3 and 5: 3 + 1 + (4 - 3), 5 + 3 + (4 - 5). In the end all are 6, the sum of the steps.
    assert run_replicas(2, work, tmp_path) == [[1.0, 3.0, 5.0, 6.0], [3.0, 5.0, 7.0, 6.0]]


def test_refresh_applies_overlapped_average_early(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[float]:
        model, seen = Point(size=1), []
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with GroupSync(
            model, optimizer, "age", options=full_group(2), overlap=True, timeout=TIMEOUT
        ) as sync:
            model.weight.grad = torch.tensor([-1.0 - 2 * ctx.rank])
            optimizer.step()
            sync.step()
            deadline = time.monotonic() + TIMEOUT
            while model.weight.item() != 2.0 and time.monotonic() < deadline:
                sync.apply_pending()  # as between micro-batches
            seen.append(model.weight.item())
            optimizer.step()
            sync.step()
            seen.append(model.weight.item())
            sync.average_all()
            seen.append(model.weight.item())
        return seen

    # As without the refresh, except that the mean of 1 and 3 is applied within the step.
    assert run_replicas(2, work, tmp_path) == [[2.0, 3.0, 4.0], [2.0, 5.0, 4.0]]


def test_overlap_may_change_between_steps(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[float]:
        model, seen = Point(size=1), []
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with GroupSync(model, optimizer, "age", options=full_group(2), timeout=TIMEOUT) as sync:
            for overlap in (False, True, False):
                sync.overlap = overlap
                assert sync.overlap == overlap
                model.weight.grad = torch.tensor([-1.0 - 2 * ctx.rank])
                optimizer.step()
                sync.step()
                seen.append(model.weight.item())
        return seen

    # The second mean, 4, is applied in the third step.
    assert run_replicas(2, work, tmp_path) == [[2.0, 3.0, 6.0], [2.0, 5.0, 6.0]]


def test_refresh_after_optimizer_step_keeps_update(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> float:
        model = Point(size=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with GroupSync(
            model, optimizer, "age", options=full_group(2), overlap=True, timeout=TIMEOUT
        ) as sync:
            model.weight.grad = torch.tensor([-1.0 - 2 * ctx.rank])
            for _ in range(2):
                optimizer.step()
                sync.apply_pending()
                sync.step()
            sync.average_all()
        return model.weight.item()

    assert run_replicas(2, work, tmp_path) == [4.0, 4.0]


def test_local_policy_applies_outer_nesterov_step(tmp_path: Path) -> None:
    """Two local steps move the workers by 2 and 6: the outer optimizer sees a gradient of -4."""

    def work(ctx: DistContext) -> list[float]:
        model, seen = Point(size=1), []
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        outer = OuterNesterov(lr=0.5, momentum=0.5)
        with GroupSync(model, optimizer, "local", every=2, outer=outer, timeout=TIMEOUT) as sync:
            for _ in range(4):
                model.weight.grad = torch.tensor([-1.0 - 2 * ctx.rank])
                optimizer.step()
                sync.step()
                seen.append(model.weight.item())
        return seen

    # Velocity 4, step 0.5 * (4 + 0.5 * 4) = 3; then velocity 6, step 0.5 * (4 + 0.5 * 6) = 3.5.
    assert run_replicas(2, work, tmp_path) == [[1.0, 3.0, 4.0, 6.5], [3.0, 3.0, 6.0, 6.5]]


def test_every_n_averages_only_each_nth_step(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[float]:
        model, seen = Point(size=1), []
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with GroupSync(model, optimizer, "all_reduce", every=2, timeout=TIMEOUT) as sync:
            for _ in range(4):
                model.weight.grad = torch.tensor([-1.0 - 2 * ctx.rank])
                optimizer.step()
                sync.step()
                seen.append(model.weight.item())
        return seen

    assert run_replicas(2, work, tmp_path) == [[1.0, 4.0, 5.0, 8.0], [3.0, 4.0, 7.0, 8.0]]


@pytest.mark.parametrize("overlap", [False, True])
def test_last_worker_under_local_takes_outer_steps_alone(overlap: bool, tmp_path: Path) -> None:
    outer = OuterNesterov(lr=0.5, momentum=0.8)

    def work(ctx: DistContext) -> list[float]:
        model, seen = Point(size=1), []
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with GroupSync(
            model, optimizer, "local", every=2, outer=outer, overlap=overlap, timeout=TIMEOUT
        ) as sync:
            for _ in range(2 if ctx.rank == 1 else 6):
                model.weight.grad = torch.tensor([-1.0 - 2 * ctx.rank])
                optimizer.step()
                sync.step()
                seen.append(model.weight.item())
            deadline = time.monotonic() + TIMEOUT
            while ctx.rank == 1 and model.weight.item() == 6.0 and time.monotonic() < deadline:
                sync.apply_pending()  # with overlap, leave after the average
        return seen

    first, _ = run_replicas(2, work, tmp_path)
    anchor, velocity, weight, expected, pending = 0.0, 0.0, 0.0, [], None
    for number in (2.0, 1.0, 1.0):  # the mean step: of both workers, then of the first one
        expected.append(weight + 1.0)
        weight += 2.0
        published = weight
        if pending is not None:
            before, mean = pending
            anchor, velocity = outer.step(anchor, anchor - mean, velocity)
            weight = published = weight + anchor - before
        pending = published, published + 2 * (number - 1.0)
        if not overlap:
            anchor, velocity = outer.step(anchor, anchor - pending[1], velocity)
            weight, pending = anchor, None
        expected.append(weight)
    assert first == pytest.approx(expected)


@pytest.mark.parametrize(
    ("policy", "every", "number"), [("age", 1, 3.0), ("age", 2, 1.0), ("all_reduce", 1, 1.0)]
)
def test_reduced_variance_optimizer_gets_num_averaged(
    policy: str, every: int, number: float, tmp_path: Path
) -> None:
    def work(ctx: DistContext) -> float:
        model = Point()
        optimizer = ReducedVarianceAdamW(model.parameters(), lr=0.1)
        with GroupSync(model, optimizer, policy, every=every, timeout=TIMEOUT):
            return optimizer.num_averaged

    assert run_replicas(3, work, tmp_path) == [number] * 3


def test_num_averaged_ends_with_the_group_sync_and_is_not_saved(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[float]:
        model, found = Point(), []
        optimizer = ReducedVarianceAdamW(model.parameters(), lr=0.1)

        def step(sync: GroupSync) -> None:
            model(target_of(ctx.rank)).backward()
            optimizer.step()
            sync.step()
            optimizer.zero_grad()
            found.append(optimizer.num_averaged)

        with GroupSync(model, optimizer, "age", timeout=TIMEOUT) as sync:
            step(sync)
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)
            step(sync)
        found.append(optimizer.num_averaged)  # as before
        with GroupSync(model, optimizer, "all_reduce", timeout=TIMEOUT, name="next") as sync:
            optimizer.load_state_dict(saved)
            step(sync)
        return [*found, saved["param_groups"][0]["num_averaged"]]

    assert run_replicas(2, work, tmp_path) == [[2.0, 2.0, 1.0, 1.0, 1.0]] * 2


def test_half_precision_models_are_averaged(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[float]:
        model = Point(size=2).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with GroupSync(model, optimizer, "age", options=full_group(2), timeout=TIMEOUT) as sync:
            model.weight.grad = torch.full((2,), -1.0 - 2 * ctx.rank, dtype=torch.bfloat16)
            optimizer.step()
            sync.step()
        return model.weight.tolist()

    assert run_replicas(2, work, tmp_path) == [[2.0, 2.0]] * 2


def test_single_worker_trains_with_every_policy(tmp_path: Path) -> None:
    policies = ("all_reduce", "static", "random", "smart", "adaptive", "age", "pairwise", "local")

    def work(ctx: DistContext) -> list[torch.Tensor]:
        found = []
        for policy in policies:
            with train(ctx, 5, policy, name=policy) as sync:
                sync.average_all()
                found.append(sync._model.module.weight.detach().clone())
        return found

    (found,) = run_replicas(1, work, tmp_path)
    expected = target_of(0) * (1 - 0.8**5)
    for weight in found:
        torch.testing.assert_close(weight, expected)


@pytest.mark.parametrize("policy", ["static", "age"])
def test_sent_buffers_are_released_after_average(policy: str, tmp_path: Path) -> None:
    """Otherwise memory grows with every average."""

    def work(ctx: DistContext) -> list[int]:
        with train(ctx, 3, policy) as sync:
            connections = sync._rendezvous.connections._by_peer.values()
            kept = [sum(len(pair.posted) for pair in connections)]
            sync.average_all()
            return [*kept, sum(len(pair.posted) for pair in connections), len(connections)]

    assert run_replicas(2, work, tmp_path) == [[0, 0, 1], [0, 0, 1]]
