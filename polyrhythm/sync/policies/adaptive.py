"""Adaptive groups (SDPipe): workers ready within a window, such that the last P groups connect all.

Fast workers average without the stragglers, and yet no worker is isolated for long: when the last P
groups of a stage would not connect all of its workers, the next group waits for the missing ones.

Source: Miao et al., "SDPipe: A Semi-Decentralized Framework for Heterogeneity-aware
Pipeline-parallel Training", PVLDB 16(9), 2023, sections 3.2 to 3.4, 4 and 5.1 (P = 10). Departures:
the window comes from the measured arrival rate by default (`window="paper"` is the paper's; see
`window.py`); P grows with the number of workers by default (`default_last_groups`); enforcement has
a lease (`token.py`); a window of P groups does not require workers that joined after its first
group (`validators.py`); windows end early, and waits with the required arrival
(`windowed_groups.py`).
"""

import math

from polyrhythm.sync.token import EnforcementToken
from polyrhythm.sync.validators import UnionConnectivity
from polyrhythm.sync.windowed_groups import WindowedGroups, WindowRule, target_size
from polyrhythm.types import Seconds


def default_last_groups(num_workers: int, group_size: int) -> int:
    """Default of P: 10, as in the paper, and more for many workers.

    The first group connects g workers, and each further one g - 1 more at best: all N take
    (N - 1) / (g - 1) groups that form a tree. Ten groups of 3 connect at most 21 workers; with
    more, no candidate would ever be valid. But random groups form no tree: workers that were in few
    groups are missing at the end, so that about log N times as many groups connect all, as in the
    coupon collector's problem. Here P is log2(N) / 3 trees, which is 10 groups at N = 16 and g = 3,
    as in the paper. In simulations of 8 stages of equal workers, 24 % of the groups were enforced
    or waived at N = 16. With 4/3 of a tree that stayed so for 125 workers, with log2(N) / 3 it was
    1 %, and with P = 10 it was 97 %.
    """
    tree = (num_workers - 1) / max(group_size - 1, 1)
    return max(10, math.ceil(tree * math.log2(max(num_workers, 1)) / 3))


class Adaptive(WindowedGroups):
    """The policy of one stage; the stages of a job share one token."""

    def __init__(
        self,
        num_workers: int,
        *,
        last_groups: int | None = None,  # P; None for `default_last_groups`
        window: WindowRule = "rate",  # T, or the rule for it
        group_size: int | None = None,  # target of "rate"; None for 3, or all of fewer workers
        max_window: Seconds = 30.0,
        startup_timeout: Seconds = 60.0,  # longest wait at the start for absent workers
        stage: int = 0,
        token: EnforcementToken | None = None,
    ) -> None:
        if last_groups is None:
            last_groups = default_last_groups(num_workers, target_size(group_size, num_workers))
        super().__init__(
            UnionConnectivity(last_groups),
            num_workers=num_workers,
            window=window,
            group_size=group_size,
            max_window=max_window,
            startup_timeout=startup_timeout,
            stage=stage,
            token=token,
        )
