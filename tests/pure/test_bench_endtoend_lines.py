"""How many lines of a script change: counted from the examples, and shown in the docs."""

import ast
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.endtoend.lines import (
    PLAIN,
    TRAINER,
    changed,
    counted,
    examples,
    lines_to_change,
    shown,
)

DOCS = Path(__file__).parents[2] / "docs" / "train.md"
scripts = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12).map("\n".join)


def example(name: str) -> str:
    return (examples() / name).read_text()


def test_of_each_place_the_larger_side_counts() -> None:
    before = "a\nb\nc\nd\ne\n"
    assert changed(before, before) == 0
    assert changed(before, "a\nB\nc\nd\ne\n") == 1
    assert changed(before, "a\nd\ne\n") == 2
    assert changed(before, "a\nx\ny\nz\nc\nd\n") == 3 + 1


def test_what_a_script_is_and_empty_lines_do_not_count() -> None:
    assert counted('"""What it is.\n\nAnd more.\n"""\n\na = 1\n\n\nb = 2\n') == ["a = 1", "b = 2"]
    assert changed('"""Plain."""\na\n', '"""Another."""\n\n\na\n') == 0


@given(scripts, scripts)
def test_no_fewer_lines_change_than_the_lengths_differ_by(before: str, after: str) -> None:
    lengths = len(counted(before)), len(counted(after))
    assert abs(lengths[0] - lengths[1]) <= changed(before, after) <= sum(lengths)


def test_the_docs_show_what_changes_in_the_example_and_how_many_lines() -> None:
    text = DOCS.read_text()
    section = text[text.index("## From a plain script") :].split("\n## ")[0]
    assert f" {lines_to_change()} lines change" in section
    block = section.split("```diff\n")[1].split("\n```")[0]
    assert block.splitlines() == shown(example(PLAIN), example(TRAINER))


def test_the_examples_are_scripts_of_their_own_with_the_same_data_and_model() -> None:
    plain, trainer = (set(counted(example(name))) for name in (PLAIN, TRAINER))
    assert not any("polyrhythm" in line for line in plain)
    assert "import polyrhythm as pr" in trainer
    same = [line for line in counted(example(PLAIN)) if line in trainer]
    ast.parse("\n".join(same))  # what stays is whole statements
