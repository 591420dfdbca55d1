"""`polyrhythm train`: a script that uses the Trainer, on processes of this machine or of a lab."""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from polyrhythm.cli.ending import end_on_sigterm
from polyrhythm.errors import LaunchError

if TYPE_CHECKING:
    from rich.console import Console

    from polyrhythm.plan.plan import Plan
    from polyrhythm.run.launch import Place
    from polyrhythm.types import Seconds


_LOOK: "Seconds" = 60.0  # at processes, at least that often


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCommand:
    """Run a training script in several processes, each of which makes the same Trainer.

    polyrhythm train script.py --local 4

    polyrhythm train script.py --lab cluster.toml --plan plan.json -- --lr 1e-3

    On many machines use torchrun, which starts the same script.
    """

    script: tyro.conf.Positional[Path]
    """A Python file."""
    arguments: tyro.conf.Positional[tuple[str, ...]] = ()
    """After --: what the script gets."""
    local: int | None = None
    """Processes on this machine; by default as many as the plan has workers, or one."""
    lab: str | None = None
    """A cluster to rehearse on this machine, one process per device: a file, or a bundled one."""
    scenario: str | None = None
    """What happens in the lab meanwhile: a file, or a bundled scenario such as sdpipe_b."""
    plan: Path | None = None
    """Who does what, from `polyrhythm plan`; a plan that the script itself names comes first."""
    output: Path = Path("runs/output")
    """Folder for the output of all processes but the first, whose output is shown."""
    timeout: float | None = None
    """End everything after so many seconds."""

    def run(self, console: "Console") -> int:
        from polyrhythm.plan.plan import VARIABLE, Plan

        self._check()
        plan = None if self.plan is None else Plan.load(self.plan)
        if self.plan is not None:
            os.environ[VARIABLE] = str(self.plan.absolute())
        if self.lab is not None:
            return self._run_in_lab(self.lab, console)
        return self._run_here(plan)

    def _run_here(self, plan: "Plan | None") -> int:
        from polyrhythm.lab.program import become, preload
        from polyrhythm.lab.rehearse import TIMED_OUT
        from polyrhythm.run.launch import LocalJob

        program = self._program()
        number = self.local or (1 if plan is None else plan.num_workers)
        preload(program)
        end_on_sigterm()

        def work(place: "Place") -> None:
            become(program, {})
            self._check_fitted()

        with LocalJob(work, number, output_folder=self.output, shown=(0,)) as job:
            if self.timeout is not None and not job.wait(self.timeout):
                print(f"timeout after {self.timeout:g} s", file=sys.stderr)
                return TIMED_OUT
            while not job.wait(_LOOK):
                pass
        return 0

    def _run_in_lab(self, cluster: str, console: "Console") -> int:
        from polyrhythm.cli.lab import Run

        return Run(
            cluster=cluster,
            program=tuple(self._program()),
            scenario=self.scenario,
            timeout=self.timeout,
        ).run(console)

    def _check_fitted(self) -> None:
        trainer = sys.modules.get("polyrhythm.run.trainer.trainer")
        if trainer is None or not trainer.Trainer.num_fits:
            raise LaunchError(
                f"{self.script} has ended without training",
                expected="a script that makes a polyrhythm.Trainer and calls its fit",
                fix="call trainer.fit(steps=...); or start it with python, if it is to do else",
            )

    def _program(self) -> list[str]:
        return [sys.executable, str(self.script), *self.arguments]

    def _check(self) -> None:
        written = shlex.join(["polyrhythm", "train", str(self.script)])
        if not self.script.is_file():
            raise LaunchError(
                f"{self.script}: no such file", expected="a Python script", fix="check its path"
            )
        if self.local is not None and self.local < 1:
            raise LaunchError(
                f"--local {self.local}", expected="1 process or more", fix=f"{written} --local 4"
            )
        if self.local is not None and self.lab is not None:
            raise LaunchError(
                f"--local {self.local} with --lab {self.lab}",
                expected="one of the two: a lab has a process per device",
                fix=f"{written} --lab {self.lab}",
            )
        if self.scenario is not None and self.lab is None:
            raise LaunchError(
                f"--scenario {self.scenario} without a lab",
                expected="a cluster that it happens to",
                fix=f"{written} --lab CLUSTER --scenario {self.scenario}",
            )
