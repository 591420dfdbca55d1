"""`polyrhythm coordinator`: run a job's coordinator as a separate process; it ends with the job."""

import contextlib
import gc
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from polyrhythm.errors import PolicyError
from polyrhythm.processes import exit_on_sigterm

if TYPE_CHECKING:
    from rich.console import Console

    from polyrhythm.run.coordinator.server import Coordinator
    from polyrhythm.sync.scheduler import Scheduler
    from polyrhythm.sync.setup import Setup
    from polyrhythm.types import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysCommand:
    """Write the keys of a job to a new file that only its owner can read.

    Under torchrun: copy the file to each machine, as a secret, and set POLYRHYTHM_KEYS to its path.
    """

    path: tyro.conf.Positional[Path] = Path("job.keys")
    """The file to write."""

    def run(self, console: "Console") -> int:
        from polyrhythm.run.coordinator.keys import KEYS_VARIABLE, JobKeys

        JobKeys.new().save(self.path)
        line = f"new keys in {self.path}: copy it to each machine, as a secret; with torchrun, set"
        _print(console, f"{line} {KEYS_VARIABLE}={self.path}")
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorCommand:
    """Form averaging groups for the workers of one job, on any machines with the job's keys.

    By default the process of rank 0 does this; a separate coordinator survives the loss of any
    worker. It serves one job and ends when all workers have left (status 0) or are lost (1).
    Ctrl-C ends it earlier.
    """

    bind: str = "tcp://0.0.0.0:29600"
    """Address and port that workers connect to; port 0 selects a free one."""
    policy: str = "adaptive"
    """Name of the group policy, such as adaptive, age, partial_reduce or all_reduce."""
    num_stages: int = 1
    """Number of stages of the model; each stage averages separately."""
    num_pipelines: int
    """Number of pipelines, each of which has all stages."""
    options: tuple[str, ...] = ()
    """Options of the policy: name=value, repeatable, or one JSON object."""
    every: int | None = None
    """Steps between two averages; must match the workers' value."""
    seed: int = 0
    """Seed of random policies; must match the workers' value."""
    keys: Path = Path("job.keys")
    """File with the job's keys; written if it does not exist. Each worker needs a copy."""
    log: Path | None = None
    """Folder for scheduler.jsonl, the log of all events and decisions, for `polyrhythm replay`."""
    heartbeat_timeout: float = 15.0
    """Seconds without a heartbeat after which a worker counts as dead."""
    startup_timeout: float = 60.0
    """Seconds that the first worker waits for the others before training starts."""

    def run(self, console: "Console") -> int:
        from polyrhythm.observe.counters import counters_text
        from polyrhythm.run.coordinator.keys import JobKeys
        from polyrhythm.run.coordinator.server import Coordinator
        from polyrhythm.sync.decision_log import LOG_NAME

        setup, has_keys = self._setup(), self.keys.exists()
        keys = JobKeys.load(self.keys) if has_keys else JobKeys.new()
        log = None if self.log is None else self.log / LOG_NAME
        last_present: list[Worker] = []  # the last non-empty set of present workers

        def log_info(line: str) -> None:
            _print(console, line)
            last_present[:] = coordinator.present or last_present

        coordinator = Coordinator(
            setup,
            bind=self.bind,
            keys=keys.server_keys,
            log=log,
            heartbeat_timeout=self.heartbeat_timeout,
            startup_timeout=self.startup_timeout,
            log_info=log_info,
        )
        exit_on_sigterm()
        gc.freeze()  # collecting the imported modules' objects took 40 ms each time
        with coordinator:
            if not has_keys:  # after all other arguments are accepted
                keys.save(self.keys)
                _print(console, f"new keys in {self.keys}: copy it to each machine, as a secret")
            try:
                self._print_banner(coordinator, setup, log, console)
                _wait_until_over(coordinator, console)
                status, why = _exit_status(coordinator.scheduler, last_present)
                if coordinator.is_over:
                    _print(console, why)
            except KeyboardInterrupt:  # the user ends it before the job ends
                status = 130
                _print(console, "stopped")
            finally:
                _print(console, f"in all: {counters_text(coordinator.counters)}")
        return status

    def _setup(self) -> "Setup":
        from polyrhythm.sync.setup import Setup, at_flag, parse_options

        options = parse_options(self.options, flag="--options")
        try:
            return Setup(
                policy=self.policy,
                num_stages=self.num_stages,
                num_pipelines=self.num_pipelines,
                options=options,
                every=self.every,
                seed=self.seed,
            )
        except PolicyError as error:
            raise at_flag(error, flag="--options") from None

    def _print_banner(
        self, coordinator: "Coordinator", setup: "Setup", log: Path | None, console: "Console"
    ) -> None:
        from polyrhythm.tables import print_line

        address = coordinator.address
        for any_address in ("//0.0.0.0:", "//[::]:"):
            address = address.replace(any_address, f"//{socket.gethostname()}:")
        shared = {"options": setup.options, "every": self.every, "seed": self.seed}
        arguments = "".join(f"{name}={value!r}, " for name, value in shared.items() if value)
        for line in (
            f"coordinator at {coordinator.address}: {setup.text}, {self.num_stages} stages x "
            f"{self.num_pipelines} pipelines = {self.num_stages * self.num_pipelines} workers",
            f"in each worker: GroupSync(model, optimizer, {self.policy!r}, {arguments}"
            f"coordinator={address!r}, keys={str(self.keys)!r})",
            *([] if log is None else [f"log: {log}"]),
            "it ends when all workers have left; Ctrl-C ends it before",
        ):
            print_line(console, line)


def _print(console: "Console", line: str) -> None:
    """Print a line; a closed pipe (`| head`) must not end the job."""
    from polyrhythm.tables import print_line

    with contextlib.suppress(OSError, SystemExit):  # rich turns a BrokenPipeError into SystemExit
        print_line(console, line)


def _wait_until_over(coordinator: "Coordinator", console: "Console") -> None:
    """Wait until the job is over or the coordinator has failed; closing it raises its error."""
    has_refused = False
    while not coordinator.wait(1.0) and not coordinator.is_over:
        if not has_refused and coordinator.counters["unauthenticated"]:
            has_refused = True  # print it once: a client without keys tries again and again
            _print(console, "refused: a connection without this job's keys")


def _exit_status(scheduler: "Scheduler", last: Sequence["Worker"]) -> tuple[int, str]:
    """Return the exit status and its reason: 0 if the last present worker left in good order."""
    from polyrhythm.sync.members import MemberStatus

    statuses = {worker: member.status for worker, member in scheduler.membership.members.items()}
    not_lost = (MemberStatus.ABSENT, MemberStatus.LEFT)
    lost = [worker for worker, status in statuses.items() if status not in not_lost]
    names = ", ".join(map(str, lost))
    if not lost:
        return 0, "all workers have left: the job is over"
    if MemberStatus.LEFT not in statuses.values():
        return 1, "all workers are lost"
    if set(last) <= set(lost):
        return 1, f"the last worker is lost (lost in all: {names})"
    return 0, f"all workers have left, except {names} (lost): the job is over"
