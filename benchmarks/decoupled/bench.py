"""All-reduce in two halves against DDP and FSDP2: how much of it hides, on slow and far links.

Two and four workers on hosts of the lab, real gloo processes, emulated compute: layers sleep, but
have weights and gradients. All sides are in the same processes and take turns; DDP and ours are
swept over bucket sizes, and compared at their best; so is what tuning finds with a grid of sizes.
How fast gradients can travel is measured with plain messages, and with it the paper's bounds. With
four workers, all that a host sends to other nodes shares one line.
"""

import tempfile
import time
from pathlib import Path

from rich.console import Console

from benchmarks.decoupled.collectives import HalfRow
from benchmarks.decoupled.ratios import BARS, figures, ratios_of
from benchmarks.decoupled.rounds import measure
from benchmarks.decoupled.settings import FULL_PLAN, QUICK_PLAN
from benchmarks.decoupled.steps import Measured
from benchmarks.decoupled.tables import show_halves, show_ratios, show_setting
from benchmarks.decoupled.worker import MeasureHalves
from benchmarks.decoupled.workers import Workers, cluster
from benchmarks.result import Result
from polyrhythm.lab.lab import Lab

__all__ = ["BARS", "run"]


def run(*, quick: bool, console: Console) -> Result:
    plan = QUICK_PLAN if quick else FULL_PLAN
    found: dict[str, Measured] = {}
    halves: list[HalfRow] = []
    until = time.monotonic()
    for num_workers in plan.worker_counts:
        with (
            tempfile.TemporaryDirectory() as folder,
            Lab(cluster(num_workers)) as lab,
            Workers(lab, Path(folder)) as workers,
        ):
            for setting in plan.settings:
                if setting.num_workers == num_workers:
                    until += setting.budget  # what one leaves, the next may use
                    found[setting.name] = measure(workers, setting, until=until)
                    show_setting(console, found[setting.name])
            network = plan.halves
            workers.set_network(network.latency, network.bandwidth, uplink=num_workers > 2)
            halves += workers.ask(MeasureHalves(network))[0]
    show_halves(console, halves)
    ratios = ratios_of(found)
    show_ratios(console, ratios, quick=quick)
    return Result(
        bench="decoupled",
        ratios=ratios,
        figures=figures(found, halves),
        rows=[*(row for measured in found.values() for row in measured.rows), *halves],
    )
