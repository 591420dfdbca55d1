"""Plans are carried out in the lab as they are written; its figures are not judged."""

import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.plan.lab_jobs import carry_out, parts
from benchmarks.plan.lab_rows import EQUAL, PLANNED, lab_rows
from benchmarks.plan.lab_setting import FULL, QUICK, placed, random_plans, uneven, world
from benchmarks.sleeping.job import lab_cluster
from polyrhythm.errors import LabError
from polyrhythm.lab.lab import Lab
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.problem import Problem


def in_order(problem: Problem) -> Plan:
    return placed(problem, [device.name for device in problem.cluster.devices]).plan


@pytest.mark.timeout(60)
def test_the_rows_of_the_lab_have_their_ratios() -> None:
    said: list[str] = []
    found = lab_rows(quick=True, make_plan=in_order, on_progress=said.append)
    assert set(found.ratios) == {"lab_vs_random", "lab_predicted", "uneven"}
    assert all(ratio >= 0 for ratio in found.ratios.values())
    assert {(row.ratio, row.side) for row in found.rows} == {
        ("lab_vs_random", PLANNED),
        ("lab_vs_random", "random 0"),
        ("uneven", PLANNED),
        ("uneven", EQUAL),
    }
    assert len(said) == len(found.rows)


@pytest.mark.timeout(60)
def test_a_worker_that_fails_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    problem = uneven(QUICK)
    plan = in_order(problem)
    wrong = replace(plan, pipelines=(replace(plan.pipelines[0], schedule="nonsense"),))
    with (
        pytest.raises(LabError, match="nonsense"),
        Lab(lab_cluster(problem.cluster)) as lab,
    ):
        carry_out(lab, wrong, problem, num_steps=2, folder=tmp_path, number=0)
    assert all(child.status is not None for child in lab.children)


def test_every_worker_has_the_work_of_its_stage_at_the_speed_of_its_device() -> None:
    problem = uneven(FULL)
    plan = replace(in_order(problem), layers_per_stage=(12, 12, 4, 4))
    found = parts(plan, problem)
    assert [part.rank for part in found] == [0, 1, 2, 3]
    assert len({round(part.forward, 9) for part in found}) == 1  # three times slower, a third
    assert all(math.isclose(part.backward, 3 * part.forward) for part in found)


def test_the_lab_stands_for_the_same_ratios_of_time_and_bytes() -> None:
    short, long = world(FULL), world(replace(FULL, time_scale=1.0, byte_scale=1.0))
    for mine, real in zip(parts_of(short), parts_of(long), strict=True):
        assert math.isclose(mine / real, FULL.time_scale, rel_tol=1e-3)


def parts_of(problem: Problem) -> list[float]:
    """Seconds: of a forward, of a message, and of the gradients over the same link."""
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
