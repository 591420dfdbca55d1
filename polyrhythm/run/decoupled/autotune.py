"""Tune the buckets while training: all workers time their steps, rank 0 decides."""

import logging
import time

import torch

from polyrhythm.run.comm.process_groups import Replicas
from polyrhythm.sync.fusion.tuner import (
    BayesianSearch,
    BucketCandidate,
    BucketDecision,
    BucketTuner,
    Space,
)
from polyrhythm.types import Seconds

_logger = logging.getLogger(__name__)


class BucketAutotuner:
    """Every worker has one and calls it at the same steps."""

    def __init__(self, space: Space, replicas: Replicas) -> None:
        self._trials = BucketTuner(BayesianSearch(space=space))
        self._replicas = replicas
        self.current, self.is_over = self._trials.current, False
        self._seconds: list[Seconds] = []  # step times of the current trial on this worker
        self._last_step_end: Seconds | None = None

    def restart(self) -> None:
        """Restart the clock: the time since the last step belongs to no step."""
        self._last_step_end = time.perf_counter()

    def after_step(self, call: str) -> BucketCandidate | None:
        """Return the candidate to switch to now, None for no change; all workers make the call."""
        now = time.perf_counter()
        if self.is_over:
            return None
        if self._last_step_end is not None:
            self._seconds.append(now - self._last_step_end)
        self._last_step_end = now
        if len(self._seconds) < self._trials.num_steps:
            return None
        gathered = self._replicas.all_gather_object(self._seconds, call)
        slowest = [max(times) for times in zip(*gathered, strict=True)]
        self._seconds.clear()
        decision: BucketDecision = self._replicas.run_on_first(
            lambda: self._decide(slowest), call, as_type=BucketDecision
        )
        previous, self.current = self.current, decision.candidate
        self.is_over = decision.is_final
        return None if previous == self.current else self.current

    def _decide(self, slowest: list[Seconds]) -> BucketDecision:
        decision: BucketDecision | None = None
        with torch.enable_grad():  # to fit the Gaussian process, also if step() runs under no_grad
            for seconds in slowest:
                decision = self._trials.after_step(seconds)
        assert decision is not None, "a trial has at least one step"
        _logger.info("gradient buckets of %s: %s", decision.candidate, decision.why)
        return decision
