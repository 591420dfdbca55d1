"""Figures 3 and 10: how many trials it takes to find a good size of buffers."""

from collections.abc import Sequence
from functools import cache
from statistics import fmean

from polyrhythm.sync.fusion.timeline import StepEstimate
from polyrhythm.sync.fusion.tuner import SIZES, GridSearch, RandomSearch
from polyrhythm.types import Bytes, Seconds
from reproduction.claim import Plot, Row
from reproduction.dear import methods
from reproduction.dear.fusion import STUDIED
from reproduction.dear.setting import ETHERNET, Model, work
from reproduction.stated import always

_NEAR = 1.01  # of the best: a good one
_CHOSEN: Bytes = 35_000_000  # by the search of Fig. 3
_SEEDS = 10
_MOST = 20  # trials of a search without a model


def rows() -> list[Row]:
    dense = next(model for model in STUDIED if model.name == "DenseNet-201")
    after_nine = methods.tuning(work(dense), ETHERNET)[:9][-1]
    counts = [trials(model) for model in STUDIED]
    return [
        always(
            "section IV.B, Fig. 3",
            f"{dense.name}, 10GbE: after 9 samples a size is within 1 % of the best",
            [after_nine.seconds <= _NEAR * _best(dense)],
        ),
        always(
            "section IV.B, Fig. 3",
            f"{dense.name}, 10GbE: buffers of 35 MB are within 1 % of the best",
            [_at(dense, _CHOSEN) <= _NEAR * _best(dense)],
            why=f"a step with 35 MB takes {_at(dense, _CHOSEN) / _best(dense):.2f} times the best: "
            "all gradients are in three buffers, and the last of these is hidden by nothing",
        ),
        always(
            "section VI.G, Fig. 10",
            "Bayesian optimization needs fewer trials than random and grid search, of models",
            [count["Bayesian"] < min(count["random"], count["grid"]) for count in counts],
        ),
    ]


def plots() -> list[Plot]:
    counts = {model.name: trials(model) for model in STUDIED}
    kinds = ("Bayesian", "random", "grid")
    return [
        Plot(
            name="fig10",
            title="Fig. 10: trials until a size is within 1 % of the best, 10GbE",
            x="model",
            y="trials",
            series={k: [(name, count[k]) for name, count in counts.items()] for k in kinds},
            printed={},
        )
    ]


@cache
def trials(model: Model) -> dict[str, float]:
    """Until a size is near the best; of random search, the mean over seeds."""
    space = methods.space_of(work(model))
    chances = [RandomSearch(space=space, num_trials=_MOST, seed=seed) for seed in range(_SEEDS)]
    grid = GridSearch(space=space, num_trials=_MOST)
    drawn = [methods.found_by(search, work(model), ETHERNET) for search in chances]
    return {
        "Bayesian": _needed(methods.tuning(work(model), ETHERNET), model),
        "random": fmean(_needed(steps, model) for steps in drawn),
        "grid": _needed(methods.found_by(grid, work(model), ETHERNET), model),
    }


def _needed(steps: Sequence[StepEstimate], model: Model) -> int:
    good = _NEAR * _best(model)
    return next((i + 1 for i, step in enumerate(steps) if step.seconds <= good), len(steps) + 1)


def _best(model: Model) -> Seconds:
    return min(_at(model, size) for size in SIZES)


def _at(model: Model, size: Bytes) -> Seconds:
    return methods.dear_fixed(work(model), ETHERNET, size).seconds
