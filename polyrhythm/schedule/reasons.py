"""Texts that explain why the tuner switches, stays, or fails."""

from polyrhythm.cost.memory import MemoryBudget
from polyrhythm.cost.pipeline import PipelineTimes
from polyrhythm.describe.units import show
from polyrhythm.errors import PlanError
from polyrhythm.schedule.candidates import ScheduleCandidate
from polyrhythm.types import Bytes, Seconds


def faster(
    best: ScheduleCandidate,
    current: ScheduleCandidate,
    predicted: Seconds,
    until_now: Seconds,
    times: PipelineTimes,
) -> str:
    """Explain a switch that shortens the step, with the slowest link."""
    saying = f"predicted {_time(predicted)} instead of {_time(until_now)}"
    if best.microbatch_size != current.microbatch_size:
        saying += f" with micro-batches of {best.microbatch_size}, not {current.microbatch_size}"
    if times.num_stages == 1:
        return saying
    link = max(range(times.num_stages - 1), key=times.transfers.__getitem__)
    transfer, forward = _time(times.transfers[link]), _time(times.forward[link])
    return f"{saying}: transfers on link {link} take {transfer} per {forward} forward"


def lighter(
    candidate: ScheduleCandidate, current: ScheduleCandidate, predicted: Seconds, until_now: Seconds
) -> str:
    """Explain a switch that saves memory."""
    return (
        f"holds {_held(candidate)} instead of {_held(current)} samples in flight, "
        f"and is predicted to take {_time(predicted)} instead of {_time(until_now)}"
    )


def staying(
    best: ScheduleCandidate, current: ScheduleCandidate, predicted: Seconds, until_now: Seconds
) -> str:
    """Explain a decision not to switch: `best` runs already, or is not clearly better."""
    if best == current:
        return f"predicted {_time(until_now)}, the best there is"
    return f"predicted {_time(until_now)}; {best} would take {_time(predicted)}: no clear gain yet"


def too_large(candidate: ScheduleCandidate, budget: MemoryBudget) -> str:
    """Explain that the running candidate does not fit a budget that was set later."""
    size = candidate.microbatch_size
    if size not in budget.stages:
        return f"nothing is known of the memory of micro-batches of {size}"
    needed = budget.needed(size, candidate.in_flight)
    stage = _fullest(needed, budget)
    return (
        f"{candidate.spec} needs {_size(needed[stage])} on stage {stage}, "
        f"which has {_size(budget.limits[stage])}"
    )


def nothing_fits(budget: MemoryBudget, smallest: int) -> PlanError:
    """Return the error for a budget in which not even one smallest micro-batch fits."""
    if smallest not in budget.stages:
        return PlanError(
            f"nothing is known of the memory of micro-batches of {smallest}",
            expected="the memory of every stage with micro-batches of that size",
            fix=f"add it beside {', '.join(map(str, sorted(budget.stages))) or 'the limits'}",
        )
    needed = budget.needed(smallest, (1,) * len(budget.limits))
    stage = _fullest(needed, budget)
    memory, limit = budget.stages[smallest][stage], _size(budget.limits[stage])
    return PlanError(
        f"stage {stage} needs {_size(needed[stage])} for one micro-batch of {smallest} "
        f"in flight, and has {limit}",
        expected=f"weights {_size(memory.weights)} + gradients {_size(memory.gradients)} + "
        f"optimizer {_size(memory.optimizer)} + activation {_size(memory.activation)} + "
        f"{budget.window} messages of {_size(memory.message)} within {limit}",
        fix=f"move layers from stage {stage} to another, use smaller micro-batches, "
        f"or raise the memory limit by {_size(needed[stage] - budget.limits[stage])}",
    )


def _fullest(needed: tuple[Bytes, ...], budget: MemoryBudget) -> int:
    return max(range(len(needed)), key=lambda stage: needed[stage] - budget.limits[stage])


def _held(candidate: ScheduleCandidate) -> int:
    return candidate.microbatch_size * sum(candidate.in_flight)


def _time(time: Seconds) -> str:
    return show(time, Seconds)


def _size(size: Bytes) -> str:
    return show(size, Bytes)
