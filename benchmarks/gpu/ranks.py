"""Ranks that share one GPU: run a function in several processes and collect what it returns."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from benchmarks.gpu.model import DEVICE
from polyrhythm.errors import WorkerError
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.types import Seconds

TIMEOUT: Seconds = 120.0  # of any wait for another rank
GLOO, NCCL = "cpu:gloo,cuda:gloo", "cpu:gloo,cuda:nccl"
_TAIL = 1500  # characters of a log that an error shows


def use_nccl(ctx: DistContext) -> None:
    """Let NCCL take the ranks of one GPU for those of different hosts, connected by sockets."""
    os.environ |= {
        "NCCL_HOSTID": f"host{ctx.rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }
    torch.cuda.set_device(DEVICE)


def run_ranks(
    work: Callable[[DistContext], dict[str, float]], num_ranks: int = 2, timeout: Seconds = TIMEOUT
) -> list[dict[str, float]]:
    """Return what `work` returns on each rank; raise RuntimeError with the end of all logs."""
    with tempfile.TemporaryDirectory() as folder:

        def run(ctx: DistContext) -> None:
            (Path(folder) / f"{ctx.rank}.json").write_bytes(msgspec.json.encode(work(ctx)))

        try:
            with LocalJob(run, num_ranks, output_folder=Path(folder) / "logs") as job:
                if not job.wait(timeout):
                    raise TimeoutError(f"ranks are not done after {timeout:g} s")
        except (WorkerError, TimeoutError) as error:
            raise RuntimeError(f"{error}\n{log_tails(Path(folder))}") from error
        found = [(Path(folder) / f"{rank}.json").read_bytes() for rank in range(num_ranks)]
        return [msgspec.json.decode(each, type=dict[str, float]) for each in found]


def log_tails(folder: Path) -> str:
    """Return the end of each log in a folder."""
    texts = {
        path.relative_to(folder): path.read_text(errors="replace").strip()
        for path in sorted(folder.glob("**/*.log"))
    }
    return "\n".join(f"{name}: {text[-_TAIL:]}" for name, text in texts.items() if text)
