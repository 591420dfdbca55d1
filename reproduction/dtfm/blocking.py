"""Pipelines whose stages wait for their messages: when each stage of one is done.

A stage does one thing after another. It sends, and goes on when the message has left; it receives,
and goes on when the message is there. What it sends and what it receives between two pieces of work
travel at the same time. So it is in both systems of the paper:

- Megatron waits for all messages between two pieces of work (`p2p_communication.py`).
- DT-FM's runtime has a stream for each of receiving, computing and sending, but one NCCL
  communicator for the pipeline (`dist_gpipe_pipeline_async.py`), and NCCL runs what is asked of one
  communicator one after another, from whatever streams (github.com/NVIDIA/nccl/issues/574). A stage
  asks for "receive i, send i, receive i + 1", so it does not receive before it has sent.

The order of work is `schedule`'s own list; only the waiting differs from `cost/pipeline.py`, whose
stages never wait for what they send.
"""

from collections.abc import Iterator, Sequence
from functools import cache

from polyrhythm.cost.pipeline import PipelineTimes
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import Action, Op, Seconds

# Micro-batches; from the first on, what they take repeats itself every few: as many as a critical
# stage has in flight. Of up to 8 stages all such numbers but 7 divide the difference.
_FEW, _MORE = 40, 160


def blocking_ends(schedule: Sequence[Sequence[Action]], times: PipelineTimes) -> list[Seconds]:
    """When each stage has done all of its list."""
    last = times.num_stages - 1
    arrivals: dict[tuple[Op, int, int], Seconds] = {}  # of what, at which stage, which one
    ends = [0.0] * (last + 1)

    def stage_run(stage: int) -> Iterator[None]:
        now = 0.0
        for op, m in schedule[stage]:
            source, target = (stage - 1, stage + 1) if op is Op.F else (stage + 1, stage - 1)
            if 0 <= source <= last:
                while (op, stage, m) not in arrivals:
                    yield
                now = max(now, arrivals[op, stage, m])
            now += times.forward[stage] if op is Op.F else times.backward[stage]
            ends[stage] = now
            if 0 <= target <= last:
                link = times.activations[stage] if op is Op.F else times.gradients[target]
                now += link.busy[0]
                arrivals[op, target, m] = now + link.latency

    waiting = [stage_run(stage) for stage in range(last + 1)]
    while waiting:
        waiting = [run for run in waiting if next(run, ends) is None]
    return ends


@cache
def blocking_1f1b(times: PipelineTimes, num_microbatches: int) -> Seconds:
    """One step of one pipeline. Many micro-batches are reckoned from few: they are all alike."""
    if num_microbatches > _MORE:
        few, more = blocking_1f1b(times, _FEW), blocking_1f1b(times, _MORE)
        return more + (num_microbatches - _MORE) * (more - few) / (_MORE - _FEW)
    schedule = ScheduleSpec("1f1b").build(
        num_stages=times.num_stages, num_microbatches=num_microbatches
    )
    return max(blocking_ends(schedule, times))
