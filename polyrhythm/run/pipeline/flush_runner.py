"""Run a pipeline with a flush: every step runs the whole schedule and computes all gradients."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from polyrhythm.cost.memory import peak_in_flight
from polyrhythm.run.pipeline.autotune import ScheduleAutotuner
from polyrhythm.run.pipeline.batch import Batch, BatchHeader
from polyrhythm.run.pipeline.executor import Executor
from polyrhythm.run.pipeline.gradients import TiedGradients
from polyrhythm.run.pipeline.wrappers import ShardedModules, check_module
from polyrhythm.schedule.builders import Schedule
from polyrhythm.schedule.check import check
from polyrhythm.schedule.spec import ExplicitSchedule, ScheduleSpec

_EVAL_WINDOW = 8  # without backwards only messages need memory


class _BuiltSchedule(NamedTuple):
    schedule: Schedule
    in_flight: list[int]  # maximum by stage


@dataclass(slots=True, kw_only=True)
class FlushRunner:
    """Runs one stage; `spec` may be changed between steps, equally on all stages."""

    module: nn.Module
    executor: Executor
    num_stages: int
    spec: ScheduleSpec | ExplicitSchedule
    tied: TiedGradients | None
    autotuner: ScheduleAutotuner | None
    accumulation_context: Callable[[], AbstractContextManager[object]] = nullcontext
    # The schedule of the last step; `spec` is that of the next.
    last_spec: ScheduleSpec | ExplicitSchedule = field(init=False)
    _schedules: dict[tuple[ScheduleSpec | ExplicitSchedule, int], _BuiltSchedule] = field(
        default_factory=dict, init=False
    )
    _sharded: ShardedModules | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.last_spec = self.spec

    @property
    def has_gradients(self) -> bool:
        return True

    @property
    def microbatch_size(self) -> int | None:
        """The micro-batch size that the tuner wants for the next batch; None for no change."""
        tuner = self.autotuner
        if tuner is None or tuner.candidate is None or not tuner.microbatch_sizes:
            return None
        return tuner.candidate.microbatch_size

    def post_receives(self, header: BatchHeader) -> int:
        """Prepare for a batch; return the number of its first micro-batch."""
        stage, connections = self.executor.stage, self.executor.connections
        if header.training:
            stage.peak_in_flight = 0
        if connections is not None:
            in_flight = [_EVAL_WINDOW] * self.num_stages
            if header.training:
                in_flight = self._build(len(header.kinds)).in_flight
            connections.set_windows(in_flight, in_flight[stage.stage])
        self.executor.post_receives(header)
        return 0

    def run(self, batch: Batch) -> None:
        actions = self._build(batch.num_microbatches).schedule[self.executor.stage.stage]
        if self._sharded is None:  # users apply fully_shard after they have created the pipeline
            is_tuned, stage = self.autotuner is not None, self.executor.stage.stage
            check_module(self.module, stage=stage, is_tuned=is_tuned, flush=True)
            self._sharded = ShardedModules(self.module)
        with self.tied.sum_gradients() if self.tied is not None else nullcontext():
            with self._sharded.accumulation_context(), self.accumulation_context():
                self.executor.run(actions[:-1], batch)
            self.executor.run(actions[-1:], batch)  # the last backward
        if self.executor.connections is not None:
            self.executor.connections.drain()
        self.last_spec = self.spec
        self._tune(batch)

    def release(self) -> None:
        """Free the activations of a failed step."""
        self.executor.stage.release()

    def _tune(self, batch: Batch) -> None:
        stage = self.executor.stage
        transfers = self.executor.pop_transfers()
        if self.autotuner is None:
            return
        self.autotuner.after_step(
            batch.step, batch.header, stage.durations(), transfers, stage.activation_bytes
        )
        self.executor.clock_offsets = self.autotuner.clock_offsets
        if self.autotuner.candidate is not None:
            self.spec = self.autotuner.candidate.spec

    def _build(self, num_microbatches: int) -> _BuiltSchedule:
        key = (self.spec, num_microbatches)
        if key not in self._schedules:
            schedule = self.spec.build(
                num_stages=self.num_stages, num_microbatches=num_microbatches
            )
            check(schedule, num_microbatches=num_microbatches)
            self._schedules[key] = _BuiltSchedule(schedule, list(map(peak_in_flight, schedule)))
        return self._schedules[key]
