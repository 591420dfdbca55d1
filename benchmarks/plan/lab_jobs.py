"""Carry out a plan in the lab: each worker sleeps as long as its stage would compute."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.sleeping.job import ENVELOPE, NUMBER
from benchmarks.sleeping.job import carry_out as carry_out_parts
from benchmarks.sleeping.worker import Part
from polyrhythm.lab.lab import Lab
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.problem import Problem
from polyrhythm.types import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    steps: tuple[Seconds, ...]  # from the end of a step to the end of the next
    trouble: str | None  # why the emulated network was no good meanwhile, if it was not


def parts(plan: Plan, problem: Problem) -> list[Part]:
    """What each worker does, in the order of ranks."""
    assert plan.microbatch_size is not None, "the plan is complete"
    stages = problem.stages(plan.layers_per_stage, plan.microbatch_size)
    found = []
    for rank in range(plan.num_workers):
        worker = plan.worker(rank)
        pipeline, stage = plan.pipelines[worker.pipeline], stages[worker.stage]
        assert pipeline.num_microbatches is not None, "the plan is complete"
        assert len(set(pipeline.devices)) == plan.num_stages, "a device for each stage"
        device = pipeline.devices[worker.stage]
        speed = problem.speeds[problem.index[device]]
        found.append(
            Part(
                worker=worker,
                device=device,
                num_stages=plan.num_stages,
                num_pipelines=plan.num_pipelines,
                num_microbatches=pipeline.num_microbatches,
                schedule=pipeline.schedule,
                forward=stage.forward / speed,
                backward=stage.backward / speed,
                num_activations=round((stages[0].activation_bytes - ENVELOPE) / NUMBER),
                num_weights=max(1, round(stage.gradient_bytes / NUMBER)),
            )
        )
    return found


def carry_out(
    lab: Lab, plan: Plan, problem: Problem, *, num_steps: int, folder: Path, number: int
) -> Measured:
    """Steps after the first, which finds the pipelines empty; `number` is not used twice."""
    measured = carry_out_parts(
        lab, parts(plan, problem), num_steps=num_steps, folder=folder, number=number
    )
    over = [max(of_step) for of_step in zip(*measured.ends, strict=False)][:num_steps]
    return Measured(
        steps=tuple(b - a for a, b in pairwise(over)),
        trouble=measured.trouble,
    )
