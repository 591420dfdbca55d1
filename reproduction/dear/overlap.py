"""Figures 5, 8 and 11, and equation 9: halves of an all-reduce, and what of them compute hides."""

from collections.abc import Callable, Mapping
from statistics import fmean

from polyrhythm.cost.decoupled import Ring, StepTimes
from polyrhythm.sync.fusion.layers import by_bytes
from polyrhythm.sync.fusion.timeline import StepEstimate, dear
from polyrhythm.types import Bytes, Seconds
from reproduction.claim import Plot, Row
from reproduction.dear import methods
from reproduction.dear.setting import (
    ETHERNET,
    MODELS,
    WORKERS,
    Model,
    Network,
    Work,
    work,
)
from reproduction.stated import always, stated

_SIZES: tuple[Bytes, ...] = tuple(1000 * 4**i for i in range(9))  # 1 kB to 66 MB
_BATCHES = {"ResNet-50": (16, 32, 64), "BERT-Base": (16, 32, 64)}  # the text gives none
_SAME: Seconds = 1e-9  # apart by rounding only
_SYSTEMS: Mapping[str, Callable[[Work, Network], StepEstimate]] = {
    "Horovod": methods.horovod,
    "PyTorch-DDP": methods.ddp,
    "MG-WFBP": methods.mg_wfbp,
    "DeAR": methods.dear_fixed,
}


class _ScatterOnly(Ring):
    def all_gather(self, size: Bytes, num_workers: int) -> Seconds:
        return 0.0


class _GatherOnly(Ring):
    def reduce_scatter(self, size: Bytes, num_workers: int) -> Seconds:
        return 0.0

    def all_gather(self, size: Bytes, num_workers: int) -> Seconds:
        return Ring.reduce_scatter(self, size, num_workers)


def rows() -> list[Row]:
    return [*_half_rows(), *_breakdown_rows(), *_batch_rows(), *_bound_rows()]


def plots() -> list[Plot]:
    return [_halves_plot(), _breakdown_plot(), *(_batch_plot(name) for name in _BATCHES)]


def exposed(one: Work, network: Network) -> dict[str, Seconds]:
    """Figure 8: communication that nothing hides; of DeAR, and of each half without the other."""
    ring, layers = network.ring, one.layers
    buckets = by_bytes([layer.size for layer in layers], methods.BUFFER)
    halves = {"RS-only": _ScatterOnly, "AG-only": _GatherOnly}
    return {
        **{
            name: dear(
                layers, buckets, half(latency=ring.latency, bandwidth=ring.bandwidth), WORKERS
            ).exposed
            for name, half in halves.items()
        },
        "DeAR": methods.dear_fixed(one, network).exposed,
        "Horovod": methods.horovod(one, network).exposed,
    }


def _half_rows() -> list[Row]:
    """All given: a ring's halves are equal by equations 3 to 5."""
    ring = ETHERNET.ring
    found = []
    for size in (_SIZES[0], _SIZES[-1]):
        both = ring.all_reduce(size, WORKERS)
        half = ring.reduce_scatter(size, WORKERS) / both
        what = f"reduce-scatter over all-reduce, {size / 1e6:.3g} MB, 10GbE"
        found.append(stated("section VI.B, Fig. 5", what, 0.5, half, is_given=True))
    ratio = ring.all_reduce(1_000_000, WORKERS) / ring.all_reduce(500_000, WORKERS)
    what = "all-reduce of 1 MB over one of 0.5 MB (which give the latency), 10GbE"
    return [*found, stated("section II.D", what, 4.5 / 3.9, ratio, is_given=True)]


def _breakdown_rows() -> list[Row]:
    parts = [exposed(work(model), ETHERNET) for model in MODELS]
    place = "section VI.F, Fig. 8"
    bounds = [work(model).bounds(ETHERNET.ring) for model in MODELS]
    return [
        always(
            place,
            "what is not hidden of RS-only is less than of AG-only, 10GbE",
            [part["RS-only"] < part["AG-only"] - _SAME for part in parts],
            why="of ResNet-50 and DenseNet-201 both show the same here: one buffer of the first "
            "layers, whose gradients come last and whose weights are needed first",
        ),
        always(
            place,
            "what is not hidden of DeAR is less than of Horovod, 10GbE",
            [part["DeAR"] < part["Horovod"] for part in parts],
            why=methods.OVERHEADS,
        ),
        stated(
            place,
            "backward over forward, mean of five models",
            2.0,
            fmean(each.backward / each.forward for each in bounds),
        ),
    ]


def _batch_rows() -> list[Row]:
    holds = []
    for model in _batched():
        for batch in _BATCHES[model.name]:
            times = {n: step(work(model, batch), ETHERNET).seconds for n, step in _SYSTEMS.items()}
            holds.append(min(times, key=times.__getitem__) == "DeAR")
    what = "DeAR is the fastest, of models and batches, 10GbE"
    return [always("section VI.H, Fig. 11", what, holds, why=methods.OVERHEADS)]


def _bound_rows() -> list[Row]:
    """Equation 9, where communication is ever longer; given: a backward takes two forwards."""
    gains = [
        StepTimes(forward=1.0, backward=2.0, reduce_scatter=half, all_gather=half).gain
        for half in (0.5, 1.5, 2.0, 4.0, 8.0)
    ]
    what = "the most that decoupling saves, in forwards"
    return [stated("section VI.I, equation 9", what, 1.0, max(gains), is_given=True)]


def _batched() -> list[Model]:
    return [model for model in MODELS if model.name in _BATCHES]


def _halves_plot() -> Plot:
    ring = ETHERNET.ring
    calls = {
        "all-reduce": ring.all_reduce,
        "reduce-scatter": ring.reduce_scatter,
        "all-gather": ring.all_gather,
    }
    return Plot(
        name="fig5",
        title="Fig. 5: an all-reduce and its halves, 64 GPUs, 10GbE",
        x="MB",
        y="ms",
        series={
            name: [(size / 1e6, 1e3 * call(size, WORKERS)) for size in _SIZES]
            for name, call in calls.items()
        },
        printed={"all-reduce": [(0.5, 3.9), (1.0, 4.5)]},
    )


def _breakdown_plot() -> Plot:
    parts = {model.name: exposed(work(model), ETHERNET) for model in MODELS}
    kinds = ("RS-only", "AG-only", "DeAR", "Horovod")
    return Plot(
        name="fig8",
        title="Fig. 8: communication that is not hidden, 10GbE",
        x="model",
        y="ms",
        series={k: [(name, 1e3 * part[k]) for name, part in parts.items()] for k in kinds},
        printed={},
    )


def _batch_plot(name: str) -> Plot:
    model = next(each for each in MODELS if each.name == name)
    return Plot(
        name=f"fig11_{name}",
        title=f"Fig. 11: samples per second of 64 GPUs, {name}, 10GbE",
        x="samples of each GPU",
        y="samples per second",
        series={
            system: [
                (batch, WORKERS * batch / step(work(model, batch), ETHERNET).seconds)
                for batch in _BATCHES[name]
            ]
            for system, step in _SYSTEMS.items()
        },
        printed={},
    )
