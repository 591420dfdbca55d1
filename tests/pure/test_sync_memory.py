"""The memory of a scheduler does not grow with the number of steps."""

import gc
import tracemalloc

import pytest

from polyrhythm.sync.dispatch import SamplerState
from polyrhythm.sync.setup import Setup
from tests.grids import long_except
from tests.pure.simulated_steps import SimulatedSteps

MAX_BYTES_PER_STEP = 16


@pytest.mark.parametrize("policy", long_except(["age", "adaptive", "pairwise", "random"], 1))
def test_memory_of_a_scheduler_does_not_grow_with_steps(policy: str) -> None:
    state = SamplerState(limit=10**9)
    setup = Setup(policy=policy, num_stages=1, num_pipelines=3, sampler_state=state)
    steps, num_steps = SimulatedSteps(setup), 500
    steps.run(num_steps)
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        steps.run(num_steps)
        gc.collect()
        growth = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert growth <= MAX_BYTES_PER_STEP * num_steps
