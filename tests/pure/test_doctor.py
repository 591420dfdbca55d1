"""The doctor's report is complete and unmodified, and fails only for training."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from polyrhythm.describe.check_result import CheckResult
from polyrhythm.observe import doctor

pytestmark = pytest.mark.timeout(30)

ADVICE = "pip install 'polyrhythm[lab]'; only the lab needs it"
OK = CheckResult("torch", "2.13.0+cpu", True)
FACT = CheckResult("memory", "23.5GiB", None)
NOTE = CheckResult("/dev/shm", "64MiB", None, "docker run --shm-size=2g")
MISSING = CheckResult("pyroute2", "not installed", False, ADVICE)


def report(*, terminal=False, width=200, training=(), lab=(), extras=()):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)
    essential = doctor.show(console, training=training, lab=lab, extras=extras)
    return console.file.getvalue(), essential


@pytest.mark.parametrize("terminal", [False, True])
def test_report_shows_every_group_finding_and_advice_as_written(terminal):
    text, _ = report(terminal=terminal, training=[OK, FACT, NOTE], lab=[MISSING], extras=[OK])
    for result in (OK, FACT, NOTE, MISSING):
        assert result.subject in text
        assert result.found in text
        assert result.advice in text  # with its brackets, which rich would remove as markup
    assert text.index("Training") < text.index("Lab") < text.index("Extras")


def test_report_to_a_file_is_one_unwrapped_line_per_finding_without_frames():
    text, _ = report(width=40, training=[OK, FACT, NOTE], lab=[MISSING])
    lines = text.splitlines()
    assert lines[1:4] == [
        "  ok    torch     2.13.0+cpu",
        "        memory    23.5GiB",
        "  note  /dev/shm  64MiB",
    ]
    assert f"                  -> {ADVICE}" in lines
    assert text.isascii()


def test_terminal_table_fits_a_narrow_terminal():
    text, _ = report(terminal=True, width=60, training=[OK], lab=[MISSING])
    assert max(map(len, text.splitlines())) <= 60
    assert "needs it" in text  # wrapped, not truncated


found = st.sampled_from([OK, FACT, NOTE, MISSING])


@given(st.lists(found), st.lists(found), st.lists(found), st.booleans())
def test_only_a_missing_training_need_is_essential(training, lab, extras, terminal):
    text, essential = report(terminal=terminal, training=training, lab=lab, extras=extras)
    assert essential == (MISSING in training)
    assert ("Training works" in text) == (MISSING not in training)
    assert ("the lab works." in text) == (MISSING not in lab)


def test_missing_extra_names_the_package_and_its_install_command(monkeypatch):
    monkeypatch.setattr(
        doctor.importlib.util, "find_spec", lambda name: None if name == "uvicorn" else object()
    )
    (result,) = doctor.extras()
    assert result.ok is False
    assert result.found == "no uvicorn"
    assert "polyrhythm[watch]" in result.advice


def test_missing_without_advice_is_refused():
    with pytest.raises(AssertionError, match="say what to do"):
        CheckResult("torch", "not installed", False)
