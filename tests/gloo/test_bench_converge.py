"""`bench converge --quick` runs and prints every ratio; its emulated machines and records."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.converge.bench import BARS
from benchmarks.converge.loss_curves import (
    EmulatedStep,
    ModelTrack,
    SharedModels,
    load_weights,
    rate,
    weights_of,
)
from benchmarks.converge.setting import (
    ALL_REDUCE,
    FULL,
    ConvergeRun,
    EmulatedMachines,
    recorded,
    setting_b,
)
from benchmarks.converge.tasks import LearningTask, NoisyDigits, SourceText, num_weights
from benchmarks.harness.report import names_of
from polyrhythm.describe.slowness import load_traces


@pytest.mark.long
@pytest.mark.timeout(110)
def test_the_quick_benchmark_ends_with_its_ratios(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polyrhythm", "bench", "converge", "--quick", "--out", "."]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bench"] == "converge"
    assert set(result["ratios"]) == names_of(BARS)
    assert all(ratio > 0 for ratio in result["ratios"].values())
    rows = json.loads((tmp_path / "converge.json").read_text())["rows"]
    sides = {(row["task"], row["side"]) for row in rows if "side" in row}
    both = {(task, side) for task in ("gpt", "cnn") for side in ("all_reduce", "age", "overlap")}
    assert both <= sides


@pytest.fixture(scope="module", params=[SourceText, NoisyDigits])
def task(request: pytest.FixtureRequest) -> LearningTask:
    made: LearningTask = request.param()
    return made


def test_a_seed_fixes_weights_and_batches_and_workers_draw_differently(task: LearningTask) -> None:
    assert torch.equal(task.draw(1, 2, 3)[0], task.draw(1, 2, 3)[0])
    for other in ((0, 2, 3), (1, 0, 3), (1, 2, 0)):
        assert not torch.equal(task.draw(1, 2, 3)[0], task.draw(*other)[0])
    assert np.array_equal(weights_of(task.build(1)), weights_of(task.build(1)))
    assert len(weights_of(task.build(1))) == num_weights(task)


def test_loaded_weights_equal_the_saved_ones(task: LearningTask) -> None:
    one, other = task.build(1), task.build(2)
    load_weights(other, weights_of(one))
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_longer_steps_scale_all_times_of_the_machines() -> None:
    for make in (setting_b, recorded):
        machines = make(2, 0.1, 10, 5)
        longer = machines.with_step(0.3)
        assert longer.step == 0.3
        assert longer.every == pytest.approx(3 * machines.every)
        assert longer.slow.probability == machines.slow.probability
        if make is recorded:
            assert longer.slow.trace_duration == pytest.approx(3 * machines.slow.trace_duration)


def test_the_rate_rises_from_nothing_to_its_peak_and_falls_to_nothing() -> None:
    rates = [rate(part / 100) for part in range(101)]
    assert max(rates) == pytest.approx(1)
    assert (rates[0], rates[100]) == (0, 0)
    assert rates.index(max(rates)) == 20


def test_the_mean_of_a_moment_is_over_the_models_held_then() -> None:
    machines = setting_b(2, 10 / 9, 2, 1)
    assert (machines.num_batches, machines.every) == (4, 10.0)
    shared = SharedModels(machines, num_weights=2)
    models = [torch.nn.Linear(1, 1) for _ in range(2)]
    tracks = [ModelTrack(shared, model) for model in models]
    held = [weights_of(model) for model in models]
    for now, worker in ((4.0, 0), (12.0, 0), (14.0, 1)):
        with torch.no_grad():
            models[worker].weight += 1
        assert shared.take_batch() is not None
        tracks[worker].step(now, is_late=False)
        if now <= 10:
            held[worker] = weights_of(models[worker])
    (mean,) = shared.means()  # at 10 s: later changes are not in it
    assert mean == pytest.approx((held[0] + held[1]) / 2)
    assert (shared.take_batch(), shared.take_batch()) == (3, None)
    reports = [track.finish(15.0) for track in tracks]
    assert [report.ends for report in reports] == [[4.0, 12.0], [14.0]]


def emulated_step(machines: EmulatedMachines, worker: int, seed: int) -> EmulatedStep:
    run = ConvergeRun(task=NoisyDigits(), machines=machines, target=0.0, side=ALL_REDUCE, seed=seed)
    return EmulatedStep.of(run, worker, load_traces(machines.scenario(seed)))


def steps_of(
    machines: EmulatedMachines, worker: int, seed: int, count: int, *, now: float = 0.0
) -> list[float]:
    step = emulated_step(machines, worker, seed)
    return [step.moments(now, 4)[-1] - now for _ in range(count)]


@pytest.mark.long
def test_setting_b_sleeps_three_steps_before_a_tenth_of_forwards_and_backwards() -> None:
    machines = setting_b(8, 0.1, 10, 1)
    steps = steps_of(machines, 3, 0, 20_000)
    assert {round(step, 6) for step in steps} == {0.1, 0.4, 0.7}
    assert sum(steps) / len(steps) == pytest.approx(0.16, rel=0.02)
    assert steps == steps_of(machines, 3, 0, 20_000)
    assert steps != steps_of(machines, 4, 0, 20_000)


@pytest.mark.long
def test_micro_batches_follow_the_sleeps_of_their_step() -> None:
    step = emulated_step(setting_b(8, 0.4, 10, 1), 3, 0)
    moments = {tuple(round(at, 6) for at in step.moments(0.0, 4)) for _ in range(1000)}
    assert moments == {
        tuple(round(at, 6) for at in (x, *(x + y + 0.1 * k for k in (1, 2, 3, 4))))
        for x in (0, 1.2)  # before the forward of the first
        for y in (0, 1.2)  # before its backward
    }


def test_recorded_machines_have_their_recorded_speeds() -> None:
    machines = recorded(16, 0.1, 100, 1)
    assert machines.slow.trace_duration is not None
    third = machines.slow.trace_duration / 3
    slowest, fastest = (
        sum(steps_of(machines, worker, 0, 500, now=third)) / 500 for worker in (0, 12)
    )
    assert slowest == pytest.approx(0.1 / 0.2, rel=0.2)  # after three hours it had a fifth
    assert fastest == pytest.approx(0.1, rel=0.2)


def test_the_full_benchmark_ends_within_twenty_minutes() -> None:
    seconds = 0.0
    for trial in FULL.trials:
        longest = max(1.0, 0.6 * len(trial.others))  # lane, in runs of all_reduce
        seconds += len(FULL.seeds) * longest * trial.machines.num_points * trial.machines.every
    assert seconds < 1200
