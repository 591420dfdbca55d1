"""`polyrhythm demo`: a real training run, here or in torchrun's processes, with live progress."""

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from polyrhythm.cli.ending import end_on_sigterm
from polyrhythm.errors import LaunchError
from polyrhythm.run.compute import Compute
from polyrhythm.run.demo.job import Job, Settings, new_run_folder

if TYPE_CHECKING:
    from rich.console import Console

    from polyrhythm.observe.progress import Progress
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
        from polyrhythm.run.launch import Place  # loads torch

        place = Place.from_environment(os.environ)
        run = self._run_here(job, console) if place is None else self._run_at(place, job, console)
        if run is not None:
            self._finish(run, console)
        return 0

    def _run_here(self, job: Job, console: "Console") -> Path:
        from polyrhythm.events import merge
        from polyrhythm.run.demo.train import load_text, train
        from polyrhythm.run.launch import LocalJob

        _check_crowd(job.plan.num_workers)
        text = load_text(job.settings)
        compute = Compute.from_environment(os.environ)
        run = self._begin(job, console)
        end_on_sigterm()
        try:
            with (
                LocalJob(
                    lambda place: train(place, job, text, run, compute),
                    job.plan.num_workers,
                    output_folder=run / "workers",
                    name=lambda rank: f"worker {job.plan.worker(rank)} (rank {rank})",
                ) as workers,
                self._progress(run, job, console) as progress,
            ):
                while not workers.wait(0.2):
                    progress.update()
        finally:
            merge(run)
        return run

    def _run_at(self, place: "Place", job: Job, console: "Console") -> Path | None:
        """As one process of torchrun's; rank 0 also shows the progress. None on the other ranks."""
        from polyrhythm.events import merge
        from polyrhythm.run.demo.train import load_text, train

        job.check_processes(place.world_size)
        text = load_text(job.settings)
        compute = Compute.from_environment(os.environ)
        if place.rank > 0:
            train(place, job, text, None, compute)
            return None
        run = self._begin(job, console)
        done = threading.Event()
        with self._progress(run, job, console) as progress:

            def follow() -> None:
                while not done.wait(0.2):
                    progress.update()

            follower = threading.Thread(target=follow, daemon=True)
            follower.start()
            try:
                train(place, job, text, run, compute)
            finally:
                done.set()
                follower.join()
        merge(run)
        return run

    def _begin(self, job: Job, console: "Console") -> Path:
        from polyrhythm.tables import print_line

        run = new_run_folder(self.out, "demo")
        job.save(run)
        plan = job.plan
        print_line(
            console,
            f"{plan.num_stages} stages x {plan.num_pipelines} pipelines = "
            f"{plan.num_workers} processes, schedule {job.settings.schedule}, "
            f"sync {job.settings.sync}, {job.settings.steps} steps",
        )
        return run

    def _progress(self, run: Path, job: Job, console: "Console") -> "Progress":
        from polyrhythm.observe.progress import Progress

        return Progress(
            run,
            num_steps=job.settings.steps,
            num_pipelines=job.settings.pipelines,
            console=console,
        )

    def _finish(self, run: Path, console: "Console") -> None:
        from polyrhythm.events import read_run
        from polyrhythm.observe.summary import Summary
        from polyrhythm.tables import print_line

        summary = Summary.of(read_run(run))
        summary.show(console)
        if len(summary.losses) < self.settings.steps:
            print_line(console, "warning: the event log is not complete; is the disk full?")
        print_line(console, f"run folder: {run}")


def _check_crowd(num_workers: int) -> None:
    cores = os.cpu_count() or 1
    if num_workers > max(64, 8 * cores):
        raise LaunchError(
            f"{num_workers} processes on a machine with {cores} cores",
            expected=f"at most {max(64, 8 * cores)}",
            fix="use fewer --stages or --pipelines",
        )
