"""A pipeline that is flushed: every step runs the whole schedule, and ends with all gradients."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from polyrhythm.cost.memory import peak_in_flight
from polyrhythm.run.pipeline.batch import Batch
from polyrhythm.run.pipeline.connections import Cut
from polyrhythm.run.pipeline.executor import Executor
from polyrhythm.run.pipeline.gradients import TiedGradients
from polyrhythm.run.pipeline.tuning import Tuning
from polyrhythm.run.pipeline.wrappers import Sharded, check_module
from polyrhythm.schedule.builders import Schedule
from polyrhythm.schedule.check import check
from polyrhythm.schedule.recipe import Recipe, Written

_EVAL_WINDOW = 8  # forwards hold nothing, so that only messages count


class _Built(NamedTuple):
    schedule: Schedule
    in_flight: list[int]  # at the most, by stage


@dataclass(slots=True, kw_only=True)
class Flushed:
    """One stage of it. `recipe` may be changed between steps, on all stages alike."""

    module: nn.Module
    executor: Executor
    num_stages: int
    recipe: Recipe | Written
    tied: TiedGradients | None
    tuning: Tuning | None
    accumulating: Callable[[], AbstractContextManager[object]] = nullcontext
    last_recipe: Recipe | Written = field(init=False)  # of the last step; `recipe`: of the next
    _schedules: dict[tuple[Recipe | Written, int], _Built] = field(default_factory=dict, init=False)
    _sharded: Sharded | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.last_recipe = self.recipe

    @property
    def has_gradients(self) -> bool:
        return True

    @property
    def microbatch_size(self) -> int | None:
        """As the tuner wants the next batch cut; None where it has nothing to say."""
        if self.tuning is None or self.tuning.candidate is None or not self.tuning.microbatch_sizes:
            return None
        return self.tuning.candidate.microbatch_size

    def expect(self, told: Cut) -> int:
        """Prepare for a batch; the number of its first micro-batch."""
        stage, connections = self.executor.stage, self.executor.connections
        if told.training:
            stage.peak_in_flight = 0
        if connections is not None:
            in_flight = [_EVAL_WINDOW] * self.num_stages
            if told.training:
                in_flight = self._built(len(told.kinds)).in_flight
            connections.set_windows(in_flight, in_flight[stage.stage])
        self.executor.expect(told)
        return 0

    def run(self, batch: Batch) -> None:
        actions = self._built(batch.num_microbatches).schedule[self.executor.stage.stage]
        if self._sharded is None:  # not before: who splits a model with us shards its part later
            is_tuned, stage = self.tuning is not None, self.executor.stage.stage
            check_module(self.module, stage=stage, is_tuned=is_tuned, flush=True)
            self._sharded = Sharded(self.module)
        with self.tied.summed() if self.tied is not None else nullcontext():
            with self._sharded.accumulating(), self.accumulating():
                self.executor.run(actions[:-1], batch)
            self.executor.run(actions[-1:], batch)  # the last backward
        if self.executor.connections is not None:
            self.executor.connections.drain()
        self.last_recipe = self.recipe
        self._tune(batch)

    def release(self) -> None:
        """Free what a step that failed has left."""
        self.executor.stage.release()

    def _tune(self, batch: Batch) -> None:
        stage = self.executor.stage
        transfers = self.executor.taken_transfers()
        if self.tuning is None:
            return
        self.tuning.after_step(
            batch.step, batch.cut, stage.durations(), transfers, stage.activation_bytes
        )
        self.executor.clocks_ahead = self.tuning.clocks_ahead
        if self.tuning.candidate is not None:
            self.recipe = self.tuning.candidate.recipe

    def _built(self, num_microbatches: int) -> _Built:
        key = (self.recipe, num_microbatches)
        if key not in self._schedules:
            schedule = self.recipe.build(
                num_stages=self.num_stages, num_microbatches=num_microbatches
            )
            check(schedule, num_microbatches=num_microbatches)
            self._schedules[key] = _Built(schedule, list(map(peak_in_flight, schedule)))
        return self._schedules[key]
