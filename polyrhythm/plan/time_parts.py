"""Name the parts of a step's time: compute, and the links that a step waits for."""

from collections.abc import Sequence

from polyrhythm.cost.pipeline import PipelineTimes
from polyrhythm.cost.step import StepSpec, StepTime, groups_of
from polyrhythm.plan.plan import TimePart
from polyrhythm.plan.problem import Problem


def time_parts(
    time: StepTime, step: StepSpec, times: Sequence[PipelineTimes], problem: Problem
) -> tuple[TimePart, ...]:
    names = [device.name for device in problem.cluster.devices]
    busiest = max(
        (
            (one.forward[i] + one.backward[i]) * len(replica.schedule[0]),
            f"computing on {names[run.device]}",
        )
        for one, replica in zip(times, step.replicas, strict=True)
        for i, run in enumerate(replica.runs)
    )
    links = [
        (there.transfer + back.transfer, f"{names[a.device]} - {names[b.device]}")
        for one, replica in zip(times, step.replicas, strict=True)
        for there, back, a, b in zip(
            one.activations, one.gradients, replica.runs[:-1], replica.runs[1:], strict=True
        )
    ]
    parts = [
        TimePart(name=busiest[1], takes=time.compute),
        TimePart(name="filling and draining pipelines", takes=time.bubbles),
    ]
    if links:
        parts.append(TimePart(name=f"activations, slowest {max(links)[1]}", takes=time.transfers))
    if len(step.replicas) > 1:
        parts.append(TimePart(name=f"gradients, {_slowest_pair(step, names)}", takes=time.sync))
    return tuple(sorted(parts, key=lambda part: -part.takes))


def _slowest_pair(step: StepSpec, names: Sequence[str]) -> str:
    slowest = max(
        (
            step.links.transfer(a, b, group.size / len(group.members)),
            f"slowest {names[a]} - {names[b]}",
        )
        for group in groups_of(step)
        for a in group.members
        for b in group.members
        if a != b
    )
    return slowest[1]
