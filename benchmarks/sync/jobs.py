"""The processes of the synchronisation benchmark: a worker per host of a lab, and a server."""

import multiprocessing
import time
from collections.abc import Sequence
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.sync.settings import BANDWIDTH, LATENCY, Setting, Side, device_name
from benchmarks.sync.training import Answer
from benchmarks.sync.worker import DEADLINE, Order, Place, work
from benchmarks.words import word_of_each
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.scenario import LinkChange
from polyrhythm.errors import LabError
from polyrhythm.lab.lab import Lab
from polyrhythm.types import BytesPerSecond, Seconds

SERVER, REGION = "server", "lab"
_HEAD_START: Seconds = 0.05  # from the last word of preparation until all begin


def cluster(num_workers: int) -> Cluster:
    """Hosts all alike, with a fast link between any two of them."""
    names = [*(device_name(rank) for rank in range(num_workers)), SERVER]
    return Cluster(
        name="sync",
        devices=tuple(Device(name=name, region=REGION) for name in names),
        regions=(REGION,),
        latency=((LATENCY,),),
        bandwidth=((BANDWIDTH,),),
    )


class Workers:
    """While a `with` block lasts."""

    def __init__(self, lab: Lab, *, num_stages: int, folder: Path) -> None:
        """`num_stages`: of the pipelines in a grid; a worker runs one of them."""
        self._lab, self._num_stages, self._folder = lab, num_stages, folder
        self._pipes: list[Connection] = []
        self._numbers = count()
        self._what = "nothing"
        self._setting: Setting | None = None  # of the present order

    def __enter__(self) -> Self:
        hosts = self._lab.hosts
        for rank, host in enumerate(hosts):
            ours, theirs = multiprocessing.Pipe()
            self._pipes.append(ours)
            place = Place(
                rank=rank,
                num_workers=len(hosts) - 1,
                num_stages=self._num_stages,
                master=self._lab.address(hosts[0]),
                folder=self._folder,
            )
            self._lab.spawn(host, work, place, theirs, output=self._folder / f"{host}.log")
            theirs.close()
        self._words("joining", DEADLINE)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._tell(None)
            self._lab.wait(self._lab.children, timeout=10.0)
        for pipe in self._pipes:
            pipe.close()

    def prepare(self, setting: Setting, side: Side) -> None:
        """Over a fast network, whatever the setting's is like: connections take many messages."""
        self._what, self._setting = f"{side.name} in {setting.name}", setting
        self._set_network(LATENCY, BANDWIDTH)
        self._tell(Order(number=next(self._numbers), setting=setting, side=side))

    def wait_until_prepared(self) -> None:
        self._words(f"preparing {self._what}", DEADLINE)
        assert self._setting is not None, "it was to be prepared"
        self._set_network(self._setting.latency, self._setting.bandwidth)

    def begin(self, moment: Seconds) -> None:
        self._tell(moment)

    def finish(self) -> list[Answer]:
        """An answer per worker."""
        assert self._setting is not None, "it has begun"
        patience = self._setting.length + DEADLINE
        *answers, lost = self._words(f"training {self._what}", patience)
        if lost:
            raise LabError(
                f"the parameter server lost {len(lost)} workers: {lost[0]}",
                expected="all to leave in good order",
                fix="report it, with what it says",
            )
        return answers

    def trouble(self) -> str | None:
        """Why the emulated network was no good since this was last asked, if it was not."""
        return self._lab.report(reset=True).switch_timing.trouble

    def _set_network(self, latency: Seconds, bandwidth: BytesPerSecond) -> None:
        self._lab.change(
            LinkChange(at=0.0, source=REGION, target=REGION, latency=latency, bandwidth=bandwidth)
        )

    def _tell(self, word: object) -> None:
        for pipe in self._pipes:
            pipe.send(word)

    def _words(self, action: str, patience: Seconds) -> list[Any]:
        return word_of_each(self._pipes, self._lab.children, action, patience)


def run_together(
    lanes: Sequence[Workers], jobs: Sequence[tuple[Setting, Side]]
) -> list[list[Answer]]:
    """Each job on workers of its own, all at the same time."""
    used = lanes[: len(jobs)]
    for lane, job in zip(used, jobs, strict=True):
        lane.prepare(*job)
    for lane in used:
        lane.wait_until_prepared()
    moment = time.monotonic() + _HEAD_START
    for lane in used:
        lane.begin(moment)
    return [lane.finish() for lane in used]
