"""Pipelines over real TCP: lost hosts end all stages in time; pauses and slow links do not."""

import re
import signal
import statistics
import time
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.describe.scenario import LinkChange
from polyrhythm.lab.lab import Lab
from polyrhythm.processes import PEER_LOST, Child
from polyrhythm.run.pipeline.pipeline import Pipeline
from tests.grids import long_except
from tests.lab.hosts import cluster
from tests.lab.stages import lines, start, wait_for_lines

NUM_STAGES = 3
NUM_MICROBATCHES = 6
WIDTH = 128
ROWS = 64 * NUM_MICROBATCHES  # a message of 32 KB takes 13 ms
TIMEOUT = 5.0


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2, ROWS, WIDTH, generator=random).unbind())


def model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_STAGES)))


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def train(stage: int, *, timeout: float, num_steps: int) -> None:
    """Print `step` and its seconds for every step; check gradients against a single process."""
    whole, (inputs, target) = model(), batch()
    alone = deepcopy(whole)
    functional.mse_loss(alone(inputs), target).backward()
    with Pipeline.from_sequential(
        whole,
        loss_fn=functional.mse_loss,
        n_microbatches=NUM_MICROBATCHES,
        schedule="1f1b",
        timeout=timeout,
    ) as pipeline:
        for _ in range(num_steps):
            began = time.perf_counter()
            pipeline.step(*([inputs] if stage == 0 else []), target=target)
            seconds = time.perf_counter() - began
            for ours, theirs in zip(
                gradients(pipeline.module), gradients(alone[stage]), strict=True
            ):
                torch.testing.assert_close(ours, theirs)
            pipeline.module.zero_grad()
            print("step", seconds, flush=True)


def step_times(child: Child) -> list[float]:
    return [float(seconds) for (seconds,) in lines(child, "step")]


@pytest.mark.alone
@pytest.mark.timeout(100)
@pytest.mark.parametrize(("victim", "silent"), long_except([(0, True), (1, True), (2, False)], 1))
def test_host_lost_in_training_ends_all_others_within_the_timeout(
    tmp_path: Path, victim: int, silent: bool
) -> None:
    with Lab(cluster(NUM_STAGES, latency=0.005)) as lab:
        work = partial(train, timeout=TIMEOUT, num_steps=10**6)
        stages = start(lab, tmp_path, work, timeout=30)
        wait_for_lines(stages, "step", 4)  # the first ones may take longer than the timeout
        lab.kill(lab.hosts[victim], silent=silent)
        assert lab.wait(stages, timeout=6 * TIMEOUT), "a stage hangs"
    assert stages[victim].status == -signal.SIGKILL
    for survivor in stages[:victim] + stages[victim + 1 :]:
        assert survivor.status == PEER_LOST, survivor.reason
        match = re.search(r"lost s[0-2]p0 during (.+) after ([\d.]+) s: ", survivor.reason)
        assert match, survivor.reason
        assert re.fullmatch(r"receiving [FB]\d|sending [FB]\d|waiting for the next step", match[1])
        assert float(match[2]) < 2 * TIMEOUT


@pytest.mark.long
@pytest.mark.timeout(100)
def test_pause_shorter_than_the_timeout_only_delays(tmp_path: Path) -> None:
    with Lab(cluster(NUM_STAGES, latency=0.005)) as lab:
        work = partial(train, timeout=30, num_steps=10)
        stages = start(lab, tmp_path, work, timeout=30)
        wait_for_lines(stages, "step", 2)
        lab.pause(lab.hosts[1])
        time.sleep(2.0)
        lab.pause(lab.hosts[1], paused=False)
        assert lab.wait(stages, timeout=60), [stage.reason for stage in stages]
        assert [stage.status for stage in stages] == [0] * NUM_STAGES, stages[0].reason
    times = step_times(stages[2])
    assert max(times) > 2 * statistics.median(times), "it was paused while it trained"


@pytest.mark.alone
@pytest.mark.timeout(100)
def test_slower_link_only_slows_training(tmp_path: Path) -> None:
    full = 2.5e6
    with Lab(cluster(NUM_STAGES, latency=0.005, bandwidth=full)) as lab:
        work = partial(train, timeout=30, num_steps=7)
        stages = start(lab, tmp_path, work, timeout=30)
        wait_for_lines(stages, "step", 3)
        lab.change(LinkChange(at=0, source="b", target="c", bandwidth=full / 8))
        assert lab.wait(stages, timeout=80), [stage.reason for stage in stages]
        assert [stage.status for stage in stages] == [0] * NUM_STAGES, stages[0].reason
    times = step_times(stages[0])
    assert statistics.median(times[-3:]) > 2 * statistics.median(times[:3])
