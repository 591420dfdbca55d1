"""Tuning while training: steps are timed, times agreed on, and one worker says what comes next."""

import logging
import time

import torch

from polyrhythm.run.decoupled.portable import Gathered
from polyrhythm.sync.fusion.tuner import Bayesian, Candidate, Decision, Space, Trials
from polyrhythm.types import Seconds

_logger = logging.getLogger(__name__)


class Tuning:
    """All workers have one, and call it at the same steps."""

    def __init__(self, space: Space, gathered: Gathered, rank: int) -> None:
        self._trials = Trials(Bayesian(space=space))
        self._gathered, self._is_first = gathered, rank == 0
        self.current, self.is_over = self._trials.current, False
        self._seconds: list[Seconds] = []  # of the steps of this trial, here
        self._ended: Seconds | None = None  # the step before, here

    def restart(self) -> None:
        """Steps begin now: what was between is not of any."""
        self._ended = time.perf_counter()

    def after_step(self) -> Candidate | None:
        """What to change to now, if anything."""
        now = time.perf_counter()
        if self.is_over:
            return None
        if self._ended is not None:
            self._seconds.append(now - self._ended)
        self._ended = now
        if len(self._seconds) < self._trials.num_steps:
            return None
        slowest = [max(of) for of in zip(*self._gathered(self._seconds, "step()"), strict=True)]
        self._seconds.clear()
        mine = self._decided(slowest) if self._is_first else None
        decision: Decision = self._gathered(mine, "step()")[0]
        before, self.current = self.current, decision.candidate
        self.is_over = decision.is_final
        return None if before == self.current else self.current

    def _decided(self, slowest: list[Seconds]) -> Decision:
        found: Decision | None = None
        with torch.enable_grad():  # a Gaussian process is fitted, in the middle of a step
            for seconds in slowest:
                found = self._trials.after_step(seconds)
        assert found is not None, "a decision after so many steps"
        _logger.info("gradients go in buckets of %s: %s", found.candidate, found.why)
        return found
