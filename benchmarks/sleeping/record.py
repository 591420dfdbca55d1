"""When workers have ended their steps, in memory that their forks share with who started them.

It crosses no network, so that a job on a slow one is watched and ended without being disturbed.
"""

import mmap
from itertools import takewhile

from polyrhythm.types import Seconds

MOST_STEPS = 1000  # of one worker
_DOUBLE = 8  # bytes


class Record:
    """To be made before the fork. Times are of time.monotonic(), one clock for all processes."""

    def __init__(self, *, num_stages: int, num_pipelines: int) -> None:
        self.num_stages, self.num_pipelines = num_stages, num_pipelines
        num_times = num_stages * num_pipelines * MOST_STEPS
        self._times = memoryview(mmap.mmap(-1, _DOUBLE * num_times)).cast("d")  # zeros, and shared

    def add(self, rank: int, step: int, moment: Seconds) -> None:
        assert step < MOST_STEPS, "who records ends the job before"
        self._times[rank * MOST_STEPS + step] = moment

    def ends(self) -> list[list[Seconds]]:
        """Of each pipeline, when each step was over on all its stages."""
        return [
            [max(of_step) for of_step in zip(*map(self._of, self._ranks(p)), strict=False)]
            for p in range(self.num_pipelines)
        ]

    def num_ended(self) -> list[int]:
        """Steps of each pipeline that were over on all its stages."""
        return [len(of_pipeline) for of_pipeline in self.ends()]

    def _ranks(self, pipeline: int) -> range:
        return range(pipeline * self.num_stages, (pipeline + 1) * self.num_stages)

    def _of(self, rank: int) -> list[Seconds]:
        start = rank * MOST_STEPS
        return list(takewhile(bool, self._times[start : start + MOST_STEPS]))
