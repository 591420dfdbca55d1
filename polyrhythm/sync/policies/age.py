"""Groups by age: whoever is ready within a window, such that no group misses anybody's older news.

As `adaptive`, but what is bounded is how old the information in a model is, not whether the last
groups connect. A group of workers that have lately averaged with somebody who knows is as good as
one with the slow worker itself; so a worker that is always slow holds nobody up, as long as what
little it does spreads. A group is valid if, of every worker, all updates but the last `max_age` are
in the model of one of its members at least.

Source: none; the window and the waiting are SDPipe's (`windowed.py`), the measure is described in
`mixing.py`. An update is what a worker brings to a group, so with a group every n steps an age of
10 is 10 n steps. The bound holds for groups when they are formed: the model of a worker that is
computing grows older until it comes back, by what the others do meanwhile.
"""

import math

from polyrhythm.sync.token import EnforcementToken
from polyrhythm.sync.validators import CausalAge
from polyrhythm.sync.windowed_groups import WindowedGroups, WindowRule
from polyrhythm.types import Seconds


def default_max_age(num_workers: int) -> int:
    """A, if nobody says otherwise: 10 for up to 16 workers, in proportion to log2(N) beyond.

    An update spreads as a rumour does: while few know of it, each group of those who do lets some
    more know, so that their number grows by a factor per round, and the last few hear of it in
    about as many rounds again. Among N who pass it on to one other per round, that takes log2(N) +
    ln(N) rounds (Pittel, "On Spreading a Rumor", SIAM J. Appl. Math. 47(1), 1987), a round being
    one update of each: 6.8 for 16 workers, 11.8 for 125. Half as much again leaves room for rounds
    that are not in step: 10 and 18. In a simulation of equal workers, 2 % of the groups or fewer
    are waited for then; a bound that is half as large asks for several times as many.
    """
    return max(10, math.ceil(2.5 * math.log2(max(num_workers, 1))))


class Age(WindowedGroups):
    """One stage of a job; stages that share pipelines share one token."""

    def __init__(
        self,
        num_workers: int,
        *,
        max_age: int | None = None,  # A; None for `default_max_age`
        window: WindowRule = "rate",  # T, or how to find it
        group_size: int | None = None,  # what "rate" aims at; None for 3, or all of fewer
        max_window: Seconds = 30.0,
        startup: Seconds = 60.0,  # how long a stage waits, at the start, for workers yet to join
        stage: int = 0,
        token: EnforcementToken | None = None,
    ) -> None:
        super().__init__(
            CausalAge(default_max_age(num_workers) if max_age is None else max_age),
            num_workers=num_workers,
            window=window,
            group_size=group_size,
            max_window=max_window,
            startup=startup,
            stage=stage,
            token=token,
        )
