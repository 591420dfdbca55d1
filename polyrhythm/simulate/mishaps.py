"""What befalls a simulated job: links that change, devices that are gone, and that come (back).

A device that is gone takes its pipeline with it. The others notice after a while. When all devices
of a pipeline are there, its workers join, copy model and optimizer state from whoever the scheduler
names, and begin with an empty pipeline.
"""

from collections.abc import Callable, Sequence
from typing import Any

from polyrhythm.describe.scenario import LinkChange, Scenario
from polyrhythm.simulate.averaging import Averaging, Member
from polyrhythm.simulate.clock import AFTERWARDS, AGAIN, CHANGES, TRIES, Clock
from polyrhythm.simulate.engine.engine import Engine
from polyrhythm.simulate.network import Network
from polyrhythm.sync.messages import Dead, Heal, Join
from polyrhythm.types import Seconds, Worker

NOTICED: Seconds = 2.0  # after a death: what killed workers of real groups take
_LOOK: Seconds = 0.01  # how often a worker asks whether what it is to copy is there
_ROUNDED: Seconds = 1e-6  # what sums of the same times in another order may differ by
STATE = 3  # times the weights: AdamW's moments are copied with them


class Mishaps:
    """`begin` starts a pipeline that `wants` to go on, `end` stops it; `changed`: links have."""

    def __init__(
        self,
        scenario: Scenario,
        names: Sequence[str],  # of devices
        pipelines: Sequence[Sequence[Member]],
        nodes: Sequence[str],
        averaging: Averaging,
        *,
        clock: Clock,
        engine: Engine,
        network: Network,
        wants: Callable[[int], bool],
        begin: Callable[[int], None],
        end: Callable[[int], None],
        changed: Callable[[], None],
    ) -> None:
        self._names, self._pipelines, self._nodes = names, pipelines, nodes
        self._averaging, self._clock, self._engine = averaging, clock, engine
        self._network, self._changed = network, changed
        self._wants, self._begin, self._end = wants, begin, end
        self._away: set[int] = _away_at_first(scenario, names)
        self._came = [0.0] * len(names)  # when each device did, the last time
        self._present = [0.0] * len(names)  # seconds, up to when it went
        self._joining: dict[int, dict[Worker, Heal]] = {}  # pipelines; what is to be copied
        happens: list[tuple[Seconds, Callable[..., None], Any]] = [
            *((change.at, self._change, change) for change in scenario.link),
            *((kill.at, self._kill, names.index(kill.device)) for kill in scenario.kill),
            *((join.at, self._join, names.index(join.device)) for join in scenario.join),
        ]
        self.last: Seconds = max((at for at, _, _ in happens), default=0.0)
        for at, callback, given in happens:
            clock.at(at, callback, given, priority=CHANGES)

    def start(self) -> None:
        for pipeline, members in enumerate(self._pipelines):
            if self._is_whole(members):
                self._tell_join(members)
                self._begin(pipeline)

    def present(self) -> list[Seconds]:
        """For how long each device was there until now."""
        now = self._clock.now
        return [
            before + (0.0 if device in self._away else now - came)
            for device, (before, came) in enumerate(zip(self._present, self._came, strict=True))
        ]

    def heal(self, command: Heal) -> None:
        """A worker copies from another one, then has its clock."""
        joining = self._joining.get(command.worker.pipeline)
        if joining is not None:
            joining[command.worker] = command
            self._copy(command, self._averaging.members[command.worker].life)

    def _copy(self, heal: Heal, life: int) -> None:
        member = self._averaging.members[heal.worker]
        source = self._averaging.members[heal.source]
        if not self._still(heal, life):
            return
        takes = self._network.transfer(source.device, member.device, STATE * member.parameters)
        has_it = source.clock > heal.clock or source.pending is None  # that step has ended there
        if source.clock < heal.clock or not has_it:
            self._clock.at(self._clock.now + _LOOK, self._copy, heal, life, priority=TRIES)
        elif takes == float("inf"):  # over a link that is lost
            self._clock.at(self._clock.now + AGAIN, self._copy, heal, life, priority=TRIES)
        else:
            self._clock.at(self._clock.now + takes, self._healed, heal, life)

    def _healed(self, heal: Heal, life: int) -> None:
        if not self._still(heal, life):
            return
        worker, members = heal.worker, self._averaging.members
        has = heal.clock if heal.clock >= 0 else members[heal.source].clock
        members[worker].clock = max(members[worker].clock, has)
        for observer in self._averaging.observers:
            observer.on_healed(worker, heal.source, self._clock.now)
        del self._joining[worker.pipeline][worker]
        self._begin_if_whole(worker.pipeline, life)

    def _still(self, heal: Heal, life: int) -> bool:
        """Neither has it died meanwhile, nor was it told to copy from another one."""
        told = self._joining.get(heal.worker.pipeline, {}).get(heal.worker)
        return told == heal and self._averaging.members[heal.worker].life == life

    def _change(self, change: LinkChange) -> None:
        for link in self._network.changed(change):
            self._engine.set_link(*link)
        self._engine.change_rates(self._clock.now, self._averaging.most())
        self._changed()

    def _kill(self, device: int) -> None:
        self._away.add(device)
        self._present[device] += self._clock.now - self._came[device]
        for pipeline, members in enumerate(self._pipelines):
            if not any(member.device == device for member in members):
                continue
            self._end(pipeline)
            self._joining.pop(pipeline, None)
            for member in members:
                if member.device == device:
                    lost = member.worker, member.life
                    self._clock.at(self._clock.now + NOTICED, self._notice, *lost)
                self._averaging.forget(member)

    def _notice(self, worker: Worker, life: int) -> None:
        self._tell(worker, Dead, life)

    def _join(self, device: int) -> None:
        self._away.discard(device)
        self._came[device] = self._clock.now
        for pipeline, members in enumerate(self._pipelines):
            is_of_it = any(member.device == device for member in members)
            if is_of_it and self._is_whole(members) and self._wants(pipeline):
                self._joining[pipeline] = {}
                for member in members:
                    member.clock = 0
                self._tell_join(members)
                # By then all know whether they are to copy from anybody.
                at = (
                    self._clock.now
                    + _ROUNDED
                    + self._averaging.coordinator.words([m.worker for m in members])
                )
                self._clock.at(
                    at, self._begin_if_whole, pipeline, members[0].life, priority=AFTERWARDS
                )

    def _begin_if_whole(self, pipeline: int, life: int) -> None:
        """Once nobody of it copies any more; who was not told to begins with what it has."""
        is_same = self._pipelines[pipeline][0].life == life
        if is_same and self._joining.get(pipeline) == {}:
            del self._joining[pipeline]
            latest = max(member.clock for member in self._pipelines[pipeline])
            for member in self._pipelines[pipeline]:
                member.clock = latest
            self._begin(pipeline)

    def _tell_join(self, members: Sequence[Member]) -> None:
        for member in members:
            node = self._nodes[member.device]
            self._tell(member.worker, Join, node, member.clock, member.life)

    def _tell(self, worker: Worker, kind: Callable[..., Any], *given: Any) -> None:
        self._averaging.coordinator.tell(worker, kind, *given)

    @property
    def nobody_is_whole(self) -> bool:
        """Whether every pipeline has lost a device."""
        return not any(map(self._is_whole, self._pipelines))

    def _is_whole(self, members: Sequence[Member]) -> bool:
        return not any(member.device in self._away for member in members)


def _away_at_first(scenario: Scenario, names: Sequence[str]) -> set[int]:
    """Who joins without having been killed before."""
    killed = {kill.device: kill.at for kill in sorted(scenario.kill, key=lambda kill: -kill.at)}
    return {
        names.index(join.device)
        for join in scenario.join
        if killed.get(join.device, float("inf")) > join.at
    }
