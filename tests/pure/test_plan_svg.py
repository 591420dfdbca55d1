"""The picture of a plan is valid XML with every device, group and pipeline."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.observe.plan_map import HEIGHT, WIDTH, Box, arrange_boxes, place_devices
from polyrhythm.observe.plan_svg import draw_plan
from polyrhythm.plan.plan import PipelinePlan, Plan, PredictedStep
from tests.pure.plan_examples import cluster

SVG = "{http://www.w3.org/2000/svg}"


def plan_of(where: Cluster, num_stages: int, num_pipelines: int) -> Plan:
    names = [device.name for device in where.devices]
    return Plan(
        layers_per_stage=(2,) * num_stages,
        pipelines=tuple(
            PipelinePlan(
                devices=tuple(names[number * num_stages : (number + 1) * num_stages]),
                num_microbatches=number + 1,
            )
            for number in range(num_pipelines)
        ),
        left_out=tuple(names[num_stages * num_pipelines :]),
    )


def drawn(plan: Plan, where: Cluster) -> ElementTree.Element:
    return ElementTree.fromstring(draw_plan(plan, where))


def by_class(picture: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [each for each in picture.iter() if each.get("class") == name]


def title(element: ElementTree.Element) -> str:
    return element.findtext(f"{SVG}title") or ""


@pytest.mark.parametrize(
    ("sizes", "num_stages", "num_pipelines"),
    [
        ({"a": 2, "b": 2}, 2, 2),
        ({"a": 1}, 1, 1),
        ({"a": 5, "b": 2, "c": 1}, 3, 2),
        ({f"r{i}": 8 for i in range(8)}, 8, 8),
        ({f"r{i}": 1 for i in range(64)}, 2, 32),
        ({"all": 64}, 16, 4),
    ],
)
def test_all_devices_pipelines_and_groups_are_drawn(
    sizes: dict[str, int], num_stages: int, num_pipelines: int
) -> None:
    where = cluster(sizes)
    plan = plan_of(where, num_stages, num_pipelines)
    picture = drawn(plan, where)
    assert len(by_class(picture, "region")) == len(sizes)
    assert len(by_class(picture, "group")) == num_stages
    assert len(by_class(picture, "pipeline")) == (num_pipelines if num_stages > 1 else 0)
    titles = {title(each) for each in by_class(picture, "device")}
    for number, pipeline in enumerate(plan.pipelines):
        for stage, device in enumerate(pipeline.devices):
            assert f"{device}: stage {stage} of pipeline {number}" in titles
    for device in plan.left_out:
        assert f"{device}: left out" in titles
    assert len(titles) == len(where.devices)


def test_devices_of_a_group_share_a_tint_and_those_of_a_pipeline_a_colour() -> None:
    where = cluster({"a": 4, "b": 4})
    plan = plan_of(where, 3, 2)
    tints: dict[str, set[str | None]] = {}
    colours: dict[str, set[str | None]] = {}
    for device in by_class(drawn(plan, where), "device"):
        if title(device).endswith("left out"):
            continue
        rect = device.find(f"{SVG}rect")
        assert rect is not None
        stage, pipeline = re.findall(r"\d+", title(device).partition(": ")[2])
        tints.setdefault(stage, set()).add(rect.get("fill"))
        colours.setdefault(pipeline, set()).add(rect.get("stroke"))
    for found, number in ((tints, 3), (colours, 2)):
        assert len(found) == number
        assert all(len(values) == 1 for values in found.values())
        assert len(set.union(*found.values())) == number  # different from all others


def test_a_line_goes_from_device_to_device_in_the_order_of_stages() -> None:
    where = cluster({"a": 4})
    plan = plan_of(where, 4, 1)
    picture = drawn(plan, where)
    [line] = by_class(picture, "pipeline")
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", line.get("d") or "")]
    ends = [(numbers[0], numbers[1])] + [
        (numbers[i + 4], numbers[i + 5]) for i in range(0, len(numbers) - 4, 4)
    ]
    middles = {}
    for device in by_class(picture, "device"):
        rect = device.find(f"{SVG}rect")
        assert rect is not None
        x, y = float(rect.get("x", "")) + WIDTH / 2, float(rect.get("y", "")) + HEIGHT / 2
        middles[title(device).partition(":")[0]] = (x, y)
    assert ends == [middles[device] for device in plan.pipelines[0].devices]


def test_a_device_with_several_stages_is_drawn_once() -> None:
    where = cluster({"a": 2})
    plan = Plan(
        layers_per_stage=(1, 1, 1), pipelines=(PipelinePlan(devices=("a/0", "a/0", "a/1")),)
    )
    titles = [title(each) for each in by_class(drawn(plan, where), "device")]
    assert titles == ["a/0: stage 0-1 of pipeline 0", "a/1: stage 2 of pipeline 0"]


@settings(deadline=None)
@given(st.lists(st.text(max_size=30), min_size=2, max_size=6, unique=True), st.text(max_size=40))
def test_names_of_any_letters_give_valid_xml(names: list[str], model: str) -> None:
    where = replace(
        cluster({"a": 1}),
        name=model,
        devices=tuple(Device(name=name, region=name) for name in names),
        regions=tuple(names),
        latency=((0.0,) * len(names),) * len(names),
        bandwidth=((1.0,) * len(names),) * len(names),
    )
    plan = replace(
        plan_of(where, 2, len(names) // 2),
        model=model,
        cluster=model,
        predicted=PredictedStep(step=1.5, bound=1.0, parts=()),
    )
    picture = drawn(plan, where)
    assert len(by_class(picture, "device")) == len(names)


def test_markup_in_a_name_stays_text() -> None:
    where = cluster({"<b>&\"'": 2})
    picture = drawn(plan_of(where, 2, 1), where)
    assert "<b>&\"'/0: stage 0 of pipeline 0" in {title(d) for d in by_class(picture, "device")}
    assert picture.find(f".//{SVG}b") is None


def corners(boxes: list[Box]) -> list[tuple[float, float, float, float]]:
    return [(box.x, box.y, box.x + box.width, box.y + box.height) for box in boxes]


@settings(deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=16), st.integers(1, 8))
def test_devices_and_boxes_do_not_overlap(sizes: list[int], num_stages: int) -> None:
    where = cluster({f"r{i}": size for i, size in enumerate(sizes)})
    num_stages = min(num_stages, sum(sizes))
    boxes = arrange_boxes(
        place_devices(plan_of(where, num_stages, sum(sizes) // num_stages), where), left=5, top=7
    )
    devices = [
        (box.x + p.x - WIDTH / 2, box.y + p.y - HEIGHT / 2, box.x + p.x + WIDTH / 2, box.y + p.y)
        for box in boxes
        for p in box.positions
    ]
    for kind in (corners(boxes), devices):
        for i, a in enumerate(kind):
            for b in kind[:i]:
                apart = a[0] >= b[2] or b[0] >= a[2] or a[1] >= b[3] or b[1] >= a[3]
                assert apart, (a, b)
    for box in boxes:
        for position in box.positions:
            assert WIDTH / 2 < position.x < box.width - WIDTH / 2
            assert HEIGHT / 2 < position.y < box.height - HEIGHT / 2 - 13  # the name is below
