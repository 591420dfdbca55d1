"""`polyrhythm train`: run a script that uses the Trainer, on this machine or in a lab."""

import os
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from polyrhythm.errors import LaunchError, WorkerError
from polyrhythm.processes import FAILED, INTERRUPTED, TERMINATED, exit_on_sigterm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from polyrhythm.plan.degrees import Degrees
    from polyrhythm.plan.plan import Plan
    from polyrhythm.processes import Child
    from polyrhythm.run.comm.launch import DistContext
    from polyrhythm.run.coordinator.epoch_server import LossTimeouts
    from polyrhythm.run.coordinator.job_coordinator import JobCoordinator
    from polyrhythm.types import Seconds


_POLL_INTERVAL: "Seconds" = 60.0  # between checks of the processes
_TRAINER = "polyrhythm.run.trainer.trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCommand:
    """Run a training script in several processes, each of which creates the same Trainer.

    polyrhythm train script.py --local 4

    polyrhythm train script.py --stages 2 --pipelines 2

    polyrhythm train script.py --lab cluster.toml --plan plan.json -- --lr 1e-3

    On many machines use torchrun, which starts the same script.
    """

    script: tyro.conf.Positional[Path]
    """A Python file."""
    arguments: tyro.conf.Positional[tuple[str, ...]] = ()
    """After --: arguments of the script."""
    local: int | None = None
    """Number of processes on this machine; by default the plan's number of workers, stages x
    pipelines, or one."""
    elastic: bool = False
    """On this machine: start a process again that is lost; it joins the others, which train on."""
    stages: int | None = None
    """Number of stages of each pipeline, without a plan: layers are assigned to them by cost and
    memory. By default the number of processes divided by --pipelines."""
    pipelines: int | None = None
    """Number of pipelines, which are replicas of the whole model; by default the number of
    processes divided by --stages."""
    lab: str | None = None
    """A cluster to rehearse in a lab, with one process per device, or as the plan assigns them."""
    scenario: str | None = None
    """Slowdowns and faults in the lab: a file, or a bundled scenario such as sdpipe_b."""
    plan: Path | None = None
    """A plan from `polyrhythm plan`; a plan that the script itself passes takes precedence."""
    output: Path = Path("runs/output")
    """Folder for the output of all processes except the first, whose output is shown."""
    timeout: float | None = None
    """Seconds after which all processes are ended."""
    preemption_notice: str | None = None
    """Cloud whose metadata service is asked whether it takes this machine away: aws, gcp, azure or
    auto. A notice acts as SIGTERM to the processes of that machine."""

    def run(self, console: "Console") -> int:
        from polyrhythm.plan.plan import PLAN_VARIABLE, Plan
        from polyrhythm.preemption_notice import NOTICE_VARIABLE, NoticeWatch

        self._check()
        os.environ.update(self._degrees.environment)
        if self.preemption_notice is not None:
            NoticeWatch(self.preemption_notice)  # refuses another cloud
            os.environ[NOTICE_VARIABLE] = self.preemption_notice
        num_fits = _num_fits()  # before the fork: workers inherit the count
        plan = None if self.plan is None else Plan.load(self.plan)
        if self.plan is not None:
            os.environ[PLAN_VARIABLE] = str(self.plan.absolute())
        try:
            if self.lab is not None:
                return self._run_in_lab(self.lab, plan, num_fits, console)
            return self._run_here(plan, num_fits)
        except WorkerError as error:
            if error.status in (TERMINATED, INTERRUPTED):
                return error.status
            print(error.traceback, end="", file=sys.stderr)
            raise _without_shown_error(error) from None

    def _run_here(self, plan: "Plan | None", num_fits: int) -> int:
        from polyrhythm.lab.program import PRELOADED, preload, run_program
        from polyrhythm.lab.rehearsal import TIMED_OUT
        from polyrhythm.run.comm.launch import RESTART_DELAY, LocalJob

        program = self._program()
        by_default = self._degrees.num_processes if plan is None else plan.num_workers
        num_processes = self.local or by_default
        if self._degrees.are_given:
            self._degrees.complete(num_processes)
        preload(program, (*PRELOADED, _TRAINER))

        def work(ctx: "DistContext") -> None:
            run_program(program, ctx.environment)
            self._check_fitted(num_fits)

        with LocalJob(
            work,
            num_processes,
            output_folder=self.output,
            shown_ranks=(0,),
            keeps_survivors=True,
            restart_delay=RESTART_DELAY if self.elastic else None,
        ) as job:
            _forward_sigterm(job.request_stop)
            is_interrupted = _forward_interrupt(lambda: job.request_stop(signal.SIGINT))
            try:
                if self.timeout is not None and not job.wait(self.timeout):
                    print(f"timeout after {self.timeout:g} s", file=sys.stderr)
                    return TIMED_OUT
                while not job.wait(_POLL_INTERVAL):
                    pass
            except WorkerError as error:
                if is_interrupted() and error.status != INTERRUPTED:  # nothing could be saved
                    raise KeyboardInterrupt from None
                raise
            finally:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        return 0

    def _run_in_lab(
        self, cluster: str, plan: "Plan | None", num_fits: int, console: "Console"
    ) -> int:
        from polyrhythm.describe.bundled_files import is_name
        from polyrhythm.describe.cluster import Cluster
        from polyrhythm.describe.scenario import Scenario
        from polyrhythm.lab.program import PRELOADED
        from polyrhythm.lab.rehearsal import Rehearsal
        from polyrhythm.plan.host_assignment import assign_hosts
        from polyrhythm.run.emulated_compute import SCENARIO
        from polyrhythm.tables import print_line

        described = Cluster.load(cluster)
        rank_hosts = assign_hosts(plan, described)
        if self._degrees.are_given:
            self._degrees.complete(len(rank_hosts))
        scenario, environment = Scenario(name="nothing happens"), {}
        if self.scenario is not None:
            scenario = Scenario.load(self.scenario)
            named = is_name(self.scenario)
            environment[SCENARIO] = self.scenario if named else str(Path(self.scenario).absolute())
        rehearsal = Rehearsal(
            cluster=described,
            scenario=scenario,
            program=self._program(),
            environment=environment,
            output=self.output,
            log=lambda line: print_line(console, line),
            rank_hosts=rank_hosts,
            shown_ranks=(0,),
            on_success=lambda: self._check_fitted(num_fits),
            is_one_job=True,
            coordination=LabCoordination(rank_hosts, self.output) if len(rank_hosts) > 1 else None,
            preloaded=(*PRELOADED, _TRAINER),
        )
        _forward_sigterm(rehearsal.request_stop)
        return rehearsal.run(name=None, timeout=self.timeout)

    def _check_fitted(self, num_fits_before: int) -> None:
        if _num_fits() == num_fits_before:
            raise LaunchError(
                f"{self.script} has ended without training",
                expected="a script that makes a polyrhythm.Trainer and calls its fit",
                fix="call trainer.fit(max_steps=...); or start it with python if it does not train",
            )

    @property
    def _degrees(self) -> "Degrees":
        from polyrhythm.plan.degrees import Degrees

        return Degrees(stages=self.stages, pipelines=self.pipelines)

    def _program(self) -> list[str]:
        return [sys.executable, str(self.script), *self.arguments]

    def _check(self) -> None:
        command = shlex.join(["polyrhythm", "train", str(self.script)])
        if not self.script.is_file():
            raise LaunchError(
                f"{self.script}: no such file", expected="a Python script", fix="check its path"
            )
        if self.timeout is not None and not 0 < self.timeout < float("inf"):
            raise LaunchError(
                f"--timeout {self.timeout:g}",
                expected="seconds above 0",
                fix="omit --timeout to wait without a limit",
            )
        if self.local is not None and self.local < 1:
            raise LaunchError(
                f"--local {self.local}", expected="1 process or more", fix=f"{command} --local 4"
            )
        if self._degrees.are_given and self.plan is not None:
            raise LaunchError(
                f"{self._degrees} with --plan {self.plan}",
                expected="one of the two: a plan has its own stages and pipelines",
                fix="omit --plan, or omit --stages and --pipelines",
            )
        if self.local is not None and self.lab is not None:
            raise LaunchError(
                f"--local {self.local} with --lab {self.lab}",
                expected="one of the two: a lab has a process per device",
                fix=f"{command} --lab {self.lab}",
            )
        if self.elastic and self.lab is not None:
            raise LaunchError(
                f"--elastic with --lab {self.lab}",
                expected="--elastic on this machine: hosts of a lab come back in a scenario",
                fix="omit one of the two",
            )
        if self.scenario is not None and self.lab is None:
            raise LaunchError(
                f"--scenario {self.scenario} without a lab",
                expected="--lab with a cluster in which to play it",
                fix=f"{command} --lab CLUSTER --scenario {self.scenario}",
            )


class LabCoordination:
    """The coordinator of a job in the lab, on one of its hosts (`JobCoordination`)."""

    def __init__(
        self, rank_hosts: "Sequence[str]", output: Path, timeouts: "LossTimeouts | None" = None
    ) -> None:
        self._rank_hosts, self._output, self._timeouts = rank_hosts, output, timeouts
        self._coordinator: JobCoordinator | None = None

    def start(self, address: str, ports: tuple[int, int], start: "Callable[..., Child]") -> None:
        from polyrhythm.run.coordinator.job_coordinator import JobCoordinator, LabHost
        from polyrhythm.run.coordinator.keys import WorkerKeys

        log = self._output / "membership.jsonl"
        log.unlink(missing_ok=True)  # of an earlier job
        self._keys = WorkerKeys.for_job(len(self._rank_hosts))
        self._coordinator = JobCoordinator(
            [worker.client for worker in self._keys],
            output=self._output / "coordinator.log",
            log=log,
            timeouts=self._timeouts,
            lab_host=LabHost(address, ports, start),
        )

    def join(self, rank: int) -> None:
        from polyrhythm.run.comm.launch import DistContext, set_context

        assert self._coordinator is not None, "it was started before"
        keys, host = self._keys[rank], self._rank_hosts[rank]
        set_context(
            DistContext(
                rank=rank,
                world_size=len(self._rank_hosts),
                local_rank=self._rank_hosts[:rank].count(host),
                is_local=True,
                keys=keys,
                store_address=self._coordinator.store_address,
                coordinator=self._coordinator.access(keys.client),
                keeps_survivors=True,
            )
        )

    def report_exit(self, rank: int, why: str) -> None:
        assert self._coordinator is not None, "it was started before"
        self._coordinator.report_exit(rank, why)

    def close(self) -> None:
        assert self._coordinator is not None, "it was started before"
        self._coordinator.process.end()
        self._coordinator.close()


def _num_fits() -> int:
    trainer = sys.modules.get(_TRAINER)
    return 0 if trainer is None else int(trainer.Trainer.num_fits)


def _without_shown_error(error: WorkerError) -> WorkerError:
    """Shorten the error of the first process, whose traceback ends with it and is shown."""
    if error.output is not None or not error.traceback or error.status != FAILED:
        return error
    name = str(error).removesuffix(f" {error.reason}")
    return WorkerError(error.rank, name, "failed, as above", status=error.status, output=None)


def _forward_sigterm(request_stop: "Callable[[], None]") -> None:
    """Forward the first SIGTERM to the job, which saves and stops; exit at once on the second."""

    def on_sigterm(*_: object) -> None:
        exit_on_sigterm()
        request_stop()

    signal.signal(signal.SIGTERM, on_sigterm)


def _forward_interrupt(request_stop: "Callable[[], None]") -> "Callable[[], bool]":
    """Forward the first Ctrl-C to the job, which saves if it can; the second one ends it at once.

    The processes have sessions of their own, so the terminal does not signal them. Return a
    function that tells whether one was forwarded.
    """
    forwarded: list[object] = []

    def on_interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        forwarded.append(True)
        request_stop()

    signal.signal(signal.SIGINT, on_interrupt)
    return lambda: bool(forwarded)
