"""ResNets' throughput (Figs. 21 to 23), and what computing and averaging cost alone (Fig. 16)."""

from collections.abc import Sequence
from dataclasses import replace

from polyrhythm.types import Seconds
from reproduction.prague.models import RESNET_50, VGG_16, Model
from reproduction.prague.pace import pace
from reproduction.prague.testbed import (
    AD_PSGD,
    ALL_REDUCE,
    SMART,
    STATIC,
    Workers,
    job,
)
from reproduction.prague.training import FIVE_TIMES, HOMOGENEOUS, slowed

_THIRTY_TWO = Workers(number=32)
_TEN_HOURS: Seconds = 36_000.0
COLUMNS = {  # of Figs. 21 and 22
    HOMOGENEOUS: (ALL_REDUCE, AD_PSGD, STATIC, SMART),
    FIVE_TIMES: (ALL_REDUCE, AD_PSGD, SMART),
}
BATCHES = (64, 128, 256)
DENSE = tuple(Workers(number=number) for number in (2, 4, 8, 16))
SEPARATE = tuple(Workers(number=number, per_node=1) for number in (4, 8, 12))


def images_per_second(model: Model) -> dict[int, dict[str, float]]:
    """Of a GPU; by what one worker sleeps, and by method."""
    return {
        times: {
            method: model.batch / pace(job(method, model, scenario=slowed(times)))
            for method in methods
        }
        for times, methods in COLUMNS.items()
    }


def iterations() -> dict[str, float]:
    """Of ResNet-50 on 32 workers in ten hours."""
    return {
        method: _TEN_HOURS / pace(job(method, RESNET_50, _THIRTY_TWO))
        for method in COLUMNS[HOMOGENEOUS]
    }


def computing() -> dict[int, Seconds]:
    """VGG-16's step, by batch."""
    return {batch: replace(VGG_16, batch=batch).compute for batch in BATCHES}


def all_reduces(placements: Sequence[Workers]) -> dict[int, Seconds]:
    """Of VGG-16's gradients, by number of workers."""
    return {
        workers.number: pace(job(ALL_REDUCE, VGG_16, workers), num_steps=10) - VGG_16.compute
        for workers in placements
    }
