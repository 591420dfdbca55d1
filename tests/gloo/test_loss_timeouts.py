"""Waits that cannot work together are refused before training begins."""

import math
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from polyrhythm.errors import PolicyError, WorkerError
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.coordinator.epoch_server import LossTimeouts
from polyrhythm.run.trainer.trainer import Trainer


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_heartbeat": 0.5},
        {"min_heartbeat": 20.0},
        {"max_heartbeat": math.inf},
        {"reconnect": 0.0},
        {"reconnect": 16.0},
        {"answer": 15.0},
        {"answer": math.inf},
    ],
)
def test_timeouts_in_the_wrong_order_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(PolicyError, match="each longer than the one before"):
        LossTimeouts(**wrong)


def test_a_step_fails_after_a_lost_process_is_known() -> None:
    timeouts = LossTimeouts()
    waits = [part.split(" s ")[0] for part in timeouts.order(60.0).split("; ")]
    assert waits == ["after 1", "after 15", "after 60", "after 600"]
    assert timeouts.order(3600.0).endswith(
        "after 3600 s a step fails that waits for a process that is alive"
    )
    with pytest.raises(PolicyError, match="use timeout=30 or more") as caught:
        timeouts.order(15.0)
    assert "timeout=15 s" in caught.value.wrong


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ((0.5,), 5.0),  # the shortest
        ((0.5, 0.5, 4.0, 0.5), 5.0),  # few outliers change nothing
        ((0.5, 1.5, 2.5), 11.5),  # 1.5 + 10 * 1.0
        ((0.5, 9.0), 15.0),  # the longest
    ],
)
def test_how_long_a_process_may_be_silent_is_learned_from_its_gaps(
    gaps: tuple[float, ...], expected: float
) -> None:
    learned = LossTimeouts().learned_heartbeat()
    assert learned.current == 15.0
    for _, gap in zip(range(40), cycle(gaps), strict=False):
        learned.record(gap)
    assert learned.current == pytest.approx(expected)


@pytest.mark.long
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("timeout", "timeouts"),
    [(10.0, None), (20.0, LossTimeouts(max_heartbeat=25.0))],
    ids=["default", "of the job"],
)
def test_a_trainer_refuses_a_timeout_that_is_shorter_than_heartbeats(
    tmp_path: Path, timeout: float, timeouts: LossTimeouts | None
) -> None:
    def work(_: DistContext) -> None:
        inputs = torch.zeros(8, 4)
        Trainer(
            nn.Sequential(nn.Linear(4, 4)),
            mse_loss,
            lambda named: torch.optim.SGD(named, lr=0.1),
            TensorDataset(inputs, inputs),
            batch_size=2,
            stages=1,
            pipelines=2,
            timeout=timeout,
        )

    with (
        pytest.raises(WorkerError, match=f"timeout={timeout:g} s, in a job that goes on after"),
        LocalJob(
            work, 2, output_folder=tmp_path / "logs", keeps_survivors=True, timeouts=timeouts
        ) as job,
    ):
        assert job.wait(30)
