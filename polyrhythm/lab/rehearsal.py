"""Run one program on every host of a lab, as torchrun would, while a scenario plays.

The caller decides whether the processes form one job, so that a failure ends all (`is_one_job`).
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.scenario import Scenario
from polyrhythm.errors import LabError, WorkerError
from polyrhythm.lab.lab import Lab
from polyrhythm.lab.namespace import enter_user_namespace
from polyrhythm.lab.program import PRELOADED, is_on_path, preload, run_program
from polyrhythm.processes import (
    BAD_INPUT,
    PEER_LOST,
    TERMINATED,
    Child,
    end_all,
    is_loss,
    reserve_port,
    wait_for_any,
)
from polyrhythm.types import Seconds

TIMED_OUT = 124  # as the program `timeout` has it
_LAB_PORT = 29500  # free: every lab has its own network
_COORDINATOR_PORTS = 29501, 29502
_FAILURE_TIMEOUT: Seconds = 2.0  # wait for the failed process itself, after its peers lost it


class JobCoordination(Protocol):
    """What lets the others of a job go on after a loss; a caller of Rehearsal implements it."""

    def start(self, address: str, ports: tuple[int, int], start: Callable[..., Child]) -> None:
        """Start its process on a host with this address, as `start(function, output=...)`."""
        ...

    def join(self, rank: int) -> None:
        """In the process of a rank: use the coordination."""
        ...

    def report_exit(self, rank: int, why: str) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Rehearsal:
    """One program on every host; `log` is called with a line per failure, end or warning.

    `rank_hosts` maps ranks to hosts, by default one rank per host. Each process writes to a file in
    the folder `output`, except the ranks `shown_ranks`. `on_success` runs on the host after the
    program succeeds. With `is_one_job` the first failure ends all: `run` raises WorkerError. With
    `coordination`, too, the others go on without a process that was killed, has left or is cut off.
    """

    cluster: Cluster
    scenario: Scenario
    program: Sequence[str]
    environment: dict[str, str]  # in addition to torchrun's variables
    output: Path | None
    log: Callable[[str], None]
    rank_hosts: tuple[str, ...] = ()
    shown_ranks: Collection[int] = ()
    on_success: Callable[[], None] | None = None
    is_one_job: bool = False
    coordination: JobCoordination | None = None
    preloaded: Sequence[str] = PRELOADED  # modules
    _running: dict[int, Child] = field(default_factory=dict, init=False)  # by rank
    _started: dict[int, Seconds] = field(default_factory=dict, init=False)  # scenario time
    _num_starts: Counter[int] = field(default_factory=Counter, init=False)
    _failed: dict[int, Child] = field(default_factory=dict, init=False)
    _failed_at: Seconds | None = field(default=None, init=False)  # the first of them
    _stop_requested: bool = field(default=False, init=False)
    _lost: dict[int, Child] = field(default_factory=dict, init=False)  # the others go on
    _has_succeeded: bool = field(default=False, init=False)  # one of them

    def __post_init__(self) -> None:
        self.scenario.check(self.cluster)
        self.rank_hosts = self.rank_hosts or tuple(device.name for device in self.cluster.devices)
        if not is_on_path(self.program[0]):
            raise LabError(
                f"program {self.program[0]!r} cannot be run",
                expected="a program on the PATH, or the path of an executable file",
                fix="check its name; a script needs its interpreter: -- python my_script.py",
            )
        if self.output is not None:
            try:
                self.output.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LabError(
                    f"output folder {self.output}: {error.strerror}",
                    expected="a writable folder",
                    fix="pass another one: --output FOLDER",
                ) from None

    def request_stop(self) -> None:
        """Send SIGTERM to all programs, which may save a checkpoint; `run` waits for their end."""
        self._stop_requested = True
        for child in self._running.values():
            if child.status is None:
                os.kill(child.pid, signal.SIGTERM)

    def run(self, *, name: str | None, timeout: Seconds | None) -> int:
        """Run in a lab; return 0, or 1 if a program failed that the scenario did not kill."""
        enter_user_namespace()  # before importing torch: its threads would make this fail
        preload(self.program, self.preloaded)
        with Lab(self.cluster, self.scenario, name=name) as lab:
            if warning := lab.overload():
                self.log(f"warning: {warning}")
            addresses = {host: lab.address(host) for host in lab.hosts}
            self.log(f"lab {lab.name}: {len(lab.hosts)} hosts")
            if self.coordination is not None:
                host = self._coordinator_host()
                start = partial(lab.spawn, host)
                self.coordination.start(addresses[host], _COORDINATOR_PORTS, start)
            try:
                lab.play()
                status = self._run_all(lab, addresses[self.rank_hosts[0]], _LAB_PORT, timeout)
            finally:
                if self.coordination is not None:
                    self.coordination.close()
            switch_timing = lab.report().switch_timing
            self.log(f"switch: {switch_timing}")
            if switch_timing.trouble:
                self.log(f"warning: the lab was late: {switch_timing.trouble}")
        return status

    def _coordinator_host(self) -> str:
        """Return the first of the hosts that lose fewest links and are not killed or paused.

        All others of a host that is cut off would be fenced, if the coordinator were there.
        """
        events = self.scenario.kill, self.scenario.pause, self.scenario.join
        touched = {event.device for kind in events for event in kind}
        lost = (change for change in self.scenario.link if change.up is False)
        links = {frozenset(pair) for change in lost for pair in change.pairs(self.cluster)}
        num_lost = Counter(host for link in links for host in link)
        return min(self.rank_hosts, key=lambda host: (host in touched, num_lost[host]))

    def run_in_process(self, *, timeout: Seconds | None) -> int:
        """Run on this machine's own network; of the scenario only slow workers are played."""
        ignored = [
            kind for kind in ("link", "pause", "kill", "join") if getattr(self.scenario, kind)
        ]
        if ignored:
            self.log(f"warning: without a lab network these events are not played: {ignored}")
        preload(self.program, self.preloaded)
        self.environment["GLOO_SOCKET_IFNAME"] = "lo"
        with reserve_port() as reserved:
            address, port = reserved.getsockname()
            try:
                return self._run_all(None, address, port, timeout)
            finally:
                end_all(list(self._running.values()))

    def _run_all(self, lab: Lab | None, master: str, port: int, timeout: Seconds | None) -> int:
        """Start all hosts that are present, then those that join; wait until all have ended."""
        start = lab.started_at if lab and lab.started_at else time.monotonic()
        absent = self.scenario.absent_at_start if lab else set()
        joins = sorted((join.at, join.device) for join in self.scenario.join) if lab else []
        size = str(len(self.rank_hosts))
        common = {"MASTER_ADDR": master, "MASTER_PORT": str(port), "WORLD_SIZE": size}
        for rank, host in enumerate(self.rank_hosts):
            if host not in absent:
                self._start(lab, rank, common, start)
        while self._running or joins:
            now = time.monotonic() - start
            if timeout is not None and now >= timeout:
                running = ", ".join(dict.fromkeys(self.rank_hosts[rank] for rank in self._running))
                self.log(f"timeout after {timeout:g} s, still running: {running}")
                return TIMED_OUT
            if joins and joins[0][0] <= now:
                joined = joins.pop(0)[1]
                for rank in (rank for rank, host in enumerate(self.rank_hosts) if host == joined):
                    if self.coordination is not None and rank in self._started:
                        self.log(f"{joined} is back: its process cannot join the running job")
                    else:
                        self._start(lab, rank, common, start)
            wait_time = min(1.0, joins[0][0] - now if joins else 1.0)
            if lab is not None:
                lab.wait_for_any(list(self._running.values()), wait_time)
            else:
                wait_for_any(list(self._running.values()), wait_time)
            self._collect(time.monotonic() - start)
        return self._status()

    def _status(self) -> int:
        """Return the exit status when all have ended."""
        if self.coordination is not None and not self._stop_requested:
            if self._has_succeeded:
                return 0
            self.log("no process is left")
            is_stopped = TERMINATED in {child.status for child in self._lost.values()}
            return TERMINATED if is_stopped else 1
        if self.is_one_job and self._failed:  # all were terminated: real failures have raised
            return TERMINATED
        return 1 if self._failed else 0

    def _start(self, lab: Lab | None, rank: int, common: dict[str, str], start: Seconds) -> None:
        host = self.rank_hosts[rank]
        local_rank = self.rank_hosts[:rank].count(host)
        index = [device.name for device in self.cluster.devices].index(host)
        environment = {
            **common,
            "RANK": str(rank),
            "GROUP_RANK": str(list(dict.fromkeys(self.rank_hosts)).index(host)),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.rank_hosts.count(host)),
            "POLYRHYTHM_DEVICE": host,
            "POLYRHYTHM_DEVICE_INDEX": str(index),
            "POLYRHYTHM_STARTED_AT": str(start),
            **self.environment,
        }
        output = None
        if self.output is not None and rank not in self.shown_ranks:
            self._num_starts[rank] += 1
            name = host.replace("/", "-") + (f"-{local_rank}" if local_rank else "")
            suffix = f".{self._num_starts[rank]}" if self._num_starts[rank] > 1 else ""
            output = self.output / f"{name}{suffix}.log"
        if lab is not None:
            child = lab.spawn(
                host, self._work, rank, environment, output=output, keeps_failure=self.is_one_job
            )
        else:
            work = partial(self._work, rank, environment)
            child = Child(work, output=output, keeps_failure=self.is_one_job)
        self._running[rank] = child
        self._started[rank] = time.monotonic() - start

    def _work(self, rank: int, environment: dict[str, str]) -> None:
        if self.coordination is not None:
            self.coordination.join(rank)
        run_program(self.program, environment)
        if self.on_success is not None:
            self.on_success()

    def _collect(self, now: Seconds) -> None:
        for rank, child in list(self._running.items()):
            if child.status is None:
                continue
            del self._running[rank]
            host = self.rank_hosts[rank]
            if self.is_one_job and child.output and not child.output.stat().st_size:
                child.output.unlink()
            kills = [kill.at for kill in self.scenario.kill if kill.device == host]
            by_scenario = any(self._started[rank] <= at <= now or at == 0 for at in kills)
            if by_scenario and child.status == -signal.SIGKILL:
                self.log(f"{host} was killed by the scenario")  # nobody reports a power cut
            elif self.coordination is not None and self._is_loss(child.status):
                self._lost[rank] = child
                reason, *rest = child.reason.splitlines()
                self.coordination.report_exit(rank, f"it {reason}")
                has_left = child.status == TERMINATED
                line = f"{host} {'has left' if has_left else reason}: the others go on"
                self.log("\n".join([line, *rest]))
            elif child.status:
                self._failed[rank] = child
                if not self.is_one_job:
                    self.log(f"{host} {child.reason}")
            else:
                self._has_succeeded = True
        if self.is_one_job:
            self._raise_failure(now)

    def _is_loss(self, status: int) -> bool:
        """Whether the others go on without a process with this status."""
        return is_loss(status) and not self._stop_requested

    def _raise_failure(self, now: Seconds) -> None:
        """Raise WorkerError for the process that failed by itself, not for peers that lost it.

        Peers may end first, and every process refuses bad input, so wait up to `_FAILURE_TIMEOUT`
        for another cause. Terminated processes may be saving, and raise nothing. Where the others
        go on, a process that has lost its peers was cut off from them.
        """
        status = {rank: child.status or 0 for rank, child in self._failed.items()}
        if self._stop_requested:  # some may not have installed their handler yet
            status = {rank: TERMINATED if s == -signal.SIGTERM else s for rank, s in status.items()}
        by_itself = set(status.values()) - {PEER_LOST, TERMINATED}
        if not status or (TERMINATED in status.values() and not by_itself):
            return
        if self.coordination and not by_itself and (self._running or self._has_succeeded):
            return
        if self._failed_at is None:
            self._failed_at = now
        if by_itself - {BAD_INPUT} or not self._running or now - self._failed_at > _FAILURE_TIMEOUT:
            last = (BAD_INPUT, PEER_LOST, TERMINATED)  # other statuses first, then in this order
            rank = min(
                status,
                key=lambda r: (
                    status[r] in last and last.index(status[r]) + 1,
                    not self._failed[r].failure.traceback,
                    r,
                ),
            )
            raise self._error(rank)

    def _error(self, rank: int) -> WorkerError:
        child = self._failed[rank]
        has_output = child.output is not None and child.output.exists()
        return WorkerError(
            rank,
            self.rank_hosts[rank],
            child.reason,
            status=child.status or 0,
            output=str(child.output) if has_output else None,
            traceback=child.failure.traceback,
        )
