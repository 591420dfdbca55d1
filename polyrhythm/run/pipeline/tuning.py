"""Measure the pipeline while it trains, agree on the numbers, and let the tuner choose.

Every few steps the stages exchange what they saw: their forwards and backwards, and how long the
messages they received occupied each link. All then hold the same numbers, and each one's tuner
comes to the same decision, which takes effect with the next step.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from torch import nn

from polyrhythm.cost.memory import MemoryBudget, StageMemory
from polyrhythm.cost.observed import Observed, busy_times
from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes
from polyrhythm.events import EventLog
from polyrhythm.run.groups import all_gather
from polyrhythm.run.peers import waiting_for
from polyrhythm.run.pipeline.clocks import Distance, clocks_ahead, measure
from polyrhythm.run.pipeline.connections import Connections, Cut
from polyrhythm.run.pipeline.transport import Kind, Transfer
from polyrhythm.schedule.candidates import Candidate
from polyrhythm.schedule.tune import Tuner
from polyrhythm.types import Bytes, Op, Seconds

_MOST_SAMPLES = 64  # messages per direction that a decision looks back on
_MOST_DECIDING = 0.01  # of the time of training: short steps are tuned more seldom
_TRIAL = 2  # steps with a size that is new
_WAITING = 8  # messages that have come and wait to be used, of both directions
_NO_LIMIT = 2**53  # more than any memory, and whole as a float
_STEADY = 0.02  # of a forward and a backward: transfers that vary less are taken to be constant
_MOST_STEPS = 1000  # between decisions, all the same


class Seen(NamedTuple):
    """What one stage reports; `Bytes` fields are those of StageMemory, and its limit."""

    forward: Seconds
    backward: Seconds
    latency: Seconds  # to the next stage
    step: Seconds  # a whole step, since the last decision
    deciding: Seconds  # what that decision took
    weights: Bytes
    gradients: Bytes
    optimizer: Bytes
    activation: Bytes
    message: Bytes
    limit: Bytes
    num_activations: int
    num_gradients: int


_NUM_TIMES = Seen._fields.index("weights")


@dataclass(slots=True, kw_only=True)
class StageLimits:
    """What this stage holds whatever the schedule, and what it may hold."""

    weights: Bytes
    gradients: Bytes
    optimizer: Bytes
    limit: Bytes | None

    @classmethod
    def of(cls, module: nn.Module, limit: Bytes | None, optimizer_floats: float) -> Self:
        """`optimizer_floats` numbers of its state per trained weight."""
        parameters = list(module.parameters())
        trained = [p for p in parameters if p.requires_grad]
        return cls(
            weights=sum(p.numel() * p.element_size() for p in parameters),
            gradients=sum(p.numel() * p.element_size() for p in trained),
            optimizer=round(optimizer_floats * 4 * sum(p.numel() for p in trained)),
            limit=limit,
        )


@dataclass(slots=True, kw_only=True)
class Tuning:
    """With a fixed number of micro-batches there is one size, called 1, whatever it really is."""

    microbatch_sizes: tuple[int, ...] | None  # to choose from; None: their number is fixed
    every: int
    fixed: StageLimits
    connections: Connections | None
    log: EventLog | None
    candidate: Candidate | None = field(default=None, init=False)  # None: not decided yet
    clocks_ahead: dict[str, Seconds] = field(default_factory=dict, init=False)  # of neighbours
    _tuner: Tuner | None = field(default=None, init=False)
    _times: dict[int, PipelineTimes] = field(default_factory=dict, init=False)
    _memory: dict[int, list[StageMemory]] = field(default_factory=dict, init=False)
    _is_trial: bool = field(default=True, init=False)  # the first step is one
    _num_steps: int = field(default=0, init=False)
    _next: int = field(default=_TRIAL, init=False)  # steps until the next decision
    _began: Seconds = field(default_factory=time.perf_counter, init=False)
    _deciding: Seconds = field(default=0.0, init=False)
    _samples: dict[Kind, "_Samples"] = field(default_factory=dict, init=False)

    def after_step(
        self,
        step: int,
        cut: Cut,
        durations: Sequence[tuple[Op, Kind, Seconds]],
        transfers: Sequence[tuple[str, Transfer]],
        activation_bytes: dict[Kind, Bytes],
    ) -> None:
        """Take note of a step; when it is time, decide: `candidate` is what to run next."""
        self._num_steps += 1
        # The first step with another size allocates, compiles and tunes kernels: it tells nothing.
        if not (self._is_trial and self._num_steps == 1):
            self._note(durations, transfers)
        if self._num_steps < self._next:
            return
        start = time.perf_counter()
        # Batches may differ; the kind of micro-batch that was seen most stands for all.
        kind = max(self._samples, key=lambda kind: len(self._samples[kind].durations[Op.F]))
        sizes = dict(zip(cut.kinds, cut.sizes, strict=True))
        size = 1 if self.microbatch_sizes is None else sizes.get(kind, max(cut.sizes))
        seen, activations, gradients = self._exchanged(
            self._samples[kind], activation_bytes.get(kind, 0)
        )
        self._times[size] = _times(seen, activations, gradients)
        self._memory[size] = [_memory(one) for one in seen]
        self._decide(step, size, cut, seen)
        self._next = _TRIAL if self._is_trial else _num_steps_until_next(self.every, seen)
        self._num_steps = 0
        self._samples.clear()
        self._began = time.perf_counter()
        self._deciding = self._began - start

    def _decide(self, step: int, size: int, cut: Cut, seen: Sequence[Seen]) -> None:
        sizes = self.microbatch_sizes or (size,)
        budget = self._budget(sizes, size, seen)
        if self._tuner is None:
            batch_size = len(cut.sizes) if self.microbatch_sizes is None else sum(cut.sizes)
            self._tuner = Tuner(
                num_stages=len(seen),
                batch_size=batch_size,
                microbatch_sizes=tuple(sorted(sizes, key=lambda other: other != size)),
                budget=budget,
            )
        self._tuner.budget = budget
        decision = self._tuner.decide(self._times)
        wanted = self._tuner.wants_measured(self._times)
        self._is_trial = wanted is not None
        self.candidate = decision.candidate if wanted is None else self._tuner.trial(wanted)
        if self.log is not None:
            self.log.write(
                "plan",
                step=step,
                name=str(decision.candidate.recipe),
                why=decision.why,
                values={
                    "microbatches": decision.candidate.num_microbatches,
                    "microbatch_size": self._shown_size(decision.candidate, cut),
                    "predicted": decision.predicted,
                    "kept_predicted": decision.current_predicted,
                    "switched": int(decision.switched),
                    **({} if wanted is None else {"measures_next": wanted}),
                },
            )

    def _shown_size(self, candidate: Candidate, cut: Cut) -> int:
        return max(cut.sizes) if self.microbatch_sizes is None else candidate.microbatch_size

    def _budget(self, sizes: Sequence[int], size: int, seen: Sequence[Seen]) -> MemoryBudget | None:
        if all(one.limit == _NO_LIMIT for one in seen):
            return None
        return MemoryBudget(
            stages={
                other: self._memory.get(other) or _scaled(self._memory[size], other / size)
                for other in sizes
            },
            limits=[one.limit for one in seen],
            window=_WAITING,
        )

    def _note(
        self,
        durations: Sequence[tuple[Op, Kind, Seconds]],
        transfers: Sequence[tuple[str, Transfer]],
    ) -> None:
        for op, kind, seconds in durations:
            self._samples.setdefault(kind, _Samples()).durations[op].append(seconds)
        if self.connections is None:
            return
        stage = self.connections.stage
        for peer, transfer in transfers:
            # Messages that skip stages are left out: the model knows neighbours only.
            is_near = peer in (self.connections.name(stage - 1), self.connections.name(stage + 1))
            if is_near and transfer.kind in self._samples:
                samples = self._samples[transfer.kind]
                is_forward = transfer.action.op is Op.F
                (samples.activations if is_forward else samples.gradients).append(transfer)

    def _exchanged(
        self, samples: "_Samples", activation: Bytes
    ) -> tuple[list[Seen], list[list[Seconds]], list[list[Seconds]]]:
        """What every stage saw: its times, and how long messages took that it received."""
        before, after = (None, None) if self.connections is None else measure(self.connections)
        if self.connections is not None:
            self.clocks_ahead = clocks_ahead(self.connections, before, after)
        activations = _busy(samples.activations, before, is_ahead=True)
        gradients = _busy(samples.gradients, after, is_ahead=False)
        received = (*samples.activations, *samples.gradients)
        message = max((transfer.nbytes for transfer in received), default=0)
        mine = Seen(
            forward=statistics.median(samples.durations[Op.F]),
            backward=statistics.median(samples.durations[Op.B]),
            latency=0.0 if after is None else after.latency,
            step=(time.perf_counter() - self._began) / self._num_steps,
            deciding=self._deciding,
            weights=self.fixed.weights,
            gradients=self.fixed.gradients,
            optimizer=self.fixed.optimizer,
            activation=activation + message,  # and what a micro-batch sends, until it has left
            message=message,
            limit=_NO_LIMIT if self.fixed.limit is None else self.fixed.limit,
            num_activations=len(activations),
            num_gradients=len(gradients),
        )
        told = torch.zeros(len(Seen._fields) + 2 * _MOST_SAMPLES, dtype=torch.float64)
        place = len(Seen._fields)
        told[:place] = torch.tensor(mine, dtype=torch.float64)
        told[place : place + len(activations)] = torch.tensor(activations, dtype=told.dtype)
        place += _MOST_SAMPLES
        told[place : place + len(gradients)] = torch.tensor(gradients, dtype=told.dtype)
        heard = [told]
        if self.connections is not None:
            heard = [torch.empty_like(told) for _ in range(self.connections.num_stages)]
            with waiting_for("another stage", "exchanging measured times"):
                all_gather(self.connections.control, heard, told)
        return _read(heard)


@dataclass(slots=True)
class _Samples:
    """What was seen of one kind of micro-batch since the last decision, the latest of it."""

    durations: dict[Op, deque[Seconds]] = field(
        default_factory=lambda: {op: deque(maxlen=_MOST_SAMPLES) for op in Op}
    )
    activations: deque[Transfer] = field(default_factory=lambda: deque(maxlen=_MOST_SAMPLES))
    gradients: deque[Transfer] = field(default_factory=lambda: deque(maxlen=_MOST_SAMPLES))


def _num_steps_until_next(every: int, seen: Sequence[Seen]) -> int:
    """The same on all stages, from numbers that all have."""
    # The stage that came last waited for nobody: what it spent is what the decision cost.
    deciding, step = min(one.deciding for one in seen), max(one.step for one in seen)
    return min(max(every, math.ceil(deciding / (_MOST_DECIDING * step))), _MOST_STEPS)


def _busy(
    transfers: Sequence[Transfer], distance: Distance | None, *, is_ahead: bool
) -> list[Seconds]:
    """`is_ahead`: the distance was measured by the sender, whose clock ours is ahead of."""
    if distance is None:
        return []
    offset = distance.ahead if is_ahead else -distance.ahead
    seen = [Observed(t.sent + offset, t.posted, t.arrived) for t in transfers]
    return busy_times(seen, latency=distance.latency)


def _read(
    heard: Sequence[torch.Tensor],
) -> tuple[list[Seen], list[list[Seconds]], list[list[Seconds]]]:
    seen, activations, gradients = [], [], []
    for told in heard:
        values = told.tolist()
        head, rest = values[: len(Seen._fields)], values[len(Seen._fields) :]
        one = Seen(*head[:_NUM_TIMES], *(int(value) for value in head[_NUM_TIMES:]))
        seen.append(one)
        activations.append(rest[: one.num_activations])
        gradients.append(rest[_MOST_SAMPLES : _MOST_SAMPLES + one.num_gradients])
    return seen, activations, gradients


def _times(
    seen: Sequence[Seen], activations: Sequence[list[Seconds]], gradients: Sequence[list[Seconds]]
) -> PipelineTimes:
    """Link s carries activations that stage s+1 received, and gradients that stage s received."""

    period = max(one.forward + one.backward for one in seen)

    def links(received: Sequence[list[Seconds]]) -> tuple[LinkTimes, ...]:
        return tuple(
            LinkTimes(busy=_recorded_or_mean(busy, period), latency=one.latency)
            for one, busy in zip(seen[:-1], received, strict=True)
        )

    return PipelineTimes(
        forward=tuple(one.forward for one in seen),
        backward=tuple(one.backward for one in seen),
        activations=links(activations[1:]),
        gradients=links(gradients[:-1]),
    )


def _recorded_or_mean(busy: list[Seconds], period: Seconds) -> tuple[Seconds, ...]:
    """Recorded times where they vary; else their mean, which is quicker to simulate with."""
    if len(busy) > 1 and statistics.pstdev(busy) > _STEADY * period:
        return tuple(busy)
    return (statistics.fmean(busy) if busy else 0.0,)


def _memory(seen: Seen) -> StageMemory:
    return StageMemory(
        weights=seen.weights,
        gradients=seen.gradients,
        optimizer=seen.optimizer,
        activation=seen.activation,
        message=seen.message,
    )


def _scaled(stages: Sequence[StageMemory], factor: float) -> list[StageMemory]:
    """An estimate for a micro-batch size that has not run: what depends on it grows with it."""
    return [
        StageMemory(
            weights=stage.weights,
            gradients=stage.gradients,
            optimizer=stage.optimizer,
            activation=round(stage.activation * factor),
            message=round(stage.message * factor),
        )
        for stage in stages
    ]
