"""Recipes: a schedule as a word that prints, reads back and builds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import ScheduleError
from polyrhythm.schedule.builders import build
from polyrhythm.schedule.check import check
from polyrhythm.schedule.recipe import Recipe

limits_s = st.lists(st.integers(1, 40), min_size=1, max_size=8).map(
    lambda limits: tuple(sorted(limits, reverse=True))
)
recipes = st.one_of(
    st.just(Recipe("1f1b")),
    st.just(Recipe("gpipe")),
    st.integers(1, 40).map(lambda k: Recipe("kfkb", k=k)),
    limits_s.map(lambda limits: Recipe("bounded", limits=limits)),
)


@given(recipes)
def test_a_recipe_reads_back_what_it_prints(recipe: Recipe) -> None:
    assert Recipe.parse(str(recipe)) == recipe


@given(recipes, st.integers(1, 8), st.integers(1, 32))
def test_a_recipe_builds_a_schedule_that_can_run(
    recipe: Recipe, num_stages: int, num_microbatches: int
) -> None:
    num_stages = num_stages if recipe.limits is None else len(recipe.limits)
    schedule = recipe.build(num_stages=num_stages, num_microbatches=num_microbatches)
    check(schedule, num_microbatches=num_microbatches)
    assert len(schedule) == num_stages


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (Recipe("1f1b"), "1f1b"),
        (Recipe("gpipe"), "gpipe"),
        (Recipe("kfkb", k=2), "kfkb:2"),
        (Recipe("bounded", limits=(7, 5, 3, 1)), "bounded:7,5,3,1"),
    ],
)
def test_each_kind_has_its_text(recipe: Recipe, text: str) -> None:
    assert str(recipe) == text
    assert Recipe.parse(f" {text.upper().replace(',', ', ')} ") == recipe


def test_a_recipe_builds_what_the_builders_build() -> None:
    shape = {"num_stages": 4, "num_microbatches": 7}
    assert Recipe("1f1b").build(**shape) == build("1f1b", **shape)
    assert Recipe("gpipe").build(**shape) == build("gpipe", **shape)
    assert Recipe("kfkb", k=3).build(**shape) == build("kfkb", **shape, k=3)
    limits = (5, 4, 3, 1)
    recipe = Recipe("bounded", limits=limits)
    assert recipe.build(**shape) == build("bounded", **shape, limits=limits)


@pytest.mark.parametrize(
    ("text", "says"),
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
def test_text_that_is_no_recipe_is_refused(text: str, says: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Recipe.parse(text)
    assert says in str(caught.value)


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
def test_a_recipe_that_cannot_build_cannot_be_made(options: dict[str, object]) -> None:
    with pytest.raises(ScheduleError):
        Recipe(**options)  # type: ignore[arg-type]


def test_limits_for_other_stages_are_refused_when_built() -> None:
    with pytest.raises(ScheduleError, match="3 limits, one per stage"):
        Recipe("bounded", limits=(2, 1)).build(num_stages=3, num_microbatches=4)
