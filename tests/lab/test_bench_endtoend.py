"""`bench endtoend` runs and emulates what it describes; its values are not judged."""

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.endtoend.bench import BARS
from benchmarks.endtoend.heterogeneous import (
    FULL,
    PREEMPTED,
    QUICK,
    baseline_plan,
    bursts,
    problem_of,
    random_layouts,
)
from benchmarks.endtoend.homogeneous import OURS, TORCH, homogeneous
from benchmarks.endtoend.job import (
    EmulatedSpeed,
    JobLog,
    JobPool,
    JobSetting,
    SlotRow,
    StepReport,
    ratio_of_steps,
)
from benchmarks.endtoend.workers import (
    CONTEXT,
    buckets,
    byte_scale,
    layer_bytes,
    model,
    texts,
)
from benchmarks.harness.network import PREEMPTED_SHARE
from benchmarks.harness.pool import PoolWorker
from benchmarks.harness.report import names_of
from polyrhythm.describe.scenario import Scenario
from polyrhythm.describe.slowness import Slowness
from polyrhythm.errors import LabError
from polyrhythm.lab.lab import Lab
from polyrhythm.types import Worker

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.long
@pytest.mark.timeout(250)
def test_the_quick_benchmark_ends_with_its_ratios(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polyrhythm", "bench", "endtoend", "--quick", "--out", "."]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["ratios"]) == names_of(BARS)
    assert result["ratios"]["heterogeneous"] > 0
    # In so few steps only synchronous modes are tried: both sides learn the same.
    assert abs(result["ratios"]["heterogeneous_loss"]) < 1e-4
    assert result["figures"]["heterogeneous_torch_loss_error"] < 1e-4
    rows = json.loads((tmp_path / "endtoend.json").read_text())["rows"]
    assert {row["side"] for row in rows} == {"torch", "ours", "saving", "not saving"}


@pytest.mark.long
@pytest.mark.timeout(60)
def test_two_jobs_alternate_on_the_same_hosts() -> None:
    shown: list[str] = []
    ratio, rows = homogeneous(quick=True, show=shown.append)
    assert ratio > 0
    assert [(row.side, row.round) for row in rows] == [(TORCH, 0), (OURS, 0), (TORCH, 1), (OURS, 1)]
    assert len(shown) == 1 + len(rows)


@pytest.mark.timeout(60)
def test_a_worker_that_fails_ends_the_run_with_its_reason() -> None:
    problem = problem_of(QUICK)
    setting = JobSetting(
        plan=baseline_plan(random_layouts(problem, QUICK)[0], QUICK, 1),
        num_steps=1,
        forward=0.001,
        backward=0.003,
        num_held_out=1,
        timeout=30.0,
    )
    with Lab(problem.cluster) as lab:
        pool = JobPool(lab, fail, setting)
        with pytest.raises(LabError, match="it is broken"), pool:
            pool.begin()
    assert all(child.status is not None for child in lab.children)


def fail(worker: PoolWorker, setting: JobSetting) -> None:
    raise RuntimeError("it is broken")


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["plain.py", "trainer.py"])
def test_the_examples_learn(name: str) -> None:
    done = subprocess.run(
        [sys.executable, name],
        cwd=EXAMPLES,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    loss = float(done.stdout.split()[-1])
    assert loss < math.log(256) / 3


def test_a_stage_takes_the_emulated_time_for_each_sample_of_a_micro_batch() -> None:
    speed = EmulatedSpeed(forward=0.02, backward=0.04)
    module = nn.Linear(2, 2)
    speed.attach(module)
    module(torch.ones(1, 2)).sum().backward()
    assert speed.first is None  # the clock has not started
    speed.start = time.monotonic()
    for size in (1, 3):
        before = speed.slept
        output = module(torch.ones(size, 2))
        forward = speed.slept - before
        output.sum().backward()
        backward = speed.slept - before - forward
        assert 0.5 * 0.02 * size < forward <= 0.02 * size
        assert 0.5 * 0.04 * size < backward <= 0.04 * size
    with torch.no_grad():
        before = speed.slept
        module(torch.ones(1, 2))
        assert speed.slept == before  # an evaluation


def test_the_delay_of_a_scenario_is_drawn_before_each_action() -> None:
    always = Scenario.load("sdpipe_b")
    always = replace(always, slow=(replace(always.slow[0], probability=1.0),))
    speed = EmulatedSpeed(forward=0.01, backward=0.03, slowness=Slowness.of(always, "any"))
    module = nn.Linear(2, 2)
    speed.attach(module)
    speed.start = time.monotonic()
    module(torch.ones(1, 2)).sum().backward()
    delays = 2 * 3 * (0.01 + 0.03)
    assert delays < speed.slept <= delays + 0.01 + 0.03


def test_buckets_have_every_parameter_once_and_exceed_the_limit_by_one_at_most() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (5, 300, 7, 20, 1000, 3)]
    found = list(buckets(parameters, 100))
    assert [p for some in found for p in some] == parameters[::-1]
    for some in found:
        assert sum(p.nbytes for p in some[:-1]) < 100
    assert all(sum(p.nbytes for p in some) >= 100 for some in found[:-1])


def test_layers_and_messages_are_scaled_alike() -> None:
    problem = problem_of(FULL)
    layer = problem.profile.layers[1]
    real = 50_358_272 * 4 / 8_388_608
    assert math.isclose(layer.parameter_bytes / layer.activation_bytes, real, rel_tol=0.01)
    assert math.isclose(layer.parameter_bytes, 50_358_272 * 4 * byte_scale(), rel_tol=1e-6)
    assert [one.parameter_bytes for one in problem.profile.layers] == layer_bytes(24)
    assert math.isclose(layer.backward, 3 * layer.forward)


def test_only_links_between_regions_are_preempted_with_the_given_share() -> None:
    cluster = problem_of(FULL).cluster
    found = bursts(cluster, dwell=1.0, until=200.0, seed=0)
    assert [change.at for change in found] == sorted(change.at for change in found)
    pairs = {(change.source, change.target) for change in found}
    assert pairs == {(a, b) for a in cluster.regions for b in cluster.regions if a != b}
    place = {region: number for number, region in enumerate(cluster.regions)}
    whole = [cluster.bandwidth[place[c.source]][place[c.target]] for c in found]
    left = [(c.bandwidth or 0.0) / w for c, w in zip(found, whole, strict=True)]
    assert {round(part, 6) for part in left} == {PREEMPTED, 1.0}
    assert abs(sum(part < 1 for part in left) / len(left) - PREEMPTED_SHARE) < 0.02
    assert abs(len(found) / len(pairs) / 200.0 - 1.0) < 0.05  # one draw per dwell
    assert found == bursts(cluster, dwell=1.0, until=200.0, seed=0)


def test_random_layouts_have_every_device_once_and_the_same_batch_for_every_size() -> None:
    problem = problem_of(FULL)
    layouts = random_layouts(problem, FULL)
    assert len(set(layouts)) == FULL.num_layouts
    for layout in layouts:
        assert sorted(layout) == sorted(device.name for device in problem.cluster.devices)
        assert {baseline_plan(layout, FULL, size).batch for size in FULL.baseline_sizes} == {64}


def test_both_sides_build_the_same_model_and_learn_no_held_out_window() -> None:
    first, second = model(3).state_dict(), model(3).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    text, held_out = texts(8)
    assert len(held_out) == 8
    assert len(text) > 1000
    assert not set(text.indices) & set(held_out.indices)
    inputs, target = held_out[7]
    assert torch.equal(inputs[1:], target[:-1])
    assert len(text[len(text) - 1][1]) == len(target) == CONTEXT


def test_a_slot_is_timed_from_the_end_of_its_second_step_on_the_slower_pipeline() -> None:
    log = JobLog(start=0.0)
    for step, moment in enumerate((10.0, 11.0, 12.0, 20.0, 22.0, 24.0)):
        for pipeline in (0, 1):
            worker, end = Worker(1, pipeline), moment + 0.5 * pipeline
            log.steps.append(StepReport(worker, step, 1, 0.0, end))
    assert log.step_of_slot(0, 3) == 1.0
    assert log.step_of_slot(1, 3) == 2.0


def test_a_ratio_is_taken_between_adjacent_slots_without_the_first() -> None:
    steps = {"a": (9.0, 2.0, 4.0, 6.0), "b": (1.0, 1.0, 1.0, 2.0)}
    rows = [
        SlotRow(part="x", side=side, round=slot, step=step)
        for side, each in steps.items()
        for slot, step in enumerate(each)
    ]
    assert ratio_of_steps(rows, "a", "b") == 3.0
