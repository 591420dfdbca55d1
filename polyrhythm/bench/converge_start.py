"""The model that a training begins with: fresh, or after a stretch that all sides have in common.

The first few hundred batches of a language model are unlike the rest of its training: steps are as
long as they can be, and when the first plateau ends is chance. A benchmark of minutes would measure
nothing else. So one process trains through them, once per seed, and all sides go on from there; it
is not measured. Replicas are kept in step at first in practice, too ("post-local SGD": Lin et al.,
"Don't Use Large Mini-Batches, Use Local SGD", arXiv:1808.07217).
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from polyrhythm.bench.converge_record import shared, weights_of
from polyrhythm.bench.converge_tasks import Batch, Task, num_weights
from polyrhythm.errors import LaunchError
from polyrhythm.run.launch import LocalJob, Place
from polyrhythm.types import Seconds

_WARM_UP = 20  # batches
_NUM_PARTS = 8  # that make one batch, each as large as that of a worker
_PROCESSES = 2
_PATIENCE: Seconds = 300.0
_ASIDE = 1_000_000  # added to seeds: these batches are no worker's


def starting_weights(
    task: Task, seeds: Sequence[int], *, num_batches: int, lr: float
) -> Mapping[int, np.ndarray]:
    """Of each seed, after so many batches at that learning rate."""
    found = {seed: shared(num_weights(task), np.float32) for seed in seeds}

    def work(place: Place) -> None:
        torch.set_num_threads(1)
        for seed in seeds[place.rank :: _PROCESSES]:
            model = task.build(seed)
            _train(task, model, seed, num_batches, lr)
            found[seed][:] = weights_of(model)

    with (
        tempfile.TemporaryDirectory() as folder,
        LocalJob(work, _PROCESSES, output_folder=Path(folder)) as job,
    ):
        if not job.wait(_PATIENCE):
            raise LaunchError(
                f"the first {num_batches} batches took more than {_PATIENCE:g} s",
                expected="less, on two idle cores",
                fix="run the benchmark while the machine has nothing else to do",
            )
    return found


def _train(task: Task, model: nn.Module, seed: int, num_batches: int, lr: float) -> None:
    optimizer = task.optimizer(model, lr, of_models=False)
    for number in range(num_batches):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (number + 1) / _WARM_UP)
        torch.autograd.backward(task.loss(model, joined(task, seed + _ASIDE, number, _NUM_PARTS)))
        clip_grad_norm_(model.parameters(), task.largest_norm)
        optimizer.step()
        optimizer.zero_grad()


def joined(task: Task, seed: int, step: int, num_parts: int) -> Batch:
    """What so many workers draw for one step, as one batch."""
    parts = [task.draw(seed, part, step) for part in range(num_parts)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
