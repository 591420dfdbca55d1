"""Explain why no plan fits into memory: the stage that lacks memory, how much, and fixes."""

from itertools import accumulate, pairwise

import numpy as np

from polyrhythm.errors import PlanError
from polyrhythm.plan.partition import partition_layers
from polyrhythm.plan.problem import Problem

_GIB = 2**30


def out_of_memory_error(problem: Problem, microbatch_size: int) -> PlanError:
    """Return the error for the most favourable case: smallest micro-batches and most stages."""
    least = problem.least_memory(microbatch_size)
    limits = problem.memory_limits
    single = [float(least[i, i + 1]) for i in range(problem.num_layers)]
    largest, roomiest = int(np.argmax(single)), int(np.argmax(limits))
    if single[largest] > limits[roomiest]:
        return PlanError(
            f"layer {problem.profile.layers[largest].name!r} alone needs "
            f"{single[largest] / _GIB:.2f} GiB with a micro-batch of {microbatch_size}, and no "
            f"device has more than {limits[roomiest] / _GIB:.2f} GiB to give",
            expected="every layer to fit into some device",
            fix=f"use a device with {(single[largest] - limits[roomiest]) / _GIB:.2f} GiB more, "
            "smaller micro-batches, or a smaller memory reserve",
        )
    stages = problem.job.num_stages or min(problem.num_layers, problem.num_devices)
    kept = np.sort(np.argsort(-limits, kind="stable")[:stages])
    counts = partition_layers(single, (1 / limits[kept]).tolist())
    lacking = [
        (float(least[a, b] - limits[device]), number, device, range(a, b))
        for number, (device, (a, b)) in enumerate(
            zip(kept.tolist(), pairwise(accumulate(counts, initial=0)), strict=True)
        )
    ]
    most, stage, device, layers = max(lacking, key=lambda item: item[0])
    name = problem.cluster.devices[device].name
    has = limits[device]
    if most <= 0:  # one pipeline fits: the number of pipelines or the layout is the cause
        return PlanError(
            "no plan was found that fits into memory",
            expected="every device to hold its layers, with gradients, optimizer state and one "
            "micro-batch",
            fix="use fewer pipelines, more stages, or smaller micro-batches",
        )
    return PlanError(
        f"no plan was found that fits: of {stages} stages, split by memory, stage {stage} (layers "
        f"{layers.start} to {layers.stop - 1}) needs {(has + most) / _GIB:.2f} GiB and {name!r} "
        f"has {has / _GIB:.2f} GiB to give",
        expected="every stage to fit, with its weights, gradients, optimizer state and one "
        f"micro-batch of {microbatch_size}",
        fix=f"add a device, or {most / _GIB:.2f} GiB to {name!r}; or use smaller micro-batches, "
        "more stages, a lighter optimizer or a smaller memory reserve",
    )
