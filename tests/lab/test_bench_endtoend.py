"""The benchmark of the whole runs, and emulates what it says; its figures are not judged."""

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

from benchmarks.endtoend import rival
from benchmarks.endtoend.bench import BARS
from benchmarks.endtoend.crew import Crew, Heard
from benchmarks.endtoend.pace import Pace
from benchmarks.endtoend.quiet import OURS, TORCH, quiet
from benchmarks.endtoend.side import Assignment, Ended
from benchmarks.endtoend.stormy_setting import (
    FULL,
    PREEMPTED,
    PREEMPTED_SHARE,
    QUICK,
    bursts,
    byte_scale,
    laid_out,
    problem_of,
    quick,
    random_layouts,
)
from benchmarks.endtoend.task import CONTEXT, layer_bytes, model, texts
from benchmarks.endtoend.turns import TurnRow, ratio, step_of_turn
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
    assert set(result["ratios"]) == set(BARS)
    assert result["ratios"]["stormy"] > 0
    # In so few steps nothing but synchronous ways are tried: both sides learn the same.
    assert abs(result["ratios"]["stormy_loss"]) < 1e-4
    assert result["figures"]["stormy_torch_loss_error"] < 1e-4
    rows = json.loads((tmp_path / "endtoend.json").read_text())["rows"]
    assert {row["side"] for row in rows} == {"torch", "ours", "saving", "not saving"}


@pytest.mark.timeout(60)
def test_two_jobs_take_turns_on_the_same_hosts() -> None:
    said: list[str] = []
    found, rows = quiet(quick=True, say=said.append)
    assert found > 0
    assert [(row.side, row.turn) for row in rows] == [(TORCH, 0), (OURS, 0), (TORCH, 1), (OURS, 1)]
    assert len(said) == 1 + len(rows)


@pytest.mark.timeout(60)
def test_a_worker_that_fails_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    problem = problem_of(QUICK)
    told = Assignment(
        plan=laid_out(random_layouts(problem, QUICK)[0], QUICK, 1),
        num_steps=1,
        forward=0.001,
        backward=0.003,
        num_held_out=1,
        timeout=30.0,
    )
    with Lab(quick(problem.cluster)) as lab:
        crew = Crew(lab, _fails, told, output=tmp_path, port=29500)
        with pytest.raises(LabError, match="it is broken"), crew:
            crew.begin()
    assert all(child.status is not None for child in lab.children)


def _fails(told: Assignment, seat: object, boss: object) -> None:
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


def test_a_stage_takes_as_long_as_it_should_whatever_the_size_of_the_micro_batch() -> None:
    pace = Pace(forward=0.02, backward=0.04)
    module = nn.Linear(2, 2)
    pace.keep(module)
    module(torch.ones(1, 2)).sum().backward()
    assert pace.first is None  # it has not begun
    pace.begin(time.monotonic())
    for size in (1, 3):
        before = pace.slept
        output = module(torch.ones(size, 2))
        forward = pace.slept - before
        output.sum().backward()
        backward = pace.slept - before - forward
        assert 0.5 * 0.02 * size < forward <= 0.02 * size
        assert 0.5 * 0.04 * size < backward <= 0.04 * size
    with torch.no_grad():
        before = pace.slept
        module(torch.ones(1, 2))
        assert pace.slept == before  # an evaluation


def test_what_a_scenario_adds_is_drawn_before_each_action() -> None:
    always = Scenario.load("sdpipe_b")
    always = replace(always, slow=(replace(always.slow[0], probability=1.0),))
    pace = Pace(forward=0.01, backward=0.03, slowness=Slowness.of(always, "any"))
    module = nn.Linear(2, 2)
    pace.keep(module)
    pace.begin(time.monotonic())
    module(torch.ones(1, 2)).sum().backward()
    delays = 2 * 3 * (0.01 + 0.03)
    assert delays < pace.slept <= delays + 0.01 + 0.03


def test_buckets_have_every_parameter_once_and_few_bytes_more_than_the_limit() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (5, 300, 7, 20, 1000, 3)]
    found = list(rival.buckets(parameters, 100))
    assert [p for some in found for p in some] == parameters[::-1]
    for some in found:
        assert sum(p.nbytes for p in some[:-1]) < 100
    assert all(sum(p.nbytes for p in some) >= 100 for some in found[:-1])


def test_a_layer_and_a_message_are_as_far_from_the_real_ones() -> None:
    problem = problem_of(FULL)
    layer = problem.profile.layers[1]
    real = 50_358_272 * 4 / 8_388_608
    assert math.isclose(layer.parameter_bytes / layer.activation_bytes, real, rel_tol=0.01)
    assert math.isclose(layer.parameter_bytes, 50_358_272 * 4 * byte_scale(), rel_tol=1e-6)
    assert [one.parameter_bytes for one in problem.profile.layers] == layer_bytes(24)
    assert math.isclose(layer.backward, 3 * layer.forward)


def test_links_between_regions_are_preempted_as_often_as_said_and_others_never() -> None:
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
        assert {laid_out(layout, FULL, size).batch for size in FULL.rival_sizes} == {64}


def test_both_sides_build_the_same_model_and_never_learn_what_is_held_out() -> None:
    first, second = model(3).state_dict(), model(3).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    text, held_out = texts(8)
    assert len(held_out) == 8
    assert len(text) > 1000
    assert not set(text.places.tolist()) & set(held_out.places.tolist())
    inputs, target = held_out[7]
    assert torch.equal(inputs[1:], target[:-1])
    assert len(text[len(text) - 1][1]) == len(target) == CONTEXT


def test_a_turn_is_timed_from_the_end_of_its_first_step_on_the_slower_pipeline() -> None:
    heard = Heard(began=0.0)
    for step, moment in enumerate((10.0, 11.0, 12.0, 20.0, 22.0, 24.0)):
        for pipeline in (0, 1):
            heard.steps.append(_ended(step, pipeline, moment + 0.5 * pipeline))
    assert step_of_turn(heard, 0, 3) == 1.0
    assert step_of_turn(heard, 1, 3) == 2.0


def test_a_ratio_is_taken_between_turns_next_to_each_other_and_not_of_the_first() -> None:
    steps = {"a": (9.0, 2.0, 4.0, 6.0), "b": (1.0, 1.0, 1.0, 2.0)}
    rows = [
        TurnRow(part="x", side=side, turn=turn, step=step)
        for side, each in steps.items()
        for turn, step in enumerate(each)
    ]
    assert ratio(rows, "a", "b") == 3.0


def _ended(step: int, pipeline: int, moment: float) -> Ended:
    return Ended(worker=Worker(1, pipeline), step=step, num_samples=1, loss=0.0, moment=moment)
