"""`sync="auto"` during training: rank 0 collects step timings and decides on the sync mode.

The first stage of each pipeline publishes its step timings in the job's store. In lockstep all
workers wait at the end of each window for rank 0's decision. In groups no worker waits: rank 0
reads the timings published so far while training continues.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from polyrhythm.run.comm.store import JobStore, Members
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.sync.autoswitch import AutoSwitch, SwitchDecision
from polyrhythm.sync.replay import JobShape, StepTiming
from polyrhythm.types import Seconds

_PUBLISH_EVERY = 5  # steps, in groups: small next to a window, and few messages
_logger = logging.getLogger(__name__)


class StepTimeExchange:
    """Publishes step timings on first stages; rank 0 reads them and decides. One per fit."""

    def __init__(
        self,
        name: str,
        store: JobStore,
        first_stages: Members,
        pipelines: Sequence[int],
        shape: JobShape,
        log: EventLog | None,
    ) -> None:
        """`first_stages` of these `pipelines`; the first of them is the leader."""
        auto, self._is_leader = AutoSwitch(shape), store.rank == first_stages.leader
        self._auto, self.num_steps = auto if self._is_leader else None, auto.num_steps
        self._name, self._store, self._log = name, store, log
        self._first_stages = first_stages
        self._ranks = dict(zip(pipelines, first_stages.ranks, strict=True))  # of those left
        self._phase, self._num_published = -1, 0
        self._num_read = dict.fromkeys(pipelines, 0)  # publications, by pipeline
        self._unpublished: list[StepTiming] = []
        self._num_made = 0  # steps of this phase
        self._stays = shape.is_one_machine

    def begin(self, sync_mode: str, step: int) -> None:
        """Start a phase of training in one sync mode."""
        if self._is_leader:  # the last phase is over on all of them
            for pipeline in self._ranks:
                while self._is_published(pipeline):
                    self._read(pipeline)
        self._phase += 1
        self._num_published, self._num_read = 0, dict.fromkeys(self._ranks, 0)
        self._unpublished, self._num_made = [], 0
        if self._phase == 0 and self._is_leader:
            why = "training starts in lockstep and is measured"
            if self._stays:
                why = "all pipelines are on one machine, where training stays in lockstep"
            self._record(sync_mode, step, why, {})

    def add_timing(self, timing: StepTiming) -> None:
        """Add the timing of a step, on the first stage of this pipeline."""
        self._unpublished.append(timing)

    def publish(self) -> None:
        """Publish the timings added since the last call, on the first stage."""
        timings, self._unpublished = self._unpublished, []
        name = self._publication(self._num_published)
        self._num_published += 1
        self._store.publish(name, timings, self._first_stages, as_type=list[StepTiming])

    def after_window(self, step: int) -> SwitchDecision:
        """In lockstep, on rank 0: decide from the timings of all pipelines."""
        return self._decide([self._read(pipeline) for pipeline in self._ranks], step)

    def forget(self, lost: Collection[int]) -> None:
        """Wait for these pipelines no more, and use their timings no more."""
        left = [index for index, pipeline in enumerate(self._ranks) if pipeline not in lost]
        if len(left) < len(self._ranks):
            if self._auto is not None:
                self._auto.keep(left)
            self._ranks = {p: rank for p, rank in self._ranks.items() if p not in lost}

    def after_step(
        self, step: int, lost: Callable[[], Collection[int]] = tuple
    ) -> SwitchDecision | None:
        """In groups, on each first stage: publish; rank 0 decides once per window.

        `lost` returns the pipelines that are lost.
        """
        self._num_made += 1
        if len(self._unpublished) >= _PUBLISH_EVERY:
            self.publish()
        if self._auto is None or self._num_made % self.num_steps:
            return None
        self.forget(lost())
        times = [list[StepTiming]() for _ in self._ranks]
        for pipeline, steps in zip(self._ranks, times, strict=True):
            while self._is_published(pipeline):
                steps += self._read(pipeline)
        return self._decide(times, step)

    def _publication(self, number: int) -> str:
        return f"step timings {number} of phase {self._phase} of {self._name}"

    def _is_published(self, pipeline: int) -> bool:
        """Whether there are timings that this process has not read yet."""
        name = self._publication(self._num_read[pipeline])
        return self._store.is_published(name, self._ranks[pipeline], self._first_stages)

    def _read(self, pipeline: int) -> list[StepTiming]:
        name, members = self._publication(self._num_read[pipeline]), self._first_stages
        rank = self._ranks[pipeline]
        timings = self._store.receive(name, rank, members, as_type=list[StepTiming])
        self._store.delete(name, members, rank=rank)  # only the leader reads it
        self._num_read[pipeline] += 1
        return timings

    def _decide(self, times: Sequence[Sequence[StepTiming]], step: int) -> SwitchDecision:
        assert self._auto is not None, "only rank 0 decides"
        decision = self._auto.after_window(times)
        if decision.switches:
            self._record(decision.sync_mode, step, decision.why, decision.predicted)
        return decision

    def _record(
        self, sync_mode: str, step: int, why: str, predicted: Mapping[str, Seconds]
    ) -> None:
        """Log the decision; `step` is the next global step."""
        level = logging.WARNING if self._phase > 0 or predicted else logging.INFO
        _logger.log(level, "sync=auto: %s from step %d on: %s", sync_mode, step, why)
        if self._log is not None:
            values = {f"{name}_s": seconds for name, seconds in predicted.items()}
            self._log.write("sync_mode", step=step, name=sync_mode, why=why, values=values)
