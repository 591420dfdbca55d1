"""The optimizer's state of one moment, put together while training goes on."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from polyrhythm.errors import PeerError
from polyrhythm.run.checkpoint.checkpoints import Checkpoints
from polyrhythm.run.checkpoint.manifest import CheckpointError
from polyrhythm.run.decoupled import optimizer as decoupled
from polyrhythm.run.decoupled.beside import Later
from polyrhythm.run.decoupled.reducing import Reducing
from polyrhythm.run.groups import break_off
from polyrhythm.run.launch import Place
from polyrhythm.run.trainer.trainer import Trainer
from tests.gloo.decoupled import ours, own_steps, stack
from tests.gloo.pipelines import run_stages
from tests.gloo.trainers import model, plan_of, run_job, samples


def wait_to_gather(until: threading.Event) -> None:
    """In this process, which ends: whoever puts state together beside training waits for it."""
    whole_state = decoupled.whole_state

    def after_it(*given: Any) -> Any:
        is_beside = threading.current_thread() is not threading.main_thread()
        assert not is_beside or until.wait(20)
        return whole_state(*given)

    decoupled.whole_state = after_it


@pytest.mark.parametrize("bucket_bytes", [200, "auto"])  # auto: buckets change on the way
def test_it_is_that_of_the_moment_when_it_was_asked_for(
    bucket_bytes: int | str, tmp_path: Path
) -> None:
    def work(place: Place) -> tuple[Any, Any, Any]:
        net = stack()
        optimizer = ours(net, bucket_bytes=bucket_bytes)
        own_steps(place, net, optimizer, range(3))
        expected, goes_on = optimizer.state_dict(), threading.Event()
        wait_to_gather(goes_on)
        later = optimizer.state_later()
        optimizer.param_groups[0]["lr"] = 0.5
        own_steps(place, net, optimizer, range(3, 30))
        goes_on.set()
        found, now = later.result(), optimizer.state_dict()
        optimizer.close()
        return expected, found, now

    for expected, found, now in run_stages(3, work, tmp_path):
        assert found["param_groups"] == expected["param_groups"] != now["param_groups"]
        assert found["state"].keys() == expected["state"].keys()
        for index, of in expected["state"].items():
            for key, value in of.items():
                assert torch.equal(found["state"][index][key], value)
                assert not torch.equal(now["state"][index][key], value)


def test_a_worker_that_is_lost_meanwhile_is_an_error(tmp_path: Path) -> None:
    def work(place: Place) -> str:
        net = stack()
        optimizer = ours(net)
        own_steps(place, net, optimizer, range(2))
        goes_on = threading.Event()
        wait_to_gather(goes_on)
        later = optimizer.state_later()
        if place.rank == 1:
            break_off(optimizer._team.beside()._group)
        goes_on.set()
        with pytest.raises(PeerError) as lost:
            later.result()
        optimizer.close()
        return lost.value.action

    assert run_stages(2, work, tmp_path) == ["state_later()"] * 2


def test_what_was_begun_after_the_end_is_an_error() -> None:
    thread = Reducing([], timeout=5.0)
    thread.close()
    later = Later(lambda: thread.is_alive)
    thread.start(lambda: later.run(dict))
    with pytest.raises(PeerError, match="closed meanwhile"):
        later.result()


def test_state_without_the_optimizer_that_it_is_of_is_refused(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match="without an optimizer"):
            checkpoints.save(1, stack(), later=dict)
        assert checkpoints.save(1, stack())  # it is as if it had not been asked


def test_training_goes_on_while_a_checkpoint_is_put_together(tmp_path: Path) -> None:
    """The first save's state comes together when three more steps are made; and it is restored."""
    saved, made = 6, 11

    def work(_: Place | None) -> tuple[list[float], list[float]]:
        goes_on = threading.Event()

        def heard(end: Any) -> None:
            if end.step == saved + 3:
                time.sleep(0.2)  # whoever waits for it has time to see it
                goes_on.set()

        def trainer(**more: Any) -> Trainer:
            return Trainer(
                model,
                mse_loss,
                lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
                samples(),
                plan=plan_of(1, 2),
                batch_size=24,
                microbatch_size=2,
                sync="decoupled",
                run=tmp_path / "run",
                checkpoint_every=saved,
                keep=9,
                deadline=20.0,
                **more,
            )

        with trainer(callbacks=[heard]) as first:
            wait_to_gather(goes_on)
            losses = list(first.fit(steps=made).losses)
        path = tmp_path / "run" / "checkpoints" / f"step-{saved:08}"
        with trainer() as second:
            second.restore(path)
            again = list(second.fit(steps=made).losses)
        return losses[saved:], again

    for losses, again in run_job(2, work, tmp_path / "job"):
        assert len(again) == made - saved
        assert again == pytest.approx(losses, abs=1e-5)
