"""How large SDPipe's groups are by P, as Fig. 9 of the published appendix has it.

Eight workers side by side, and P groups that have to connect all. The appendix does not say under
which sleeps; with equal workers all would be in one group whatever P is, so it is B here.
"""

from dataclasses import replace

import numpy as np

from polyrhythm.simulate.simulator import simulate
from reproduction.claim import Plot, Row
from reproduction.sdpipe.models import BERT
from reproduction.sdpipe.testbed import (
    LONGEST_WINDOW,
    SDPIPE,
    Grid,
    job_of,
    sleeps,
)
from reproduction.stated import stated

_GRID = Grid(1, 8)
_STEPS = 400
# Lower quartile, median and upper quartile, as read off the box plot.
PRINTED = {1: (8, 8, 8), 2: (6, 8, 8), 5: (3, 4, 6)}
_NAMES = ("lower quartile", "median", "upper quartile")
_WHY = (
    "a group that lacks somebody is formed here when the first arrival makes it valid; the paper's "
    "Algorithm 2 opens another window for it, which catches more"
)


def quartiles(last_groups: int) -> tuple[float, float, float]:
    """Of the sizes of groups, one alone among them."""
    job = job_of(SDPIPE, BERT, _GRID, sleeps(BERT, _GRID, "B"))
    options = {"window": LONGEST_WINDOW, "last_groups": last_groups}
    found = simulate(replace(job, sync=replace(job.sync, options=options)), num_steps=_STEPS)
    sizes = np.repeat(list(found.group_sizes), list(found.group_sizes.values()))
    low, middle, high = np.percentile(sizes, [25, 50, 75])
    return float(low), float(middle), float(high)


def figure_9() -> tuple[list[Row], list[Plot]]:
    ours = {last: quartiles(last) for last in PRINTED}
    rows = [
        stated(
            "appendix, Fig. 9 (read off its drawing)",
            f"size of groups of 8 workers, P = {last}: {name}",
            PRINTED[last][place],
            ours[last][place],
            why=_WHY,
            is_given=last == 1,  # one group that connects all has all
        )
        for last in PRINTED
        for place, name in enumerate(_NAMES)
    ]
    plot = Plot(
        name="fig9",
        title="Appendix, Fig. 9: size of groups of 8 workers",
        x="groups that connect all (P)",
        y="members",
        series={
            name: [(f"P = {last}", sizes[place]) for last, sizes in ours.items()]
            for place, name in enumerate(_NAMES)
        },
        printed={
            name: [(f"P = {last}", sizes[place]) for last, sizes in PRINTED.items()]
            for place, name in enumerate(_NAMES)
        },
    )
    return rows, [plot]
