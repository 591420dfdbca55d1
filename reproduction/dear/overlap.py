"""Figures 5, 8 and 11, and equation 9: reduce-scatter and all-gather, and what compute hides."""

import math
from collections.abc import Iterator
from statistics import fmean

from polyrhythm.sync.fusion.layers import by_bytes
from polyrhythm.types import Bytes, Seconds
from reproduction.dear import methods
from reproduction.dear.ring import Ring, StepTimes
from reproduction.dear.testbed import (
    ETHERNET,
    MODELS,
    NUM_WORKERS,
    ComputeTimes,
    DearModel,
    DearNetwork,
    compute_times,
)
from reproduction.dear.timeline import dear
from reproduction.paper_row import PaperRow, Plot, always

_SIZES: tuple[Bytes, ...] = tuple(1000 * 4**i for i in range(9))  # 1 kB to 66 MB
_BATCHES = (16, 32, 64)  # of Fig. 11; the text gives none
_BATCHED = tuple(model for model in MODELS if model.name in ("ResNet-50", "BERT-Base"))
_ROUNDING: Seconds = 1e-9
_FREE = Ring(latency=0.0, bandwidth=math.inf)


def rows() -> list[PaperRow]:
    return [*_collective_rows(), *_exposed_rows(), _batch_row(), _bound_row()]


def plots() -> list[Plot]:
    return [_collectives_plot(), _exposed_plot(), *map(_batch_plot, _BATCHED)]


def exposed(times: ComputeTimes, network: DearNetwork) -> dict[str, Seconds]:
    """Figure 8: communication that compute does not hide, by system and phase."""
    ring, layers = network.ring, times.layers
    buckets = by_bytes([layer.size for layer in layers], methods.BUCKET)
    return {
        "RS-only": dear(layers, buckets, ring, NUM_WORKERS, gather_ring=_FREE).exposed,
        "AG-only": dear(layers, buckets, _FREE, NUM_WORKERS, gather_ring=ring).exposed,
        "DeAR": methods.dear_fixed(times, network).exposed,
        "Horovod": methods.horovod(times, network).exposed,
    }


def _collective_rows() -> list[PaperRow]:
    """Given rows: by equations 3 to 5 both phases of a ring take the same time."""
    ring = ETHERNET.ring
    found = []
    for size in (_SIZES[0], _SIZES[-1]):
        half = ring.reduce_scatter(size, NUM_WORKERS) / ring.all_reduce(size, NUM_WORKERS)
        what = f"reduce-scatter over all-reduce, {size / 1e6:.3g} MB, 10GbE"
        found.append(PaperRow("section VI.B, Fig. 5", what, 0.5, half, is_given=True))
    ratio = ring.all_reduce(1_000_000, NUM_WORKERS) / ring.all_reduce(500_000, NUM_WORKERS)
    what = "all-reduce of 1 MB over one of 0.5 MB (the latency is derived from both), 10GbE"
    return [*found, PaperRow("section II.D", what, 4.5 / 3.9, ratio, is_given=True)]


def _exposed_rows() -> Iterator[PaperRow]:
    place = "section VI.F, Fig. 8"
    parts = [exposed(compute_times(model), ETHERNET) for model in MODELS]
    yield always(
        place,
        "RS-only exposes less communication than AG-only, 10GbE",
        [part["RS-only"] < part["AG-only"] - _ROUNDING for part in parts],
        why="with ResNet-50 and DenseNet-201 both expose the same here: one bucket of the first "
        "layers, whose gradients come last and whose weights are needed first",
    )
    what = "DeAR exposes less communication than Horovod, 10GbE"
    holds = [part["DeAR"] < part["Horovod"] for part in parts]
    yield always(place, what, holds, why=methods.NO_OVERHEADS)
    bounds = [compute_times(model).bounds(ETHERNET.ring) for model in MODELS]
    mean = fmean(each.backward / each.forward for each in bounds)
    yield PaperRow(place, "backward over forward, mean of five models", 2.0, mean)


def _batch_row() -> PaperRow:
    holds = []
    for model in _BATCHED:
        for batch in _BATCHES:
            speeds = {name: _samples(model, batch, name) for name in methods.FUSED}
            holds.append(max(speeds, key=speeds.__getitem__) == "DeAR")
    what = "DeAR is the fastest, of models and batches, 10GbE"
    return always("section VI.H, Fig. 11", what, holds, why=methods.NO_OVERHEADS)


def _samples(model: DearModel, batch: int, method: str) -> float:
    """Samples per second of all GPUs."""
    step = methods.FUSED[method](compute_times(model, batch), ETHERNET)
    return NUM_WORKERS * batch / step.seconds


def _bound_row() -> PaperRow:
    """Equation 9 for ever longer communication. Given: a backward takes two forwards."""
    gains = [
        StepTimes(forward=1.0, backward=2.0, reduce_scatter=phase, all_gather=phase).gain
        for phase in (0.5, 1.5, 2.0, 4.0, 8.0)
    ]
    what = "the most that decoupling saves, in forwards"
    return PaperRow("section VI.I, equation 9", what, 1.0, max(gains), is_given=True)


def _collectives_plot() -> Plot:
    ring = ETHERNET.ring
    collectives = {
        "all-reduce": ring.all_reduce,
        "reduce-scatter": ring.reduce_scatter,
        "all-gather": ring.all_gather,
    }
    return Plot(
        name="fig5",
        title="Fig. 5: all-reduce, reduce-scatter and all-gather, 64 GPUs, 10GbE",
        x="MB",
        y="ms",
        series={
            name: [(size / 1e6, 1e3 * time(size, NUM_WORKERS)) for size in _SIZES]
            for name, time in collectives.items()
        },
        printed={"all-reduce": [(0.5, 3.9), (1.0, 4.5)]},
        is_log=True,
    )


def _exposed_plot() -> Plot:
    parts = {model.name: exposed(compute_times(model), ETHERNET) for model in MODELS}
    kinds = ("RS-only", "AG-only", "DeAR", "Horovod")
    return Plot(
        name="fig8",
        title="Fig. 8: exposed communication, 10GbE",
        x="model",
        y="ms",
        series={k: [(name, 1e3 * part[k]) for name, part in parts.items()] for k in kinds},
    )


def _batch_plot(model: DearModel) -> Plot:
    return Plot(
        name=f"fig11_{model.name}",
        title=f"Fig. 11: samples per second of 64 GPUs, {model.name}, 10GbE",
        x="samples per GPU",
        y="samples per second",
        series={
            name: [(batch, _samples(model, batch, name)) for batch in _BATCHES]
            for name in methods.FUSED
        },
    )
