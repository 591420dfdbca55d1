"""Fig. 10: which k is chosen as the load of the network changes, once an hour.

Every hour each size of micro-batches is tried for two steps of 1F1B, as the runtime's tuner does,
and the transfers are recorded. The six plans of the paper are predicted from that by the function
which the tuner uses; beside them stands what our tuner chooses, from all its candidates.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes, length
from polyrhythm.schedule.tuner import ScheduleDecision, ScheduleTuner
from polyrhythm.types import Seconds
from reproduction.ada_grouper.compared import VISIBLE
from reproduction.ada_grouper.cut import GPT, alone
from reproduction.ada_grouper.granularity import BATCH, NUM_WORKERS, SIZES
from reproduction.ada_grouper.platforms import BUSY_FLOWS, S1
from reproduction.ada_grouper.steps import Traffic, kfkb, run_steps
from reproduction.claim import Plot, Row

_LOADS = (BUSY_FLOWS, BUSY_FLOWS, BUSY_FLOWS, S1.other_flows, BUSY_FLOWS)
_PRINTED_K = (5, 6, 6, 3, 4)
_PRINTED_GAIN = {0: 1.20, 1: 1.20, 2: 1.20, 4: 1.21}
_TRIAL_STEPS = 2
_RECORDED = 64  # messages per direction that a decision looks back on


@dataclass(frozen=True, slots=True, kw_only=True)
class Hour:
    predicted: Mapping[int, Seconds]  # a step, by k
    decision: ScheduleDecision  # of our tuner

    @property
    def k(self) -> int:
        """What the paper's tuner would choose: the shortest; of those alike, the least memory."""
        enough = VISIBLE * min(self.predicted.values())
        return min(k for k, takes in self.predicted.items() if takes <= enough)

    @property
    def gain(self) -> float:
        return self.predicted[1] / self.predicted[self.k]


def measure() -> list[Hour]:
    sizes = tuple(dict.fromkeys(SIZES.values()))
    tuner = ScheduleTuner(num_stages=NUM_WORKERS, batch_size=BATCH, microbatch_sizes=sizes)
    hours = []
    for number, flows in enumerate(_LOADS):
        times = {size: _recorded(size, flows, f"hour {number}") for size in sizes}
        predicted = {k: _predicted(k, times[size]) for k, size in SIZES.items()}
        hours.append(Hour(predicted=predicted, decision=tuner.decide(times)))
    return hours


def _recorded(size: int, flows: float, seed: str) -> PipelineTimes:
    """What is known about micro-batches of that size after a trial."""
    times = alone(GPT["GPT-Medium"], S1, NUM_WORKERS, size)
    traffic = Traffic.of(flows, num_stages=NUM_WORKERS, seed=seed)
    trial = run_steps(
        kfkb(1), times, traffic, num_microbatches=BATCH // size, num_steps=_TRIAL_STEPS
    )
    steps = [recorded for _, recorded in trial]
    return replace(
        times,
        activations=tuple(
            _latest(links) for links in zip(*(step.activations for step in steps), strict=True)
        ),
        gradients=tuple(
            _latest(links) for links in zip(*(step.gradients for step in steps), strict=True)
        ),
    )


def _latest(links: tuple[LinkTimes, ...]) -> LinkTimes:
    """One direction of one link, over the steps of a trial."""
    busy = [sample for link in links for sample in link.busy]
    return replace(links[0], busy=tuple(busy[-_RECORDED:]))


def _predicted(k: int, times: PipelineTimes) -> Seconds:
    schedule = kfkb(k).build(num_stages=NUM_WORKERS, num_microbatches=BATCH // SIZES[k])
    return length(schedule, times)


def rows(hours: list[Hour]) -> Iterator[Row]:
    for number, (hour, printed) in enumerate(zip(hours, _PRINTED_K, strict=True)):
        yield Row(
            place="Fig. 10",
            what=f"the k that is chosen at hour {number}",
            printed=printed,
            ours=hour.k,
            is_exact=True,
            why="" if hour.k == printed else _why(hour, printed),
        )
    for number, printed_gain in _PRINTED_GAIN.items():
        gain = hours[number].gain
        yield Row(
            place="Fig. 10",
            what=f"the chosen k over 1F1B, predicted, at hour {number}",
            printed=printed_gain,
            ours=gain,
        )


def _why(hour: Hour, printed: int) -> str:
    longer = hour.predicted[printed] / hour.predicted[hour.k]
    if longer < VISIBLE:
        return (
            f"k = {printed} takes as long, within 0.1 %, but more memory: with micro-batches of "
            "one size, any k from 4 on hides all transfers"
        )
    return (
        f"k = {printed} takes {100 * (longer - 1):.1f} % longer: a device computes at one rate "
        "here, so that small micro-batches lose less than theirs did, and fill and drain the "
        "pipeline faster"
    )


def plots(hours: list[Hour]) -> Iterator[Plot]:
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
        "the third hour is quiet",
        x="hours",
        y="throughput over 1F1B at the beginning",
        series=series,
        printed={},
    )
