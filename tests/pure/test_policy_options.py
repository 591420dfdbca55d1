"""Options of a policy on a command line: as a policy takes them, or refused with the flag."""

import pytest

from polyrhythm.errors import PolicyError
from polyrhythm.run.coordinator.options import at_flag, parse_options


@pytest.mark.parametrize(
    ("texts", "options"),
    [
        ([], {}),
        (["group_size=4", "window=rate"], {"group_size": 4, "window": "rate"}),
        (["a=1.5", "b=", "c=x=y", "d=[1]"], {"a": 1.5, "b": "", "c": "x=y", "d": [1]}),
        (
            ['{"group_size": 4, "window": null}', "seed=3"],
            {"group_size": 4, "window": None, "seed": 3},
        ),
    ],
)
def test_options_are_read_as_they_are_meant(texts: list[str], options: dict[str, object]) -> None:
    assert parse_options(texts, flag="--options") == options


@pytest.mark.parametrize("text", ["nonsense", "=1", '{"group_size"', "{}x", ""])
def test_what_is_no_option_is_refused_with_the_flag(text: str) -> None:
    with pytest.raises(PolicyError) as refused:
        parse_options([text], flag="--sync-options")
    assert refused.value.wrong.startswith(f"--sync-options {text!r}")
    assert "--sync-options" in refused.value.fix


@pytest.mark.parametrize(
    ("fix", "at_command_line"),
    [
        ("give it as such a value in options={...}", "give it as such a value in --options"),
        ("did you mean 'age'?", "did you mean 'age'?"),
    ],
)
def test_what_to_do_is_said_for_the_command_line(fix: str, at_command_line: str) -> None:
    error = at_flag(PolicyError("wrong", expected="right", fix=fix), flag="--options")
    assert (error.wrong, error.expected, error.fix) == ("wrong", "right", at_command_line)
