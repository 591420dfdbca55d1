"""A printed plan shows all devices and the predicted figures, and 64 devices fit on a screen."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.observe.plan_table import (
    MAX_LINES,
    MAX_ROWS,
    PlanProgress,
    show_change,
    show_front,
    show_plan,
    show_reserve,
)
from polyrhythm.plan.plan import PipelinePlan, Plan, TimePart
from polyrhythm.plan.predict import Prediction, predict
from polyrhythm.plan.replan import ReplanResult
from polyrhythm.plan.search import PlanResult, SearchProgress
from tests.pure.plan_examples import cluster, predicted, problem, profile

FOUR = problem(cluster({"Oregon": 3, "Tokyo": 2}))
WORLD = {f"region {letter}": 8 for letter in "abcdefgh"}
MANY = problem(cluster(WORLD), profile(16, microbatch_size=1), job=None)


def shown(
    prediction: Prediction, bound: float | None = None, price_bound: float | None = None
) -> str:
    console = Console(file=io.StringIO(), width=80)
    least = 0.75 * prediction.time.total if bound is None else bound
    planned = PlanResult(best=prediction, bound=least, front=(), price_bound=price_bound)
    show_plan(prediction, planned, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def row(text: str, *cells: str) -> bool:
    return any(line.split()[: len(cells)] == list(cells) for line in text.splitlines())


def line(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(name))


def test_few_devices_have_a_row_each() -> None:
    prediction = predicted(2, 2, FOUR)
    text = shown(prediction)
    assert "2 stages x 2 pipelines, micro-batches of 2, sync all_reduce" in text
    for use in prediction.uses:
        layers = f"{use.layers.start}-{use.layers.stop - 1}"
        cells = str(use.pipeline), str(use.stages.start), use.device, use.region, layers
        assert row(text, *cells)
    assert f"{prediction.uses[0].memory / 2**20:.0f}MiB / 922MiB" in text  # a tenth is reserved


def test_a_device_with_several_stages_has_one_row_for_them() -> None:
    plan = replace(
        predicted(2, 1, FOUR).plan,
        layers_per_stage=(2, 3, 3),
        pipelines=(PipelinePlan(devices=("Oregon/0", "Oregon/0", "Tokyo/0"), num_microbatches=16),),
        left_out=("Oregon/1",),
    )
    text = shown(predict(plan, FOUR))
    assert row(text, "0", "0-1", "Oregon/0", "Oregon", "0-4")
    assert row(text, "0", "2", "Tokyo/0", "Tokyo", "5-7")


def test_predictions_are_printed_one_per_line() -> None:
    prediction = predicted(2, 2, FOUR)
    step = prediction.time.total
    text = shown(prediction, bound=0.75 * step)
    assert f"for 32 samples: {32 / step:.4g} samples/s" in line(text, "step ")
    assert line(text, "bound").endswith("at most 25 % of it could be saved")
    assert prediction.price is not None
    assert f"{prediction.price:.4g} per step" in line(text, "price")
    assert f"{prediction.price / 32 * 1e6:.4g} per million" in line(text, "price")
    assert "cheaper than 0.5" in shown(prediction, price_bound=0.5)
    assert line(text, "left out") == "left out   1 device: Tokyo/1"


def test_the_three_largest_parts_are_named_with_their_shares() -> None:
    prediction = predicted(2, 2, FOUR)
    step = prediction.time.total
    parts = tuple(
        TimePart(name=name, takes=share * step)
        for name, share in (("first", 0.5), ("second", 0.3), ("third", 0.15), ("fourth", 0.05))
    )
    text = shown(replace(prediction, parts=parts))
    parts_shown = "of it       50 % first\n            30 % second\n            15 % third\nbound"
    assert parts_shown in text


def test_prices_and_left_out_devices_are_shown_only_if_present() -> None:
    text = shown(predicted(2, 2, problem(cluster({"a": 2, "b": 2}, price=None))))
    assert "price" not in text
    assert "left out" not in text


@pytest.mark.parametrize("by_stage", [True, False])
def test_many_devices_share_rows_and_none_is_missing(by_stage: bool) -> None:
    prediction = predicted(8, 8, MANY, by_stage=by_stage)
    assert len(prediction.uses) > MAX_ROWS
    text = shown(prediction)
    rows = [line for line in text.splitlines() if "GiB" in line or "MiB" in line]
    assert len(rows) == 8
    assert all("8: 0-7" in line for line in rows)
    assert [name for name in WORLD if not any(name in line for line in rows)] == []
    assert max(map(len, rows)) <= 80


def test_of_many_devices_the_busiest_and_the_fullest_are_shown() -> None:
    slow = replace(MANY.cluster.devices[3], speed=0.1, memory=2**29)
    devices = tuple(slow if device.name == slow.name else device for device in MANY.cluster.devices)
    prediction = predicted(8, 8, problem(replace(MANY.cluster, devices=devices), MANY.profile))
    text = shown(prediction)
    use = next(use for use in prediction.uses if use.device == slow.name)
    first = next(line for line in text.splitlines() if " region a " in line and "8: 0-7" in line)
    assert f"{use.busy:.4g}s" in first
    assert "461MiB" in first


def test_devices_without_numbers_are_named() -> None:
    where = cluster({f"host-{i}": 1 for i in range(30)})
    devices = tuple(replace(device, name=device.region) for device in where.devices)
    text = shown(predicted(2, 15, problem(replace(where, devices=devices), job=None)))
    assert all(device.name in text for device in devices)


def test_equal_pipelines_share_a_row() -> None:
    text = shown(predicted(8, 8, MANY, by_stage=True))
    [found] = [line for line in text.splitlines() if " > " in line]
    assert found.startswith("0-7 ")
    assert " > ".join(WORLD) in found


def test_front_numbers_its_plans_and_marks_the_chosen_one() -> None:
    front = [predicted(2, 2, FOUR), predicted(2, 1, FOUR), predicted(1, 1, FOUR)]
    console = Console(file=io.StringIO(), width=80)
    show_front(front, taken=1, console=console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [line for line in text.splitlines() if line[:1].isdigit()]
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    assert ["this one" in line for line in lines] == [False, True, False]
    for line, each in zip(lines, front, strict=True):
        assert f"{each.price:.4g}" in line
        stages, pipelines = each.plan.num_stages, each.plan.num_pipelines
        assert f"{stages} stage{'s' * (stages > 1)} x {pipelines} pipeline" in line


def change(
    running: Prediction | str,
    chosen: Prediction,
    *moved: str,
    migration: float = 30.0,
    lost: tuple[int, ...] = (),
) -> str:
    console = Console(file=io.StringIO(), width=80)
    answer = ReplanResult(
        planned=PlanResult(best=chosen, bound=0.1, front=()),
        migration=migration,
        moved=moved,
        from_checkpoint=lost,
        why="because",
    )
    show_change(answer, running=running, num_steps=1000, console=console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_change_shows_moved_devices_migration_time_and_break_even() -> None:
    slow, fast = predicted(2, 1, FOUR), predicted(2, 2, FOUR)
    text = change(slow, fast, "Oregon/2", "Tokyo/0")
    steps = 30 / (slow.time.total - fast.time.total)
    assert "2 devices: Oregon/2, Tokyo/0 with new layers; 2 as before" in line(text, "moves")
    assert line(text, "migration").startswith("migration  30s, then ")
    assert f"after {steps:,.0f} of 1,000 steps" in line(text, "migration")
    assert line(text, "decision") == "decision   because"


def test_plan_that_cannot_go_on_shows_the_reason_and_no_gain() -> None:
    text = change("device 'x' of pipeline 0", predicted(2, 2, FOUR), "Oregon/2", lost=(3, 4, 7))
    assert line(text, "running") == "running    cannot continue: device 'x' of pipeline 0"
    assert "of 1,000 steps" not in text
    assert line(text, "lost").startswith("lost       layers 3-4, 7 are on no device")


def test_kept_plan_moves_no_device() -> None:
    same = predicted(2, 2, FOUR)
    text = change(same, same, migration=0.0)
    assert "every device keeps its layers" in text
    assert "migration" not in text


def test_restart_takes_time_even_if_no_device_moves() -> None:
    text = change(predicted(2, 1, FOUR), predicted(2, 2, FOUR), migration=5.0)
    assert "every device keeps its layers" in text
    assert line(text, "migration").startswith("migration  5s, then ")


def test_without_a_terminal_a_search_prints_few_lines() -> None:
    console = Console(file=io.StringIO(), width=80)
    best = "about 2 s, 2 stages"
    with PlanProgress(console) as progress:
        for done in range(1000):
            progress.update(SearchProgress(doing="[some] thing", done=done, total=1000, best=best))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert 2 <= len(lines) <= MAX_LINES + 1
    assert lines[0] == "planning 0/1000: [some] thing; best so far about 2 s, 2 stages"


def test_terminal_line_keeps_brackets() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with PlanProgress(console) as progress:
        progress.update(SearchProgress(doing="[some] thing", done=1, total=2, best=""))
    assert "planning 1/2: [some] thing" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("pipelines", "hosts", "buddy", "expected"),
    [
        (("ab",), {}, None, "a loss of any device ends the job: there is only one pipeline"),
        (("ab", "cd"), {}, None, "each machine may be lost: a whole pipeline is left"),
        (("ab", "cd"), dict.fromkeys("ac", "h1"), None, "without any one of h1"),
        (("ab", "cd"), dict.fromkeys("abcd", "h1"), None, ""),
        (("ab", "cd"), {}, True, "each machine may be lost: a whole pipeline is left"),
        (("ab", "cd"), {}, False, "without any one of a, b, c, d"),
        (("a", "b", "c", "d"), dict.fromkeys("ab", "h1"), True, "without any one of h1"),
        (("a", "b", "c", "d"), dict.fromkeys("ac", "h1"), True, "each machine may be lost"),
    ],
)
def test_machines_that_training_cannot_lose_are_named(
    pipelines: tuple[str, ...], hosts: dict[str, str], buddy: bool | None, expected: str
) -> None:
    devices = tuple(Device(name=name, region="r", host=hosts.get(name)) for name in "abcd")
    over = Cluster(
        name="x", devices=devices, regions=("r",), latency=((0.0,),), bandwidth=((1e9,),)
    )
    plan = Plan(
        layers_per_stage=(1,) * len(pipelines[0]),
        pipelines=tuple(PipelinePlan(devices=tuple(names)) for names in pipelines),
        sync="all_reduce" if buddy is None else "decoupled",
    )
    console = Console(file=io.StringIO(), width=120)
    show_reserve(plan, over, console, buddy=buddy is not False)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.startswith("losses ") == bool(expected)
    assert expected in text
