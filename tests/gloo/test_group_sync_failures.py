"""Workers killed at any point of an average: the others continue, and lose no weights."""

import math
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from polyrhythm.errors import PeerError
from polyrhythm.run.averaging import exchange, rounds, split_all_reduce
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.coordinator.sessions import FromWorker
from polyrhythm.sync.protocol import Done
from tests.gloo.replicas import run_with_failures, target_of, train
from tests.grids import long_except

VICTIM = 2


def step(sync: GroupSync, ctx: DistContext) -> None:
    model, optimizer = sync._model.module, sync._model.optimizer
    optimizer.zero_grad()
    model(target_of(ctx.rank)).backward()
    optimizer.step()
    sync.step()


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(point: str) -> None:
    """Kill this process the third time that it reaches `point`."""
    count = iter(range(1000))

    def third() -> bool:
        return next(count) == 2

    if point == "before the exchange":
        connect = rounds.PeerConnections.connect
        rounds.PeerConnections.connect = lambda *a, **k: die() if third() else connect(*a, **k)
    elif point == "between the two exchanges":
        weighted_sum = exchange.weighted_sum
        for module in (exchange, split_all_reduce):
            module.weighted_sum = lambda *a: die() if third() else weighted_sum(*a)
    elif point == "before Done":
        done = rounds.Done
        rounds.Done = lambda *a, **more: die() if third() else done(*a, **more)
    else:
        assert point == "after Done"
        from polyrhythm.run.coordinator.client import CoordinatorClient

        send = CoordinatorClient.send

        def send_and_die(client: CoordinatorClient, message: FromWorker) -> None:
            send(client, message)
            if isinstance(message, Done) and third():
                time.sleep(0.05)  # the message is sent
                die()

        CoordinatorClient.send = send_and_die


@pytest.mark.parametrize(
    ("policy", "point"),
    long_except(
        [
            ("age", "before the exchange"),
            ("age", "between the two exchanges"),
            ("age", "before Done"),
            ("age", "after Done"),
            ("all_reduce", "between the two exchanges"),
            ("smart", "before the exchange"),
        ],
        *(1, 3, 4),
    ),
)
def test_others_continue_when_worker_is_killed(policy: str, point: str, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[int, torch.Tensor]:
        if ctx.rank == VICTIM:
            die_at(point)
        # Every group waits for all: otherwise a victim that starts late may be in no group.
        options = {"window": math.inf, "group_size": 4} if policy == "age" else {}
        with train(ctx, 30, policy, options=options) as sync:
            sync.average_all()
            return sync.num_steps, sync._model.module.weight.detach().clone()

    found = run_with_failures(4, work, tmp_path, lost={VICTIM})
    assert [steps for steps, _ in found.values()] == [30] * 3
    weights = [weight for _, weight in found.values()]
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    assert weights[0].isfinite().all()


@pytest.mark.long
def test_all_reduce_waits_for_straggler(tmp_path: Path) -> None:
    """For longer than several learned group timeouts."""

    def work(ctx: DistContext) -> tuple[int, torch.Tensor]:
        with train(ctx, 20, "all_reduce") as sync:
            if ctx.rank == 1:
                weighted_sum = split_all_reduce.weighted_sum
                split_all_reduce.weighted_sum = lambda *a: (time.sleep(4.5), weighted_sum(*a))
            step(sync, ctx)
            split_all_reduce.weighted_sum = exchange.weighted_sum
            step(sync, ctx)
            return sync.num_steps, sync._model.module.weight.detach().clone()

    (first_steps, first), (second_steps, second) = run_with_failures(
        2, work, tmp_path, lost=set()
    ).values()
    assert first_steps == second_steps == 22
    assert torch.equal(first, second)


def test_failed_average_all_raises(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        def fail(*_: object, **__: object) -> None:
            raise PeerError("s0p9", action="averaging", waited=0.1, cause="raised by the test")

        sync = train(ctx, 3, "age")
        rounds.all_reduce_mean = fail
        with pytest.raises(PeerError) as caught, sync:
            sync.average_all()
        return str(caught.value)

    for message in run_with_failures(2, work, tmp_path, lost=set()).values():
        assert "averaging all workers" in message
        assert "failed" in message
