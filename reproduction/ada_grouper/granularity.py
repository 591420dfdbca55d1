"""Fig. 6: smaller micro-batches in larger groups, at equal memory, in five rounds.

Also measured, though not in the paper: 1F1B with equally small micro-batches, and other loads of
the network.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from polyrhythm.types import Seconds
from reproduction.ada_grouper.models import GPT
from reproduction.ada_grouper.steps import AdaGrouperJob, is_faster
from reproduction.ada_grouper.testbed import BUSY_FLOWS, S1
from reproduction.paper_row import PaperRow, Plot, always

BATCH, NUM_WORKERS = 192, 8
SIZES = {1: 6, 2: 3, 3: 2, 4: 1, 5: 1, 6: 1}  # of micro-batches, by k: 6 // k
_BUSY = (3, 5)
_ROUNDS = {number: BUSY_FLOWS if number in _BUSY else S1.other_flows for number in (1, 2, 3, 4, 5)}
_LOADS, _LOAD_KS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0), (1, 2, 3, 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class GranularityResult:
    rounds: Mapping[int, Mapping[int, Seconds]]  # step time by round and k
    plain: Mapping[int, Seconds]  # step time of 1F1B by micro-batch size, in Round 3
    loads: Mapping[float, Mapping[int, Seconds]]  # step time by other flows and k

    def gain(self, number: int, k: int) -> float:
        return self.rounds[number][1] / self.rounds[number][k]

    @property
    def gains(self) -> list[float]:
        """Gains of every k above 1 over 1F1B, in all rounds."""
        return [self.gain(number, k) for number in self.rounds for k in SIZES if k > 1]

    @property
    def gain_by_size_alone(self) -> float:
        """1F1B with micro-batches of 1 over 1F1B with micro-batches of 6, in a busy round."""
        return self.plain[6] / self.plain[1]


def measure() -> GranularityResult:
    return GranularityResult(
        rounds={number: _steps(flows, f"round {number}") for number, flows in _ROUNDS.items()},
        plain={
            size: medium_job(BUSY_FLOWS, "round 3").pipeline_step(1, size)
            for size in sorted(set(SIZES.values()))
        },
        loads={flows: _steps(flows, "load", ks=_LOAD_KS) for flows in _LOADS},
    )


def medium_job(flows: float, seed: str) -> AdaGrouperJob:
    platform = replace(S1, other_flows=flows)
    return AdaGrouperJob(GPT["GPT-Medium"], platform, NUM_WORKERS, BATCH, seed)


def _steps(flows: float, seed: str, ks: tuple[int, ...] = tuple(SIZES)) -> dict[int, Seconds]:
    return {k: medium_job(flows, seed).pipeline_step(k, SIZES[k]) for k in ks}


def rows(found: GranularityResult) -> Iterator[PaperRow]:
    what = "kFkB over 1F1B, throughput, {} of k = 2-6 and five rounds"
    yield PaperRow("Fig. 6", what.format("least"), 1.10, min(found.gains))
    yield PaperRow("Fig. 6", what.format("greatest"), 1.25, max(found.gains))
    for number in _BUSY:
        what = f"1F1B in Round {number}, which is busy, over Round 1"
        yield PaperRow("Fig. 6", what, 0.90, found.rounds[1][1] / found.rounds[number][1])
        what = f'kFkB over 1F1B in Round {number}, least of k = 2-6 ("more than 20%")'
        least = min(found.gain(number, k) for k in SIZES if k > 1)
        yield PaperRow("Fig. 6", what, 1.20, least)
    yield always(
        "Fig. 6",
        'throughput does not rise with every k from 3 to 6 ("no deterministic further '
        'improvement"), of rounds',
        [not _rises(steps) for steps in found.rounds.values()],
    )


def _rises(steps: Mapping[int, Seconds]) -> bool:
    return all(is_faster(steps[k] / steps[k + 1]) for k in (3, 4, 5))


def plots(found: GranularityResult) -> Iterator[Plot]:
    first, loads = found.rounds[1][1], found.loads.items()
    unloaded = found.loads[0.0][1]
    series = {
        f"Round {number}{' (busy)' if number in _BUSY else ''}": [
            (k, first / step) for k, step in steps.items()
        ]
        for number, steps in found.rounds.items()
    }
    series["1F1B, equal micro-batches, Round 3"] = [
        (k, first / found.plain[size]) for k, size in SIZES.items()
    ]
    yield Plot(
        name="granularity",
        title="Fig. 6: GPT-Medium on 8 workers of S1, batch 192, micro-batches of 6 // k",
        x="k of kFkB",
        y="throughput over 1F1B of Round 1",
        series=series,
        printed={f"Round {number} (busy)": [(1, 0.90)] for number in _BUSY},
    )
    yield Plot(
        name="load",
        title="The same at other loads: the rounds have one other flow, or three when busy",
        x="other flows on each link, on average",
        y="ratio of throughputs",
        series={
            **{
                f"k = {k} over 1F1B": [(flows, steps[1] / steps[k]) for flows, steps in loads]
                for k in _LOAD_KS[1:]
            },
            "1F1B over 1F1B without other flows": [
                (flows, unloaded / steps[1]) for flows, steps in loads
            ],
        },
    )
