"""Run one program on every host of a lab, as torchrun would, while a scenario plays.

Programs on hosts are each other's peers, or have nothing to do with one another: what a failure of
one means for the rest is for whoever asks (`is_one_job`).
"""

import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.scenario import Scenario
from polyrhythm.errors import LabError, WorkerError
from polyrhythm.lab.lab import Lab
from polyrhythm.lab.namespace import become_lord
from polyrhythm.lab.program import PRELOADED, become, findable, preload
from polyrhythm.lab.timeline import absent_at_first
from polyrhythm.processes import BAD_INPUT, PEER_LOST, TOLD_TO_END, Child, end_all, wait_for_any
from polyrhythm.types import Seconds

TIMED_OUT = 124  # as the program `timeout` has it
_LAB_PORT = 29500  # every lab has a network of its own: the port is free
_PATIENCE: Seconds = 2.0  # until whoever was lost is seen to have failed


@dataclass(slots=True, kw_only=True)
class Rehearsal:
    """`say` gets a line about whatever ends or goes wrong.

    `seats` are the hosts of the processes, by rank: every one once, unless it is said. Output goes
    to a file per process in the folder `output`, but for the ranks `shown`. `after` is called on
    the host when the program has ended well. In `is_one_job` the first process that fails ends
    all: `run` raises WorkerError.
    """

    cluster: Cluster
    scenario: Scenario
    program: Sequence[str]
    environment: dict[str, str]  # beside torchrun's
    output: Path | None
    say: Callable[[str], None]
    seats: tuple[str, ...] = ()
    shown: Collection[int] = ()
    after: Callable[[], None] | None = None
    is_one_job: bool = False
    preloaded: Sequence[str] = PRELOADED  # modules
    _running: dict[int, Child] = field(default_factory=dict, init=False)  # by rank
    _started: dict[int, Seconds] = field(default_factory=dict, init=False)  # on the clock
    _lives: Counter[int] = field(default_factory=Counter, init=False)
    _failed: dict[int, Child] = field(default_factory=dict, init=False)
    _failed_at: Seconds | None = field(default=None, init=False)  # the first of them
    _is_noticed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.scenario.check(self.cluster)
        self.seats = self.seats or tuple(device.name for device in self.cluster.devices)
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

    def give_notice(self) -> None:
        """SIGTERM to every program, which may save what it has; `run` goes on until they end."""
        self._is_noticed = True
        for child in self._running.values():
            if child.status is None:
                os.kill(child.pid, signal.SIGTERM)

    def run(self, *, name: str | None, timeout: Seconds | None) -> int:
        """On hosts with a network of their own; 0, or 1 if a program failed that nobody killed."""
        become_lord()  # before torch is loaded: it starts threads, and then it would be too late
        preload(self.program, self.preloaded)
        with Lab(self.cluster, self.scenario, name=name) as lab:
            if warning := lab.overload():
                self.say(f"warning: {warning}")
            addresses = {host: lab.address(host) for host in lab.hosts}
            self.say(f"lab {lab.name}: {len(lab.hosts)} hosts")
            lab.play()
            status = self._go_on(lab, addresses[self.seats[0]], _LAB_PORT, timeout)
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
        preload(self.program, self.preloaded)
        self.environment["GLOO_SOCKET_IFNAME"] = "lo"
        try:
            return self._go_on(None, "127.0.0.1", port, timeout)
        finally:
            end_all(list(self._running.values()))

    def _go_on(self, lab: Lab | None, master: str, port: int, timeout: Seconds | None) -> int:
        """Start everybody who is there, then whoever joins, until all have ended."""
        began = lab.started_at if lab and lab.started_at else time.monotonic()
        absent = absent_at_first(self.scenario) if lab else frozenset()
        joins = sorted((join.at, join.device) for join in self.scenario.join) if lab else []
        size = str(len(self.seats))
        common = {"MASTER_ADDR": master, "MASTER_PORT": str(port), "WORLD_SIZE": size}
        for rank, host in enumerate(self.seats):
            if host not in absent:
                self._start(lab, rank, common, began)
        while self._running or joins:
            now = time.monotonic() - began
            if timeout is not None and now >= timeout:
                running = ", ".join(dict.fromkeys(self.seats[rank] for rank in self._running))
                self.say(f"timeout after {timeout:g} s, still running: {running}")
                return TIMED_OUT
            if joins and joins[0][0] <= now:
                joined = joins.pop(0)[1]
                for rank in (rank for rank, host in enumerate(self.seats) if host == joined):
                    self._start(lab, rank, common, began)
            until = min(1.0, joins[0][0] - now if joins else 1.0)
            if lab is not None:
                lab.wait_for_any(list(self._running.values()), until)
            else:
                wait_for_any(list(self._running.values()), until)
            self._collect(time.monotonic() - began)
        if self.is_one_job and self._failed:  # and it was no failure
            return TOLD_TO_END
        return 1 if self._failed else 0

    def _start(self, lab: Lab | None, rank: int, common: dict[str, str], began: Seconds) -> None:
        host = self.seats[rank]
        local_rank = self.seats[:rank].count(host)
        index = [device.name for device in self.cluster.devices].index(host)
        environment = {
            **common,
            "RANK": str(rank),
            "GROUP_RANK": str(list(dict.fromkeys(self.seats)).index(host)),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.seats.count(host)),
            "POLYRHYTHM_DEVICE": host,
            "POLYRHYTHM_DEVICE_INDEX": str(index),
            "POLYRHYTHM_STARTED_AT": str(began),
            **self.environment,
        }
        output = None
        if self.output is not None and rank not in self.shown:
            self._lives[rank] += 1
            name = host.replace("/", "-") + (f"-{local_rank}" if local_rank else "")
            life = f".{self._lives[rank]}" if self._lives[rank] > 1 else ""
            output = self.output / f"{name}{life}.log"
        if lab is not None:
            child = lab.spawn(host, self._work, environment, output=output)
        else:
            child = Child(partial(self._work, environment), output=output)
        self._running[rank] = child
        self._started[rank] = time.monotonic() - began

    def _work(self, environment: dict[str, str]) -> None:
        become(self.program, environment)
        if self.after is not None:
            self.after()

    def _collect(self, now: Seconds) -> None:
        for rank, child in list(self._running.items()):
            if child.status is None:
                continue
            del self._running[rank]
            host = self.seats[rank]
            if self.is_one_job and child.output and not child.output.stat().st_size:
                child.output.unlink()
            kills = [kill.at for kill in self.scenario.kill if kill.device == host]
            by_scenario = any(self._started[rank] <= at <= now or at == 0 for at in kills)
            if by_scenario and child.status == -signal.SIGKILL:
                self.say(f"{host} was killed by the scenario")
            elif child.status:
                self._failed[rank] = child
                if not self.is_one_job:
                    self.say(f"{host} {child.reason}")
        if self.is_one_job:
            self._raise_failure(now)

    def _raise_failure(self, now: Seconds) -> None:
        """Of one that failed by itself, not of those that lost it as a peer.

        They may be seen first, and what is refused is refused by all: they have a moment. Who was
        told to end may be saving, and is left alone.
        """
        status = {rank: child.status or 0 for rank, child in self._failed.items()}
        if self._is_noticed:  # some may not have begun to listen
            status = {
                rank: TOLD_TO_END if s == -signal.SIGTERM else s for rank, s in status.items()
            }
        by_itself = set(status.values()) - {PEER_LOST, TOLD_TO_END}
        if not status or (TOLD_TO_END in status.values() and not by_itself):
            return
        if self._failed_at is None:
            self._failed_at = now
        if by_itself - {BAD_INPUT} or not self._running or now - self._failed_at > _PATIENCE:
            later = (BAD_INPUT, PEER_LOST, TOLD_TO_END)  # in this order
            rank = min(status, key=lambda r: (status[r] in later and later.index(status[r]) + 1, r))
            raise self._error(rank)

    def _error(self, rank: int) -> WorkerError:
        child = self._failed[rank]
        spoke = child.output is not None and child.output.exists()
        return WorkerError(
            rank,
            self.seats[rank],
            child.reason,
            status=child.status or 0,
            output=str(child.output) if spoke else None,
        )
