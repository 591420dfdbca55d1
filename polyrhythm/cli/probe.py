"""`polyrhythm doctor`, `show` and `probe`: check this machine and descriptions, measure a cluster.

A probe runs locally or under torchrun, and writes its measurements into a cluster file.
"""

import os
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from polyrhythm.errors import LaunchError, PeerError, WorkerError
from polyrhythm.processes import BAD_INPUT, PEER_LOST, Child, exit_on_sigterm
from polyrhythm.types import Seconds

if TYPE_CHECKING:
    from rich.console import Console

    from polyrhythm.run.comm.launch import DistContext, LocalJob
    from polyrhythm.run.probe.probe import ProbeOptions

MAX_LOCAL = 64
_GPU_CHECK_TIMEOUT: Seconds = 120.0  # the first use of a GPU driver may be slow
_NUM_TAIL_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Doctor:
    """Check this machine for training and the lab, and print how to install what is missing."""

    def run(self, console: "Console") -> int:
        from polyrhythm.lab import abilities
        from polyrhythm.observe import doctor
        from polyrhythm.run import machine

        is_incomplete = doctor.show(
            console,
            training=machine.check_results(),
            lab=abilities.check_results(),
            extras=doctor.extras(),
        )
        return 1 if is_incomplete else 0


@dataclass(frozen=True, slots=True)
class Show:
    """Check a description and print it: a TOML or JSON file, or the name of a bundled one."""

    kind: tyro.conf.Positional[Literal["cluster", "model", "scenario"]]
    """What the file describes."""
    file: tyro.conf.Positional[str]
    """The file, or the name of a bundled description, such as case5_worldwide or sdpipe_b."""
    cluster: str | None = None
    """For a scenario: check that this cluster has all devices and links that it names."""

    def run(self, console: "Console") -> int:
        from polyrhythm.observe import description

        description.show(self.kind, self.file, console, cluster=self.cluster)
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Measure all devices and all links between them, and write a cluster description.

    Start one process per device on all machines with torchrun:
    torchrun --nnodes=4 --nproc-per-node=8 ... -m polyrhythm probe -o cluster.toml
    """

    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("cluster.toml")
    """The cluster file to write, on the machine of rank 0."""
    local: int | None = None
    """Number of processes to start on this machine, instead of using torchrun."""
    name: str | None = None
    """Name of the cluster; by default that of the file."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device whose speed and memory is measured: auto uses the GPUs if there are any."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype for measuring a device's speed."""
    all_at_once: bool = False
    """Measure pairs of the same machines concurrently: faster, but they share network cards."""
    seconds: float = 0.2
    """Minimum duration of a transfer that measures a bandwidth."""
    repeat: int = 5
    """Number of measurements of each value; their median and spread are written."""
    pair_timeout: float = 20.0
    """Seconds for one pair, after which its bandwidth is accepted even if it still grows."""
    timeout: float = 60.0
    """Seconds to wait for a message of another process before it counts as lost."""

    def run(self, console: "Console") -> int:
        from polyrhythm.describe.write import check_target
        from polyrhythm.run.comm.launch import DistContext

        options, ctx = self._options(), DistContext.from_environment(os.environ)
        if ctx is None or ctx.rank == 0:  # the process that writes the file
            check_target(self.out, (".toml",))
        if ctx is not None and self.local is not None:
            raise LaunchError(
                f"--local {self.local} in a process of torchrun's",
                expected="torchrun's processes, or --local",
                fix="omit --local, or start without torchrun",
            )
        if ctx is not None:
            self._run_as(ctx, options, console)
        else:
            self._run_here(options, console)
        if ctx is None or ctx.rank == 0:
            self._show(console)
        return 0

    def _options(self) -> "ProbeOptions":
        from datetime import UTC, datetime

        from polyrhythm.run.probe.probe import ProbeEffort, ProbeOptions

        return ProbeOptions(
            cluster_name=self.name or self.out.stem,
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            device=self.device,
            dtype=self.dtype,
            all_at_once=self.all_at_once,
            effort=ProbeEffort(
                seconds=self.seconds,
                repeat=self.repeat,
                pair_timeout=self.pair_timeout,
                timeout=self.timeout,
            ),
        )

    def _run_here(self, options: "ProbeOptions", console: "Console") -> None:
        from polyrhythm.run.comm.launch import LocalJob

        if self.local is None or not 1 <= self.local <= MAX_LOCAL:
            raise LaunchError(
                "no processes to measure with" if self.local is None else f"--local {self.local}",
                expected=f"torchrun's processes, one per device, or --local with 1 to {MAX_LOCAL}",
                fix="polyrhythm probe --local 2, or torchrun --nproc-per-node=2 -m polyrhythm "
                "probe",
            )
        exit_on_sigterm()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            progress = folder / "progress"
            _check_device(self.device, folder)

            def work(ctx: "DistContext") -> None:
                self._measure(ctx, options, progress.write_text)

            with (
                LocalJob(work, self.local, output_folder=folder) as job,
                console.status(f"measuring with {self.local} processes") as status,
            ):
                _watch(
                    job,
                    progress,
                    on_progress=lambda text: status.update(f"measuring {text}"),
                    stall_timeout=options.effort.stall_timeout,
                )

    def _run_as(self, ctx: "DistContext", options: "ProbeOptions", console: "Console") -> None:
        with console.status("measuring") if ctx.rank == 0 else nullcontext() as status:

            def show_progress(text: str) -> None:
                if status is not None:
                    status.update(f"measuring {text}")

            self._measure(ctx, options, show_progress)

    def _measure(
        self, ctx: "DistContext", options: "ProbeOptions", show_progress: Callable[[str], object]
    ) -> None:
        """Measure as one process; rank 0 shows progress and writes the file."""
        from polyrhythm.describe.write import write_cluster
        from polyrhythm.run.probe.probe import probe

        host = socket.gethostname()
        device = os.environ.get("POLYRHYTHM_DEVICE", f"{host}/{ctx.local_rank}")
        cluster = probe(ctx, device, options, show_progress if ctx.rank == 0 else lambda text: None)
        if cluster is not None:
            write_cluster(cluster, self.out)

    def _show(self, console: "Console") -> None:
        from polyrhythm.observe import description
        from polyrhythm.tables import print_line

        description.show("cluster", str(self.out), console)
        print_line(console, f"written to {self.out}")


def _check_device(name: str, folder: Path) -> None:
    """Raise DescriptionError if unusable; a fork checks: CUDA must not be initialised here."""
    if name != "cuda":
        return
    from polyrhythm.describe.measure import device_of

    child = Child(lambda: device_of(name), output=folder / "device.log")
    try:
        is_usable = child.wait(_GPU_CHECK_TIMEOUT) == 0
    finally:
        child.end()
    if not is_usable:
        device_of(name)


def _watch(
    job: "LocalJob", progress: Path, on_progress: Callable[[str], object], *, stall_timeout: Seconds
) -> None:
    """Wait for the end of a job; pass the progress that its rank 0 writes on to `on_progress`.

    Raises WorkerError with the end of the worker's output, whose file may be temporary. Raises
    PeerError if there is no progress for `stall_timeout`.
    """
    shown, deadline = "", time.monotonic() + stall_timeout
    try:
        while not job.wait(0.2):
            text = progress.read_text() if progress.exists() else ""
            if text != shown:
                shown, deadline = text, time.monotonic() + stall_timeout
                on_progress(text)
            elif time.monotonic() > deadline:
                raise PeerError(
                    "all processes",
                    action=f"measuring {shown}",
                    waited=stall_timeout,
                    cause="no progress, and no error",
                )
    except WorkerError as error:
        raise _with_output_tail(error) from None


def _with_output_tail(error: WorkerError) -> WorkerError:
    reason = error.reason
    # The reason of a UserError or of a lost peer is complete.
    if error.output is not None and error.status not in (BAD_INPUT, PEER_LOST):
        lines = Path(error.output).read_text(errors="replace").rstrip().splitlines()
        reason += "\n  end of its output:" + "".join(
            f"\n    {line}" for line in lines[-_NUM_TAIL_LINES:]
        )
    return WorkerError(
        error.rank, f"worker of rank {error.rank}", reason, status=error.status, output=None
    )
