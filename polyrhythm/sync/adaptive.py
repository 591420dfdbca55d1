"""Adaptive groups (SDPipe): whoever is ready within a window, such that the last P groups connect.

Fast workers average without the slow ones, and yet no worker is left to itself for long: when the
last P groups of a stage would not connect all of its workers, the next one waits for those missing.

Source: Miao et al., "SDPipe: A Semi-Decentralized Framework for Heterogeneity-aware
Pipeline-parallel Training", PVLDB 16(9), 2023, sections 3.2 to 3.4, 4 and 5.1 (P = 10). Departures:
the window comes from the measured arrival rate by default (`window="paper"` is the paper's; see
`window.py`); enforcement has a lease (`token.py`); P groups ask nothing of workers that came after
the first of them (`mixing.py`); windows end early, and waits with the arrival that was needed
(`windowed.py`).
"""

from polyrhythm.sync.mixing import UnionConnectivity
from polyrhythm.sync.token import EnforcementToken
from polyrhythm.sync.windowed import WindowedGroups, WindowRule
from polyrhythm.types import Seconds


class Adaptive(WindowedGroups):
    """One stage of a job; stages that share pipelines share one token."""

    def __init__(
        self,
        num_workers: int,
        *,
        last_groups: int = 10,  # P
        window: WindowRule = "rate",  # T, or how to find it
        group_size: int | None = None,  # what "rate" aims at; None for 3, or all of fewer
        max_window: Seconds = 30.0,
        startup: Seconds = 60.0,  # how long a stage waits, at the start, for workers yet to join
        stage: int = 0,
        token: EnforcementToken | None = None,
    ) -> None:
        super().__init__(
            UnionConnectivity(last_groups),
            num_workers=num_workers,
            window=window,
            group_size=group_size,
            max_window=max_window,
            startup=startup,
            stage=stage,
            token=token,
        )
