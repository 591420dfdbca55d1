"""The benchmark of convergence ends with what is asked of it, and its parts do what they say."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.converge.bench import AT_LEAST, AT_MOST
from benchmarks.converge.plan import FULL, Setting, recorded, setting_b
from benchmarks.converge.record import Record, Track, load_weights, weights_of
from benchmarks.converge.tasks import NoisyDigits, SourceText, Task, num_weights
from benchmarks.converge.worker import Pace, rate
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
    assert set(result["ratios"]) == {*AT_LEAST, *AT_MOST, "depth_final_loss"}
    assert all(ratio > 0 for ratio in result["ratios"].values())
    rows = json.loads((tmp_path / "converge.json").read_text())["rows"]
    sides = {(row["task"], row["side"]) for row in rows if "side" in row}
    both = {(task, side) for task in ("gpt", "cnn") for side in ("all_reduce", "age", "overlap")}
    assert both <= sides


@pytest.fixture(scope="module", params=[SourceText, NoisyDigits])
def task(request: pytest.FixtureRequest) -> Task:
    made: Task = request.param()
    return made


def test_a_seed_fixes_weights_and_batches_and_workers_draw_differently(task: Task) -> None:
    assert torch.equal(task.draw(1, 2, 3)[0], task.draw(1, 2, 3)[0])
    for other in ((0, 2, 3), (1, 0, 3), (1, 2, 0)):
        assert not torch.equal(task.draw(1, 2, 3)[0], task.draw(*other)[0])
    assert np.array_equal(weights_of(task.build(1)), weights_of(task.build(1)))
    assert len(weights_of(task.build(1))) == num_weights(task)


def test_weights_come_back_as_they_were(task: Task) -> None:
    one, other = task.build(1), task.build(2)
    load_weights(other, weights_of(one))
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_slower_machines_have_longer_steps_and_all_that_goes_with_them() -> None:
    for make in (setting_b, recorded):
        setting = make(num_workers=2, step=0.1, steps=10, looks=5)
        longer = setting.paced(0.3)
        assert longer.step == 0.3
        assert longer.every == pytest.approx(3 * setting.every)
        assert longer.slow.probability == setting.slow.probability
        if make is recorded:
            assert longer.slow.trace_duration == pytest.approx(3 * setting.slow.trace_duration)


def test_the_rate_rises_from_nothing_to_its_peak_and_falls_to_nothing() -> None:
    rates = [rate(part / 100) for part in range(101)]
    assert max(rates) == pytest.approx(1)
    assert (rates[0], rates[100]) == (0, 0)
    assert rates.index(max(rates)) == 20


def test_a_recorded_moment_is_the_mean_of_the_models_held_then() -> None:
    record = Record(num_workers=2, num_batches=4, num_weights=2, every=10.0, num_moments=3)
    models = [torch.nn.Linear(1, 1) for _ in range(2)]
    clock = [0.0]
    record.now = lambda: clock[0]  # type: ignore[method-assign]
    tracks = [Track(record, worker, model) for worker, model in enumerate(models)]
    held = [weights_of(model) for model in models]
    for at, worker in ((4.0, 0), (12.0, 0), (14.0, 1)):
        clock[0] = at
        with torch.no_grad():
            models[worker].weight += 1
        number = record.take()
        assert number is not None
        tracks[worker].step(number, is_late=False)
        if at <= 10:
            held[worker] = weights_of(models[worker])
    (mean,) = record.means()  # of 10 s: what changed after that is not in it
    assert mean == pytest.approx((held[0] + held[1]) / 2)
    assert (record.take(), record.take()) == (3, None)
    assert record.curve().batches == (1, 4)


def steps_of(
    setting: Setting, worker: int, seed: int, count: int, *, now: float = 0.0
) -> list[float]:
    pace = Pace.of(setting, worker, seed, load_traces(setting.scenario(seed)))
    return [pace.moments(now, 4)[-1] - now for _ in range(count)]


def test_setting_b_sleeps_three_steps_before_a_tenth_of_forwards_and_backwards() -> None:
    setting = setting_b(num_workers=8, step=0.1, steps=10, looks=1)
    found = steps_of(setting, 3, 0, 20_000)
    assert {round(step, 6) for step in found} == {0.1, 0.4, 0.7}
    assert sum(found) / len(found) == pytest.approx(0.16, rel=0.02)
    assert found == steps_of(setting, 3, 0, 20_000)
    assert found != steps_of(setting, 4, 0, 20_000)


def test_micro_batches_follow_the_sleeps_of_their_step() -> None:
    pace = Pace.of(setting_b(num_workers=8, step=0.4, steps=10, looks=1), 3, 0, {})
    found = {tuple(round(at, 6) for at in pace.moments(0.0, 4)) for _ in range(1000)}
    assert found == {
        tuple(round(at, 6) for at in (x, *(x + y + 0.1 * k for k in (1, 2, 3, 4))))
        for x in (0, 1.2)  # before the forward of the first
        for y in (0, 1.2)  # before its backward
    }


def test_recorded_machines_take_as_long_as_they_took() -> None:
    setting = recorded(num_workers=16, step=0.1, steps=100, looks=1)
    assert setting.slow.trace_duration is not None
    third = setting.slow.trace_duration / 3
    slowest, fastest = (
        sum(steps_of(setting, worker, 0, 500, now=third)) / 500 for worker in (0, 12)
    )
    assert slowest == pytest.approx(0.1 / 0.2, rel=0.2)  # after three hours it had a fifth
    assert fastest == pytest.approx(0.1, rel=0.2)


def test_the_full_benchmark_has_time_for_its_runs() -> None:
    seconds = 0.0
    for trial in FULL.trials:
        lanes = [1.0, *(0.6 * len(lane) for lane in trial.lanes)]  # in runs of all_reduce
        seconds += len(FULL.seeds) * max(lanes) * trial.setting.looks * trial.setting.every
    assert seconds < 1200
