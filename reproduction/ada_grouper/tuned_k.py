"""Fig. 10: the k that is chosen once an hour, as the load of the network changes.

Every hour each micro-batch size runs two trial steps of 1F1B, as with the tuner of the runtime, and
the transfer times are recorded. The tuner's cost function predicts the paper's six plans from them.
The choice of our tuner, among all its candidates, is plotted as well.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes, length
from polyrhythm.schedule.tuner import ScheduleDecision, ScheduleTuner
from polyrhythm.types import Seconds
from reproduction.ada_grouper.granularity import BATCH, NUM_WORKERS, SIZES, medium_job
from reproduction.ada_grouper.steps import VISIBLE, kfkb
from reproduction.ada_grouper.testbed import BUSY_FLOWS, S1
from reproduction.paper_row import PaperRow, Plot

_LOADS = (BUSY_FLOWS, BUSY_FLOWS, BUSY_FLOWS, S1.other_flows, BUSY_FLOWS)
_PRINTED_K = (5, 6, 6, 3, 4)
_PRINTED_GAIN = {0: 1.20, 1: 1.20, 2: 1.20, 4: 1.21}
_TRIAL_STEPS = 2
_MAX_RECORDED = 64  # latest messages per direction that a decision uses


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningHour:
    predicted: Mapping[int, Seconds]  # step time by k
    decision: ScheduleDecision  # of our tuner

    @property
    def k(self) -> int:
        """The choice of the paper's tuner: the shortest step, and of ties the least memory."""
        enough = VISIBLE * min(self.predicted.values())
        return min(k for k, step in self.predicted.items() if step <= enough)

    @property
    def gain(self) -> float:
        return self.predicted[1] / self.predicted[self.k]


def measure() -> list[TuningHour]:
    sizes = tuple(dict.fromkeys(SIZES.values()))
    tuner = ScheduleTuner(num_stages=NUM_WORKERS, batch_size=BATCH, microbatch_sizes=sizes)
    hours = []
    for number, flows in enumerate(_LOADS):
        times = {size: _trial(size, flows, f"hour {number}") for size in sizes}
        predicted = {k: _predict(k, times[size]) for k, size in SIZES.items()}
        hours.append(TuningHour(predicted=predicted, decision=tuner.decide(times)))
    return hours


def _trial(size: int, flows: float, seed: str) -> PipelineTimes:
    """Times of micro-batches of `size` samples, as measured in a trial."""
    steps = [measured for _, measured in medium_job(flows, seed).steps(1, size, _TRIAL_STEPS)]
    return replace(
        steps[0],
        activations=tuple(map(_latest, zip(*(step.activations for step in steps), strict=True))),
        gradients=tuple(map(_latest, zip(*(step.gradients for step in steps), strict=True))),
    )


def _latest(links: tuple[LinkTimes, ...]) -> LinkTimes:
    """Join the times of one direction of one link over the steps of a trial."""
    busy = [sample for link in links for sample in link.busy]
    return replace(links[0], busy=tuple(busy[-_MAX_RECORDED:]))


def _predict(k: int, times: PipelineTimes) -> Seconds:
    schedule = kfkb(k).build(num_stages=NUM_WORKERS, num_microbatches=BATCH // SIZES[k])
    return length(schedule, times)


def rows(hours: list[TuningHour]) -> Iterator[PaperRow]:
    for number, (hour, printed) in enumerate(zip(hours, _PRINTED_K, strict=True)):
        yield PaperRow(
            "Fig. 10",
            f"the k that is chosen at hour {number}",
            printed,
            hour.k,
            is_exact=True,
            why=_why(hour, printed),
        )
    for number, gain in _PRINTED_GAIN.items():
        what = f"the chosen k over 1F1B, predicted, at hour {number}"
        yield PaperRow("Fig. 10", what, gain, hours[number].gain)


def _why(hour: TuningHour, printed: int) -> str:
    ratio = hour.predicted[printed] / hour.predicted[hour.k]
    if ratio < VISIBLE:
        return (
            f"k = {printed} takes as long, within 0.1 %, but more memory: with micro-batches of "
            "one size, any k from 4 on hides all transfers"
        )
    return (
        f"k = {printed} takes {100 * (ratio - 1):.1f} % longer: a device computes at one rate "
        "here, so small micro-batches lose less than the paper's, and fill and drain the pipeline "
        "faster"
    )


def plots(hours: list[TuningHour]) -> Iterator[Plot]:
    first = hours[0].predicted[1]
    series = {
        f"k = {k}": [(number, first / hour.predicted[k]) for number, hour in enumerate(hours)]
        for k in SIZES
    }
    series["our tuner"] = [
        (number, first / hour.decision.predicted) for number, hour in enumerate(hours)
    ]
    yield Plot(
        name="tuning",
        title="Fig. 10: GPT-Medium on 8 workers of S1, plans predicted once an hour; "
        "hour 3 is not busy",
        x="hours",
        y="throughput over 1F1B at hour 0",
        series=series,
    )
