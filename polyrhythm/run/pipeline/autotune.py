"""Measure the pipeline while it trains, exchange the measurements, and let the tuner choose.

Every few steps the stages all-gather their measurements: the times of forwards and backwards, and
how long received messages occupied each link. All stages then have the same numbers, and each one's
tuner comes to the same decision, which takes effect with the next step.

Clock offset and latency between neighbouring stages are measured by a few pings. As in NTP, the
quickest of several round trips is the least disturbed, and its middle is taken as the time at which
the other clock was read. Clocks drift, so the measurement is repeated.
"""

import math
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec
import torch
from torch import nn

from polyrhythm.cost.memory import MemoryBudget, StageMemory
from polyrhythm.cost.pipeline import LinkTimes, MessageTiming, PipelineTimes, busy_times
from polyrhythm.errors import peer_errors
from polyrhythm.run.comm.process_groups import receive, send
from polyrhythm.run.pipeline.batch import BatchHeader, MicrobatchKind
from polyrhythm.run.pipeline.transport import Connections, Transfer
from polyrhythm.schedule.candidates import ScheduleCandidate
from polyrhythm.schedule.tuner import ScheduleTuner
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.types import Bytes, Op, Seconds

# Of the actions that a GPU has run, see `StageCompute`.
Durations = Callable[..., Sequence[tuple[Op, MicrobatchKind, Seconds]]]

_MAX_SAMPLES = 64  # messages per direction that a decision uses
_MAX_DECIDING_SHARE = 0.01  # of the training time: short steps are tuned less often
_TRIAL_STEPS = 2  # steps with a new micro-batch size
_RECEIVE_WINDOW = 8  # messages received and not used yet, of both directions
_NO_LIMIT = 2**53  # more than any memory
_REPORT_BYTES: Bytes = 4096  # on the wire: 9 per number
_STEADY_SHARE = 0.02  # of a forward and a backward: transfers that vary less count as constant
_NUM_PINGS = 3
_PING_TAG = 2**21  # above the tags of batch headers
_MAX_STEPS = 1000  # between decisions, however long a decision takes


class StageReport(msgspec.Struct, frozen=True):
    """The measurements of one stage."""

    forward: Seconds
    backward: Seconds
    latency: Seconds  # to the next stage
    step: Seconds  # a whole step, since the last decision
    deciding: Seconds  # duration of that decision
    memory: StageMemory
    limit: Bytes | None
    activations: list[Seconds]  # how long each message from the previous stage occupied the link
    gradients: list[Seconds]  # the same from the next stage
    nccl_activation: Seconds | None = None  # the same to the next stage, over NCCL
    nccl_gradient: Seconds | None = None  # and to the previous one


class ClockOffset(NamedTuple):
    """The clock offset and latency between this stage and a neighbour."""

    latency: Seconds  # half the quickest round trip
    offset: Seconds  # the neighbour's clock minus this one's


def fixed_memory(module: nn.Module, optimizer_floats: float) -> StageMemory:
    """Return the memory of a stage without micro-batches; the floats are those per weight."""
    parameters = list(module.parameters())
    trained = [p for p in parameters if p.requires_grad]
    return StageMemory(
        weights=sum(p.nbytes for p in parameters),
        gradients=sum(p.nbytes for p in trained),
        optimizer=round(optimizer_floats * 4 * sum(p.numel() for p in trained)),
        activation=0,
        message=0,
    )


@dataclass(slots=True, kw_only=True)
class ScheduleAutotuner:
    """Chooses schedule and micro-batch size; with a fixed number of them the size counts as 1."""

    microbatch_sizes: tuple[int, ...] | None  # candidates; None: the number is fixed
    every: int
    memory: StageMemory  # of this stage without micro-batches
    limit: Bytes | None
    connections: Connections | None
    log: EventLog | None
    candidate: ScheduleCandidate | None = field(default=None, init=False)  # None: not decided yet
    clock_offsets: dict[str, ClockOffset] = field(default_factory=dict, init=False)  # by neighbour
    _tuner: ScheduleTuner | None = field(default=None, init=False)
    _times: dict[int, PipelineTimes] = field(default_factory=dict, init=False)
    _memory: dict[int, list[StageMemory]] = field(default_factory=dict, init=False)
    _is_trial: bool = field(default=True, init=False)  # the first step is a trial
    _num_steps: int = field(default=0, init=False)  # since the last decision
    _next: int = field(default=_TRIAL_STEPS, init=False)  # steps until the next decision
    _start: Seconds = field(default_factory=time.perf_counter, init=False)
    _measured_since: Seconds = field(default=0.0, init=False)  # without the first step of a trial
    _deciding: Seconds = field(default=0.0, init=False)
    # Of the steps since the last decision: the same on all stages, unlike what GPUs have run.
    _num_microbatches: Counter[MicrobatchKind] = field(default_factory=Counter, init=False)
    _samples: defaultdict[MicrobatchKind, "_Samples"] = field(
        default_factory=lambda: defaultdict(_Samples), init=False
    )

    @property
    def has_choice(self) -> bool:
        """Whether there is more than one stage or size, or a memory limit."""
        return not (
            self.connections is None and self.microbatch_sizes is None and self.limit is None
        )

    def after_step(
        self,
        step: int,
        header: BatchHeader,
        durations: Durations,
        transfers: Sequence[tuple[str, Transfer]],
        activation_bytes: dict[MicrobatchKind, Bytes],
    ) -> None:
        """Record a step and, every few steps, decide: `candidate` runs next."""
        if not self.has_choice:
            return
        self._num_steps += 1
        # The first step with a new size allocates, compiles and tunes kernels: it is not typical.
        if self._is_trial and self._num_steps == 1:
            self._measured_since = time.perf_counter()
        else:
            self._record_transfers(transfers)
            self._num_microbatches.update(header.kinds)
        self._add(durations(self._measured_since))
        if self._num_steps < self._next:
            return
        # Batches may differ; the most frequent kind of micro-batch represents all.
        ((kind, _),) = self._num_microbatches.most_common(1)
        if not all(self._samples[kind].durations.values()):
            # As a rule in a trial, once for each size: the host is as far ahead as a trial is long.
            # It cannot decide later instead: all stages decide after the same step.
            timeout = None if self.connections is None else self.connections.step_timeout
            self._add(durations(self._measured_since, timeout=timeout))
        start = time.perf_counter()
        sizes = dict(zip(header.kinds, header.sizes, strict=True))
        size = 1 if self.microbatch_sizes is None else sizes.get(kind, max(header.sizes))
        reports = self._exchange_reports(kind, activation_bytes.get(kind, 0))
        self._times[size] = combined_times(reports)
        self._memory[size] = [report.memory for report in reports]
        self._decide(step, size, header, reports)
        self._next = _TRIAL_STEPS if self._is_trial else _num_steps_until_next(self.every, reports)
        self._num_steps = 0
        self._samples.clear()
        self._num_microbatches.clear()
        self._start = time.perf_counter()
        self._deciding = self._start - start

    def _decide(
        self, step: int, size: int, header: BatchHeader, reports: Sequence[StageReport]
    ) -> None:
        sizes = self.microbatch_sizes or (size,)
        budget = self._budget(sizes, size, reports)
        if self._tuner is None:
            batch_size = len(header.sizes) if self.microbatch_sizes is None else sum(header.sizes)
            self._tuner = ScheduleTuner(
                num_stages=len(reports),
                batch_size=batch_size,
                microbatch_sizes=tuple(sorted(sizes, key=lambda other: other != size)),
                budget=budget,
            )
        self._tuner.budget = budget
        decision = self._tuner.decide(self._times)
        size_to_measure = self._tuner.size_to_measure(self._times)
        self._is_trial = size_to_measure is not None
        self.candidate = (
            decision.candidate if size_to_measure is None else self._tuner.trial(size_to_measure)
        )
        if self.log is not None:
            self.log.write(
                "plan",
                step=step,
                name=str(decision.candidate.spec),
                why=decision.why,
                values={
                    "microbatches": decision.candidate.num_microbatches,
                    "microbatch_size": decision.candidate.microbatch_size
                    if self.microbatch_sizes
                    else max(header.sizes),
                    "predicted": decision.predicted,
                    "kept_predicted": decision.current_predicted,
                    "switched": int(decision.switched),
                    **({} if size_to_measure is None else {"measures_next": size_to_measure}),
                },
            )

    def _budget(
        self, sizes: Sequence[int], size: int, reports: Sequence[StageReport]
    ) -> MemoryBudget | None:
        if all(report.limit is None for report in reports):
            return None
        return MemoryBudget(
            stages={
                other: self._memory.get(other) or _scaled(self._memory[size], other / size)
                for other in sizes
            },
            limits=[_NO_LIMIT if report.limit is None else report.limit for report in reports],
            window=_RECEIVE_WINDOW,
        )

    def _add(self, durations: Iterable[tuple[Op, MicrobatchKind, Seconds]]) -> None:
        for op, kind, seconds in durations:
            self._samples[kind].durations[op].append(seconds)

    def _record_transfers(self, transfers: Sequence[tuple[str, Transfer]]) -> None:
        if self.connections is None:
            return
        neighbours = _neighbours(self.connections)
        for peer, transfer in transfers:
            # Messages that skip stages are left out: the cost model has only neighbours.
            if peer in neighbours:
                samples = self._samples[transfer.kind]
                is_forward = transfer.action.op is Op.F
                (samples.activations if is_forward else samples.gradients).append(transfer)

    def _exchange_reports(self, kind: MicrobatchKind, activation: Bytes) -> list[StageReport]:
        """Gather the reports of all stages."""
        samples, before, after = self._samples[kind], None, None
        sends: list[Seconds | None] = [None, None]
        if self.connections is not None:
            sends = self.connections.quickest_sends(kind)
            self.clock_offsets = measure_offsets(self.connections)
            before, after = map(self.clock_offsets.get, _neighbours(self.connections))
        received = (*samples.activations, *samples.gradients)
        message = max((transfer.nbytes for transfer in received), default=0)
        own_report = StageReport(
            forward=statistics.median(samples.durations[Op.F]),
            backward=statistics.median(samples.durations[Op.B]),
            latency=0.0 if after is None else after.latency,
            step=(time.perf_counter() - self._start) / self._num_steps,
            deciding=self._deciding,
            # A micro-batch's message takes memory while it is sent.
            memory=replace(self.memory, activation=activation + message, message=message),
            limit=self.limit,
            activations=_busy(samples.activations, before),
            gradients=_busy(samples.gradients, after),
            nccl_activation=sends[0],
            nccl_gradient=sends[1],
        )
        if self.connections is None:
            return [own_report]
        payload, action = msgspec.msgpack.encode(own_report), "exchanging measured times"
        gathered = self.connections.all_gather_bytes(payload, _REPORT_BYTES, action)
        return [msgspec.msgpack.decode(report, type=StageReport) for report in gathered]


@dataclass(slots=True)
class _Samples:
    """The latest measurements of one kind of micro-batch since the last decision."""

    durations: dict[Op, deque[Seconds]] = field(
        default_factory=lambda: {op: deque(maxlen=_MAX_SAMPLES) for op in Op}
    )
    activations: deque[Transfer] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))
    gradients: deque[Transfer] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))


def _num_steps_until_next(every: int, reports: Sequence[StageReport]) -> int:
    """Return the steps until the next decision, the same on all stages."""
    # The stage that came last waited for no other: its time is the cost of the decision.
    deciding = min(report.deciding for report in reports)
    step = max(report.step for report in reports)
    return min(max(every, math.ceil(deciding / (_MAX_DECIDING_SHARE * step))), _MAX_STEPS)


def _busy(transfers: Sequence[Transfer], clock: ClockOffset | None) -> list[Seconds]:
    """Return the busy times of the link over gloo from a neighbour, whose clock is given."""
    if clock is None:
        return []
    timings = [
        MessageTiming(t.sent - clock.offset, t.posted, t.arrived)
        for t in transfers
        if not t.is_nccl
    ]
    return busy_times(timings, latency=clock.latency)


def combined_times(reports: Sequence[StageReport]) -> PipelineTimes:
    """Combine reports: link s carries activations to stage s+1 and gradients to stage s."""
    period = max(report.forward + report.backward for report in reports)

    def links(
        received: Sequence[list[Seconds]], nccl: Sequence[Seconds | None]
    ) -> tuple[LinkTimes, ...]:
        return tuple(
            LinkTimes(
                busy=_recorded_or_mean(busy, period) if sent is None else (sent,),
                latency=report.latency if sent is None else 0.0,
            )
            for report, busy, sent in zip(reports[:-1], received, nccl, strict=True)
        )

    return PipelineTimes(
        forward=tuple(report.forward for report in reports),
        backward=tuple(report.backward for report in reports),
        activations=links(
            [report.activations for report in reports[1:]],
            [report.nccl_activation for report in reports[:-1]],
        ),
        gradients=links(
            [report.gradients for report in reports[:-1]],
            [report.nccl_gradient for report in reports[1:]],
        ),
    )


def _recorded_or_mean(busy: list[Seconds], period: Seconds) -> tuple[Seconds, ...]:
    """Return recorded times if they vary, else their mean, which is faster to simulate."""
    if len(busy) > 1 and statistics.pstdev(busy) > _STEADY_SHARE * period:
        return tuple(busy)
    return (statistics.fmean(busy) if busy else 0.0,)


def _scaled(stages: Sequence[StageMemory], factor: float) -> list[StageMemory]:
    """Estimate the memory of a micro-batch size that has not run, in proportion to the size."""
    return [
        replace(
            stage,
            activation=round(stage.activation * factor),
            message=round(stage.message * factor),
        )
        for stage in stages
    ]


def _neighbours(connections: Connections) -> tuple[str, str]:
    """Return the names of the previous and the next stage, also where there is none."""
    return connections.name(connections.stage - 1), connections.name(connections.stage + 1)


def measure_offsets(connections: Connections) -> dict[str, ClockOffset]:
    """Measure the neighbours, by name; all stages call this together, between steps.

    Links that start at an even stage come first, all at once; then the others.
    """
    stage, (before, after) = connections.stage, _neighbours(connections)
    measured: dict[str, ClockOffset] = {}
    for parity in (0, 1):
        if stage % 2 == parity and stage < connections.num_stages - 1:
            measured[after] = _ping(connections, stage + 1)
        elif stage % 2 != parity and stage > 0:
            measured[before] = _pong(connections, stage - 1)
    return measured


def _ping(connections: Connections, other: int) -> ClockOffset:
    trips = []
    for _ in range(_NUM_PINGS):
        start = time.perf_counter()
        _send_times(connections, other, 0.0, 0.0)
        remote_time, _ = _receive_times(connections, other)
        end = time.perf_counter()
        trips.append(ClockOffset((end - start) / 2, remote_time - (start + end) / 2))
    quickest = min(trips)
    _send_times(connections, other, *quickest)
    return quickest


def _pong(connections: Connections, other: int) -> ClockOffset:
    for _ in range(_NUM_PINGS):
        _receive_times(connections, other)
        _send_times(connections, other, time.perf_counter(), 0.0)
    latency, offset = _receive_times(connections, other)
    return ClockOffset(latency, -offset)


def _send_times(connections: Connections, other: int, *times: Seconds) -> None:
    with peer_errors(connections.name(other), "comparing clocks"):
        message = torch.tensor(times, dtype=torch.float64)
        send(connections.control, message, other, tag=_PING_TAG)


def _receive_times(connections: Connections, other: int) -> list[Seconds]:
    message = torch.zeros(2, dtype=torch.float64)
    with peer_errors(connections.name(other), "comparing clocks"):
        receive(connections.control, message, other, tag=_PING_TAG)
    times: list[Seconds] = message.tolist()
    return times
