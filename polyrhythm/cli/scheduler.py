"""`polyrhythm scheduler`: the scheduler of a job as a process of its own, until it is stopped."""

import contextlib
import gc
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.cli.ending import end_on_sigterm
from polyrhythm.errors import PolicyError

if TYPE_CHECKING:
    from rich.console import Console

    from polyrhythm.run.coordinator.coordinator import Coordinator
    from polyrhythm.run.coordinator.keys import JobKeys
    from polyrhythm.run.coordinator.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCommand:
    """Decide who averages with whom, for workers on any machines that have the job's keys.

    Without it the process of rank 0 does so. On its own it outlives any worker.
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
    silence: float = 15.0
    """Seconds after which a worker that is not heard is taken to be dead."""
    startup: float = 60.0
    """Seconds that the first worker waits for the last, before they begin."""

    def run(self, console: "Console") -> int:
        from polyrhythm.run.coordinator.coordinator import Coordinator
        from polyrhythm.run.coordinator.decision_log import NAME
        from polyrhythm.run.coordinator.setup import Setup

        setup = Setup(
            policy=self.policy,
            num_stages=self.stages,
            num_pipelines=self.pipelines,
            options=_parsed(self.options),
            every=self.every,
            seed=self.seed,
        )
        log = None if self.log is None else self.log / NAME
        coordinator = Coordinator.of(
            setup,
            bind=self.bind,
            keys=self._keys(console),
            log=log,
            silence=self.silence,
            startup=self.startup,
            say=partial(_say, console),
        )
        end_on_sigterm()
        gc.freeze()  # all that was imported: to go through it, now and then, took 40 ms
        with coordinator:
            try:
                self._introduce(coordinator, setup, log, console)
                while not coordinator.wait(1.0):
                    pass
            finally:
                _summarise(coordinator, console)
        return 0

    def _keys(self, console: "Console") -> "JobKeys":
        from polyrhythm.run.coordinator.keys import JobKeys
        from polyrhythm.tables import print_line

        if self.keys.exists():
            return JobKeys.load(self.keys)
        keys = JobKeys.new()
        keys.save(self.keys)
        print_line(console, f"new keys in {self.keys}: copy it to each machine, as a secret")
        return keys

    def _introduce(
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
            "Ctrl-C ends it",
        ):
            print_line(console, line)


def _say(console: "Console", line: str) -> None:
    """A reader that has gone (`| head`) does not end the job."""
    from polyrhythm.tables import print_line

    with contextlib.suppress(OSError, SystemExit):  # rich makes the one of the other
        print_line(console, line)


def _parsed(texts: tuple[str, ...]) -> dict[str, object]:
    """Options as the policy takes them."""
    import msgspec

    options: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        is_object = text.startswith("{")
        try:
            if is_object:
                options |= msgspec.json.decode(text, type=dict[str, object])
            else:
                options[name] = msgspec.json.decode(value)
            problem = ""
        except msgspec.MsgspecError as error:
            options[name] = value  # text needs no quotes
            problem = str(error) if is_object else ""
        if problem or not (is_object or (name and equals)):
            raise PolicyError(
                f"--options {text!r}" + (f": {problem}" if problem else ""),
                expected="name=value, or a JSON object",
                fix="--options group_size=4 window=rate",
            )
    return options


def _summarise(coordinator: "Coordinator", console: "Console") -> None:
    from polyrhythm.tables import print_line

    counters = coordinator.counters
    counted = ", ".join(f"{name} {counters[name]:,}" for name in sorted(counters))
    print_line(console, f"in all: {counted or 'nothing happened'}")
