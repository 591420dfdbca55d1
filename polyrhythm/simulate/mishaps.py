"""What befalls a simulated job: links that change, devices that are gone, and that come (back).

A device that is gone takes its pipeline with it. The others notice after a while. When all devices
of a pipeline are there, its workers join, copy model and optimizer state from whoever the scheduler
names, and begin with an empty pipeline.
"""

from collections.abc import Callable, Sequence
from typing import Any

from polyrhythm.describe.scenario import LinkChange, Scenario
from polyrhythm.simulate.averaging import Averaging, Member
from polyrhythm.simulate.clock import Clock
from polyrhythm.simulate.engine.engine import Engine
from polyrhythm.simulate.network import Network
from polyrhythm.sync.messages import Dead, Heal, Join
from polyrhythm.types import Seconds

NOTICED: Seconds = 2.0  # after a death: what killed workers of real groups take
STATE = 3  # times the weights: AdamW's moments are copied with them


class Mishaps:
    """`begin` starts the runs of a pipeline; `end` stops them."""

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
        begin: Callable[[int], None],
        end: Callable[[int], None],
    ) -> None:
        self._names, self._pipelines, self._nodes = names, pipelines, nodes
        self._averaging, self._clock, self._engine = averaging, clock, engine
        self._network, self._begin, self._end = network, begin, end
        self._away: set[int] = _away_at_first(scenario, names)
        self._healing: dict[int, int] = {}  # pipelines that copy, and how many workers of them
        for change in scenario.link:
            clock.at(change.at, self._change, change, priority=-1)
        for kill in scenario.kill:
            clock.at(kill.at, self._kill, names.index(kill.device), priority=-1)
        for join in scenario.join:
            clock.at(join.at, self._join, names.index(join.device), priority=-1)

    def start(self) -> None:
        for pipeline, members in enumerate(self._pipelines):
            if self._is_whole(members):
                self._tell_join(members)
                self._begin(pipeline)

    def heal(self, command: Heal) -> None:
        """A worker copies from another one, then has its clock."""
        member = self._averaging.members[command.worker]
        source = self._averaging.members[command.source]
        takes = self._network.transfer(source.device, member.device, STATE * member.size)
        self._clock.at(self._clock.now + takes, self._healed, member, member.life, source)

    def _change(self, change: LinkChange) -> None:
        for a, b, latency, bandwidth in self._network.changed(change):
            self._engine.change_link(self._clock.now, a, b, latency, bandwidth)

    def _kill(self, device: int) -> None:
        self._away.add(device)
        for pipeline, members in enumerate(self._pipelines):
            if not any(member.device == device for member in members):
                continue
            self._end(pipeline)
            self._healing.pop(pipeline, None)
            for member in members:
                self._averaging.forget(member)
                if member.device == device:
                    lost = member.worker, member.life
                    self._clock.at(self._clock.now + NOTICED, self._notice, *lost)

    def _notice(self, *lost: Any) -> None:
        worker, life = lost
        self._tell(worker, Dead, life)

    def _join(self, device: int) -> None:
        self._away.discard(device)
        for pipeline, members in enumerate(self._pipelines):
            if any(member.device == device for member in members) and self._is_whole(members):
                self._healing[pipeline] = len(members)
                for member in members:
                    member.life, member.clock = member.life + 1, 0
                self._tell_join(members)
                # Where nobody is left to copy from, nobody heals: it begins with what it has.
                if len(self._away_pipelines()) == len(self._pipelines) - 1:
                    del self._healing[pipeline]
                    self._begin(pipeline)

    def _healed(self, member: Member, life: int, source: Member) -> None:
        pipeline = member.worker.pipeline
        if member.life != life or pipeline not in self._healing:
            return  # it has died meanwhile
        member.clock = max(member.clock, source.clock)
        self._healing[pipeline] -= 1
        if self._healing[pipeline] == 0:
            del self._healing[pipeline]
            self._begin(pipeline)

    def _tell_join(self, members: Sequence[Member]) -> None:
        for member in members:
            node = self._nodes[member.device]
            self._tell(member.worker, Join, node, member.clock, member.life)

    def _tell(self, worker: Any, kind: Callable[..., Any], *given: Any) -> None:
        assert self._averaging.coordinator is not None, "it is set before anything happens"
        self._averaging.coordinator.tell(worker, kind, *given)

    def _is_whole(self, members: Sequence[Member]) -> bool:
        return not any(member.device in self._away for member in members)

    def _away_pipelines(self) -> list[int]:
        return [
            pipeline
            for pipeline, members in enumerate(self._pipelines)
            if not self._is_whole(members)
        ]


def _away_at_first(scenario: Scenario, names: Sequence[str]) -> set[int]:
    """Who joins without having been killed before."""
    killed = {kill.device: kill.at for kill in sorted(scenario.kill, key=lambda kill: -kill.at)}
    return {
        names.index(join.device)
        for join in scenario.join
        if killed.get(join.device, float("inf")) > join.at
    }
