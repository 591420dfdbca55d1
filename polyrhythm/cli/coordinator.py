"""`polyrhythm coordinator`: the scheduler of a job as a process of its own. It ends with the job."""

import contextlib
import gc
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.cli.signals import exit_on_sigterm
from polyrhythm.errors import PolicyError

if TYPE_CHECKING:
    from rich.console import Console

    from polyrhythm.run.coordinator.coordinator import Coordinator
    from polyrhythm.run.coordinator.keys import JobKeys
    from polyrhythm.sync.scheduler import Scheduler
    from polyrhythm.sync.setup import Setup
    from polyrhythm.types import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorCommand:
    """Decide who averages with whom, for workers on any machines that have the job's keys.

    Without it the process of rank 0 does so. On its own it outlives any worker. It serves one job
    and ends with it: when all workers have left (status 0), or all are lost (1). The next job needs
    a new one. Ctrl-C ends it before.
    """

    bind: str = "tcp://0.0.0.0:29600"
    """Address and port that workers connect to; port 0 for any that is free."""
    policy: str = "adaptive"
    """By its name, such as adaptive, age, partial_reduce or all_reduce."""
    stages: int = 1
    """Stages of the model, which average each on its own."""
    pipelines: int
    """Replicas of all stages."""
    options: tuple[str, ...] = ()
    """Of the policy: name=value, once or more, or one JSON object."""
    every: int | None = None
    """Steps from one average to the next, as the workers have it."""
    seed: int = 0
    """Of policies that choose at random, as the workers have it."""
    keys: Path = Path("job.keys")
    """The job's keys: written if the file is not there; each worker needs a copy."""
    log: Path | None = None
    """Folder for scheduler.jsonl: all that happened and was decided, to be replayed."""
    heartbeat_timeout: float = 15.0
    """Seconds after which a worker that is not heard is taken to be dead."""
    startup_timeout: float = 60.0
    """Seconds that the first worker waits for the last, before they begin."""

    def run(self, console: "Console") -> int:
        from polyrhythm.observe.counters import counters_text
        from polyrhythm.run.coordinator.coordinator import Coordinator
        from polyrhythm.sync.decision_log import LOG_NAME

        setup = self._setup()
        log = None if self.log is None else self.log / LOG_NAME
        here: list[Worker] = []  # when one came or went last, and anybody was left

        def log_info(line: str) -> None:
            _say(console, line)
            here[:] = coordinator.present or here

        coordinator = Coordinator.of(
            setup,
            bind=self.bind,
            keys=self._keys(console),
            log=log,
            heartbeat_timeout=self.heartbeat_timeout,
            startup_timeout=self.startup_timeout,
            log_info=log_info,
        )
        exit_on_sigterm()
        gc.freeze()  # all that was imported: to go through it, now and then, took 40 ms
        with coordinator:
            try:
                self._print_banner(coordinator, setup, log, console)
                _wait_until_over(coordinator, console)
                status, why = _exit_status(coordinator.scheduler, here)
                if coordinator.is_over:
                    _say(console, why)
            except KeyboardInterrupt:  # the way to end it before the job does
                status = 130
                _say(console, "stopped")
            finally:
                _say(console, f"in all: {counters_text(coordinator.counters)}")
        return status

    def _setup(self) -> "Setup":
        from polyrhythm.run.coordinator.options import at_flag, parse_options
        from polyrhythm.sync.setup import Setup

        options = parse_options(self.options, flag="--options")
        try:
            return Setup(
                policy=self.policy,
                num_stages=self.stages,
                num_pipelines=self.pipelines,
                options=options,
                every=self.every,
                seed=self.seed,
            )
        except PolicyError as error:
            raise at_flag(error, flag="--options") from None

    def _keys(self, console: "Console") -> "JobKeys":
        from polyrhythm.run.coordinator.keys import JobKeys
        from polyrhythm.tables import print_line

        if self.keys.exists():
            return JobKeys.load(self.keys)
        keys = JobKeys.new()
        keys.save(self.keys)
        print_line(console, f"new keys in {self.keys}: copy it to each machine, as a secret")
        return keys

    def _print_banner(
        self, coordinator: "Coordinator", setup: "Setup", log: Path | None, console: "Console"
    ) -> None:
        from polyrhythm.tables import print_line

        address = coordinator.address
        for anywhere in ("//0.0.0.0:", "//[::]:"):
            address = address.replace(anywhere, f"//{socket.gethostname()}:")
        alike = {"options": setup.options, "every": self.every, "seed": self.seed}
        given = "".join(f"{name}={value!r}, " for name, value in alike.items() if value)
        for line in (
            f"scheduler at {coordinator.address}: {setup.text}, {self.stages} stages x "
            f"{self.pipelines} pipelines = {self.stages * self.pipelines} workers",
            f"in each worker: GroupSync(model, optimizer, {self.policy!r}, {given}"
            f"coordinator={address!r}, keys={str(self.keys)!r})",
            *([] if log is None else [f"log: {log}"]),
            "it ends when all workers have left; Ctrl-C ends it before",
        ):
            print_line(console, line)


def _say(console: "Console", line: str) -> None:
    """A reader that has gone (`| head`) does not end the job."""
    from polyrhythm.tables import print_line

    with contextlib.suppress(OSError, SystemExit):  # rich makes the one of the other
        print_line(console, line)


def _wait_until_over(coordinator: "Coordinator", console: "Console") -> None:
    """Or until it has failed, which closing it will tell."""
    has_refused = False
    while not coordinator.wait(1.0) and not coordinator.is_over:
        if not has_refused and coordinator.counters["unauthenticated"]:
            has_refused = True  # once: whoever has no keys tries again and again
            _say(console, "refused: a connection without this job's keys")


def _exit_status(scheduler: "Scheduler", last: Sequence["Worker"]) -> tuple[int, str]:
    """The exit status, and why: a job has ended well if the last to go has left in good order."""
    from polyrhythm.sync.members import MemberStatus

    statuses = {worker: member.status for worker, member in scheduler.membership.members.items()}
    lost = [
        w
        for w, status in statuses.items()
        if status not in (MemberStatus.ABSENT, MemberStatus.LEFT)
    ]
    names = ", ".join(map(str, lost))
    if not lost:
        return 0, "all workers have left: the job is over"
    if MemberStatus.LEFT not in statuses.values():
        return 1, "all workers are lost"
    if set(last) <= set(lost):
        return 1, f"the last worker is lost (lost in all: {names})"
    return 0, f"all workers have left, except {names} (lost): the job is over"
