"""Tuning while training: steps are timed, times agreed on, and one worker says what comes next."""

import logging
import time

import torch

from polyrhythm.run.decoupled.state_dict import AllGatherObject
from polyrhythm.sync.fusion.tuner import (
    Bayesian,
    BucketCandidate,
    BucketDecision,
    BucketTuner,
    Space,
)
from polyrhythm.types import Seconds

_logger = logging.getLogger(__name__)


class BucketAutotuner:
    """All workers have one, and call it at the same steps."""

    def __init__(self, space: Space, all_gather_object: AllGatherObject, rank: int) -> None:
        self._trials = BucketTuner(Bayesian(space=space))
        self._all_gather_object, self._is_first = all_gather_object, rank == 0
        self.current, self.is_over = self._trials.current, False
        self._seconds: list[Seconds] = []  # of the steps of this trial, here
        self._last_step_end: Seconds | None = None  # the step before, here

    def restart(self) -> None:
        """Steps begin now: what was between is not of any."""
        self._last_step_end = time.perf_counter()

    def after_step(self) -> BucketCandidate | None:
        """What to change to now, if anything."""
        now = time.perf_counter()
        if self.is_over:
            return None
        if self._last_step_end is not None:
            self._seconds.append(now - self._last_step_end)
        self._last_step_end = now
        if len(self._seconds) < self._trials.num_steps:
            return None
        slowest = [
            max(of) for of in zip(*self._all_gather_object(self._seconds, "step()"), strict=True)
        ]
        self._seconds.clear()
        mine = self._decide(slowest) if self._is_first else None
        decision: BucketDecision = self._all_gather_object(mine, "step()")[0]
        before, self.current = self.current, decision.candidate
        self.is_over = decision.is_final
        return None if before == self.current else self.current

    def _decide(self, slowest: list[Seconds]) -> BucketDecision:
        found: BucketDecision | None = None
        with torch.enable_grad():  # a Gaussian process is fitted, in the middle of a step
            for seconds in slowest:
                found = self._trials.after_step(seconds)
        assert found is not None, "a decision after so many steps"
        _logger.info("gradients go in buckets of %s: %s", found.candidate, found.why)
        return found
