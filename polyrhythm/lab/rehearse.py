"""Run one program on every host of a lab, as torchrun would, while a scenario plays."""

import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.scenario import Scenario
from polyrhythm.errors import LabError
from polyrhythm.lab.lab import Lab
from polyrhythm.lab.namespace import become_lord
from polyrhythm.lab.program import become, findable, preload
from polyrhythm.lab.timeline import absent_at_first
from polyrhythm.processes import Child, end_all, wait_for_any
from polyrhythm.types import Seconds

TIMED_OUT = 124  # as the program `timeout` has it
_LAB_PORT = 29500  # every lab has a network of its own: the port is free


@dataclass(slots=True, kw_only=True)
class Rehearsal:
    """`say` gets a line about whatever ends or goes wrong."""

    cluster: Cluster
    scenario: Scenario
    program: Sequence[str]
    environment: dict[str, str]  # beside torchrun's
    output: Path | None
    say: Callable[[str], None]
    _running: dict[str, Child] = field(default_factory=dict, init=False)
    _started: dict[str, Seconds] = field(default_factory=dict, init=False)  # on the clock
    _lives: Counter[str] = field(default_factory=Counter, init=False)
    _failed: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.scenario.check(self.cluster)
        if not findable(self.program[0]):
            raise LabError(
                f"program {self.program[0]!r} cannot be run",
                expected="a program on the PATH, or the path of one that may be executed",
                fix="check its name; a script needs its interpreter: -- python my_script.py",
            )
        if self.output is not None:
            try:
                self.output.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LabError(
                    f"output folder {self.output}: {error.strerror}",
                    expected="a folder that can be written",
                    fix="give another one: --output FOLDER",
                ) from None

    def run(self, *, name: str | None, timeout: Seconds | None) -> int:
        """On hosts with a network of their own; 0, or 1 if a program failed that nobody killed."""
        become_lord()  # before torch is loaded: it starts threads, and then it would be too late
        preload(self.program)
        with Lab(self.cluster, self.scenario, name=name) as lab:
            if warning := lab.overload():
                self.say(f"warning: {warning}")
            addresses = {host: lab.address(host) for host in lab.hosts}
            self.say(f"lab {lab.name}: {len(lab.hosts)} hosts")
            lab.play()
            status = self._go_on(lab, addresses[lab.hosts[0]], _LAB_PORT, timeout)
            punctuality = lab.report().punctuality
            self.say(f"switch: {punctuality}")
            if punctuality.trouble:
                self.say(f"warning: the lab was not punctual: {punctuality.trouble}")
        return status

    def run_in_process(self, *, timeout: Seconds | None) -> int:
        """On this machine's own network: only slow workers of the scenario are played."""
        ignored = [
            kind for kind in ("link", "pause", "kill", "join") if getattr(self.scenario, kind)
        ]
        if ignored:
            self.say(f"warning: without a lab network these events are not played: {ignored}")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        preload(self.program)
        self.environment["GLOO_SOCKET_IFNAME"] = "lo"
        try:
            return self._go_on(None, "127.0.0.1", port, timeout)
        finally:
            end_all(list(self._running.values()))

    def _go_on(self, lab: Lab | None, master: str, port: int, timeout: Seconds | None) -> int:
        """Start everybody who is there, then whoever joins, until all have ended."""
        began = lab.started_at if lab and lab.started_at else time.monotonic()
        hosts = [device.name for device in self.cluster.devices]
        absent = absent_at_first(self.scenario) if lab else frozenset()
        joins = sorted((join.at, join.device) for join in self.scenario.join) if lab else []
        common = {"MASTER_ADDR": master, "MASTER_PORT": str(port), "WORLD_SIZE": str(len(hosts))}
        for host in hosts:
            if host not in absent:
                self._start(lab, host, common, began)
        while self._running or joins:
            now = time.monotonic() - began
            if timeout is not None and now >= timeout:
                self.say(f"timeout after {timeout:g} s, still running: {', '.join(self._running)}")
                return TIMED_OUT
            if joins and joins[0][0] <= now:
                self._start(lab, joins.pop(0)[1], common, began)
            until = min(1.0, joins[0][0] - now if joins else 1.0)
            if lab is not None:
                lab.wait_for_any(list(self._running.values()), until)
            else:
                wait_for_any(list(self._running.values()), until)
            self._collect(time.monotonic() - began)
        return 1 if self._failed else 0

    def _start(self, lab: Lab | None, host: str, common: dict[str, str], began: Seconds) -> None:
        rank = [device.name for device in self.cluster.devices].index(host)
        environment = {
            **common,
            "RANK": str(rank),
            "GROUP_RANK": str(rank),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "POLYRHYTHM_DEVICE": host,
            "POLYRHYTHM_DEVICE_INDEX": str(rank),
            "POLYRHYTHM_STARTED_AT": str(began),
            **self.environment,
        }
        output = None
        if self.output is not None:
            self._lives[host] += 1
            life = f".{self._lives[host]}" if self._lives[host] > 1 else ""
            output = self.output / f"{host.replace('/', '-')}{life}.log"
        if lab is not None:
            child = lab.run(host, self.program, environment=environment, output=output)
        else:
            child = Child(lambda: become(self.program, environment), output=output)
        self._running[host] = child
        self._started[host] = time.monotonic() - began

    def _collect(self, now: Seconds) -> None:
        for host, child in list(self._running.items()):
            if child.status is None:
                continue
            del self._running[host]
            kills = [kill.at for kill in self.scenario.kill if kill.device == host]
            by_scenario = any(self._started[host] <= at <= now or at == 0 for at in kills)
            if by_scenario and child.status == -signal.SIGKILL:
                self.say(f"{host} was killed by the scenario")
            elif child.status:
                self._failed.add(host)
                self.say(f"{host} {child.reason}")
