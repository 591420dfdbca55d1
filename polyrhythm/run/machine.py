"""Check what training can use on this machine: torch, an all-reduce, GPUs, cores, memory, disk.

torch is checked in a fresh interpreter with a timeout: an install that fails to import, crashes or
hangs becomes a check result like any other. `python -m polyrhythm.run.machine` is that interpreter.
"""

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]

from polyrhythm.describe.check_result import CheckResult
from polyrhythm.describe.units import show
from polyrhythm.processes import signal_name
from polyrhythm.types import Bytes, Seconds

if TYPE_CHECKING:
    from polyrhythm.run.comm.launch import DistContext

TORCH_TIMEOUT: Seconds = 120.0  # a first import from a slow disk is slow
GLOO_TIMEOUT: Seconds = 20.0
DEVICE = "POLYRHYTHM_DEVICE"  # names the device of a process; the lab sets it
LOW_SPACE = 2**30  # give advice below these bytes of memory, shared memory or disk

_BACKENDS = ("gloo", "nccl", "mpi")
_REINSTALL = "pip install --force-reinstall 'torch>=2.11'"


def check_results(runs: Path = Path("runs")) -> list[CheckResult]:
    """Check what training needs, in seconds; run folders will be created inside `runs`."""
    version = sys.version.split()[0]
    python = _required("Python", version, sys.version_info >= (3, 11), "use Python 3.11 or newer")
    return [
        python,
        *_torch_in_subprocess(),
        _port(),
        _cores(),
        _memory(),
        _shared_memory(),
        _disk(runs),
    ]


def _required(subject: str, found: str, ok: bool, advice: str) -> CheckResult:
    return CheckResult(subject, found, ok, "" if ok else advice)


def _torch_in_subprocess() -> list[CheckResult]:
    """Check torch in a fresh interpreter that has the module search path of this one."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
            capture_output=True,
            text=True,
            timeout=TORCH_TIMEOUT,
        )
    except OSError as error:
        return [CheckResult("torch", f"{sys.executable}: {error.strerror}", False, _REINSTALL)]
    except subprocess.TimeoutExpired:
        return [CheckResult("torch", f"no answer within {TORCH_TIMEOUT:g} s", False, _REINSTALL)]
    if done.returncode == 0:
        return [CheckResult(**fields) for fields in json.loads(done.stdout.splitlines()[-1])]
    if done.returncode < 0:
        failure = f"crashed with {signal_name(-done.returncode)}"
    else:
        failure = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
    return [CheckResult("torch", failure, False, _REINSTALL)]


def _torch_check_results() -> Iterator[CheckResult]:
    try:
        import torch
    except Exception as error:  # a broken install can raise anything, as OSError for a library
        yield CheckResult("torch", f"import fails: {_first_line(error)}", False, _REINSTALL)
        return
    dist = torch.distributed
    release = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    yield _required("torch", torch.__version__, release >= (2, 11), "pip install 'torch>=2.11'")
    available = {
        name: dist.is_available() and dist.is_backend_available(name) for name in _BACKENDS
    }
    backends = ", ".join(
        f"{'' if is_available else 'no '}{name}" for name, is_available in available.items()
    )
    yield _required("backends", backends, available["gloo"], f"get a torch with gloo: {_REINSTALL}")
    if available["gloo"]:
        yield _gloo()  # before CUDA starts: a process with CUDA must not be forked
    yield _gpus()


def _gloo() -> CheckResult:
    """Run an all-reduce in a local job of two processes; one alone would open no connection."""
    subject = "all-reduce (gloo)"
    advice = "check that lo is up (ip link set lo up) and GLOO_SOCKET_IFNAME is unset or correct"
    try:
        from polyrhythm.run.comm.launch import LocalJob

        start = time.monotonic()
        with (
            tempfile.TemporaryDirectory() as folder,
            LocalJob(_all_reduce, 2, output_folder=Path(folder)) as job,
        ):
            if not job.wait(GLOO_TIMEOUT):
                return CheckResult(subject, f"not done within {GLOO_TIMEOUT:g} s", False, advice)
    except Exception as error:
        return CheckResult(subject, _first_line(error), False, advice)
    return CheckResult(subject, f"2 processes, {time.monotonic() - start:.1f} s in total", True)


def _all_reduce(ctx: "DistContext") -> None:
    import torch

    numbers = torch.full((1024,), ctx.rank + 1.0)
    with ctx.process_group(GLOO_TIMEOUT / 2):
        torch.distributed.all_reduce(numbers)
    if not bool((numbers == 3.0).all()):
        raise RuntimeError(f"1 + 2 gave {numbers.unique().tolist()}")


def _gpus() -> CheckResult:
    import torch

    try:
        torch.cuda.init()  # unlike is_available(), its error has the reason
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except (AssertionError, RuntimeError) as error:
        num_present = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
        advice = f"{num_present} NVIDIA GPUs exist: check CUDA_VISIBLE_DEVICES, driver, torch"
        return CheckResult(
            "GPUs", f"none: {_first_line(error)}", None, advice if num_present else ""
        )
    counts = Counter(f"{gpu.name} {show(gpu.total_memory, Bytes)}" for gpu in gpus)
    listed = ", ".join(f"{count} x {gpu}" for gpu, count in counts.items())
    return CheckResult("GPUs", f"{listed} (CUDA {torch.version.cuda})", None)


def _port() -> CheckResult:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            return CheckResult("loopback port", "can be listened on", True)
    except OSError as error:
        return CheckResult("loopback port", str(error), False, "bring lo up: ip link set lo up")


def _cores() -> CheckResult:
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return CheckResult("CPU cores", f"{num_cores} of {os.cpu_count()} usable by this process", None)


def _memory() -> CheckResult:
    machine, limit = psutil.virtual_memory(), usable_memory()
    text = f"{show(machine.total, Bytes)}, {show(machine.available, Bytes)} free"
    if limit < machine.total:
        text += f"; this process's cgroup may use {show(limit, Bytes)}"
    is_low = min(machine.available, limit) < LOW_SPACE
    advice = "use few workers: each worker of the demo takes about 0.3GiB" if is_low else ""
    return CheckResult("memory", text, None, advice)


def machine_name() -> str:
    """Return the machine of this process; in the lab each device is a machine."""
    return os.environ.get(DEVICE) or socket.gethostname()


def usable_memory() -> Bytes:
    """Return the memory of this machine, or the limit of this process's cgroup if lower."""
    limit = _cgroup_limit(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    total: Bytes = psutil.virtual_memory().total
    return int(min(total, limit))


def _cgroup_limit(cgroup_file: Path, root: Path) -> float:
    """Return the lowest limit in bytes of the cgroup and its parents; inf without a limit."""
    limits = [math.inf]
    for line in cgroup_file.read_text().splitlines() if cgroup_file.exists() else ():
        _, controllers, group = line.split(":", 2)
        if controllers in ("", "memory"):  # cgroup v2, or the memory controller of v1
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            folder = root / controllers / group.lstrip("/")
            files = (parent / name for parent in (folder, *folder.parents))
            texts = (file.read_text() for file in files if file.is_file())
            limits += [float(text.replace("max", "inf")) for text in texts]
    return min(limits)


def _shared_memory() -> CheckResult:
    advice = "raise it (docker run --shm-size=2g), or use DataLoader(num_workers=0)"
    if not Path("/dev/shm").exists():
        return CheckResult("/dev/shm", "missing", None, advice)
    usage = shutil.disk_usage("/dev/shm")
    text = f"{show(usage.total, Bytes)}, {show(usage.free, Bytes)} free"
    return CheckResult("/dev/shm", text, None, advice if usage.free < LOW_SPACE else "")


def _disk(runs: Path) -> CheckResult:
    folder = runs.absolute()
    try:
        folder = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        advice = f"choose another folder with --out, or make {folder} writable"
        return CheckResult("run folder", f"{folder}: {error.strerror}", False, advice)
    advice = "free disk space, or choose another folder with --out" if free < LOW_SPACE else ""
    return CheckResult("run folder", f"{show(free, Bytes)} free in {folder}", None, advice)


def _first_line(error: object) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


if __name__ == "__main__":
    print(json.dumps([asdict(result) for result in _torch_check_results()]))
