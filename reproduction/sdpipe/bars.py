"""Plots of SDPipe's Fig. 4 and 6."""

from reproduction.claim import Plot
from reproduction.sdpipe.testbed import BY_TEXT, HETPIPE, METHODS, TRUE_AD_PSGD
from reproduction.sdpipe.throughput import (
    GRIDS,
    LARGE,
    MODELS,
    SETTINGS,
    Case,
    Times,
    samples,
)

_SHORT = {"homogeneous": "equal", "A": "A", "B": "B"}


def plots(times: Times) -> list[Plot]:
    found = [
        Plot(
            name=f"fig4-{workload.name.lower()}",
            title=f"Fig. 4: {workload.name}, stages x pipelines",
            x="grid and setting",
            y="samples per second",
            series={
                method: [
                    (
                        f"{grid} {_SHORT[setting]}",
                        samples(times, Case(workload.name, grid, setting, method)),
                    )
                    for grid in GRIDS
                    for setting in SETTINGS
                ]
                for method in (*METHODS, BY_TEXT, TRUE_AD_PSGD)
            },
            printed={},
        )
        for workload in MODELS
    ]
    bars = [
        (workload.name, grid, setting)
        for workload in MODELS
        for grid in (GRIDS[0], LARGE)
        for setting in ("homogeneous", "B")
    ]
    found.append(
        Plot(
            name="fig6",
            title="Fig. 6: throughput over that of HetPipe, 16 and 64 workers",
            x="model, grid and setting",
            y="times HetPipe",
            series={
                method: [
                    (
                        f"{name} {grid} {_SHORT[setting]}",
                        times[Case(name, grid, setting, HETPIPE)]
                        / times[Case(name, grid, setting, method)],
                    )
                    for name, grid, setting in bars
                ]
                for method in METHODS
            },
            printed={},
        )
    )
    return found
