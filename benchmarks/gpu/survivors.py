"""A replica on a GPU is lost: how long the others need until they have completed the next step.

Three replicas share the GPU, in `decoupled` over NCCL: the groups of NCCL are aborted and made
again, and the lost shard comes from its copy.
"""

import os
import signal
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch

import polyrhythm as pr
from benchmarks.gpu.model import DEVICE, TINY, RandomTokens, Size, adamw, gpt, loss_fn
from benchmarks.gpu.ranks import TIMEOUT, use_nccl
from polyrhythm.run.comm.launch import DistContext, LocalJob

_NUM_REPLICAS, _NUM_STEPS, _KILLED_AT, _VICTIM = 3, 40, 20, 1
_BATCH = 12  # sequences


def measure(size: Size, *, quick: bool) -> dict[str, float]:
    """Return the seconds from a SIGKILL to the end of the next step of the others, and a usual one.

    A step is over when its metrics have come. A survivor may have those of one more at once, as it
    was over; the next ones come after the longest time between two steps.
    """
    if quick:
        size = TINY
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def work(ctx: DistContext) -> None:
            _train(ctx, size, folder / f"{ctx.rank}.txt")

        job = LocalJob(work, _NUM_REPLICAS, output_folder=folder / "logs", keeps_survivors=True)
        with job:
            if not job.wait(TIMEOUT):
                raise RuntimeError(f"the survivors are not done after {TIMEOUT:g} s")
        times = [_read(folder / f"{rank}.txt") for rank in range(_NUM_REPLICAS)]
    killed_at = times.pop(_VICTIM)[-1]
    if any(len(each) != _NUM_STEPS for each in times):
        raise RuntimeError("a survivor has not made all steps, once each")
    gaps = [[b - a for a, b in pairwise(each)] for each in times]
    first = (_KILLED_AT + 1 + gap.index(max(gap)) for gap in (each[_KILLED_AT:] for each in gaps))
    return {
        "nccl_recover_s": max(each[i] for each, i in zip(times, first, strict=True)) - killed_at,
        "nccl_recover_step_ms": 1000 * statistics.median(gaps[0][5:_KILLED_AT]),
    }


def _read(path: Path) -> list[float]:
    return [float(line) for line in path.read_text().split()]


def _train(ctx: DistContext, size: Size, path: Path) -> None:
    use_nccl(ctx)
    with path.open("w", buffering=1) as written:

        def note(info: pr.StepInfo) -> None:
            written.write(f"{time.monotonic()}\n")
            if (ctx.rank, info.step) == (_VICTIM, _KILLED_AT):
                os.kill(os.getpid(), signal.SIGKILL)

        with pr.Trainer(
            gpt(size).cpu(),
            loss_fn,
            adamw,
            RandomTokens(size, _BATCH * _NUM_STEPS),
            batch_size=_BATCH,
            microbatch_size=_BATCH // _NUM_REPLICAS // 2,
            sync="decoupled",
            device=pr.DeviceConfig(DEVICE, autocast=torch.bfloat16, backend="nccl"),
            data=pr.DataConfig(shuffle=False),
            timeout=TIMEOUT,
        ) as trainer:
            trainer.fit(max_steps=_NUM_STEPS, progress=False, callbacks=[note])
