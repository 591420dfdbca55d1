"""Jobs that alternate: `homogeneous` on equal machines and a fast network, and `checkpoint`.

`homogeneous`: little can be gained there, and nothing may be lost. Two stages x two pipelines
run on four hosts. One byte represents as many as in the heterogeneous cluster, and time is real:
the network is InfiniBand of 100 Gbit/s, the faster one of DeAR's experiments, on which averages
take about a tenth of a step.

`checkpoint`: a step while checkpoints are written in the background, over one without. Two local
processes, replicas of a model of some 17 MB whose checkpoint, with the state of AdamW, has 50. It
is saved every second, far more often than anybody would: writing takes about half a step, in the
background, and a step waits for the copy that is written. Writes that are pending at the end of a
slot are waited for.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torch.optim import AdamW
from torch.utils.data import TensorDataset

from benchmarks.endtoend.job import JobPool, JobSetting, SlotRow, interleave, ratio_of_steps
from benchmarks.endtoend.workers import byte_scale, fit, torch_baseline, trainer_worker
from benchmarks.harness.network import uniform_cluster
from benchmarks.harness.pool import PORT, LocalHosts, PoolWorker
from benchmarks.plan.cases import equal_pipelines
from polyrhythm.lab.lab import Lab
from polyrhythm.run.trainer.config import CheckpointConfig
from polyrhythm.run.trainer.trainer import Trainer
from polyrhythm.types import BytesPerSecond, Seconds

TORCH, OURS = "torch", "ours"
SAVING, NOT_SAVING = "saving", "not saving"
_NUM_STAGES, _HOSTS = 2, ("host0", "host1", "host2", "host3")
_LATENCY: Seconds = 0.0002  # the lowest that a lab can emulate
_INFINIBAND: BytesPerSecond = 100e9 / 8
_NUM_SAMPLES = 4096
_SETTLE: Seconds = 1.5  # after a slot, for pending writes


# Layers, micro-batches of a pipeline, forward of a layer, slots, and steps of a slot.
FULL, QUICK = (24, 8, 0.004, 4, 5), (4, 4, 0.001, 2, 3)
# Width, layers, compute of a step, steps from one checkpoint to the next, slots, steps of a slot.
FULL_CHECKPOINT, QUICK_CHECKPOINT = (1024, 4, 0.5, 2, 4, 9), (64, 2, 0.02, 1, 2, 3)


def homogeneous(*, quick: bool, show: Callable[[str], None]) -> tuple[float, list[SlotRow]]:
    """Return the Trainer's steps per second over torch's, and all slots."""
    num_layers, num_microbatches, forward, num_slots, slot = QUICK if quick else FULL
    setting = JobSetting(
        plan=equal_pipelines(_HOSTS, num_layers, _NUM_STAGES, num_microbatches),
        num_steps=num_slots * slot,
        forward=forward,
        backward=3 * forward,
        slot=slot,
    )
    show("homogeneous: two jobs are started")
    cluster = uniform_cluster(_HOSTS, _LATENCY, _INFINIBAND * byte_scale())
    with (
        Lab(cluster) as lab,
        JobPool(lab, torch_baseline, setting, port=PORT) as baseline,
        JobPool(lab, trainer_worker, setting, port=PORT + 1) as ours,
    ):
        rows = interleave("homogeneous", {TORCH: baseline, OURS: ours}, show)
    return ratio_of_steps(rows, TORCH, OURS), rows


def checkpoint(*, quick: bool, show: Callable[[str], None]) -> tuple[float, list[SlotRow]]:
    """Return a step with asynchronous checkpoints over one without, and all slots."""
    size = QUICK_CHECKPOINT if quick else FULL_CHECKPOINT
    width, num_layers, step, steps_per_checkpoint, num_slots, slot = size
    setting = JobSetting(
        plan=equal_pipelines(("a", "b"), num_layers, 1, 1),
        num_steps=num_slots * slot,
        forward=step / num_layers / 4,
        backward=step / num_layers * 3 / 4,
        slot=slot,
    )
    show("checkpoint: two jobs are started")
    with ExitStack() as stack:
        pools = {
            side: stack.enter_context(JobPool(LocalHosts(), _fit_squares, setting, width, every))
            for side, every in ((NOT_SAVING, None), (SAVING, steps_per_checkpoint))
        }
        rows = interleave("checkpoint", pools, show, lambda: time.sleep(_SETTLE))
    return ratio_of_steps(rows, SAVING, NOT_SAVING), rows


def _fit_squares(
    pool_worker: PoolWorker, setting: JobSetting, width: int, every: int | None
) -> None:
    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(setting.num_layers)))

    inputs = (torch.arange(_NUM_SAMPLES) / _NUM_SAMPLES)[:, None].expand(-1, width)
    make = partial(
        Trainer,
        model,
        functional.mse_loss,
        lambda parameters: AdamW(parameters, lr=1e-3, fused=True),
        TensorDataset(inputs, inputs.square()),
        run_dir=pool_worker.folder / "run",
        checkpoint=CheckpointConfig(every=every),
    )
    fit(pool_worker, setting, make)
