"""A lab: every device of a cluster as a host on this machine, joined by links as described.

    with Lab(cluster, scenario) as lab:
        workers = [lab.spawn(host, train, rank) for rank, host in enumerate(lab.hosts)]
        lab.play()  # the scenario's clock starts
        lab.wait(workers, timeout=60)

What runs on a host is real and uses the kernel's own TCP, over the device `lab0`. When the block
ends, or this process does, in whatever way, everything in the lab ends.
"""

import gc
import importlib.util
import itertools
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
from polyrhythm.lab.orders import (
    GetReport,
    KillHost,
    OwnProcess,
    PauseHost,
    Report,
    ResetReport,
    ReviveHost,
)
from polyrhythm.lab.program import become
from polyrhythm.lab.switch import serve
from polyrhythm.lab.timeline import link_order, orders
from polyrhythm.processes import Child, end_all, wait_for_all
from polyrhythm.types import BytesPerSecond, Seconds

# What all pairs together may ask for: half of what `polyrhythm bench lab` finds on two slow cores.
SWITCH_LIMIT: BytesPerSecond = 2e9 / 8

_count = itertools.count()


class Lab:
    """Hosts are named as the cluster's devices; `name` is how other processes find this lab."""

    def __init__(
        self, cluster: Cluster, scenario: Scenario | None = None, *, name: str | None = None
    ) -> None:
        if len(cluster.devices) > namespace.MOST_HOSTS:
            raise LabError(
                f"{len(cluster.devices)} hosts",
                expected=f"at most {namespace.MOST_HOSTS}",
                fix="rehearse with fewer: --hosts 16",
            )
        self.cluster = cluster
        self.scenario = scenario or Scenario(name="nothing happens")
        self.scenario.check(cluster)
        self.name = name or f"lab-{os.getpid()}-{next(_count)}"
        self.hosts = tuple(device.name for device in cluster.devices)
        self.started_at: Seconds | None = None  # of time.monotonic(), once the scenario plays
        self._network: list[namespace.Host] = []
        self.children: list[Child] = []

    def __enter__(self) -> Self:
        if importlib.util.find_spec("pyroute2") is None:
            raise LabError(
                "the package pyroute2 is missing",
                expected="the extra [lab]",
                fix="pip install 'polyrhythm[lab]'",
            )
        namespace.become_lord()
        listening = control.claim(self.name)
        try:
            with listening:
                for number in range(len(self.hosts)):
                    self._network.append(namespace.make_host(number))
                self._start_switch(listening)
            self._control = control.Control(self.name)
        except BaseException:
            self._release()
            control.socket_path(self.name).unlink(missing_ok=True)
            raise
        return self

    def _start_switch(self, listening: socket.socket) -> None:
        gc.collect()
        gc.freeze()  # children share this process's memory as long as nobody touches it
        lifeline, self._lifeline = os.pipe()
        named = list(zip(self.hosts, self._network, strict=True))

        def work() -> None:
            os.close(self._lifeline)
            serve(named, _channels(self.cluster), listening, lifeline)

        # Not killed with its owner: it outlives it by a moment, to clean up.
        self._switch = Child(work, dies_with_owner=False)
        os.close(lifeline)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end_all(self.children)
        self._control.close()
        os.close(self._lifeline)
        if self._switch.wait(5.0) is None:
            end_all([self._switch])
        self._release()

    def _release(self) -> None:
        for host in self._network:
            os.close(host.namespace)
            os.close(host.tun)
        self._network.clear()

    def address(self, host: str) -> str:
        return self._network[self._index(host)].address

    def spawn(
        self, host: str, function: Callable[..., object], *args: object, output: Path | None = None
    ) -> Child:
        """Run `function(*args)` on the host, in a fork of this process."""
        number = self._index(host)
        child = Child(
            partial(_on_host, self._network[number], self._lifeline, function, args), output=output
        )
        self.children.append(child)
        self._control.tell(OwnProcess(pid=child.pid, host=number))
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
        return self.spawn(host, become, tuple(command), environment or {}, output=output)

    def overload(self) -> str | None:
        """A warning if all hosts at full speed would ask for more than the switch carries."""
        rows = zip(self.cluster.regions, self.cluster.bandwidth, strict=True)
        fastest = {region: max(row) for region, row in rows}
        asked = sum(fastest[device.region] for device in self.cluster.devices)
        if asked <= SWITCH_LIMIT:
            return None
        return (
            f"all hosts sending at once ask for {show(asked, BytesPerSecond)}, the switch carries "
            f"about {show(SWITCH_LIMIT, BytesPerSecond)}: use --byte-scale "
            f"{SWITCH_LIMIT / asked:.1g}, or expect a late switch"
        )

    def play(self) -> None:
        """Start the scenario's clock."""
        self.started_at = time.monotonic()
        for order in orders(self.scenario, self.cluster, self.started_at):
            self._control.tell(order)

    def wait(self, children: Sequence[Child], timeout: Seconds) -> bool:
        """Whether all of them have ended within `timeout`."""
        return wait_for_all(children, timeout)

    def change(self, change: LinkChange) -> None:
        """Change links at once, whatever the time in `change`."""
        Scenario(name="change", link=(change,)).check(self.cluster)
        self._control.tell(link_order(change, self.cluster))

    def kill(self, host: str, *, silent: bool = True) -> None:
        """Kill what runs on the host; silent as a power cut, or with the kernel's goodbyes."""
        self._control.tell(KillHost(host=self._index(host), silent=silent))

    def revive(self, host: str) -> None:
        """Join a killed host to the network again; spawn on it what should run."""
        self._control.tell(ReviveHost(host=self._index(host)))

    def pause(self, host: str, *, paused: bool = True) -> None:
        """Stop what runs on the host and hold its packets; `paused=False` lets both go on."""
        self._control.tell(PauseHost(host=self._index(host), paused=paused))

    def report(self, *, reset: bool = False) -> Report:
        """Counters per pair, and whether the switch was punctual; then count anew if `reset`."""
        report = self._control.tell(GetReport()).report
        assert report is not None, "a report was asked for"
        if reset:
            self._control.tell(ResetReport())
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
    lifeline: int,
    function: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    os.close(lifeline)  # only the owner's copy may keep the switch alive
    namespace.enter(host.namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = namespace.DEVICE
    function(*args)
