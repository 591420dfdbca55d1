"""Runs of one alternative: in the lab, and what is read off the ends of its steps."""

from collections.abc import Sequence

from benchmarks.predict.setting import (
    BACKWARD,
    FORWARDS,
    NUM_ACTIVATIONS,
    NUM_MICROBATCHES,
    NUM_STAGES,
    NUM_WEIGHTS,
    Alternative,
    device_name,
    scenario,
    workers,
)
from benchmarks.sleeping.worker import Part
from polyrhythm.types import Seconds

Ends = Sequence[Sequence[Seconds]]  # of each pipeline, when each of its steps was over


def parts(alternative: Alternative, num_pipelines: int) -> list[Part]:
    """What each worker does, in the order of ranks."""
    return [
        Part(
            worker=worker,
            device=device_name(worker),
            num_stages=NUM_STAGES,
            num_pipelines=num_pipelines,
            num_microbatches=NUM_MICROBATCHES,
            schedule=alternative.schedule,
            forward=FORWARDS[worker.stage],
            backward=BACKWARD * FORWARDS[worker.stage],
            num_activations=NUM_ACTIVATIONS,
            num_weights=NUM_WEIGHTS,
            averaging=alternative.averaging,
            scenario=scenario(num_pipelines),
        )
        for worker in workers(num_pipelines)
    ]


def step_time(ends: Ends, *, num_steps: int, num_left_out: int) -> Seconds:
    """Of one step of all pipelines, from when each step of each pipeline was over.

    Pipelines that wait for nobody make unequal numbers of steps: what counts is when all of them
    together have made as many as `num_steps` of each.
    """
    in_order = sorted(end for of_pipeline in ends for end in of_pipeline)
    first, last = (num * len(ends) - 1 for num in (num_left_out, num_steps))
    return (in_order[last] - in_order[first]) / (num_steps - num_left_out)
