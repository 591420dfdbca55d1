"""Workers lost at any point of a split all-reduce: the survivors stay exact copies."""

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyrhythm.run.averaging import exchange, rounds, split_all_reduce
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.averaging.rounds import Averager
from polyrhythm.run.averaging.split_all_reduce import SplitAllReduce
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.coordinator.client import CoordinatorClient
from polyrhythm.sync.protocol import Done
from tests.gloo.replicas import TIMEOUT, Point, run_with_failures, target_of, train
from tests.grids import long_except

VICTIM, NUM, SIZE, RATE, LAST = 2, 4, 12, 0.5, 8
FAILING_ROUND = 2  # the number of the average in which a worker dies
OWNED = [2, 6, 10]  # the victim's shards: three buckets of four numbers, one per member


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def use_small_buckets() -> None:
    exchange.SMALL, split_all_reduce.BUCKET = 0, 16


def on_third_call(
    replacement: Callable[..., Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that calls `replacement` the third time, else `original`."""
    count = iter(range(1000))

    def called(*args: Any, **more: Any) -> Any:
        return (
            replacement(*args, **more) if next(count) == FAILING_ROUND else original(*args, **more)
        )

    return called


def train_and_record(
    ctx: DistContext, watch: Callable[[GroupSync], None] = lambda _: None
) -> list[Tensor]:
    """Return the weights after each local update, each average and the final `average_all`."""
    model = Point(SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    options, seen = {"window": float("inf"), "group_size": NUM}, []
    with GroupSync(
        model, optimizer, "age", options=options, decoupled=True, timeout=TIMEOUT
    ) as sync:
        watch(sync)
        for _ in range(LAST):
            optimizer.zero_grad()
            model(target_of(ctx.rank, SIZE)).backward()
            optimizer.step()
            seen.append(model.weight.detach().clone())
            sync.step()
            sync.apply_pending()
            seen.append(model.weight.detach().clone())
        sync.average_all()
        seen.append(model.weight.detach().clone())
    return seen


def before_and_after(found: dict[int, list[Tensor]], average: int) -> tuple[Tensor, Tensor]:
    """Return the survivors' weights before and after an average."""
    before = torch.stack([seen[2 * average] for seen in found.values()])
    after = torch.stack([seen[2 * average + 1] for seen in found.values()])
    return before, after


def expected_victim_weights() -> Tensor:
    """Return the weights that the victim publishes in the round in which it dies."""
    weight = torch.zeros(SIZE)
    targets = torch.stack([target_of(rank, SIZE) for rank in range(NUM)])
    for _ in range(FAILING_ROUND):
        weight = weight + RATE * (targets.mean(0) - weight)
    return weight + RATE * (targets[VICTIM] - weight)


def check_survivors_agree(found: dict[int, list[Tensor]]) -> None:
    for average in range(LAST):
        _, after = before_and_after(found, average)
        assert (after == after[0]).all(), f"average {average}"
        assert after.isfinite().all()
    final = [seen[-1] for seen in found.values()]
    assert all(torch.equal(end, final[0]) for end in final)
    targets = torch.stack([target_of(rank, SIZE) for rank in found])
    torch.testing.assert_close(final[0], targets.mean(0), atol=0.1, rtol=0)


@pytest.mark.long
def test_unsent_shard_is_taken_from_first_survivor(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[Tensor]:
        use_small_buckets()
        if ctx.rank == VICTIM:
            SplitAllReduce.all_gather = on_third_call(die, SplitAllReduce.all_gather)
        return train_and_record(ctx)

    found = run_with_failures(NUM, work, tmp_path, lost={VICTIM})
    check_survivors_agree(found)
    before, after = before_and_after(found, FAILING_ROUND)
    expected = (before.sum(0) + expected_victim_weights()) / NUM
    expected[OWNED] = before[0][OWNED]
    torch.testing.assert_close(after[0], expected)


@pytest.mark.long
def test_shard_sent_to_one_survivor_reaches_all(tmp_path: Path) -> None:
    """Only the last survivor receives the shard; the others wait for it before."""

    def send_only_to_last(ctx: DistContext) -> None:
        send, post = exchange.PostedMessages.send, split_all_reduce.post_all_gather

        def post_and_die(messages: Any, members: Any, *args: Any, **more: Any) -> None:
            def send_to_the_last(_: Any, peer: Any, tensor: Tensor, *, tag: int) -> None:
                if peer == members[-1]:
                    send(messages, peer, tensor, tag=tag)

            exchange.PostedMessages.send = send_to_the_last
            post(messages, members, *args, **more)
            messages._connections.flush(10.0)
            time.sleep(0.2)  # the shard has arrived
            die()

        split_all_reduce.post_all_gather = on_third_call(post_and_die, post)

    def work(ctx: DistContext) -> list[Tensor]:
        use_small_buckets()
        if ctx.rank == VICTIM:
            send_only_to_last(ctx)
        return train_and_record(ctx)

    found = run_with_failures(NUM, work, tmp_path, lost={VICTIM})
    check_survivors_agree(found)
    before, after = before_and_after(found, FAILING_ROUND)
    torch.testing.assert_close(after[0], (before.sum(0) + expected_victim_weights()) / NUM)


@pytest.mark.long
@pytest.mark.parametrize("second", [1, 3])
def test_survivors_agree_after_second_failure_during_repair(second: int, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[Tensor]:
        use_small_buckets()
        if ctx.rank == VICTIM:
            SplitAllReduce.all_gather = on_third_call(die, SplitAllReduce.all_gather)
        if ctx.rank == second:
            SplitAllReduce._transfer_shards = die
        return train_and_record(ctx)

    found = run_with_failures(NUM, work, tmp_path, lost={VICTIM, second})
    for average in range(LAST):
        _, after = before_and_after(found, average)
        assert (after == after[0]).all(), f"average {average}"


@pytest.mark.long
def test_stalled_member_is_left_out_and_keeps_its_weights(tmp_path: Path) -> None:
    """It is alive, but sends nothing for longer than the others' timeout."""

    def work(ctx: DistContext) -> list[Tensor]:
        use_small_buckets()
        gather, split_all_reduce._MIN_TIMEOUT, split_all_reduce._PEER_TIMEOUT = (
            SplitAllReduce.all_gather,
            1.0,
            1.0,
        )

        def stall(*args: Any) -> Any:
            time.sleep(5.0)
            return gather(*args)

        def gather_with_short_timeout(split: SplitAllReduce, _: float, should_stop: Any) -> Any:
            return gather(split, 0.0, should_stop)

        SplitAllReduce.all_gather = (
            on_third_call(stall, gather) if ctx.rank == VICTIM else gather_with_short_timeout
        )
        return train_and_record(ctx)

    found = run_with_failures(NUM, work, tmp_path, lost=set())
    late = found.pop(VICTIM)
    _, after = before_and_after(found, FAILING_ROUND)
    assert (after == after[0]).all()
    assert torch.equal(late[2 * FAILING_ROUND], late[2 * FAILING_ROUND + 1]), "not undone"
    final = [late[-1], *(seen[-1] for seen in found.values())]
    assert all(torch.equal(end, final[0]) for end in final), "unequal after average_all"


def die_at(point: str) -> None:
    """Kill this process the third time that it reaches `point`."""
    if point == "before the exchange":
        rounds.PeerConnections.connect = on_third_call(die, rounds.PeerConnections.connect)
    elif point == "in the reduce-scatter":
        count = iter(range(1000))
        weighted_sum = exchange.weighted_sum
        third = 3 * FAILING_ROUND + 1  # the second of three buckets
        exchange.weighted_sum = lambda *a: die() if next(count) == third else weighted_sum(*a)
    elif point == "before Done":
        rounds.Done = on_third_call(die, rounds.Done)
    else:
        assert point == "after Done"
        send, done_numbers = CoordinatorClient.send, iter(range(1000))

        def send_and_die(client: CoordinatorClient, message: Any) -> None:
            send(client, message)
            if isinstance(message, Done) and next(done_numbers) == FAILING_ROUND:
                time.sleep(0.05)  # the message is sent
                die()

        CoordinatorClient.send = send_and_die


@pytest.mark.parametrize("point", ["before the exchange", "in the reduce-scatter", "before Done"])
def test_aborted_average_leaves_weights_unchanged(point: str, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[list[Tensor], list[Tensor]]:
        use_small_buckets()
        if ctx.rank == VICTIM:
            die_at(point)
        at_abort, abort = [], Averager._abort

        def watch(sync: GroupSync) -> None:
            def aborted(*args: Any) -> None:
                abort(*args)
                at_abort.append(sync._model.module.weight.detach().clone())

            Averager._abort = aborted

        return train_and_record(ctx, watch), at_abort

    found = run_with_failures(NUM, work, tmp_path, lost={VICTIM})
    check_survivors_agree({rank: seen for rank, (seen, _) in found.items()})
    for seen, at_abort in found.values():
        assert at_abort, "no average was aborted"
        assert all(torch.equal(weight, seen[2 * FAILING_ROUND]) for weight in at_abort)


@pytest.mark.long
@pytest.mark.parametrize("policy", long_except(["age", "smart", "partial_reduce"], 0))
def test_groups_continue_when_member_dies_after_done(policy: str, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[int, Tensor]:
        if ctx.rank == VICTIM:
            die_at("after Done")
        options = {"group_size": 2, "timeout": 0.5} if policy == "partial_reduce" else {}
        if policy == "age":  # every group waits for all: a victim that starts late might be in none
            options = {"window": math.inf, "group_size": NUM}
        with train(ctx, 20, policy, decoupled=True, options=options) as sync:
            sync.average_all()
            return sync.num_steps, sync._model.module.weight.detach().clone()

    found = run_with_failures(NUM, work, tmp_path, lost={VICTIM})
    weights = [weight for _, weight in found.values()]
    assert [steps for steps, _ in found.values()] == [20] * 3
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    assert weights[0].isfinite().all()


@pytest.mark.long
def test_member_that_raises_in_its_loop_is_left_out(tmp_path: Path) -> None:
    """It raises between its step and its next forward, while the others wait for its shards."""

    def work(ctx: DistContext) -> list[Tensor]:
        use_small_buckets()
        if ctx.rank != VICTIM:
            return train_and_record(ctx)
        gather = SplitAllReduce.all_gather
        SplitAllReduce.all_gather = on_third_call(
            lambda *a: (time.sleep(3.0), gather(*a))[1], gather
        )
        count = iter(range(1000))

        def watch(sync: GroupSync) -> None:
            step = sync._strategy.step

            def step_and_fail() -> None:
                step()
                if next(count) == FAILING_ROUND:
                    raise ValueError("a bug in the training loop")

            sync._strategy.step = step_and_fail

        with pytest.raises(ValueError, match="a bug"):
            train_and_record(ctx, watch)
        return []

    found = run_with_failures(NUM, work, tmp_path, lost=set())
    assert found.pop(VICTIM) == []
    check_survivors_agree(found)
