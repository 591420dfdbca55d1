"""A lab: every device of a cluster as a host on this machine, joined by links as described.

    with Lab(cluster, scenario) as lab:
        workers = [lab.spawn(host, train, rank) for rank, host in enumerate(lab.hosts)]
        lab.play()  # the scenario's clock starts
        lab.wait(workers, timeout=60)

What runs on a host is real and uses the kernel's own TCP, over the device `lab0`. When the block
ends, or this process does, in whatever way, everything in the lab ends.
"""

import contextlib
import gc
import importlib.util
import itertools
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
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
    OwnProcess,
    PauseHost,
    ResetReport,
    ReviveHost,
    SwitchReport,
)
from polyrhythm.lab.program import run_program
from polyrhythm.lab.switch import serve
from polyrhythm.lab.timeline import link_command, scenario_commands
from polyrhythm.processes import Child, end_all, wait_for_any
from polyrhythm.types import BytesPerSecond, Seconds

# What all pairs together may ask for without a doubt: `polyrhythm bench lab` finds that the switch
# carries 3.2 Gbit/s between 16 hosts on time, and 10 Gbit/s at the most, on two shared cores.
SWITCH_LIMIT: BytesPerSecond = 3e9 / 8
SHUTDOWN_TIMEOUT: Seconds = 5.0  # for a switch that was told to end

_count = itertools.count()


class Lab:
    """Hosts are named as the cluster's devices; `name` is how other processes find this lab."""

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
        control.socket_path(self.name)  # refuses a name that cannot be one
        self.hosts = tuple(device.name for device in cluster.devices)
        self.started_at: Seconds | None = None  # of time.monotonic(), once the scenario plays
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
        ours, theirs = socket.socketpair()
        self._control = control.Control(self.name, ours)
        try:
            with listening, theirs:
                for number in range(len(self.hosts)):
                    self._network.append(namespace.make_host(number))
                self._start_switch(listening, theirs)
        except BaseException:
            self._end_switch()
            self._release()
            raise
        return self

    def _start_switch(self, listening: socket.socket, theirs: socket.socket) -> None:
        gc.collect()
        gc.freeze()  # children share this process's memory as long as nobody touches it
        named = list(zip(self.hosts, self._network, strict=True))
        channels, owner = _channels(self.cluster), os.getpid()
        # Not killed with its owner: it outlives it by a moment, to clean up.
        self._switch = Child(
            lambda: serve(named, channels, listening, owner, theirs), dies_with_owner=False
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end_all(self.children)
        self._end_switch()
        self._release()

    def _end_switch(self) -> None:
        # It must be told: of a connection that closes it thinks no more than of any other client's.
        with contextlib.suppress(LabError):  # it is gone already, or was never started
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
        gc.unfreeze()

    def address(self, host: str) -> str:
        return self._network[self._index(host)].address

    def spawn(
        self, host: str, function: Callable[..., object], *args: object, output: Path | None = None
    ) -> Child:
        """Run `function(*args)` on the host, in a fork of this process."""
        number = self._index(host)
        child = Child(partial(_on_host, self._network[number], function, args), output=output)
        self.children.append(child)
        self._control.request(OwnProcess(pid=child.pid, host=number))
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
        """A warning if all hosts at full speed would ask for more than the switch carries."""
        asked = sum(max(row, default=0.0) for row in self._bandwidths())
        if asked <= SWITCH_LIMIT:
            return None
        return (
            f"all hosts sending at once would ask for {show(asked, BytesPerSecond)}, and the "
            f"switch carries about {show(SWITCH_LIMIT, BytesPerSecond)}: messages "
            f"{math.ceil(asked / SWITCH_LIMIT)} times smaller (--byte-scale) keep it punctual"
        )

    def _bandwidths(self) -> list[list[BytesPerSecond]]:
        """Of each host to every other, at the most that the scenario gives it."""
        best = [
            [0.0 if a == b else channel.bandwidth for b, channel in enumerate(row)]
            for a, row in enumerate(_channels(self.cluster))
        ]
        for change in self.scenario.link:
            for a, b in link_command(change, self.cluster).pairs:
                best[a][b] = max(best[a][b], change.bandwidth or 0.0)
        return best

    def check_switch(self) -> None:
        """Raise LabError if the switch has ended, by itself or killed for its memory."""
        assert self._switch is not None, "inside the with block"
        if self._switch.status is not None:
            raise LabError(
                f"the switch of lab {self.name!r} {self._switch.reason}",
                expected="it to run as long as the lab",
                fix="start the lab again, with fewer hosts if memory is short",
            )

    def wait_for_any(self, children: Sequence[Child], timeout: Seconds) -> None:
        """Return when one of them ends or `timeout` has passed; LabError if the switch ends."""
        assert self._switch is not None, "inside the with block"
        wait_for_any([*children, self._switch], timeout)
        self.check_switch()

    def play(self) -> None:
        """Start the scenario's clock."""
        self.started_at = time.monotonic()
        for command in scenario_commands(self.scenario, self.cluster, self.started_at):
            self._control.request(command)

    def wait(self, children: Sequence[Child], timeout: Seconds) -> bool:
        """Whether all of them have ended within `timeout`. Raises LabError if the switch ends."""
        deadline = time.monotonic() + timeout
        while running := [child for child in children if child.status is None]:
            if (left := deadline - time.monotonic()) <= 0:
                return False
            self.wait_for_any(running, left)
        return True

    def change(self, change: LinkChange) -> None:
        """Change links at once, whatever the time in `change`."""
        Scenario(name="change", link=(change,)).check(self.cluster)
        self._control.request(link_command(change, self.cluster))

    def kill(self, host: str, *, silent: bool = True) -> None:
        """Kill what runs on the host; silent as a power cut, or with the kernel's goodbyes."""
        self._control.request(KillHost(host=self._index(host), silent=silent))

    def revive(self, host: str) -> None:
        """Join a killed host to the network again; spawn on it what should run."""
        self._control.request(ReviveHost(host=self._index(host)))

    def pause(self, host: str, *, paused: bool = True) -> None:
        """Stop what runs on the host and hold its packets; `paused=False` lets both go on."""
        self._control.request(PauseHost(host=self._index(host), paused=paused))

    def report(self, *, reset: bool = False) -> SwitchReport:
        """Counters per pair, and whether the switch was punctual; then count anew if `reset`."""
        report = self._control.request(GetReport()).report
        assert report is not None, "a report was asked for"
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
            # A host alone in its region has no link inside it, and sends nothing to itself.
            Channel(cluster.latency[a][b], cluster.bandwidth[a][b] or 1.0)
            for b in regions
        ]
        for a in regions
    ]


def _on_host(
    host: namespace.Host,
    function: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    namespace.enter(host.namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = namespace.DEVICE
    function(*args)
