"""Faults of a simulated job: links that change, devices that are lost, and that join (again).

A lost device stops its pipeline. The others notice after a delay. When all devices of a pipeline
are present, its workers join, copy model and optimizer state from the source that the scheduler
names, and start with an empty pipeline.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from polyrhythm.describe.scenario import LinkChange
from polyrhythm.simulate.averaging import SimulatedAveraging, SimulatedWorker
from polyrhythm.simulate.clock import (
    PRIORITY_CHANGE,
    PRIORITY_LAST,
    PRIORITY_RETRY,
    RETRY_INTERVAL,
    Clock,
)
from polyrhythm.simulate.engine.engine import Engine
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.simulate.network import SimulatedNetwork
from polyrhythm.sync.protocol import CopyFrom, Dead, Join
from polyrhythm.types import Seconds, Worker

if TYPE_CHECKING:
    from polyrhythm.simulate.simulator import Simulation

DETECTION_DELAY: Seconds = 2.0  # until a killed worker is noticed, as measured in real groups
_POLL_INTERVAL: Seconds = 0.01  # of a worker that waits for the state to copy
_ROUNDING: Seconds = 1e-6  # above the difference of sums of the same times in another order
STATE_FACTOR = 3  # bytes copied per byte of weights: with AdamW's two moments


class FaultInjector:
    """Applies the faults of a job's scenario."""

    def __init__(
        self,
        job: SimulatedJob,
        pipelines: Sequence[Sequence[SimulatedWorker]],
        averaging: SimulatedAveraging,
        clock: Clock,
        engine: Engine,
        network: SimulatedNetwork,
        control: "Simulation",
    ) -> None:
        scenario, names = job.scenario, [device.name for device in job.cluster.devices]
        self._nodes = job.nodes or [device.region for device in job.cluster.devices]
        self._pipelines, self._averaging, self._control = pipelines, averaging, control
        self._clock, self._engine, self._network = clock, engine, network
        self._absent = {names.index(device) for device in scenario.absent_at_start}
        self._present_since = [0.0] * len(names)  # last join of each device
        self._present = [0.0] * len(names)  # seconds of presence before its last loss
        self._joining: dict[int, dict[Worker, CopyFrom]] = {}  # pending copies, by pipeline
        faults: list[tuple[Seconds, Callable[..., None], Any]] = [
            *((change.at, self._change, change) for change in scenario.link),
            *((kill.at, self._kill, names.index(kill.device)) for kill in scenario.kill),
            *((join.at, self._join, names.index(join.device)) for join in scenario.join),
        ]
        self.last: Seconds = max((at for at, _, _ in faults), default=0.0)
        for at, callback, argument in faults:
            clock.at(at, callback, argument, priority=PRIORITY_CHANGE)

    def start(self) -> None:
        for pipeline, members in enumerate(self._pipelines):
            if self._is_complete(members):
                self._send_join(members)
                self._control.begin(pipeline)

    def present(self) -> list[Seconds]:
        """Seconds for which each device was present until now."""
        now, spans = self._clock.now, zip(self._present, self._present_since, strict=True)
        return [
            before + (0.0 if device in self._absent else now - since)
            for device, (before, since) in enumerate(spans)
        ]

    def copy_from(self, command: CopyFrom) -> None:
        """Start a worker's copy from a source, whose clock it gets."""
        joining = self._joining.get(command.worker.pipeline)
        if joining is not None:
            joining[command.worker] = command
            self._copy(command, self._averaging.members[command.worker].incarnation)

    def _copy(self, copy_from: CopyFrom, incarnation: int) -> None:
        member = self._averaging.members[copy_from.worker]
        source = self._averaging.members[copy_from.source]
        if not self._is_current(copy_from, incarnation):
            return
        duration = self._network.transfer(
            source.device, member.device, STATE_FACTOR * member.parameters
        )
        has_ended = source.clock > copy_from.clock or source.pending is None  # that step
        retry_after = None
        if source.clock < copy_from.clock or not has_ended:
            retry_after = _POLL_INTERVAL
        elif duration == float("inf"):  # the link is lost
            retry_after = RETRY_INTERVAL
        if retry_after is None:
            self._clock.at(self._clock.now + duration, self._copied, copy_from, incarnation)
        else:
            at = self._clock.now + retry_after
            self._clock.at(at, self._copy, copy_from, incarnation, priority=PRIORITY_RETRY)

    def _copied(self, copy_from: CopyFrom, incarnation: int) -> None:
        if not self._is_current(copy_from, incarnation):
            return
        worker, members = copy_from.worker, self._averaging.members
        clock = copy_from.clock if copy_from.clock >= 0 else members[copy_from.source].clock
        members[worker].clock = max(members[worker].clock, clock)
        for observer in self._averaging.observers:
            observer.on_copied(worker, copy_from.source, self._clock.now)
        del self._joining[worker.pipeline][worker]
        self._begin_if_complete(worker.pipeline, incarnation)

    def _is_current(self, copy_from: CopyFrom, incarnation: int) -> bool:
        """Whether the worker is still in that incarnation and has no newer CopyFrom."""
        current = self._joining.get(copy_from.worker.pipeline, {}).get(copy_from.worker)
        return (
            current == copy_from
            and self._averaging.members[copy_from.worker].incarnation == incarnation
        )

    def _change(self, change: LinkChange) -> None:
        for source, target, *link in self._network.apply_change(change):
            self._engine.state.links[:, source, target] = link  # latency, bandwidth
        self._engine.change_rates(self._clock.now, self._averaging.max_rate())
        self._control.set_latency()

    def _kill(self, device: int) -> None:
        self._absent.add(device)
        self._present[device] += self._clock.now - self._present_since[device]
        for pipeline, members in enumerate(self._pipelines):
            if not any(member.device == device for member in members):
                continue
            self._control.end(pipeline)
            self._joining.pop(pipeline, None)
            for member in members:
                if member.device == device:
                    dead = member.worker, Dead, member.incarnation
                    send = self._averaging.coordinator.send
                    self._clock.at(self._clock.now + DETECTION_DELAY, send, *dead)
                self._averaging.reset(member)

    def _join(self, device: int) -> None:
        self._absent.discard(device)
        self._present_since[device] = self._clock.now
        for pipeline, members in enumerate(self._pipelines):
            has_device = any(member.device == device for member in members)
            if has_device and self._is_complete(members) and self._control.has_steps_left(pipeline):
                self._joining[pipeline] = {}
                for member in members:
                    member.clock = 0
                self._send_join(members)
                # By then every CopyFrom has arrived.
                workers, incarnation = [m.worker for m in members], members[0].incarnation
                round_trip = self._averaging.coordinator.max_round_trip(workers)
                begin, at = self._begin_if_complete, self._clock.now + _ROUNDING + round_trip
                self._clock.at(at, begin, pipeline, incarnation, priority=PRIORITY_LAST)

    def _begin_if_complete(self, pipeline: int, incarnation: int) -> None:
        """Start a pipeline once all its copies are done; without copies it keeps its weights."""
        is_same = self._pipelines[pipeline][0].incarnation == incarnation
        if is_same and self._joining.get(pipeline) == {}:
            del self._joining[pipeline]
            latest = max(member.clock for member in self._pipelines[pipeline])
            for member in self._pipelines[pipeline]:
                member.clock = latest
            self._control.begin(pipeline)

    def _send_join(self, members: Sequence[SimulatedWorker]) -> None:
        for member in members:
            state = self._nodes[member.device], member.clock, member.incarnation
            self._averaging.coordinator.send(member.worker, Join, *state)

    @property
    def no_pipeline_is_complete(self) -> bool:
        """Whether every pipeline has lost a device."""
        return not any(map(self._is_complete, self._pipelines))

    def _is_complete(self, members: Sequence[SimulatedWorker]) -> bool:
        return not any(member.device in self._absent for member in members)
