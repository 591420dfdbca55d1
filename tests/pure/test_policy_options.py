"""Policy options on the command line are parsed, or refused with the name of the flag."""

import pytest

from polyrhythm.errors import PolicyError
from polyrhythm.sync.setup import at_flag, parse_options


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
def test_options_are_parsed(texts: list[str], options: dict[str, object]) -> None:
    assert parse_options(texts, flag="--options") == options


@pytest.mark.parametrize("text", ["nonsense", "=1", '{"group_size"', "{}x", ""])
def test_malformed_option_is_refused_and_names_the_flag(text: str) -> None:
    with pytest.raises(PolicyError) as refused:
        parse_options([text], flag="--sync-options")
    assert refused.value.wrong.startswith(f"--sync-options {text!r}")
    assert "--sync-options" in refused.value.fix


@pytest.mark.parametrize(
    ("fix", "at_command_line"),
    [
        ("pass it with that type in options={...}", "pass it with that type in --options"),
        ("did you mean 'age'?", "did you mean 'age'?"),
    ],
)
def test_error_fix_names_the_command_line_flag(fix: str, at_command_line: str) -> None:
    error = at_flag(PolicyError("wrong", expected="right", fix=fix), flag="--options")
    assert (error.wrong, error.expected, error.fix) == ("wrong", "right", at_command_line)
