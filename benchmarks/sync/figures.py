"""What workers report, as figures: samples per second, how far models are apart, group sizes."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.sync.settings import Setting, Side
from benchmarks.sync.training import Answer
from polyrhythm.errors import LabError
from polyrhythm.types import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One side in one round."""

    setting: str
    round: int
    side: str
    samples_per_s: float
    consensus_distance: float
    loss: float
    group_size: float  # mean; nan where no group is recorded
    steps: tuple[int, int]  # of the slowest worker and of the fastest, within the measured time
    gradient_error: float
    cpu: float  # cores that all workers together kept busy, the emulated network apart


def rate(completions: Iterable[Seconds], start: Seconds, end: Seconds) -> float:
    """Steps per second, from the first completion in the window to the last.

    One that is alone in it counts as one step in all of it.
    """
    inside = [moment for moment in completions if start <= moment <= end]
    if len(inside) < 2:
        return len(inside) / (end - start)
    return (len(inside) - 1) / (inside[-1] - inside[0])


def distance(models: Sequence[Sequence[float]]) -> float:
    """Root mean square, over models and coordinates, of the difference from the mean model."""
    squares = 0.0
    for values in zip(*models, strict=True):
        mean = math.fsum(values) / len(values)
        squares += math.fsum((value - mean) ** 2 for value in values)
    return math.sqrt(squares / (len(models) * len(models[0])))


def mean_group_size(sizes: Iterable[int], num_steps: int) -> float:
    """Per group, of the sizes that all members saw; a step without an average is a group of one."""
    seen = list(sizes)
    if not seen:
        return math.nan
    num_alone = max(0, num_steps - len(seen))
    num_groups = math.fsum(1 / size for size in seen) + num_alone
    return (len(seen) + num_alone) / num_groups


def row(setting: Setting, number: int, side: Side, answers: Sequence[Answer]) -> Row:
    windows = [
        (answer.completions, answer.begin + setting.warm_up, answer.begin + setting.length)
        for answer in answers
    ]
    # All stages of a pipeline see the same samples.
    rates = [rate(*window) for window in windows]
    steps_per_s = math.fsum(rates) / setting.num_stages
    if steps_per_s == 0:
        raise LabError(
            f"no step of {side.name} in {setting.name} within {setting.measured:g} s",
            expected=f"steps of about {setting.forward + setting.backward:g} s",
            fix="run the benchmark while the machine has nothing else to do",
        )
    counts = [sum(start <= at <= end for at in done) for done, start, end in windows]
    stages = [
        [answers[rank].weights for rank in range(stage, len(answers), setting.num_stages)]
        for stage in range(setting.num_stages)
    ]
    weights = [weight for answer in answers for weight in answer.weights]
    return Row(
        setting=setting.name,
        round=number,
        side=side.name,
        samples_per_s=steps_per_s * setting.samples_per_step(side),
        consensus_distance=math.sqrt(statistics.fmean(distance(s) ** 2 for s in stages)),
        loss=statistics.fmean(weight * weight for weight in weights) / 2,
        group_size=mean_group_size(
            (size for answer in answers for size in answer.group_sizes),
            sum(len(answer.completions) for answer in answers),
        ),
        steps=(min(counts), max(counts)),
        gradient_error=max(answer.gradient_error for answer in answers),
        cpu=math.fsum(a.cpu for a in answers) / setting.length,
    )
