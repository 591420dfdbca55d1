"""The hosts of the benchmark, driven from outside: one order at a time, to all of them."""

import itertools
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.decoupled.settings import OVERHEAD
from benchmarks.decoupled.worker import Order, SetUplink, work
from benchmarks.words import word_of_each
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.scenario import LinkChange
from polyrhythm.lab.commands import SwitchReport
from polyrhythm.lab.lab import Lab
from polyrhythm.types import BytesPerSecond, Seconds

_REGION = "lab"
_PATIENCE: Seconds = 120.0  # for one order
_FAST: BytesPerSecond = 50e6
_FASTEST: BytesPerSecond = 300e6  # about as much as the switch carries
_SHORT: Seconds = 0.0002


def cluster(num_workers: int) -> Cluster:
    return Cluster(
        name="decoupled",
        devices=tuple(Device(name=f"w{rank}", region=_REGION) for rank in range(num_workers)),
        regions=(_REGION,),
        latency=((_SHORT,),),
        bandwidth=((_FAST,),),
    )


class Workers:
    """A process per host, while a `with` block lasts."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._lab, self._folder = lab, folder
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        hosts = self._lab.hosts
        for rank, host in enumerate(hosts):
            ours, theirs = multiprocessing.Pipe()
            self._pipes.append(ours)
            place = (rank, len(hosts), self._lab.address(hosts[0]))
            self._lab.spawn(host, work, *place, theirs, output=self._folder / f"{host}.log")
            theirs.close()
        self._answers("joining")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            for pipe in self._pipes:
                pipe.send(None)
            self._lab.wait(self._lab.children, timeout=10.0)
        for pipe in self._pipes:
            pipe.close()

    def ask(self, order: Order, patience: Seconds = _PATIENCE) -> list[Any]:
        """An answer per worker."""
        for pipe in self._pipes:
            pipe.send(order)
        return self._answers(str(order), patience)

    def set_network(
        self,
        latency: Seconds,
        bandwidth: BytesPerSecond,
        *,
        uplink: bool = False,
        node_size: int = 1,
    ) -> None:
        """`bandwidth`: of what TCP carries. Links inside of a node are fast and short."""
        wire = bandwidth * OVERHEAD
        self._set_uplink(wire if uplink else None, node_size)
        self._change(_REGION, _REGION, latency, max(_FAST, 2 * wire) if uplink else wire)
        for pair in itertools.combinations(enumerate(self._lab.hosts), 2):
            (one, source), (other, target) = pair
            if one // node_size == other // node_size:
                self._change(source, target, _SHORT, _FAST)

    def set_fast_network(self) -> None:
        """For preparations, which take many messages, and whose time does not count."""
        self._set_uplink(None)
        self._change(_REGION, _REGION, _SHORT, _FASTEST)

    def report(self) -> SwitchReport:
        """What the network has carried since this was last asked, and how well."""
        return self._lab.report(reset=True)

    def _set_uplink(self, bandwidth: BytesPerSecond | None, node_size: int = 1) -> None:
        hosts = self._lab.hosts
        outside = tuple(
            tuple(
                self._lab.address(host)
                for other, host in enumerate(hosts)
                if other // node_size != rank // node_size
            )
            for rank in range(len(hosts))
        )
        self.ask(SetUplink(bandwidth, outside))

    def _change(
        self, source: str, target: str, latency: Seconds, bandwidth: BytesPerSecond
    ) -> None:
        self._lab.change(
            LinkChange(at=0.0, source=source, target=target, latency=latency, bandwidth=bandwidth)
        )

    def _answers(self, action: str, patience: Seconds = _PATIENCE) -> list[Any]:
        return word_of_each(self._pipes, self._lab.children, action, patience)
