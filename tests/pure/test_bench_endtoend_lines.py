"""`lines` of `bench endtoend`: counted from the examples, and shown in the docs."""

import ast
from difflib import unified_diff
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.endtoend.bench import (
    PLAIN,
    TRAINER,
    counted_lines,
    examples,
    lines_to_change,
    num_changed,
)

DOCS = Path(__file__).parents[2] / "docs" / "train.md"
scripts = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12).map("\n".join)


def example(name: str) -> str:
    return (examples() / name).read_text()


def test_each_difference_counts_by_its_larger_side() -> None:
    before = "a\nb\nc\nd\ne\n"
    assert num_changed(before, before) == 0
    assert num_changed(before, "a\nB\nc\nd\ne\n") == 1
    assert num_changed(before, "a\nd\ne\n") == 2
    assert num_changed(before, "a\nx\ny\nz\nc\nd\n") == 3 + 1


def test_docstrings_and_empty_lines_do_not_count() -> None:
    assert counted_lines('"""What it is.\n\nAnd more.\n"""\n\na = 1\n\n\nb = 2\n') == [
        "a = 1",
        "b = 2",
    ]
    assert num_changed('"""Plain."""\na\n', '"""Another."""\n\n\na\n') == 0


@given(scripts, scripts)
def test_no_fewer_lines_change_than_the_lengths_differ_by(before: str, after: str) -> None:
    lengths = len(counted_lines(before)), len(counted_lines(after))
    assert abs(lengths[0] - lengths[1]) <= num_changed(before, after) <= sum(lengths)


def test_the_docs_show_what_changes_in_the_example_and_how_many_lines() -> None:
    text = DOCS.read_text()
    section = text[text.index("## From a plain script") :].split("\n## ")[0]
    assert f" {lines_to_change()} lines change" in section
    block = section.split("```diff\n")[1].split("\n```")[0]
    before, after = (counted_lines(example(name)) for name in (PLAIN, TRAINER))
    changes = list(unified_diff(before, after, n=0, lineterm=""))[2:]  # without the file names
    assert block.splitlines() == [line for line in changes if not line.startswith("@@")]


def test_the_examples_are_scripts_of_their_own_with_the_same_data_and_model() -> None:
    plain, trainer = (set(counted_lines(example(name))) for name in (PLAIN, TRAINER))
    assert not any("polyrhythm" in line for line in plain)
    assert "import polyrhythm as pr" in trainer
    same = [line for line in counted_lines(example(PLAIN)) if line in trainer]
    ast.parse("\n".join(same))  # what stays is whole statements
