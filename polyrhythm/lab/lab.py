"""Emulate a cluster on this machine: one host per device, with links as described.

    with Lab(cluster, scenario) as lab:
        workers = [lab.spawn(host, train, rank) for rank, host in enumerate(lab.hosts)]
        lab.play()  # start the scenario's clock
        lab.wait(workers, timeout=60)

Programs on a host are real processes and use the kernel's own TCP over the device `lab0`. All
processes of the lab end when the `with` block or this process ends, even if it is killed.
"""

import contextlib
import importlib.util
import itertools
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.read import unknown
from polyrhythm.describe.scenario import LinkChange, Scenario
from polyrhythm.describe.units import show
from polyrhythm.errors import LabError
from polyrhythm.lab import control, namespace
from polyrhythm.lab.channel import Channel
from polyrhythm.lab.commands import (
    EndLab,
    GetReport,
    KillHost,
    PauseHost,
    RegisterProcess,
    ResetReport,
    ReviveHost,
    SwitchReport,
)
from polyrhythm.lab.program import run_program
from polyrhythm.lab.switch import serve
from polyrhythm.lab.timeline import link_command, scenario_commands
from polyrhythm.processes import Child, end_all, wait_for_any
from polyrhythm.types import BytesPerSecond, Seconds

# Total traffic that the switch carries on time: `polyrhythm bench lab` measures 3.2 Gbit/s on time
# between 16 hosts, and 10 Gbit/s at most, on two shared cores.
SWITCH_LIMIT: BytesPerSecond = 3e9 / 8
SHUTDOWN_TIMEOUT: Seconds = 5.0  # for the switch, after EndLab

_count = itertools.count()


class Lab:
    """A running lab. Hosts have the names of devices; other processes attach to it by `name`."""

    def __init__(
        self, cluster: Cluster, scenario: Scenario | None = None, *, name: str | None = None
    ) -> None:
        if len(cluster.devices) > namespace.MAX_HOSTS:
            raise LabError(
                f"{len(cluster.devices)} hosts",
                expected=f"at most {namespace.MAX_HOSTS}",
                fix="rehearse with fewer: --hosts 16",
            )
        self.cluster = cluster
        self.scenario = scenario or Scenario(name="nothing happens")
        self.scenario.check(cluster)
        self.name = name or f"lab-{os.getpid()}-{next(_count)}"
        control.socket_path(self.name)  # raises LabError for an invalid name
        self.hosts = tuple(device.name for device in cluster.devices)
        self.started_at: Seconds | None = None  # time.monotonic() at `play`
        self._network: list[namespace.Host] = []
        self._switch: Child | None = None
        self.children: list[Child] = []

    def __enter__(self) -> Self:
        if importlib.util.find_spec("pyroute2") is None:
            raise LabError(
                "the package pyroute2 is missing",
                expected="the extra [lab]",
                fix="pip install 'polyrhythm[lab]'",
            )
        namespace.enter_user_namespace()
        listening = control.claim(self.name)
        owner_socket, switch_socket = socket.socketpair()
        self._control = control.Control(self.name, owner_socket)
        try:
            with listening, switch_socket:
                for number in range(len(self.hosts)):
                    self._network.append(namespace.make_host(number))
                self._start_switch(listening, switch_socket)
        except BaseException:
            self._end_switch()
            self._release()
            raise
        return self

    def _start_switch(self, listening: socket.socket, switch_socket: socket.socket) -> None:
        named = list(zip(self.hosts, self._network, strict=True))
        channels, owner = _channels(self.cluster), os.getpid()
        # The switch outlives its owner briefly, to kill the host processes and remove the socket.
        self._switch = Child(
            lambda: serve(named, channels, listening, owner, switch_socket), dies_with_owner=False
        )

    def __exit__(self, *_: object) -> None:
        end_all(self.children)
        self._end_switch()
        self._release()

    def _end_switch(self) -> None:
        # Closing the connection is not enough: the switch drops it like any other client's.
        with contextlib.suppress(LabError):  # the switch has ended, or was never started
            self._control.request(EndLab())
        self._control.close()
        if self._switch is not None and self._switch.wait(SHUTDOWN_TIMEOUT) is None:
            self._switch.end()
        control.socket_path(self.name).unlink(missing_ok=True)

    def _release(self) -> None:
        for host in self._network:
            os.close(host.namespace)
            os.close(host.tun)
        self._network.clear()

    def address(self, host: str) -> str:
        return self._network[self._index(host)].address

    def spawn(
        self,
        host: str,
        function: Callable[..., object],
        *args: object,
        output: Path | None = None,
        keeps_failure: bool = False,
    ) -> Child:
        """Run `function(*args)` on the host, in a fork of this process."""
        number = self._index(host)
        work = partial(_on_host, self._network[number], function, args)
        child = Child(work, output=output, keeps_failure=keeps_failure)
        self.children.append(child)
        self._control.request(RegisterProcess(pid=child.pid, host=number))
        return child

    def run(
        self,
        host: str,
        command: Sequence[str],
        *,
        environment: dict[str, str] | None = None,
        output: Path | None = None,
    ) -> Child:
        """Run a program on the host, with this process's environment and `environment`."""
        return self.spawn(host, run_program, tuple(command), environment or {}, output=output)

    def overload(self) -> str | None:
        """Return a warning if all hosts at full speed exceed what the switch carries."""
        traffic = sum(max(row, default=0.0) for row in self._bandwidths())
        if traffic <= SWITCH_LIMIT:
            return None
        return (
            f"all hosts sending at once need {show(traffic, BytesPerSecond)}, and the switch "
            f"carries about {show(SWITCH_LIMIT, BytesPerSecond)} on time: use messages "
            f"{math.ceil(traffic / SWITCH_LIMIT)} times smaller (--byte-scale)"
        )

    def _bandwidths(self) -> list[list[BytesPerSecond]]:
        """Return, per ordered pair of hosts, the highest bandwidth during the scenario."""
        best = [
            [0.0 if a == b else channel.bandwidth for b, channel in enumerate(row)]
            for a, row in enumerate(_channels(self.cluster))
        ]
        for change in self.scenario.link:
            for a, b in link_command(change, self.cluster).pairs:
                best[a][b] = max(best[a][b], change.bandwidth or 0.0)
        return best

    def check_switch(self) -> None:
        """Raise LabError if the switch has ended or was killed (for example, out of memory)."""
        assert self._switch is not None, "inside the with block"
        if self._switch.status is not None:
            raise LabError(
                f"the switch of lab {self.name!r} {self._switch.reason}",
                expected="a switch that runs until the lab ends",
                fix="start the lab again, with fewer hosts if memory is short",
            )

    def wait_for_any(self, children: Sequence[Child], timeout: Seconds) -> None:
        """Return when a child ends or after `timeout`; raise LabError if the switch ends."""
        assert self._switch is not None, "inside the with block"
        wait_for_any([*children, self._switch], timeout)
        self.check_switch()

    def play(self) -> None:
        """Start the scenario's clock."""
        self.started_at = time.monotonic()
        for command in scenario_commands(self.scenario, self.cluster, self.started_at):
            self._control.request(command)

    def wait(self, children: Sequence[Child], timeout: Seconds) -> bool:
        """Return whether all children end within `timeout`; raise LabError if the switch ends."""
        deadline = time.monotonic() + timeout
        while running := [child for child in children if child.status is None]:
            if (left := deadline - time.monotonic()) <= 0:
                return False
            self.wait_for_any(running, left)
        return True

    def change(self, change: LinkChange) -> None:
        """Change links at once; `change.at` is ignored."""
        Scenario(name="change", link=(change,)).check(self.cluster)
        self._control.request(link_command(change, self.cluster))

    def kill(self, host: str, *, silent: bool = True) -> None:
        """Kill the host's processes. `silent`: peers see no FIN or RST, as after a power cut."""
        self._control.request(KillHost(host=self._index(host), silent=silent))

    def revive(self, host: str) -> None:
        """Connect a killed host to the network again. No process is started on it."""
        self._control.request(ReviveHost(host=self._index(host)))

    def pause(self, host: str, *, paused: bool = True) -> None:
        """Stop the host's processes and hold its packets; `paused=False` resumes both."""
        self._control.request(PauseHost(host=self._index(host), paused=paused))

    def report(self, *, reset: bool = False) -> SwitchReport:
        """Return counters per pair and the switch's lateness; then reset them if `reset`."""
        report = self._control.request(GetReport()).report
        assert report is not None, "the reply to GetReport has a report"
        if reset:
            self._control.request(ResetReport())
        return report

    def _index(self, host: str) -> int:
        if host not in self.hosts:
            error = unknown("host", host, self.hosts)
            raise LabError(error.wrong, expected=error.expected, fix=error.fix)
        return self.hosts.index(host)


def _channels(cluster: Cluster) -> list[list[Channel]]:
    regions = [cluster.regions.index(device.region) for device in cluster.devices]
    return [
        [
            # A region with one host describes no link inside it: bandwidth 0, and never used.
            Channel(cluster.latency[a][b], cluster.bandwidth[a][b] or 1.0)
            for b in regions
        ]
        for a in regions
    ]


def _on_host(
    host: namespace.Host, function: Callable[..., object], args: tuple[object, ...]
) -> None:
    namespace.enter(host.namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = namespace.DEVICE
    function(*args)
