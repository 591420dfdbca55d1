"""Enumerate the degrees to try for a plan: stages x pipelines, and micro-batch sizes.

If none fits into memory, the error names the stage that lacks memory, how much, and fixes.
"""

from collections.abc import Iterator
from itertools import accumulate, pairwise

import numpy as np

from polyrhythm.errors import PlanError
from polyrhythm.plan.draft import PlanShape
from polyrhythm.plan.partition import partition_layers
from polyrhythm.plan.problem import Problem

_ALL_STAGES = 16  # every number of stages up to this one, then ever fewer
_GIB = 2**30
_USED = (1.0, 0.75, 0.5, 0.25)  # fractions of the largest possible number of pipelines


def sizes_for(problem: Problem) -> tuple[int, ...]:
    """Return the micro-batch sizes: measured ones and powers of two between, if they divide
    the batch.
    """
    job, known = problem.job, problem.profile.microbatch_sizes
    batch = job.batch_size
    if job.microbatch_size is not None:
        problem.profile.at(job.microbatch_size)  # refuses a size outside the profile
        sizes = {job.microbatch_size}
    else:
        powers = {2**n for n in range(known[-1].bit_length()) if known[0] <= 2**n <= known[-1]}
        sizes = powers | set(known)
    good = tuple(sorted(size for size in sizes if batch % size == 0))
    if not good:
        raise PlanError(
            f"a batch of {batch} for micro-batches of {', '.join(map(str, sorted(sizes)))}",
            expected="a batch that one of these sizes divides",
            fix=f"use a batch of {_rounded(batch, min(sizes))}, or profile other sizes",
        )
    return good


def shapes(problem: Problem) -> Iterator[PlanShape]:
    """Yield the shapes with enough devices; some leave devices out."""
    job = problem.job
    for size in sizes_for(problem):
        most = job.batch_size // size  # pipelines: each has a micro-batch at least
        for stages in _numbers_of_stages(problem):
            there_are = min(problem.num_devices // stages, most)
            wanted = {max(1, int(there_are * share)) for share in _USED} if there_are else set()
            if job.num_pipelines is not None:
                wanted = {job.num_pipelines} if job.num_pipelines <= there_are else set()
            for pipelines in sorted(wanted, reverse=True):
                yield PlanShape(stages, pipelines, size)


def infeasible_error(problem: Problem) -> PlanError:
    job = problem.job
    stages = job.num_stages or 1
    pipelines = job.num_pipelines or 1
    most = min(problem.num_layers, problem.num_devices)
    if stages * pipelines > problem.num_devices or stages > problem.num_layers:
        return PlanError(
            f"{stages} stages x {pipelines} pipelines for {problem.num_devices} devices and "
            f"{problem.num_layers} layers",
            expected=f"at most {most} stages, and a device for each stage of each pipeline",
            fix="ask for fewer, or leave the numbers open",
        )
    size = sizes_for(problem)[0]
    if pipelines > job.batch_size // size:
        return PlanError(
            f"{pipelines} pipelines for {job.batch_size // size} micro-batches of {size}",
            expected="a micro-batch or more for each pipeline",
            fix=f"use at most {job.batch_size // size} pipelines, or a batch of {pipelines * size}",
        )
    return out_of_memory_error(problem, size)


def _numbers_of_stages(problem: Problem) -> list[int]:
    most = min(problem.num_layers, problem.num_devices)
    if problem.job.num_stages is not None:
        return [problem.job.num_stages] if problem.job.num_stages <= most else []
    numbers = set(range(1, min(most, _ALL_STAGES) + 1)) | {most}
    number = _ALL_STAGES
    while number < most:
        numbers.add(number)
        number = number * 5 // 4
    numbers |= {n for n in range(1, most + 1) if problem.num_devices % n == 0}
    return sorted(numbers)


def _rounded(batch: int, size: int) -> int:
    return max(size, batch // size * size)


def out_of_memory_error(problem: Problem, microbatch_size: int) -> PlanError:
    """Return the error for the most favourable case: smallest micro-batches and most stages."""
    is_never = problem.job.recompute == "never"
    least = problem.least_memory(microbatch_size, recompute=not is_never)
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
    has_copies = problem.copies_per_weight(problem.job.num_pipelines or 2) > 0
    if most <= 0:  # one pipeline fits: the number of pipelines or the layout is the cause
        return PlanError(
            "no plan was found that fits into memory",
            expected="every device to hold its layers, with gradients, optimizer state"
            + ", the copy of a shard of another replica" * has_copies
            + " and one micro-batch",
            fix="use "
            + "buddy=False (a loss then ends the job), " * has_copies
            + "fewer pipelines, more stages, or smaller micro-batches",
        )
    return PlanError(
        f"no plan was found that fits: of {stages} stages, split by memory, stage {stage} (layers "
        f"{layers.start} to {layers.stop - 1}) needs {(has + most) / _GIB:.2f} GiB and {name!r} "
        f"has {has / _GIB:.2f} GiB to give",
        expected="every stage to fit, with its weights, gradients, optimizer state and one "
        f"micro-batch of {microbatch_size}" + ", recomputed" * (not is_never),
        fix=f"add a device, or {most / _GIB:.2f} GiB to {name!r}; or use smaller micro-batches, "
        f"more stages, {'recompute=auto, ' * is_never}a lighter optimizer or a smaller memory "
        "reserve",
    )
