"""The command `polyrhythm`: parses, joins the folders, and turns errors into exit statuses.

0 done; 1 it failed while running; 2 something the user can put right; 130 interrupted.
Everything heavy is imported inside its command, so that --help stays quick.
"""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from polyrhythm import __version__
from polyrhythm.errors import PeerError, UserError, WorkerError
from polyrhythm.run.job import Job, Settings, new_run_folder

if TYPE_CHECKING:
    from rich.console import Console

    from polyrhythm.run.launch import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Train a small GPT on Python's own source, on stages x pipelines processes of this machine.

    Under torchrun it takes the processes that torchrun started instead:
    torchrun --nproc-per-node=4 -m polyrhythm demo
    """

    settings: tyro.conf.OmitArgPrefixes[Settings] = field(default_factory=Settings)
    out: Path = Path("runs")
    """Folder in which the run gets a folder of its own."""

    def run(self, console: "Console") -> int:
        job = Job.of(self.settings)
        from polyrhythm.run.launch import Place

        place = Place.from_environment(os.environ)
        run = self._run_here(job, console) if place is None else self._run_at(place, job, console)
        if run is not None:
            self._finish(run, console)
        return 0

    def _run_here(self, job: Job, console: "Console") -> Path:
        from polyrhythm.events import merge
        from polyrhythm.observe.progress import Progress
        from polyrhythm.run.launch import LocalJob
        from polyrhythm.run.train import load_text, train

        text = load_text(job.settings)
        run = self._begin(job, console)
        try:
            with (
                LocalJob(
                    lambda place: train(place, job, text, lambda: run),
                    job.plan.num_workers,
                    output_folder=run / "workers",
                ) as workers,
                Progress(run, num_steps=job.settings.steps, console=console) as progress,
            ):
                while not workers.wait(0.2):
                    progress.update()
        finally:
            merge(run)
        return run

    def _run_at(self, place: "Place", job: Job, console: "Console") -> Path | None:
        """As one process of torchrun's; rank 0 also shows the progress. None on the other ranks."""
        from polyrhythm.events import merge
        from polyrhythm.observe.progress import Progress
        from polyrhythm.run.train import load_text, train

        job.check_processes(place.world_size)
        text = load_text(job.settings)
        if place.rank > 0:
            train(place, job, text, lambda: Path())
            return None
        run = self._begin(job, console)
        done = threading.Event()
        with Progress(run, num_steps=job.settings.steps, console=console) as progress:

            def follow() -> None:
                while not done.wait(0.2):
                    progress.update()

            follower = threading.Thread(target=follow, daemon=True)
            follower.start()
            try:
                train(place, job, text, lambda: run)
            finally:
                done.set()
                follower.join()
        merge(run)
        return run

    def _begin(self, job: Job, console: "Console") -> Path:
        run = new_run_folder(self.out, "demo")
        job.save(run)
        plan = job.plan
        console.print(
            f"{plan.num_stages} stages x {plan.num_pipelines} pipelines = "
            f"{plan.num_workers} processes, schedule {job.settings.schedule}, "
            f"{job.settings.steps} steps",
            highlight=False,
        )
        return run

    def _finish(self, run: Path, console: "Console") -> None:
        from polyrhythm.events import read_run
        from polyrhythm.observe.summary import Summary

        Summary.of(read_run(run)).show(console)
        console.print(f"run folder: {run}", highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Doctor:
    """Say what this machine has for training and the lab, and how to get what is missing."""

    def run(self, console: "Console") -> int:
        from polyrhythm.lab import abilities
        from polyrhythm.observe import doctor
        from polyrhythm.run import machine

        broken = doctor.show(
            console,
            training=machine.findings(),
            lab=abilities.findings(),
            extras=doctor.extras(),
        )
        return 1 if broken else 0


@dataclass(frozen=True, slots=True)
class Show:
    """Check a description and print it: a file (TOML or JSON), or the name of a bundled network."""

    kind: tyro.conf.Positional[Literal["cluster", "model", "scenario"]]
    """What the file describes."""
    file: tyro.conf.Positional[str]
    """The file; for a cluster also a bundled network such as case5_worldwide."""

    def run(self, console: "Console") -> int:
        from polyrhythm.observe import description

        description.show(self.kind, self.file, console)
        return 0


Command = (
    Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
    | Annotated[Show, tyro.conf.subcommand("show")]
)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console entry point; ends the process with the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--version"]:
        print(f"polyrhythm {__version__}")
        sys.exit(0)
    try:
        command: Command = tyro.cli(
            Command,
            prog="polyrhythm",
            args=arguments,
            description="Train one PyTorch model on machines that keep different time.",
        )
        from rich.console import Console

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        sys.exit(command.run(Console()))
    except UserError as error:
        status, message = 2, str(error)
    except WorkerError as error:
        status, message = (2 if error.status == 2 else 1), str(error)
    except PeerError as error:
        status, message = 1, str(error)
    except KeyboardInterrupt:
        status, message = 130, "interrupted"
    print(f"error: {message}", file=sys.stderr)
    sys.exit(status)
