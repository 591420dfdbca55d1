"""Schedule specs print, parse back and build schedules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import ScheduleError
from polyrhythm.schedule.builders import build
from polyrhythm.schedule.check import check
from polyrhythm.schedule.spec import ScheduleSpec
from tests.pure.schedule_cases import specs


@given(specs)
def test_spec_parses_back_from_its_text(spec: ScheduleSpec) -> None:
    assert ScheduleSpec.parse(str(spec)) == spec


@given(specs, st.integers(1, 8), st.integers(1, 32))
def test_spec_builds_a_runnable_schedule(
    spec: ScheduleSpec, num_stages: int, num_microbatches: int
) -> None:
    num_stages = num_stages if spec.limits is None else len(spec.limits)
    schedule = spec.build(num_stages=num_stages, num_microbatches=num_microbatches)
    check(schedule, num_microbatches=num_microbatches)
    assert len(schedule) == num_stages


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (ScheduleSpec("1f1b"), "1f1b"),
        (ScheduleSpec("gpipe"), "gpipe"),
        (ScheduleSpec("kfkb", k=2), "kfkb:2"),
        (ScheduleSpec("bounded", limits=(7, 5, 3, 1)), "bounded:7,5,3,1"),
    ],
)
def test_each_kind_has_its_text(spec: ScheduleSpec, text: str) -> None:
    assert str(spec) == text
    assert ScheduleSpec.parse(f" {text.upper().replace(',', ', ')} ") == spec


def test_spec_builds_what_the_builders_build() -> None:
    shape = {"num_stages": 4, "num_microbatches": 7}
    assert ScheduleSpec("1f1b").build(**shape) == build("1f1b", **shape)
    assert ScheduleSpec("gpipe").build(**shape) == build("gpipe", **shape)
    assert ScheduleSpec("kfkb", k=3).build(**shape) == build("kfkb", **shape, k=3)
    limits = (5, 4, 3, 1)
    spec = ScheduleSpec("bounded", limits=limits)
    assert spec.build(**shape) == build("bounded", **shape, limits=limits)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1f1b, gpipe, kfkb:2"),
        ("zigzag", "1f1b, gpipe, kfkb:2"),
        ("2f2b", "write kfkb:2"),
        ("kfkb", "kfkb with one number"),
        ("kfkb:", "kfkb with one number"),
        ("kfkb:2,3", "kfkb with one number"),
        ("kfkb:0", "k >= 1"),
        ("kfkb:-1", "1f1b, gpipe, kfkb:2"),
        ("bounded", "one limit per stage"),
        ("bounded:", "one limit per stage"),
        ("bounded:7 5", "commas"),
        ("bounded:7,,5", "commas"),
        ("bounded:3,5", "never increase"),
        ("1f1b:2", "1f1b alone"),
        ("gpipe:", "gpipe alone"),
    ],
)
def test_invalid_spec_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        ScheduleSpec.parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"name": "kfkb"},
        {"name": "bounded"},
        {"name": "1f1b", "k": 2},
        {"name": "gpipe", "limits": (1,)},
        {"name": "bounded", "limits": ()},
        {"name": "bounded", "limits": (1, 2)},
        {"name": "2f2b"},
    ],
)
def test_spec_that_cannot_build_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ScheduleError):
        ScheduleSpec(**options)  # type: ignore[arg-type]


def test_limits_for_other_stages_are_refused_when_built() -> None:
    with pytest.raises(ScheduleError, match="3 limits, one per stage"):
        ScheduleSpec("bounded", limits=(2, 1)).build(num_stages=3, num_microbatches=4)
