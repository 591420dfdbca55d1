"""plan="auto" on hosts of a lab: they probe it, agree on a plan, and train like one process."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn.functional import mse_loss

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.errors import PeerError
from polyrhythm.lab.lab import Lab
from polyrhythm.plan.plan import Plan
from polyrhythm.run.probe import probe as probing
from polyrhythm.run.trainer import autoplan
from polyrhythm.run.trainer.run_dir import CLUSTER
from polyrhythm.run.trainer.trainer import Trainer
from tests.gloo.trainer_jobs import samples

pytestmark = pytest.mark.alone  # measures time

MEGABIT = 125e3
BATCH, NUM_STEPS, TIMEOUT = 24, 4, 20.0


def two_regions() -> Cluster:
    """Return two regions with a slow link between them."""
    names = ("a/0", "a/1", "b/0", "b/1")
    return Cluster(
        name="two regions",
        devices=tuple(Device(name=name, region=name[0]) for name in names),
        regions=("a", "b"),
        latency=((0.0005, 0.01), (0.01, 0.0005)),
        bandwidth=((200 * MEGABIT, 4 * MEGABIT), (4 * MEGABIT, 200 * MEGABIT)),
    )


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 128),
        nn.Tanh(),
        nn.Linear(128, 128),
        nn.Tanh(),
        nn.Linear(128, 128),
        nn.Linear(128, 4),
    )


def train(**more: Any) -> tuple[Plan, list[tuple[int, float | None, int]]]:
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    with Trainer(model, mse_loss, optimizer, samples(), batch_size=BATCH, **more) as trainer:
        ends = trainer.fit(max_steps=NUM_STEPS).steps
        return trainer.plan, [(end.step, end.own.loss, end.own.num_samples) for end in ends]


def losses(found: list[list[tuple[int, float | None, int]]]) -> list[float]:
    """Return the losses of global batches, from all workers' shares."""
    totals = [0.0] * NUM_STEPS
    for step, loss, num_samples in (end for ends in found for end in ends):
        totals[step] += (loss or 0.0) * num_samples / BATCH
    return totals


def on_host(lab: Lab, rank: int, port: int, output: Path, work: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(len(lab.hosts)),
        "MASTER_ADDR": lab.address(lab.hosts[0]),
        "MASTER_PORT": str(port),
        "POLYRHYTHM_DEVICE": lab.hosts[rank],
    }
    found = work()
    torch.save(found, output)


def start_hosts(lab: Lab, folder: Path, port: int, work: Callable[[], Any]) -> list[Path]:
    folder.mkdir()
    outputs = [folder / f"{rank}.pt" for rank in range(len(lab.hosts))]
    for rank, host in enumerate(lab.hosts):
        log = folder / f"{rank}.txt"
        lab.spawn(host, on_host, lab, rank, port, outputs[rank], work, output=log)
    return outputs


def fail_if_probed(*_: object) -> None:
    raise AssertionError("measured again")


def train_from_cached_plan(run: Path) -> Any:
    autoplan.probe = fail_if_probed  # type: ignore[attr-defined]
    return train(run_dir=run, timeout=TIMEOUT)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_autoplan_in_lab_matches_one_process(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Lab(two_regions()) as lab:
        outputs = start_hosts(
            lab, tmp_path / "first", 29500, partial(train, run_dir=run, timeout=TIMEOUT)
        )
        assert lab.wait(lab.children, timeout=100), [c.reason for c in lab.children]
        assert [child.status for child in lab.children] == [0] * 4, [
            child.output.read_text() for child in lab.children if child.output
        ]
        repeated = start_hosts(
            lab, tmp_path / "second", 29501, partial(train_from_cached_plan, run)
        )
        assert lab.wait(lab.children, timeout=60), [c.reason for c in lab.children]
        hosts = sorted(lab.hosts)
    first, second = (
        [torch.load(path, weights_only=False) for path in paths] for paths in (outputs, repeated)
    )
    plans = [plan for plan, _ in first]
    assert all(plan == plans[0] for plan in plans)
    assert sorted(name for pipeline in plans[0].pipelines for name in pipeline.devices) == hosts
    assert plans[0].num_stages > 1, "gradients would cross the slow link"
    _, single = train()
    for found in (first, second):
        assert losses([ends for _, ends in found]) == pytest.approx(losses([single]), abs=1e-5)
    assert [plan.layers_per_stage for plan, _ in second] == [plans[0].layers_per_stage] * 4
    measured = Cluster.load(run / CLUSTER)
    across, inside = measured.link("a/0", "b/1"), measured.link("b/0", "b/1")
    assert across.bandwidth < inside.bandwidth / 4


def lose_rank_2() -> str:
    """Kill rank 2 in its first pair; the others return the name of the lost process."""

    def die(*_: object) -> None:
        os._exit(7)

    if os.environ["RANK"] == "2":
        probing.as_target = die  # type: ignore[assignment]
    start = time.monotonic()
    try:
        train(timeout=TIMEOUT)
    except PeerError as error:
        return error.peer if time.monotonic() - start < TIMEOUT else "too late"
    return "nobody"


@pytest.mark.long
@pytest.mark.timeout(100)
def test_process_dying_during_probe_is_named_by_the_others(tmp_path: Path) -> None:
    with Lab(two_regions()) as lab:
        outputs = start_hosts(lab, tmp_path / "out", 29500, lose_rank_2)
        assert lab.wait(lab.children, timeout=80), [c.reason for c in lab.children]
        lost = lab.hosts[2]
        assert [child.status for child in lab.children] == [0, 0, 7, 0]
    assert [torch.load(path) for path in outputs if path.exists()] == [lost] * 3
