"""`polyrhythm demo`: run a real training job, locally or under torchrun, with live progress."""

import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from polyrhythm.errors import LaunchError
from polyrhythm.processes import exit_on_sigterm
from polyrhythm.run.demo.job import DemoConfig, DemoJob, new_run_folder

if TYPE_CHECKING:
    from rich.console import Console

    from polyrhythm.run.comm.launch import DistContext
    from polyrhythm.sinks.progress import RunProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Train a small GPT on Python's own source, on stages x pipelines processes of this machine.

    Under torchrun it uses the processes that torchrun started:
    torchrun --nproc-per-node=4 -m polyrhythm demo
    """

    settings: tyro.conf.OmitArgPrefixes[DemoConfig] = field(default_factory=DemoConfig)
    out: Path = Path("runs")
    """Parent folder of the new run's folder."""

    def run(self, console: "Console") -> int:
        job = DemoJob.of(self.settings)
        from polyrhythm.run.comm.launch import DistContext  # loads torch

        ctx = DistContext.from_environment(os.environ)
        run = self._run_here(job, console) if ctx is None else self._run_at(ctx, job, console)
        if run is not None:
            self._finish(run, console)
        return 0

    def _run_here(self, job: DemoJob, console: "Console") -> Path:
        from polyrhythm.run.comm.launch import LocalJob
        from polyrhythm.run.demo.train import load_text, train
        from polyrhythm.sinks.jsonl import merge

        _check_num_workers(job.plan.num_workers)
        text = load_text(job.settings)
        run = self._begin(job, console)
        exit_on_sigterm()
        try:
            with (
                LocalJob(
                    lambda ctx: train(ctx, job, text, run),
                    job.plan.num_workers,
                    output_folder=run / "output",
                    name=lambda rank: f"worker {job.plan.worker(rank)} (rank {rank})",
                ) as workers,
                self._progress(run, job, console) as progress,
            ):
                while not workers.wait(0.2):
                    progress.update()
        finally:
            merge(run)
            with suppress(OSError):
                (run / "output").rmdir()  # empty unless a worker has written to it
        return run

    def _run_at(self, ctx: "DistContext", job: DemoJob, console: "Console") -> Path | None:
        """Train as one of torchrun's processes; rank 0 shows progress and returns the folder."""
        from polyrhythm.run.demo.train import load_text, train
        from polyrhythm.sinks.jsonl import merge

        job.check_processes(ctx.world_size)
        text = load_text(job.settings)
        if ctx.rank > 0:
            train(ctx, job, text, None)
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
                train(ctx, job, text, run)
            finally:
                done.set()
                follower.join()
        merge(run)
        return run

    def _begin(self, job: DemoJob, console: "Console") -> Path:
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

    def _progress(self, run: Path, job: DemoJob, console: "Console") -> "RunProgress":
        from polyrhythm.sinks.progress import RunProgress

        return RunProgress(
            run,
            num_steps=job.settings.steps,
            num_pipelines=job.settings.num_pipelines,
            console=console,
        )

    def _finish(self, run: Path, console: "Console") -> None:
        from polyrhythm.events import read_run
        from polyrhythm.observe.report import RunReport
        from polyrhythm.tables import print_line

        report = RunReport.of(read_run(run))
        report.show(console)
        if len(report.losses) < self.settings.steps:
            print_line(console, "warning: the event log is incomplete; is the disk full?")
        print_line(console, f"run folder: {run}")


def _check_num_workers(num_workers: int) -> None:
    cores = os.cpu_count() or 1
    if num_workers > max(64, 8 * cores):
        raise LaunchError(
            f"{num_workers} processes on a machine with {cores} cores",
            expected=f"at most {max(64, 8 * cores)}",
            fix="use fewer --num-stages or --num-pipelines",
        )
