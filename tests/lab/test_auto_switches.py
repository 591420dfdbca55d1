"""`auto` detects a slow network from the messages of the training itself."""

from pathlib import Path

import pytest

from benchmarks.pipeline.networks import FAST, FULL, cluster
from benchmarks.pipeline.stages import Stages
from benchmarks.pipeline.worker import Load, Order
from polyrhythm.lab.lab import Lab

FORWARD = 0.06  # a busy machine delays messages by some milliseconds


@pytest.mark.long
@pytest.mark.timeout(100)
def test_auto_schedule_leaves_1f1b_when_transfers_are_slow(tmp_path: Path) -> None:
    load = Load(num_microbatches=8, num_floats=8192)
    with Lab(cluster()) as lab, Stages(lab, load, tmp_path) as stages:

        def schedules(network: object, num_steps: int) -> list[str]:
            stages.set_network(network, FORWARD)
            order = Order(side="auto", forward=FORWARD)
            steps = [stages.step(order, network=network, seed=0) for _ in range(num_steps)]
            for answers in steps:
                assert len({answer.spec for answer in answers}) == 1, "all stages run one plan"
            return [answers[0].spec for answers in steps]

        assert schedules(FAST, 3) == ["1f1b"] * 3
        assert schedules(FULL, 10)[-1].startswith("bounded:")
