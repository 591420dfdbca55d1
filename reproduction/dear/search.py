"""Figures 3 and 10: how many trials a search for the bucket size needs."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

from polyrhythm.sync.fusion.tuner import SIZES, BucketCandidate, Search
from polyrhythm.types import Bytes, Seconds
from reproduction.dear import methods
from reproduction.dear.speedups import STUDIED
from reproduction.dear.testbed import ETHERNET, DearModel, compute_times
from reproduction.dear.timeline import StepEstimate
from reproduction.paper_row import PaperRow, Plot, always

_NEAR = 1.01  # times the best step: a good bucket size
_PAPERS_CHOICE: Bytes = 35_000_000  # by the search of Fig. 3
_SEEDS = 10
_MAX_TRIALS = 20  # of random and grid search


@dataclass(kw_only=True, slots=True)
class RandomSearch(Search):
    def _wanted(self) -> BucketCandidate:
        rng = random.Random(f"{self.seed} {len(self._observed)}")
        return BucketCandidate(rng.choice(SIZES), rng.choice(self.space.modes))


@dataclass(kw_only=True, slots=True)
class GridSearch(Search):
    """Sizes in even steps of the scale, from the smallest; all kinds of each."""

    def _wanted(self) -> BucketCandidate:
        modes = self.space.modes
        num_sizes = -(-self.num_trials // len(modes))
        nth, mode = divmod(len(self._observed), len(modes))
        return BucketCandidate(SIZES[nth * (len(SIZES) - 1) // max(1, num_sizes - 1)], modes[mode])


def rows() -> Iterator[PaperRow]:
    dense = next(model for model in STUDIED if model.name == "DenseNet-201")
    ninth = methods.tuning(compute_times(dense), ETHERNET)[:9][-1].seconds
    chosen, best = _seconds(dense, _PAPERS_CHOICE), _best(dense)
    place, name = "section IV.B, Fig. 3", f"{dense.name}, 10GbE"
    what = f"{name}: after 9 samples a size is within 1 % of the best"
    yield always(place, what, [ninth <= _NEAR * best])
    what = f"{name}: buckets of 35 MB are within 1 % of the best"
    why = (
        f"a step with 35 MB takes {chosen / best:.2f} times the best: three buckets hold all "
        "gradients, and nothing hides the last one"
    )
    yield always(place, what, [chosen <= _NEAR * best], why=why)
    what = "Bayesian optimization needs fewer trials than random and grid search, of models"
    counts = [num_trials(model) for model in STUDIED]
    holds = [count["Bayesian"] < min(count["random"], count["grid"]) for count in counts]
    yield always("section VI.G, Fig. 10", what, holds)


def plots() -> list[Plot]:
    counts = {model.name: num_trials(model) for model in STUDIED}
    kinds = ("Bayesian", "random", "grid")
    return [
        Plot(
            name="fig10",
            title="Fig. 10: trials until a size is within 1 % of the best, 10GbE",
            x="model",
            y="trials",
            series={k: [(name, count[k]) for name, count in counts.items()] for k in kinds},
        )
    ]


@cache
def num_trials(model: DearModel) -> dict[str, float]:
    """Trials until a size is near the best; for random search the mean over seeds."""
    times = compute_times(model)
    space = methods.bucket_space(times)
    grid = GridSearch(space=space, num_trials=_MAX_TRIALS)
    by_chance = [
        RandomSearch(space=space, num_trials=_MAX_TRIALS, seed=seed) for seed in range(_SEEDS)
    ]
    return {
        "Bayesian": _needed(methods.tuning(times, ETHERNET), model),
        "random": fmean(
            _needed(methods.run_search(each, times, ETHERNET), model) for each in by_chance
        ),
        "grid": _needed(methods.run_search(grid, times, ETHERNET), model),
    }


def _needed(steps: Sequence[StepEstimate], model: DearModel) -> int:
    good = _NEAR * _best(model)
    return next((i + 1 for i, step in enumerate(steps) if step.seconds <= good), len(steps) + 1)


def _best(model: DearModel) -> Seconds:
    return min(_seconds(model, size) for size in SIZES)


def _seconds(model: DearModel, size: Bytes) -> Seconds:
    return methods.dear_fixed(compute_times(model), ETHERNET, size).seconds
