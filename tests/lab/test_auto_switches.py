"""Schedule `auto` detects a slow network from the messages of the training alone."""

import pytest

from benchmarks.pipeline.networks import FAST, FULL, PipelineNetwork, cluster
from benchmarks.pipeline.worker import StageLoad, StagePool
from polyrhythm.lab.lab import Lab

pytestmark = pytest.mark.alone  # measures time

FORWARD = 0.06  # a busy machine delays messages by some milliseconds


@pytest.mark.long
@pytest.mark.timeout(100)
def test_auto_schedule_leaves_1f1b_when_transfers_are_slow() -> None:
    load = StageLoad(num_microbatches=8, num_floats=8192)
    with Lab(cluster()) as lab, StagePool(lab, load) as pool:

        def schedules_on(network: PipelineNetwork, num_steps: int) -> list[str]:
            pool.set_network(network, FORWARD)
            steps = [pool.step("auto", FORWARD, network, seed=0) for _ in range(num_steps)]
            for answers in steps:
                schedules = {answer.schedule for answer in answers}
                assert len(schedules) == 1, "all stages run one schedule"
            return [answers[0].schedule for answers in steps]

        assert schedules_on(FAST, 3) == ["1f1b"] * 3
        assert schedules_on(FULL, 10)[-1].startswith("bounded:")
