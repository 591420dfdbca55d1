"""`polyrhythm probe`: measure devices and links, here or in torchrun's processes, into a file."""

import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from polyrhythm.cli.signals import exit_on_sigterm
from polyrhythm.errors import LaunchError

if TYPE_CHECKING:
    from rich.console import Console

    from polyrhythm.run.comm.launch import DistContext
    from polyrhythm.run.probe.effort import ProbeEffort
    from polyrhythm.run.probe.probe import ProbeOptions

MAX_LOCAL = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Measure every device and every link between two of them, into a cluster's description.

    A process on each device, started by torchrun on all machines:
    torchrun --nnodes=4 --nproc-per-node=8 ... -m polyrhythm probe -o cluster.toml
    """

    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("cluster.toml")
    """The file, on the machine of rank 0."""
    local: int | None = None
    """So many processes on this machine, instead of torchrun's."""
    name: str | None = None
    """Name of the cluster; else that of the file."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Whose speed and memory to measure: auto takes the GPUs if there are any."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the numbers that a device's speed is measured with."""
    all_at_once: bool = False
    """Measure pairs of the same machines side by side: quicker, but they share network cards."""
    seconds: float = 0.2
    """How long a transfer lasts, at the least, that a bandwidth is taken from."""
    repeat: int = 5
    """Measurements of each thing: their median and spread are written."""
    pair_timeout: float = 20.0
    """Seconds for one pair, after which a bandwidth that still climbs is taken as it is."""
    timeout: float = 60.0
    """Seconds to wait for a message of another process before giving it up as lost."""

    def run(self, console: "Console") -> int:
        from polyrhythm.describe.write import check_target
        from polyrhythm.run.probe.effort import ProbeEffort

        effort = ProbeEffort(
            seconds=self.seconds,
            repeat=self.repeat,
            pair_timeout=self.pair_timeout,
            timeout=self.timeout,
        )
        from polyrhythm.run.comm.launch import DistContext  # loads torch

        ctx = DistContext.from_environment(os.environ)
        if ctx is None or ctx.rank == 0:  # who writes it
            check_target(self.out, (".toml",))
        if ctx is not None and self.local is not None:
            raise LaunchError(
                f"--local {self.local} in a process of torchrun's",
                expected="processes of torchrun, or --local",
                fix="leave --local out, or start without torchrun",
            )
        if ctx is not None:
            self._run_as(ctx, self._options(effort), console)
        else:
            self._run_here(self._options(effort), console)
        if ctx is None or ctx.rank == 0:
            self._show(console)
        return 0

    def _options(self, effort: "ProbeEffort") -> "ProbeOptions":
        from datetime import UTC, datetime

        from polyrhythm.run.probe.probe import ProbeOptions

        return ProbeOptions(
            cluster_name=self.name or self.out.stem,
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            device=self.device,
            dtype=self.dtype,
            all_at_once=self.all_at_once,
            effort=effort,
        )

    def _run_here(self, options: "ProbeOptions", console: "Console") -> None:
        from polyrhythm.run.comm.launch import LocalJob
        from polyrhythm.run.probe.local import check_device, watch

        if self.local is None or not 1 <= self.local <= MAX_LOCAL:
            raise LaunchError(
                "no processes to measure with" if self.local is None else f"--local {self.local}",
                expected=f"torchrun's, one for each device, or --local with 1 to {MAX_LOCAL}",
                fix="polyrhythm probe --local 2, or torchrun --nproc-per-node=2 -m polyrhythm "
                "probe",
            )
        exit_on_sigterm()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            progress = folder / "progress"
            check_device(self.device, folder)

            def work(ctx: "DistContext") -> None:
                self._measure(ctx, options, progress.write_text)

            with (
                LocalJob(work, self.local, output_folder=folder) as job,
                console.status(f"measuring with {self.local} processes") as status,
            ):
                watch(
                    job,
                    progress,
                    say=lambda text: status.update(f"measuring {text}"),
                    stall_timeout=options.effort.stall_timeout,
                )

    def _run_as(self, ctx: "DistContext", options: "ProbeOptions", console: "Console") -> None:
        with console.status("measuring") if ctx.rank == 0 else nullcontext() as status:

            def say(text: str) -> None:
                if status is not None:
                    status.update(f"measuring {text}")

            self._measure(ctx, options, say)

    def _measure(
        self, ctx: "DistContext", options: "ProbeOptions", say: Callable[[str], object]
    ) -> None:
        """As one process; rank 0 says how far it is, and writes the file."""
        from polyrhythm.describe.write import write_cluster
        from polyrhythm.run.probe.probe import probe

        host = socket.gethostname()
        device = os.environ.get("POLYRHYTHM_DEVICE", f"{host}/{ctx.local_rank}")
        cluster = probe(ctx, device, options, say if ctx.rank == 0 else lambda text: None)
        if cluster is not None:
            write_cluster(cluster, self.out)

    def _show(self, console: "Console") -> None:
        from polyrhythm.observe import description
        from polyrhythm.tables import print_line

        description.show("cluster", str(self.out), console)
        print_line(console, f"written to {self.out}")
