"""SDPipe's Figs. 4, 6 and 9: throughput on grids of 16 and 64 workers, and sizes of groups."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from statistics import geometric_mean
from typing import NamedTuple

import numpy as np

from polyrhythm.simulate.simulator import simulate
from polyrhythm.types import Seconds
from reproduction.paper_row import PaperRow, Plot, always, ordered, sometimes
from reproduction.sdpipe.testbed import (
    AD_PSGD,
    ALL_REDUCE,
    BATCH,
    BERT,
    BY_TEXT,
    HETPIPE,
    LONGEST_WINDOW,
    METHODS,
    MODELS,
    SDPIPE,
    TRANSFERS,
    TRUE_AD_PSGD,
    SdpipeGrid,
    SdpipeModel,
    job_of,
    sleeps,
)

_GRIDS = (SdpipeGrid(4, 4), SdpipeGrid(2, 8), SdpipeGrid(1, 16))  # of the scripts for two nodes
_LARGE = SdpipeGrid(4, 16)
_SETTINGS = {"homogeneous": "equal", "A": "A", "B": "B"}  # names in plots
_NUM_STEPS = 80
_NAMES = tuple(model.name for model in MODELS)
_ALL_METHODS = (*METHODS, BY_TEXT, TRUE_AD_PSGD)
_CELLS = tuple(product(_NAMES, _GRIDS))

# Fig. 9 of the published appendix: eight pipelines of one stage, and P groups that have to connect
# all workers. The appendix does not state the sleeps; equal workers would all be in one group for
# any P, so they are B here. Lower quartile, median and upper quartile, as read off the box plot:
_QUARTILES = {1: (8, 8, 8), 2: (6, 8, 8), 5: (3, 4, 6)}
_QUARTILE_NAMES = ("lower quartile", "median", "upper quartile")
_GROUPS_GRID, _GROUPS_STEPS = SdpipeGrid(1, 8), 400
_WHY_SMALLER = (
    "a group that misses a worker is formed here when the first arrival makes it valid; the "
    "paper's Algorithm 2 opens another window for it, which catches more workers"
)
_TOO_MUCH = (
    "if SDPipe takes 1.4 times as long under B, All-Reduce would have to wait for several sleeps "
    "in each step; here it waits for {sleeps:.1f} at most. "
    "The published code sends to a neighbour together with the next receive, so sleeps of "
    "neighbours add up; here messages leave at once"
)
_FEW_BYTES = (
    "on 4 x 4 a ring sends {ring:.1f} times the model through a node's connection, the server only "
    "{served:.1f} times each way, since pushes of its own node stay inside and only every tenth "
    "step pulls. So HetPipe is faster there with BERT-base, whose step is mostly communication"
)
_NO_JITTER = "equal workers are exactly equal here, so all are ready at the same time"


class SdpipeCase(NamedTuple):
    model: str
    grid: SdpipeGrid
    setting: str
    method: str


Times = Mapping[SdpipeCase, Seconds]  # of a step of all pipelines


def sweep(log: Callable[[str], None]) -> dict[SdpipeCase, Seconds]:
    """Simulate every case of Figs. 4 and 6."""
    found: dict[SdpipeCase, Seconds] = {}

    def run(
        model: SdpipeModel, grid: SdpipeGrid, settings: Iterable[str], methods: Iterable[str]
    ) -> None:
        log(f"{model.name} on {grid} workers")
        for setting, method in product(settings, methods):
            job = job_of(method, model, grid, sleeps(model, grid, setting))
            step = simulate(job, num_steps=_NUM_STEPS).step_time
            found[SdpipeCase(model.name, grid, setting, method)] = step

    for model in MODELS:
        for grid in _GRIDS:
            run(model, grid, _SETTINGS, _ALL_METHODS)
        run(model, _LARGE, ("homogeneous", "B"), METHODS)
    return found


def _samples(times: Times, case: SdpipeCase) -> float:
    """Samples per second."""
    return BATCH * case.grid.num_pipelines / times[case]


def _lead(times: Times, case: SdpipeCase, other: str) -> float:
    """How many times as fast as another method the case is."""
    return times[case._replace(method=other)] / times[case]


def slowdown(times: Times, name: str, method: str) -> float:
    """How many times as long a step takes under B, on average of all grids."""
    return geometric_mean(
        times[SdpipeCase(name, grid, "B", method)]
        / times[SdpipeCase(name, grid, "homogeneous", method)]
        for grid in _GRIDS
    )


def max_lead(times: Times, method: str, other: str) -> float:
    """How many times as fast as another a method is under B, at most."""
    return max(_lead(times, SdpipeCase(*cell, "B", method), other) for cell in _CELLS)


def _max_sleeps(times: Times) -> float:
    """For how many sleeps All-Reduce waits in a step under B, at most."""
    return max(
        (
            times[SdpipeCase(model.name, grid, "B", ALL_REDUCE)]
            - times[SdpipeCase(model.name, grid, "homogeneous", ALL_REDUCE)]
        )
        / model.sleeps["B"]
        for model, grid in product(MODELS, _GRIDS)
    )


def ring_share(grid: SdpipeGrid) -> float:
    """How many times the model an all-reduce sends through a node's connection."""
    return 2 * (grid.num_pipelines - 1) / grid.num_pipelines


def server_share(grid: SdpipeGrid) -> float:
    """How many times the model other nodes push to the server, or pull from it, in a step."""
    return TRANSFERS * (grid.num_pipelines - grid.pipelines_per_node)


def figure_4(times: Times) -> Iterator[PaperRow]:
    for name in _NAMES:
        why = (
            "the ratio depends on what averages cost without sleeps: over 10 Gb/s smaller groups "
            "save about as much as sleeps cost. By the text's T and P it is "
            f"{slowdown(times, name, BY_TEXT):.2f}"
        )
        what = f"{name}, SDPipe: B over homogeneous"
        yield PaperRow("section 5.2", what, 1.4, slowdown(times, name, SDPIPE), why=why)
    means = {
        method: geometric_mean(1 / times[SdpipeCase(*cell, "B", method)] for cell in _CELLS)
        for method in (SDPIPE, ALL_REDUCE, AD_PSGD)
    }
    for other, printed in ((ALL_REDUCE, 4.3), (AD_PSGD, 2.8)):
        yield PaperRow(
            "section 5.2",
            f"B, SDPipe over {other}, at most",
            printed,
            max_lead(times, SDPIPE, other),
            printed_order=(SDPIPE, other),
            our_order=ordered({method: means[method] for method in (SDPIPE, other)}),
            why=_TOO_MUCH.format(sleeps=_max_sleeps(times)),
        )
    yield from _faster_rows(times)


def _faster_rows(times: Times) -> Iterator[PaperRow]:
    """Figure 4's statements about which method is faster."""

    def ratio(one: str, other: str, setting: str, model: str, grid: SdpipeGrid) -> float:
        """How many times as long one method takes as another."""
        return _lead(times, SdpipeCase(model, grid, setting, other), one)

    equal, place, groups = "homogeneous", "Fig. 4a, 4d", (SDPIPE, ALL_REDUCE, AD_PSGD)
    what = "homogeneous: SDPipe, All-Reduce and AD-PSGD are faster than HetPipe"
    holds = [ratio(HETPIPE, one, equal, *cell) > 1 for cell in _CELLS for one in groups]
    why = _FEW_BYTES.format(ring=ring_share(_GRIDS[0]), served=server_share(_GRIDS[0]))
    yield always(place, what, holds, why=why)
    what = "homogeneous: HetPipe has less throughput with 16 pipelines than with 4"
    by_grid = [[SdpipeCase(name, grid, equal, HETPIPE) for grid in _GRIDS] for name in _NAMES]
    holds = [_samples(times, many) < _samples(times, few) for few, *_, many in by_grid]
    yield always(place, what, holds)
    what = "homogeneous, 16 pipelines: SDPipe is faster than All-Reduce"
    holds = [ratio(ALL_REDUCE, SDPIPE, equal, name, _GRIDS[-1]) > 1.01 for name in _NAMES]
    yield always(place, what, holds, why=_NO_JITTER)
    what = "homogeneous: AD-PSGD is slower than All-Reduce"
    holds = [ratio(AD_PSGD, ALL_REDUCE, equal, *cell) > 1 for cell in _CELLS]
    yield sometimes("section 5.2", what, holds)
    what = "All-Reduce is slower than HetPipe under B, and faster when homogeneous"
    holds = [
        ratio(ALL_REDUCE, HETPIPE, "B", *cell) > 1 > ratio(ALL_REDUCE, HETPIPE, equal, *cell)
        for cell in _CELLS
    ]
    yield sometimes("section 5.2", what, holds)
    what = "A and B: SDPipe is faster than All-Reduce, AD-PSGD and HetPipe"
    holds = [
        ratio(other, SDPIPE, setting, *cell) > 1
        for cell in _CELLS
        for setting in ("A", "B")
        for other in (ALL_REDUCE, AD_PSGD, HETPIPE)
    ]
    yield always("Fig. 4b, 4c, 4e, 4f", what, holds)


def figure_6(times: Times) -> list[PaperRow]:
    def lead(name: str, grid: SdpipeGrid, setting: str, method: str) -> float:
        return _lead(times, SdpipeCase(name, grid, setting, method), HETPIPE)

    cases = list(product(_NAMES, ("homogeneous", "B"), (SDPIPE, ALL_REDUCE, AD_PSGD)))
    return [
        always(
            "Fig. 6",
            "the lead over HetPipe is larger with 64 workers than with 16",
            [lead(n, _LARGE, s, m) > lead(n, _GRIDS[0], s, m) for n, s, m in cases],
        ),
        always(
            "Fig. 6",
            "64 workers, B: SDPipe leads All-Reduce and AD-PSGD",
            [
                lead(name, _LARGE, "B", SDPIPE) > lead(name, _LARGE, "B", method)
                for name, method in product(_NAMES, (ALL_REDUCE, AD_PSGD))
            ],
        ),
    ]


def throughput_plots(times: Times) -> list[Plot]:
    def points(name: str, method: str) -> list[tuple[str, float]]:
        cases = [SdpipeCase(name, *each, method) for each in product(_GRIDS, _SETTINGS)]
        return [(f"{case.grid} {_SETTINGS[case.setting]}", _samples(times, case)) for case in cases]

    def leads(method: str) -> list[tuple[str, float]]:
        bars = product(_NAMES, (_GRIDS[0], _LARGE), ("homogeneous", "B"))
        cases = [SdpipeCase(*each, method) for each in bars]
        return [
            (f"{case.model} {case.grid} {_SETTINGS[case.setting]}", _lead(times, case, HETPIPE))
            for case in cases
        ]

    fig_4 = [
        Plot(
            name=f"fig4-{name.lower()}",
            title=f"Fig. 4: {name}, stages x pipelines",
            x="grid and setting",
            y="samples per second",
            series={method: points(name, method) for method in _ALL_METHODS},
        )
        for name in _NAMES
    ]
    fig_6 = Plot(
        name="fig6",
        title="Fig. 6: throughput over that of HetPipe, 16 and 64 workers",
        x="model, grid and setting",
        y="times HetPipe",
        series={method: leads(method) for method in METHODS},
    )
    return [*fig_4, fig_6]


def group_quartiles(last_groups: int) -> tuple[float, float, float]:
    """Quartiles of group sizes with P = `last_groups`; single workers count as groups."""
    job = job_of(SDPIPE, BERT, _GROUPS_GRID, sleeps(BERT, _GROUPS_GRID, "B"))
    options = {"window": LONGEST_WINDOW, "last_groups": last_groups}
    sync = replace(job.sync, options=options)
    found = simulate(replace(job, sync=sync), num_steps=_GROUPS_STEPS).group_sizes
    sizes = np.repeat(list(found), list(found.values()))
    low, middle, high = np.percentile(sizes, [25, 50, 75])
    return float(low), float(middle), float(high)


def figure_9() -> tuple[list[PaperRow], Plot]:
    ours = {last: group_quartiles(last) for last in _QUARTILES}
    rows = [
        PaperRow(
            "appendix, Fig. 9 (read off its drawing)",
            f"size of groups of 8 workers, P = {last}: {name}",
            _QUARTILES[last][place],
            ours[last][place],
            why=_WHY_SMALLER,
            is_given=last == 1,  # a single group has to have all workers
        )
        for last in _QUARTILES
        for place, name in enumerate(_QUARTILE_NAMES)
    ]

    def series(found: Mapping[int, tuple[float, ...]]) -> dict[str, list[tuple[str, float]]]:
        return {
            name: [(f"P = {last}", sizes[place]) for last, sizes in found.items()]
            for place, name in enumerate(_QUARTILE_NAMES)
        }

    plot = Plot(
        name="fig9",
        title="Appendix, Fig. 9: size of groups of 8 workers",
        x="groups that connect all workers (P)",
        y="members",
        series=series(ours),
        printed=series(_QUARTILES),
    )
    return rows, plot
