"""torchft's DDP example under the same fault: from SIGKILL to the next step of the others.

It runs in the environment of `make baselines`. The timeouts of its lighthouse decide how soon a
lost replica is noticed: those of its README, or shorter ones.
"""

import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from polyrhythm.lab.program import exec_program
from polyrhythm.processes import Child
from polyrhythm.types import Seconds

_SCRIPT = Path(__file__).with_name("torchft_replica.py")
_ENVIRONMENT = Path(__file__).parents[2] / ".baselines"
_POLL: Seconds = 0.02
_NUM_WARM_UP = 10  # steps of all replicas before the fault


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Of torchft's lighthouse."""

    name: str
    join: Seconds  # for replicas whose heartbeats arrive, but which have not joined the quorum
    heartbeat: Seconds  # after which a replica that sends none is lost

    def __str__(self) -> str:
        return f"{self.name}: join {self.join:g} s, heartbeat {self.heartbeat:g} s"


# Heartbeats come each 0.1 s. Shorter than a second: a pause of Python or a busy core is a loss.
TIMEOUTS = (Timeouts("its example's", 10.0, 5.0), Timeouts("short", 1.0, 1.0))


def why_missing() -> str | None:
    """Return why torchft cannot run here; None if it can."""
    if (_ENVIRONMENT / ".installed").exists():  # written last
        return None
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"torchft has no wheel for {platform.machine()}, only for x86-64"
    return "torchft is not installed: run `make baselines` with Python 3.11"


def recovery(
    victim: int, timeouts: Timeouts, *, num_replicas: int, forward: Seconds, timeout: Seconds
) -> Seconds:
    """Return the time from SIGKILL to the end of the first step of all others without the victim.

    `forward`: of a step; its backward takes twice as long.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        milliseconds = (str(round(1e3 * each)) for each in (timeouts.join, timeouts.heartbeat))
        python = str(_ENVIRONMENT / "bin" / "python")
        command = [python, "-P", str(_SCRIPT), name, str(num_replicas), str(forward)]
        program = partial(exec_program, [*command, *milliseconds], {})
        job = _Job(folder, Child(program, output=folder / "log"), time.monotonic() + timeout)
        try:
            ranks = list(range(num_replicas))
            job.wait_until(
                lambda: all(len(job.ends(r, num_replicas)) >= _NUM_WARM_UP for r in ranks)
            )
            time.sleep(random.Random(victim).uniform(0, 3 * forward))  # to any time in a step
            killed = time.monotonic()
            os.kill(int((folder / f"pid{victim}").read_text()), signal.SIGKILL)
            ranks.remove(victim)

            def first_ends() -> list[list[Seconds]]:
                ends = [job.ends(rank, num_replicas - 1) for rank in ranks]
                return [[end for end in each if end > killed][:1] for each in ends]

            job.wait_until(lambda: all(first_ends()))
            return max(end for (end,) in first_ends()) - killed
        finally:
            job.child.end()


@dataclass(frozen=True, slots=True)
class _Job:
    folder: Path
    child: Child
    deadline: Seconds

    def ends(self, rank: int, num_replicas: int) -> list[Seconds]:
        """Return when steps of so many replicas have ended."""
        path = self.folder / f"steps{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        steps = [json.loads(line) for line in lines if line.endswith("\n")]
        return [step["end"] for step in steps if step["num"] == num_replicas]

    def wait_until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            time.sleep(_POLL)  # a wait for the child would never return: it has executed a program
            if self.child.status is not None or time.monotonic() > self.deadline:
                log = (self.folder / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"torchft {self.child.reason}\n{log}")
