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
from polyrhythm.describe.units import parse
from polyrhythm.events import EventLog
from polyrhythm.run.clocks import Distance, measure
from polyrhythm.run.connections import Connections, Cut
from polyrhythm.run.groups import all_gather
from polyrhythm.run.peers import waiting_for
from polyrhythm.run.transport import Kind, Transfer
from polyrhythm.schedule.candidates import Candidate
from polyrhythm.schedule.tune import Tuner
from polyrhythm.types import Bytes, Op, Seconds

_MOST_SAMPLES = 64  # messages per direction that a decision looks back on
_MOST_DECIDING = 0.01  # of the time of training: short steps are tuned more seldom
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
    def of(
        cls, module: nn.Module, memory_limit: str | Bytes | None, optimizer_floats: float
    ) -> Self:
        """`optimizer_floats` numbers of its state per trained weight."""
        limit = parse(memory_limit, Bytes) if isinstance(memory_limit, str) else memory_limit
        parameters = list(module.parameters())
        trained = [p for p in parameters if p.requires_grad]
        return cls(
            weights=sum(p.numel() * p.element_size() for p in parameters),
            gradients=sum(p.numel() * p.element_size() for p in trained),
            optimizer=round(optimizer_floats * 4 * sum(p.numel() for p in trained)),
            limit=None if limit is None else int(limit),
        )


@dataclass(slots=True, kw_only=True)
class Tuning:
    microbatch_sizes: tuple[int, ...] | None  # None: as the first batch is cut
    every: int
    window: int
    fixed: StageLimits
    connections: Connections | None
    log: EventLog | None
    candidate: Candidate | None = field(default=None, init=False)  # None: not decided yet
    _tuner: Tuner | None = field(default=None, init=False)
    _times: dict[int, PipelineTimes] = field(default_factory=dict, init=False)
    _memory: dict[int, list[StageMemory]] = field(default_factory=dict, init=False)
    _is_trial: bool = field(default=True, init=False)  # the first step is one
    _num_steps: int = field(default=0, init=False)
    _next: int = field(default=1, init=False)  # steps until the next decision
    _began: Seconds = field(default_factory=time.perf_counter, init=False)
    _deciding: Seconds = field(default=0.0, init=False)
    _durations: dict[Op, deque[Seconds]] = field(default_factory=dict, init=False)
    _activations: deque[Transfer] = field(init=False)
    _gradients: deque[Transfer] = field(init=False)

    def __post_init__(self) -> None:
        self._forget()

    def after_step(
        self,
        step: int,
        cut: Cut,
        durations: Sequence[tuple[Op, Kind, Seconds]],
        transfers: Sequence[tuple[str, Transfer]],
        activation_bytes: dict[Kind, Bytes],
    ) -> None:
        """Take note of a step; when it is time, decide: `candidate` is what to run next."""
        size = max(cut.sizes)
        kind = cut.kinds[cut.sizes.index(size)]
        self._note(kind, durations, transfers)
        self._num_steps += 1
        if self._num_steps < self._next:
            return
        start = time.perf_counter()
        seen, activations, gradients = self._exchanged(activation_bytes.get(kind, 0))
        self._times[size] = _times(seen, activations, gradients)
        self._memory[size] = [_memory(one) for one in seen]
        self._decide(step, size, cut, seen)
        self._next = 1 if self._is_trial else _num_steps_until_next(self.every, seen)
        self._forget()
        self._began = time.perf_counter()
        self._deciding = self._began - start

    def _decide(self, step: int, size: int, cut: Cut, seen: Sequence[Seen]) -> None:
        sizes = self.microbatch_sizes or (size,)
        budget = self._budget(sizes, size, seen)
        if self._tuner is None:
            batch_size = sum(cut.sizes) if self.microbatch_sizes else size * len(cut.sizes)
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
                    "microbatch_size": decision.candidate.microbatch_size,
                    "predicted": decision.predicted,
                    "switched": int(decision.switched),
                    **({} if wanted is None else {"measures_next": wanted}),
                },
            )

    def _budget(self, sizes: Sequence[int], size: int, seen: Sequence[Seen]) -> MemoryBudget | None:
        if any(one.limit < 0 for one in seen):
            return None
        return MemoryBudget(
            stages={
                other: self._memory.get(other) or _scaled(self._memory[size], other / size)
                for other in sizes
            },
            limits=[one.limit for one in seen],
            window=2 * self.window,  # activations and gradients
        )

    def _note(
        self,
        kind: Kind,
        durations: Sequence[tuple[Op, Kind, Seconds]],
        transfers: Sequence[tuple[str, Transfer]],
    ) -> None:
        for op, of_kind, seconds in durations:
            if of_kind == kind:
                self._durations[op].append(seconds)
        if self.connections is None:
            return
        stage = self.connections.stage
        for peer, transfer in transfers:
            # Messages that skip stages are left out: the model knows neighbours only.
            is_near = peer in (self.connections.name(stage - 1), self.connections.name(stage + 1))
            if is_near and transfer.kind == kind:
                kept = self._activations if transfer.action.op is Op.F else self._gradients
                kept.append(transfer)

    def _exchanged(
        self, activation: Bytes
    ) -> tuple[list[Seen], list[list[Seconds]], list[list[Seconds]]]:
        """What every stage saw: its times, and how long messages took that it received."""
        before, after = (None, None) if self.connections is None else measure(self.connections)
        activations = _busy(self._activations, before, is_ahead=True)
        gradients = _busy(self._gradients, after, is_ahead=False)
        received = (*self._activations, *self._gradients)
        mine = Seen(
            forward=statistics.median(self._durations[Op.F]),
            backward=statistics.median(self._durations[Op.B]),
            latency=0.0 if after is None else after.latency,
            step=(time.perf_counter() - self._began) / self._num_steps,
            deciding=self._deciding,
            weights=self.fixed.weights,
            gradients=self.fixed.gradients,
            optimizer=self.fixed.optimizer,
            activation=activation,
            message=max((transfer.nbytes for transfer in received), default=0),
            limit=-1 if self.fixed.limit is None else self.fixed.limit,
            num_activations=len(activations),
            num_gradients=len(gradients),
        )
        told = torch.zeros(len(Seen._fields) + 2 * _MOST_SAMPLES, dtype=torch.float64)
        samples = len(Seen._fields)
        told[:samples] = torch.tensor(mine, dtype=torch.float64)
        told[samples : samples + len(activations)] = torch.tensor(activations, dtype=told.dtype)
        samples += _MOST_SAMPLES
        told[samples : samples + len(gradients)] = torch.tensor(gradients, dtype=told.dtype)
        heard = [told]
        if self.connections is not None:
            heard = [torch.empty_like(told) for _ in range(self.connections.num_stages)]
            with waiting_for("another stage", "exchanging measured times"):
                all_gather(self.connections.control, heard, told)
        return _read(heard)

    def _forget(self) -> None:
        self._num_steps = 0
        self._durations = {op: deque(maxlen=_MOST_SAMPLES) for op in Op}
        self._activations = deque(maxlen=_MOST_SAMPLES)
        self._gradients = deque(maxlen=_MOST_SAMPLES)


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
            LinkTimes(busy=_samples(busy, period), latency=one.latency)
            for one, busy in zip(seen[:-1], received, strict=True)
        )

    return PipelineTimes(
        forward=tuple(one.forward for one in seen),
        backward=tuple(one.backward for one in seen),
        activations=links(activations[1:]),
        gradients=links(gradients[:-1]),
    )


def _samples(busy: list[Seconds], period: Seconds) -> tuple[Seconds, ...]:
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
