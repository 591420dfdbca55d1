"""Groups by causal age: workers ready within a window, such that no group misses old updates.

As `adaptive`, but it bounds how old the information in a model is, not whether the last groups
connect. A member that has recently averaged with the straggler's updates is as good as the
straggler itself; so a permanent straggler blocks no group if its few updates spread. A group is
valid if, of every worker, all updates but the last `max_age` are in the model of at least one
member.

Source: none; the window and the enforcement are SDPipe's (`windowed_groups.py`), the measure is
described in `validators.py`. An update is the contribution of a worker to a group, so with a group
every n steps an age of 10 is 10 n steps. The bound holds for groups when they are formed: the model
of a worker that computes grows older, by the updates of the others, until its next group.
"""

import math

from polyrhythm.sync.token import EnforcementToken
from polyrhythm.sync.validators import CausalAge
from polyrhythm.sync.windowed_groups import WindowedGroups, WindowRule
from polyrhythm.types import Seconds


def default_max_age(num_workers: int) -> int:
    """Default of A: 10 for up to 16 workers, in proportion to log2(N) beyond.

    An update spreads like a rumour: while few workers have it, their number grows by a factor per
    round, and the last few get it in about as many rounds again. If each of N workers passes it on
    to one other per round, that takes log2(N) + ln(N) rounds (Pittel, "On Spreading a Rumor", SIAM
    J. Appl. Math. 47(1), 1987), where a round is one update of each worker: 6.8 for 16 workers,
    11.8 for 125. One and a half times that allows for rounds that are not in step: 10 and 18. In a
    simulation of equal workers, 2 % of the groups or fewer are then enforced; half that bound
    enforces several times as many.
    """
    return max(10, math.ceil(2.5 * math.log2(max(num_workers, 1))))


class Age(WindowedGroups):
    """The policy of one stage; the stages of a job share one token."""

    def __init__(
        self,
        num_workers: int,
        *,
        max_age: int | None = None,  # A; None for `default_max_age`
        window: WindowRule = "rate",  # T, or the rule for it
        group_size: int | None = None,  # target of "rate"; None for 3, or all of fewer workers
        max_window: Seconds = 30.0,
        startup_timeout: Seconds = 60.0,  # longest wait at the start for absent workers
        stage: int = 0,
        token: EnforcementToken | None = None,
    ) -> None:
        super().__init__(
            CausalAge(default_max_age(num_workers) if max_age is None else max_age),
            num_workers=num_workers,
            window=window,
            group_size=group_size,
            max_window=max_window,
            startup_timeout=startup_timeout,
            stage=stage,
            token=token,
        )
