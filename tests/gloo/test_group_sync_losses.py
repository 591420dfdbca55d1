"""Workers that are killed at any point of an average: the others go on, and lose no weights."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from polyrhythm.run.average import averager
from polyrhythm.run.coordinator.wire import FromWorker
from polyrhythm.run.launch import Place
from polyrhythm.sync.messages import Done
from tests.gloo.replicas import run_with_losses, train

VICTIM = 2


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(point: str) -> None:
    """This process is killed the third time that it comes there."""
    count = iter(range(1000))

    def third() -> bool:
        return next(count) == 2

    if point == "before the exchange":
        connect = averager.Pairs.connect
        averager.Pairs.connect = lambda *a, **k: die() if third() else connect(*a, **k)
    elif point == "between the two exchanges":
        from polyrhythm.run.average import exchange

        weighted = exchange._weighted
        exchange._weighted = lambda *a: die() if third() else weighted(*a)
    elif point == "before Done":
        done = averager.Done
        averager.Done = lambda *a: die() if third() else done(*a)
    else:
        assert point == "after Done"
        from polyrhythm.run.coordinator.client import CoordinatorClient

        send = CoordinatorClient.send

        def send_and_die(client: CoordinatorClient, message: FromWorker) -> None:
            send(client, message)
            if isinstance(message, Done) and third():
                time.sleep(0.05)  # it is on its way
                die()

        CoordinatorClient.send = send_and_die


@pytest.mark.parametrize(
    ("policy", "point"),
    [
        ("age", "before the exchange"),
        ("age", "between the two exchanges"),
        ("age", "before Done"),
        ("age", "after Done"),
        ("all_reduce", "between the two exchanges"),
        ("smart", "before the exchange"),
    ],
)
def test_the_others_go_on_when_a_worker_is_killed(policy: str, point: str, tmp_path: Path) -> None:
    def work(place: Place) -> tuple[int, torch.Tensor]:
        if place.rank == VICTIM:
            die_at(point)
        with train(place, 30, policy) as sync:
            sync.consolidate()
            return sync.num_steps, sync._model.module.place.detach().clone()

    found = run_with_losses(4, work, tmp_path, lost={VICTIM})
    assert [steps for steps, _ in found.values()] == [30] * 3
    places = [place for _, place in found.values()]
    assert all(torch.equal(place, places[0]) for place in places)
    assert places[0].isfinite().all()
