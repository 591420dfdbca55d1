"""What befalls a simulated job: links that change, devices that are gone, and that come (back).

A device that is gone takes its pipeline with it. The others notice after a while. When all devices
of a pipeline are there, its workers join, copy model and optimizer state from whoever the scheduler
names, and begin with an empty pipeline.
"""

from collections.abc import Callable, Sequence
from typing import Any

from polyrhythm.describe.scenario import LinkChange, Scenario
from polyrhythm.simulate.averaging import SimulatedAveraging, SimulatedWorker
from polyrhythm.simulate.clock import (
    PRIORITY_CHANGE,
    PRIORITY_LAST,
    PRIORITY_RETRY,
    RETRY_INTERVAL,
    Clock,
)
from polyrhythm.simulate.engine.engine import Engine
from polyrhythm.simulate.network import SimulatedNetwork
from polyrhythm.sync.protocol import CopyFrom, Dead, Join
from polyrhythm.types import Seconds, Worker

DETECTION_DELAY: Seconds = 2.0  # after a death: what killed workers of real groups take
_POLL_INTERVAL: Seconds = 0.01  # how often a worker asks whether what it is to copy is there
_ROUNDING: Seconds = 1e-6  # what sums of the same times in another order may differ by
STATE_FACTOR = 3  # times the weights: AdamW's moments are copied with them


class FaultInjector:
    """`begin` starts a pipeline that `has_steps_left` to go on, `end` stops it; `apply_change`: links have."""

    def __init__(
        self,
        scenario: Scenario,
        names: Sequence[str],  # of devices
        pipelines: Sequence[Sequence[SimulatedWorker]],
        nodes: Sequence[str],
        averaging: SimulatedAveraging,
        *,
        clock: Clock,
        engine: Engine,
        network: SimulatedNetwork,
        has_steps_left: Callable[[int], bool],
        begin: Callable[[int], None],
        end: Callable[[int], None],
        on_link_change: Callable[[], None],
    ) -> None:
        self._names, self._pipelines, self._nodes = names, pipelines, nodes
        self._averaging, self._clock, self._engine = averaging, clock, engine
        self._network, self._on_link_change = network, on_link_change
        self._has_steps_left, self._begin, self._end = has_steps_left, begin, end
        self._absent: set[int] = _absent_at_start(scenario, names)
        self._present_since = [0.0] * len(names)  # when each device did, the last time
        self._present = [0.0] * len(names)  # seconds, up to when it went
        self._joining: dict[int, dict[Worker, CopyFrom]] = {}  # pipelines; what is to be copied
        happens: list[tuple[Seconds, Callable[..., None], Any]] = [
            *((change.at, self._change, change) for change in scenario.link),
            *((kill.at, self._kill, names.index(kill.device)) for kill in scenario.kill),
            *((join.at, self._join, names.index(join.device)) for join in scenario.join),
        ]
        self.last: Seconds = max((at for at, _, _ in happens), default=0.0)
        for at, callback, given in happens:
            clock.at(at, callback, given, priority=PRIORITY_CHANGE)

    def start(self) -> None:
        for pipeline, members in enumerate(self._pipelines):
            if self._is_complete(members):
                self._send_join(members)
                self._begin(pipeline)

    def present(self) -> list[Seconds]:
        """For how long each device was there until now."""
        now = self._clock.now
        return [
            before + (0.0 if device in self._absent else now - came)
            for device, (before, came) in enumerate(
                zip(self._present, self._present_since, strict=True)
            )
        ]

    def copy_from(self, command: CopyFrom) -> None:
        """A worker copies from another one, then has its clock."""
        joining = self._joining.get(command.worker.pipeline)
        if joining is not None:
            joining[command.worker] = command
            self._copy(command, self._averaging.members[command.worker].incarnation)

    def _copy(self, copy_from: CopyFrom, incarnation: int) -> None:
        member = self._averaging.members[copy_from.worker]
        source = self._averaging.members[copy_from.source]
        if not self._is_current(copy_from, incarnation):
            return
        takes = self._network.transfer(
            source.device, member.device, STATE_FACTOR * member.parameters
        )
        has_it = (
            source.clock > copy_from.clock or source.pending is None
        )  # that step has ended there
        if source.clock < copy_from.clock or not has_it:
            self._clock.at(
                self._clock.now + _POLL_INTERVAL,
                self._copy,
                copy_from,
                incarnation,
                priority=PRIORITY_RETRY,
            )
        elif takes == float("inf"):  # over a link that is lost
            self._clock.at(
                self._clock.now + RETRY_INTERVAL,
                self._copy,
                copy_from,
                incarnation,
                priority=PRIORITY_RETRY,
            )
        else:
            self._clock.at(self._clock.now + takes, self._copied, copy_from, incarnation)

    def _copied(self, copy_from: CopyFrom, incarnation: int) -> None:
        if not self._is_current(copy_from, incarnation):
            return
        worker, members = copy_from.worker, self._averaging.members
        has = copy_from.clock if copy_from.clock >= 0 else members[copy_from.source].clock
        members[worker].clock = max(members[worker].clock, has)
        for observer in self._averaging.observers:
            observer.on_copied(worker, copy_from.source, self._clock.now)
        del self._joining[worker.pipeline][worker]
        self._begin_if_complete(worker.pipeline, incarnation)

    def _is_current(self, copy_from: CopyFrom, incarnation: int) -> bool:
        """Neither has it died meanwhile, nor was it told to copy from another one."""
        current = self._joining.get(copy_from.worker.pipeline, {}).get(copy_from.worker)
        return (
            current == copy_from
            and self._averaging.members[copy_from.worker].incarnation == incarnation
        )

    def _change(self, change: LinkChange) -> None:
        for link in self._network.apply_change(change):
            self._engine.set_link(*link)
        self._engine.change_rates(self._clock.now, self._averaging.max_rate())
        self._on_link_change()

    def _kill(self, device: int) -> None:
        self._absent.add(device)
        self._present[device] += self._clock.now - self._present_since[device]
        for pipeline, members in enumerate(self._pipelines):
            if not any(member.device == device for member in members):
                continue
            self._end(pipeline)
            self._joining.pop(pipeline, None)
            for member in members:
                if member.device == device:
                    lost = member.worker, member.incarnation
                    self._clock.at(self._clock.now + DETECTION_DELAY, self._report_dead, *lost)
                self._averaging.reset(member)

    def _report_dead(self, worker: Worker, incarnation: int) -> None:
        self._send(worker, Dead, incarnation)

    def _join(self, device: int) -> None:
        self._absent.discard(device)
        self._present_since[device] = self._clock.now
        for pipeline, members in enumerate(self._pipelines):
            has_device = any(member.device == device for member in members)
            if has_device and self._is_complete(members) and self._has_steps_left(pipeline):
                self._joining[pipeline] = {}
                for member in members:
                    member.clock = 0
                self._send_join(members)
                # By then all know whether they are to copy from anybody.
                at = (
                    self._clock.now
                    + _ROUNDING
                    + self._averaging.coordinator.max_round_trip([m.worker for m in members])
                )
                self._clock.at(
                    at,
                    self._begin_if_complete,
                    pipeline,
                    members[0].incarnation,
                    priority=PRIORITY_LAST,
                )

    def _begin_if_complete(self, pipeline: int, incarnation: int) -> None:
        """Once nobody of it copies any more; who was not told to begins with what it has."""
        is_same = self._pipelines[pipeline][0].incarnation == incarnation
        if is_same and self._joining.get(pipeline) == {}:
            del self._joining[pipeline]
            latest = max(member.clock for member in self._pipelines[pipeline])
            for member in self._pipelines[pipeline]:
                member.clock = latest
            self._begin(pipeline)

    def _send_join(self, members: Sequence[SimulatedWorker]) -> None:
        for member in members:
            node = self._nodes[member.device]
            self._send(member.worker, Join, node, member.clock, member.incarnation)

    def _send(self, worker: Worker, kind: Callable[..., Any], *given: Any) -> None:
        self._averaging.coordinator.send(worker, kind, *given)

    @property
    def no_pipeline_is_complete(self) -> bool:
        """Whether every pipeline has lost a device."""
        return not any(map(self._is_complete, self._pipelines))

    def _is_complete(self, members: Sequence[SimulatedWorker]) -> bool:
        return not any(member.device in self._absent for member in members)


def _absent_at_start(scenario: Scenario, names: Sequence[str]) -> set[int]:
    """Who joins without having been killed before."""
    killed = {kill.device: kill.at for kill in sorted(scenario.kill, key=lambda kill: -kill.at)}
    return {
        names.index(join.device)
        for join in scenario.join
        if killed.get(join.device, float("inf")) > join.at
    }
