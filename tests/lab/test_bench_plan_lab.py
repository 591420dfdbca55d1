"""`bench plan` runs plans in the lab as they are written; the step times are not judged."""

import math
import statistics
from dataclasses import replace

import pytest

from benchmarks.harness.network import lab_cluster
from benchmarks.harness.pipeline_job import run_job
from benchmarks.plan.lab import (
    EQUAL,
    FULL,
    PLANNED,
    QUICK,
    emulated_workers,
    lab_ratios,
    lab_rows,
    placed,
    random_plans,
    uneven,
    world,
)
from polyrhythm.errors import LabError
from polyrhythm.lab.lab import Lab
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.problem import Problem


def in_order(problem: Problem) -> Plan:
    return placed(problem, [device.name for device in problem.cluster.devices]).plan


@pytest.mark.long
@pytest.mark.timeout(60)
def test_the_lab_runs_every_plan_and_gives_every_ratio() -> None:
    shown: list[str] = []
    rows = lab_rows(quick=True, make_plan=in_order, on_progress=shown.append)
    ratios, _ = lab_ratios(rows)
    assert set(ratios) == {"lab_vs_random", "lab_predicted", "uneven"}
    assert all(ratio >= 0 for ratio in ratios.values())
    assert {(row.ratio, row.side) for row in rows} == {
        ("lab_vs_random", PLANNED),
        ("lab_vs_random", "random 0"),
        ("uneven", PLANNED),
        ("uneven", EQUAL),
    }
    assert len(shown) == len(rows)


@pytest.mark.timeout(60)
def test_a_worker_that_fails_ends_the_run_with_its_reason() -> None:
    problem = uneven(QUICK)
    plan = in_order(problem)
    wrong = replace(plan, pipelines=(replace(plan.pipelines[0], schedule="nonsense"),))
    with (
        pytest.raises(LabError, match="nonsense"),
        Lab(lab_cluster(problem.cluster)) as lab,
    ):
        run_job(lab, emulated_workers(wrong, problem), 2)
    assert all(child.status is not None for child in lab.children)


def test_every_worker_has_the_work_of_its_stage_at_the_speed_of_its_device() -> None:
    problem = uneven(FULL)
    plan = replace(in_order(problem), layers_per_stage=(12, 12, 4, 4))
    workers = emulated_workers(plan, problem)
    assert [worker.rank for worker in workers] == [0, 1, 2, 3]
    assert len({round(worker.forward, 9) for worker in workers}) == 1  # a third of the speed
    assert all(math.isclose(worker.backward, 3 * worker.forward) for worker in workers)


def test_the_lab_scales_compute_and_transfers_alike() -> None:
    short, long = world(FULL), world(replace(FULL, time_scale=1.0, byte_scale=1.0))
    for scaled, real in zip(durations(short), durations(long), strict=True):
        assert math.isclose(scaled / real, FULL.time_scale, rel_tol=1e-3)


def durations(problem: Problem) -> list[float]:
    """Return the seconds of a forward, of a message, and of the gradients over the same link."""
    layer, link = problem.profile.layers[0], problem.cluster.link("Oregon/0", "London/0")
    sizes = (layer.activation_bytes, layer.parameter_bytes)
    return [layer.forward, link.latency, *(size / link.bandwidth for size in sizes)]


def test_random_placements_go_from_lucky_to_unlucky() -> None:
    problem = world(QUICK)
    steps = [one.time.total for one in random_plans(problem, 5)]
    assert len(steps) == 5
    assert steps == sorted(steps)
    many = [one.time.total for one in random_plans(problem, 10)]
    assert math.isclose(statistics.fmean(steps), statistics.fmean(many), rel_tol=0.1)
