"""Plots of Figs. 16 to 23; where the paper's text or tables have numbers, they are beside ours."""

from collections.abc import Iterator, Mapping

from reproduction.claim import Plot
from reproduction.prague.stated import (
    IMAGES,
    ITERATIONS,
    OVERALL,
    SPEED_OF_STEP,
    STEPS_TO_LOSS,
    Column,
)
from reproduction.prague.table_claims import FIGURES
from reproduction.prague.testbed import METHODS, SERVER
from reproduction.prague.throughput import DENSE, SEPARATE, all_reduces, computing
from reproduction.prague.training import HOMOGENEOUS
from reproduction.prague.vgg_claims import Vgg

_STEP, _LOSS = "a step", "to the loss"
_OTHERS = tuple(method for method in METHODS if method != SERVER)


def cost_plot() -> Plot:
    dense, separate = all_reduces(DENSE), all_reduces(SEPARATE)
    return Plot(
        name="fig16",
        title="Fig. 16: a step of VGG-16 computes, then all average",
        x="images; workers, four on a node (W) or one (S.W.)",
        y="ms",
        series={
            "computing": [(f"B.S. {n}", 1e3 * took) for n, took in computing().items()],
            "all-reduce, dense": [(f"W. {n}", 1e3 * took) for n, took in dense.items()],
            "all-reduce, separate": [(f"S.W. {n}", 1e3 * took) for n, took in separate.items()],
        },
        printed={},
    )


def section_plot(found: Mapping[int, float]) -> Plot:
    shortest = found[min(found)]
    return Plot(
        name="fig17",
        title="Fig. 17: steps to a loss if AD-PSGD averages less often",
        x="steps from one average to the next",
        y="steps, over those with an average after each",
        series={"AD-PSGD": [(length, steps / shortest) for length, steps in found.items()]},
        printed={},
    )


def vgg_plots(found: Vgg) -> Iterator[Plot]:
    calm = found[HOMOGENEOUS]
    server = calm[SERVER]
    yield Plot(
        name="fig18",
        title="Fig. 18: VGG-16, speed over the parameter server",
        x="method",
        y="speed over the parameter server's",
        series={
            _STEP: [(method, server.step / calm[method].step) for method in _OTHERS],
            _LOSS: [(method, server.time / calm[method].time) for method in _OTHERS],
        },
        printed={_STEP: _points(SPEED_OF_STEP), _LOSS: _points(OVERALL[HOMOGENEOUS])},
    )
    yield Plot(
        name="fig19",
        title="Fig. 19: VGG-16, steps to the loss over the parameter server's",
        x="method",
        y="steps over the parameter server's",
        series={_LOSS: [(method, calm[method].steps / server.steps) for method in _OTHERS]},
        printed={_LOSS: _points(STEPS_TO_LOSS)},
    )
    yield Plot(
        name="fig20",
        title="Fig. 20: VGG-16, speed to the loss if one worker sleeps",
        x="method",
        y="speed over the parameter server's without sleep",
        series={
            _named(times): [(method, server.time / column[method].time) for method in _OTHERS]
            for times, column in found.items()
        },
        printed={_named(times): _points(column) for times, column in OVERALL.items()},
    )


def image_plot(name: str, found: Mapping[int, Column]) -> Plot:
    figure = FIGURES[name]
    return Plot(
        name=f"fig{figure}",
        title=f"Fig. {figure}: {name}, images per second of a GPU",
        x="method",
        y="images per second",
        series={_named(times): _points(column) for times, column in found.items()},
        printed={_named(times): _points(column) for times, column in IMAGES[name].items()},
    )


def iteration_plot(found: Column) -> Plot:
    return Plot(
        name="fig23",
        title="Fig. 23: ResNet-50 on 32 workers, steps in ten hours",
        x="method",
        y="steps",
        series={"steps": _points(found)},
        printed={"steps": _points(ITERATIONS)},
    )


def _points(column: Column) -> list[tuple[float | str, float]]:
    return [(method, column[method]) for method in METHODS if method in column]


def _named(times: int) -> str:
    return f"{times}x" if times else "homogeneous"
