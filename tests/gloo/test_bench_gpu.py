"""`bench gpu` refuses a machine without a GPU; its figures follow from times, losses and ratios."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.alternate import Rounds, loss_difference, milliseconds, ratio
from benchmarks.gpu.averaging import hidden_share
from benchmarks.gpu.predictions import NUM_MICROBATCHES, predicted, worst_error
from benchmarks.harness.child import in_child
from polyrhythm.describe.model import Layer, ModelProfile
from tests.gloo.commands import run_forked


@pytest.mark.skipif(bool(torch.cuda.device_count()), reason="this machine has a CUDA device")
def test_machine_without_a_gpu_is_refused(tmp_path: Path) -> None:
    done = run_forked("bench", "gpu", "--quick", cwd=tmp_path)
    assert done.returncode == 2
    assert "this machine has no CUDA device" in done.stderr
    assert "expected: one NVIDIA GPU" in done.stderr
    assert "fix: " in done.stderr


def test_ratio_is_the_median_of_the_rounds() -> None:
    rounds = Rounds({"plain": [2.0, 3.0, 8.0], "ours": [1.0, 2.0, 2.0]}, {})
    assert ratio(rounds, "plain", "ours") == 2.0
    assert milliseconds(rounds, "x") == {"x_plain_ms": 3e3, "x_ours_ms": 2e3}


def test_losses_are_compared_by_step_and_rank() -> None:
    ours, other = [[1.0, 2.0], [4.0, 8.0]], [[1.0, 2.0, 9.0], [4.0, 8.8, 9.0]]
    assert loss_difference(ours, other) == pytest.approx(0.1)
    with pytest.raises(RuntimeError, match="no losses of the same steps"):
        loss_difference([[], []], other)


def test_transfer_is_hidden_if_a_step_is_as_long_as_its_compute() -> None:
    assert hidden_share(2.0, 1.0, 2.0) == 1.0
    assert hidden_share(2.0, 1.0, 2.25) == 0.75
    assert hidden_share(2.0, 1.0, 3.5) == 0.0
    assert hidden_share(2.0, 1.0, 1.9) == 1.0


def test_worst_error_needs_all_ratios() -> None:
    figures = {"memory_ratio_a": 0.9, "memory_ratio_b": 1.05, "other": 7.0}
    assert worst_error(figures, "memory_ratio_", 2) == pytest.approx(0.1)
    assert math.isnan(worst_error(figures, "memory_ratio_", 3))


def test_prediction_of_two_stages_counts_microbatches_in_flight() -> None:
    layers = tuple(
        Layer(
            name=str(number),
            forward=1.0,
            backward=2.0,
            parameter_bytes=0,
            activation_bytes=0,
            stored_bytes=1000,
            temporary_bytes=100,
        )
        for number in range(4)
    )
    profile = ModelProfile(name="four", microbatch_size=4, layers=layers)
    uses = predicted(profile, 4 * NUM_MICROBATCHES, 2, "bounded:4,2").uses
    assert [use.in_flight for use in uses] == [4, 2]
    assert [use.memory for use in uses] == [8100, 4100]
    assert [use.busy for use in uses] == [6.0 * NUM_MICROBATCHES] * 2
    whole = predicted(profile, 4 * NUM_MICROBATCHES, 1, "1f1b")
    assert whole.time.total == pytest.approx(12.0 * NUM_MICROBATCHES)


def test_part_that_fails_reports_its_traceback() -> None:
    def fail() -> dict[str, float]:
        raise ValueError("no figures today")

    with pytest.raises(RuntimeError, match="the part x failed: ValueError: no figures today") as e:
        in_child("x", fail, dict[str, float], 20.0)
    assert "in fail" in str(e.value)
