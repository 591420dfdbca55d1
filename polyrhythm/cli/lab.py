"""`polyrhythm lab`: rehearse a cluster on this machine, measure it, enter hosts, inject faults."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import tyro

from polyrhythm.errors import LabError
from polyrhythm.processes import exit_on_sigterm

if TYPE_CHECKING:
    from rich.console import Console

    from polyrhythm.describe.cluster import Cluster
    from polyrhythm.describe.scenario import Scenario
    from polyrhythm.lab.control import Control


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScaledCluster:
    """A cluster with a number of hosts and a scale."""

    cluster: tyro.conf.Positional[str]
    """A TOML or JSON file, or the name of a bundled network."""
    hosts: int | None = None
    """Use only this many of its devices, spread over its regions."""
    time_scale: float = 1.0
    """Seconds in the lab per second of the cluster: 0.1 runs ten times as fast."""
    byte_scale: float = 1.0
    """Bytes in the lab per byte in the cluster: 0.01 for messages a hundred times smaller."""

    def load(self) -> "Cluster":
        from polyrhythm.describe.cluster import Cluster
        from polyrhythm.describe.scale import fewer_devices, scaled_cluster

        cluster = Cluster.load(self.cluster)
        if self.hosts is not None:
            cluster = fewer_devices(cluster, self.hosts)
        return scaled_cluster(cluster, time_scale=self.time_scale, byte_scale=self.byte_scale)

    def load_scenario(self, source: str) -> "Scenario":
        from polyrhythm.describe.scale import scaled_scenario
        from polyrhythm.describe.scenario import Scenario

        return scaled_scenario(
            Scenario.load(source), time_scale=self.time_scale, byte_scale=self.byte_scale
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LabRun(_ScaledCluster):
    """Run a program on every host, with torchrun's variables set: lab run CLUSTER -- python x.py"""

    program: tyro.conf.Positional[tuple[str, ...]] = ()
    """After --: the program and its arguments, run once per host."""
    scenario: str | None = None
    """Slowdowns, link changes and faults: a file, or a bundled scenario such as sdpipe_b."""
    name: str | None = None
    """Name of the lab, for `lab status`, `shell`, `change`, `kill`, `revive`, `pause`, `resume`."""
    output: Path | None = None
    """Folder for one file of output per host, instead of this terminal."""
    timeout: float | None = None
    """Seconds after which all programs are ended."""
    in_process: bool = False
    """Use this machine's network, which needs no privileges; only slow workers are played."""

    def run(self, console: "Console") -> int:
        from polyrhythm.describe.bundled_files import is_name
        from polyrhythm.describe.scenario import Scenario
        from polyrhythm.lab.rehearsal import Rehearsal
        from polyrhythm.tables import print_line

        if not self.program:
            raise LabError(
                "no program to run",
                expected="a command after --",
                fix=f"polyrhythm lab run {self.cluster} -- python my_script.py",
            )
        if self.timeout is not None and not 0 < self.timeout < float("inf"):
            raise LabError(
                f"--timeout {self.timeout}",
                expected="seconds above 0",
                fix="omit --timeout to wait without a limit",
            )
        environment = {}
        scenario = Scenario(name="nothing happens")
        if self.scenario is not None:
            scenario = self.load_scenario(self.scenario)
            named = is_name(self.scenario)
            environment["POLYRHYTHM_SCENARIO"] = (
                self.scenario if named else str(Path(self.scenario).absolute())
            )
            environment["POLYRHYTHM_TIME_SCALE"] = str(self.time_scale)
        rehearsal = Rehearsal(
            cluster=self.load(),
            scenario=scenario,
            program=self.program,
            environment=environment,
            output=self.output,
            log=lambda line: print_line(console, line),
        )
        exit_on_sigterm()
        if self.in_process:
            return rehearsal.run_in_process(timeout=self.timeout)
        return rehearsal.run(name=self.name, timeout=self.timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabCheck(_ScaledCluster):
    """Measure every pair of hosts against its description and print the table."""

    def run(self, console: "Console") -> int:
        from polyrhythm.lab import check_table, measure
        from polyrhythm.lab.lab import Lab

        exit_on_sigterm()

        def progress(done: int, total: int) -> None:
            status.update(f"measuring: round {done + 1} of {total}")

        with Lab(self.load()) as lab, console.status("measuring") as status:
            found = measure.check_pairs(lab, on_progress=progress)
        check_table.show(found, console)
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunningLab:
    """A running lab."""

    lab: str | None = None
    """Name of the lab; not needed while only one is running."""

    def connect(self) -> "Control":
        from polyrhythm.lab.control import attach, running_labs

        if self.lab is not None:
            return attach(self.lab)
        running = running_labs()
        if len(running) != 1:
            raise LabError(
                f"{len(running)} labs are running" + (f": {', '.join(running)}" if running else ""),
                expected="one, or the name of one",
                fix="pass its name with --lab"
                if running
                else "start one with `polyrhythm lab run`",
            )
        return attach(running[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class LabShell(_RunningLab):
    """Open a shell, or run a program, on a host of a running lab."""

    host: tyro.conf.Positional[str]
    """Name of the host."""
    program: tyro.conf.Positional[tuple[str, ...]] = ()
    """After --: a program to run instead of your shell."""

    def run(self, console: "Console") -> int:
        from polyrhythm.lab.attach import enter_host
        from polyrhythm.lab.program import exec_program

        enter_host(self.connect(), self.host)
        sys.stdout.flush()
        exec_program(self.program or (os.environ.get("SHELL", "/bin/sh"),), {})
        raise AssertionError("exec does not return")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabStatus(_RunningLab):
    """Print the hosts, traffic per pair and lateness of a running lab."""

    def run(self, console: "Console") -> int:
        from polyrhythm.lab.attach import show_status

        show_status(self.connect(), console)
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LabChange(_RunningLab):
    """Change the link between two hosts of a running lab, both ways unless --one-way."""

    source: tyro.conf.Positional[str]
    """Name of a host."""
    target: tyro.conf.Positional[str]
    """Name of another host."""
    latency: str | None = None
    """One-way latency, such as 34ms."""
    bandwidth: str | None = None
    """Bandwidth, such as 100Mbit/s."""
    up: bool | None = None
    """False: all packets are lost; True: packets arrive again."""
    one_way: bool = False
    """Change only the direction from the first host to the second."""

    def run(self, console: "Console") -> int:
        from polyrhythm.lab.attach import change_link

        change_link(
            self.connect(),
            self.source,
            self.target,
            latency=self.latency,
            bandwidth=self.bandwidth,
            up=self.up,
            one_way=self.one_way,
        )
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostCommand(_RunningLab):
    """A command with the name of a function of `lab/attach.py`."""

    function: ClassVar[str]
    host: tyro.conf.Positional[str]
    """Name of the host."""

    def run(self, console: "Console") -> int:
        from polyrhythm.lab import attach

        print(getattr(attach, self.function)(self.connect(), self.host))
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LabKill(_HostCommand):
    """Kill a host of a running lab as a power cut would: peers receive no FIN or RST."""

    function = "kill"


@dataclass(frozen=True, slots=True, kw_only=True)
class LabRevive(_HostCommand):
    """Connect a killed host to the network again; `lab shell` starts programs on it."""

    function = "revive"


@dataclass(frozen=True, slots=True, kw_only=True)
class LabPause(_HostCommand):
    """Pause a host of a running lab: its processes stop and its packets wait."""

    function = "pause"


@dataclass(frozen=True, slots=True, kw_only=True)
class LabResume(_HostCommand):
    """Resume a paused host."""

    function = "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class LabCommand:
    """Rehearse any cluster on this machine: real TCP, chosen latency and bandwidth, faults."""

    command: tyro.conf.OmitSubcommandPrefixes[
        Annotated[LabRun, tyro.conf.subcommand("run")]
        | Annotated[LabCheck, tyro.conf.subcommand("check")]
        | Annotated[LabShell, tyro.conf.subcommand("shell")]
        | Annotated[LabStatus, tyro.conf.subcommand("status")]
        | Annotated[LabChange, tyro.conf.subcommand("change")]
        | Annotated[LabKill, tyro.conf.subcommand("kill")]
        | Annotated[LabRevive, tyro.conf.subcommand("revive")]
        | Annotated[LabPause, tyro.conf.subcommand("pause")]
        | Annotated[LabResume, tyro.conf.subcommand("resume")]
    ]

    def run(self, console: "Console") -> int:
        return self.command.run(console)
