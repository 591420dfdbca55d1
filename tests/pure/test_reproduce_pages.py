"""Pages of reproductions: every row with its verdict, and lists that replace nobody's files."""

import importlib
import math
import os
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from polyrhythm import cli
from polyrhythm.errors import UserError
from reproduction import registry
from reproduction.claim import Plot, Reproduction, Row, ordered
from reproduction.page import INDEX, index, page, show, write
from reproduction.registry import PAPERS, Paper, chosen
from reproduction.stated import always, explained, sometimes, stated

NEAR = Row(place="Fig. 1", what="fast | slow", printed=2.0, ours=2.4)
FAR = Row(place="Table II", what="sum", printed=1234.5, ours=12.0, why="no\ncache")
TURNED = Row(
    place="Fig. 2",
    what="best",
    printed=1.0,
    ours=1.0,
    printed_order=("a", "b"),
    our_order=("b", "a"),
)
PLOT = Plot(
    name="k", title="over k", x="k", y="s", series={"ours": [(1, 1.0), (2, 2.0)]}, printed={}
)
DONE = Reproduction(
    paper="zeno",
    title="Zeno: faster\nthan a tortoise",
    source="Achilles, 450 BC",
    setup="- a race\n- of two",
    rows=(NEAR, FAR, TURNED),
    plots=(PLOT,),
)


def reproduce(say) -> Reproduction:  # type: ignore[no-untyped-def]
    say("running")
    return DONE


@pytest.fixture
def zeno(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only paper there is."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")  # and as before when the test is over
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    monkeypatch.setattr(registry, "PAPERS", {"zeno": Paper(f"{__name__}:reproduce", "a race")})


def run_cli(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(["reproduce", *map(str, arguments)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize(
    ("printed", "ours", "near"),
    [
        (1, 1.2, True),
        (1, 1.21, False),
        (1, 0.8, True),
        (1, 0.79, False),
        (0, 0, True),
        (-2, -2.3, True),
        (-2, 2, False),
        (1, math.nan, False),
        (1, math.inf, False),
    ],
)
def test_a_row_is_near_within_a_fifth_of_the_printed_figure(
    printed: float, ours: float, near: bool
) -> None:
    row = Row(place="", what="", printed=printed, ours=ours)
    assert row.is_near is row.passes is near


@pytest.mark.parametrize(
    ("printed", "ours", "passes"),
    [
        (1.06, 1.0, False),
        (1.06, 1.005, False),
        (1.06, 1.007, True),
        (1.2, 1.01, False),
        (1.2, 1.03, True),
        (0.9, 1.0, False),
        (0.9, 0.995, False),
        (0.9, 0.98, True),
        (1.0, 1.1, True),  # nothing gained, nothing lost
        (61.1, 64.0, True),
    ],
)
def test_a_printed_gain_or_loss_is_kept_by_a_tenth_of_it(
    printed: float, ours: float, passes: bool
) -> None:
    row = Row(place="", what="", printed=printed, ours=ours)
    assert row.is_near
    assert row.keeps_gain is row.passes is passes
    told = page(replace(DONE, rows=(row,)))
    assert ("near, but the printed" in told) is not passes


def test_a_choice_is_equal_or_it_differs() -> None:
    row = Row(place="", what="k", printed=5, ours=5, is_exact=True)
    assert row.passes
    assert not replace(row, ours=4).passes
    assert replace(row, ours=4, is_exact=False).passes


def test_a_reason_is_given_only_where_ours_differs() -> None:
    assert stated("Fig. 1", "a", 2.0, 2.1, why="so").why == ""
    assert stated("Fig. 1", "a", 2.0, 3.0, why="so").why == "so"
    assert explained(replace(NEAR, why="old"), "so").why == ""
    assert explained(FAR, "so").why == "so"


def test_always_is_in_every_case_and_sometimes_in_one() -> None:
    assert always("Fig. 1", "a", [True] * 10).passes
    almost = always("Fig. 1", "a", [True] * 9 + [False], why="so")
    assert (almost.printed, almost.ours, almost.why) == (10, 9, "so")
    assert not almost.passes, "nine of ten is near, but not always"
    assert sometimes("Fig. 1", "a", [False, True]).passes
    assert not sometimes("Fig. 1", "a", [False, False]).passes


def test_what_is_given_is_shown_and_not_counted() -> None:
    done = replace(DONE, rows=(NEAR, replace(NEAR, is_given=True), replace(FAR, is_given=True)))
    assert (done.num_passed, len(done.counted)) == (1, 1)
    lines = page(done).splitlines()
    assert any(line.startswith("**1 of 1 rows pass**") for line in lines)
    assert sum("| given |" in line for line in lines) == 2


def test_a_row_passes_only_with_methods_in_the_printed_order() -> None:
    assert not TURNED.passes
    assert replace(TURNED, our_order=("a", "b")).passes
    assert ordered({"x": 1.0, "y": 2.0, "z": 2.0}) == ("y", "z", "x")
    assert ordered({"x": 1.0, "y": 2.0}, highest_first=False) == ("x", "y")


def test_a_page_has_every_row_with_its_verdict_and_every_plot() -> None:
    lines = page(DONE).splitlines()
    assert "# Zeno: faster than a tortoise" in lines
    assert "Achilles, 450 BC" in lines
    assert "- of two" in lines
    assert any(line.startswith("**1 of 3 rows pass**: within 20 % of ") for line in lines)
    head = lines.index("| place | what | printed | ours | ratio | verdict | why |")
    assert lines[head + 2 : head + 5] == [
        r"| Fig. 1 | fast \| slow | 2 | 2.4 | 1.20 | passes |  |",
        "| Table II | sum | 1,234 | 12 | 0.01 | differs | no cache |",
        "| Fig. 2 | best | 1 | 1 | 1.00 | differs | the order is b, a; printed: a, b |",
    ]
    assert "![over k](zeno-k.svg)" in lines


def test_a_page_and_its_plots_are_written_and_listed_with_counts(tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "reproduction"
    assert write(DONE, folder) == folder / "zeno.md"
    other = replace(DONE, paper="other", title="Other", rows=(NEAR, NEAR), plots=())
    write(other, folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        INDEX,
        "other.md",
        "zeno-k.svg",
        "zeno.md",
    ]
    assert (folder / "zeno-k.svg").read_text().startswith("<svg ")
    lines = (folder / INDEX).read_text().splitlines()
    assert "**3 of 5 rows pass**" in lines
    assert lines[-2:] == [
        "| [Other](other.md) | 2 of 2 |",
        "| [Zeno: faster than a tortoise](zeno.md) | 1 of 3 |",
    ]
    before = {path: path.read_bytes() for path in folder.iterdir()}
    write(DONE, folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_page_that_was_done_again_replaces_its_count(tmp_path: Path) -> None:
    write(DONE, tmp_path)
    write(replace(DONE, rows=(NEAR,)), tmp_path)
    assert "**1 of 1 rows pass**" in index(tmp_path)


@pytest.mark.parametrize("name", [INDEX, "zeno.md"])
def test_what_somebody_else_has_written_is_never_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("# mine\n\n**3 of 4 rows pass**\n")
    with pytest.raises(UserError, match=f"{name} is there already"):
        write(DONE, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text().startswith("# mine")


def test_pages_of_others_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# notes\n\n**3 of 4 rows pass**\n")
    write(DONE, tmp_path)
    assert "**1 of 3 rows pass**" in (tmp_path / INDEX).read_text()
    assert "notes" not in (tmp_path / INDEX).read_text()


@pytest.mark.usefixtures("zeno")
@pytest.mark.parametrize("has_docs", [False, True])
def test_the_command_prints_the_table_and_last_of_all_the_count(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_docs: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    if has_docs:
        Path("docs/reproduction").mkdir(parents=True)
    assert run_cli("zeno") == 0
    lines = capsys.readouterr().out.splitlines()
    folder = Path("docs/reproduction" if has_docs else "reproduction")
    assert lines[0] == "zeno: running"
    assert ["Fig.", "1", "fast", "|", "slow", "2", "2.4", "1.20", "passes"] in [
        line.split() for line in lines
    ]
    assert "Table II, sum: no cache" in lines
    assert f"{folder / 'zeno.md'}, with 1 plot" in lines
    assert lines[-1] == "1 of 3 rows pass"
    assert (folder / "zeno-k.svg").exists()


def test_a_terminal_breaks_long_rows_and_reasons_between_words() -> None:
    what, why = "a race of two over a hundred all-out stadia " * 3, "the tortoise had a start " * 9
    done = replace(DONE, rows=(replace(FAR, what=what.strip(), why=why.strip()),))
    shown = {}
    for is_terminal in (True, False):
        console = Console(file=StringIO(), width=90, force_terminal=is_terminal, color_system=None)
        show(done, console)
        shown[is_terminal] = console.file.getvalue()  # type: ignore[attr-defined]
    lines = shown[True].splitlines()
    assert max(map(len, lines)) <= 90
    words = [set(text.replace("─", "").split()) for text in shown.values()]
    assert words[0] == words[1], "none is broken"
    reason = next(i for i, line in enumerate(lines) if line.startswith("Table II, a race"))
    assert all(line.startswith("  ") for line in lines[reason + 1 :])
    whole = f"Table II, {what.strip()}: {why.strip()}"
    assert shown[False].splitlines()[-1] == whole, "a pipe gets one line"


@pytest.mark.usefixtures("zeno")
def test_all_papers_are_done_into_the_folder_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(registry.PAPERS, "again", registry.PAPERS["zeno"])
    assert run_cli("all", "--out", tmp_path / "out") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 6 rows pass"
    assert (tmp_path / "out" / "zeno.md").exists()


@pytest.mark.usefixtures("zeno")
@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("2", "2")])
def test_small_products_are_not_spread_over_threads_unless_somebody_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None, after: str
) -> None:
    if before is not None:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", before)
    assert run_cli("zeno", "--out", tmp_path / "out") == 0
    assert os.environ["OPENBLAS_NUM_THREADS"] == after


def test_numpy_is_not_loaded_before_the_command_runs() -> None:
    """Else its threads were started already."""
    code = "import sys, polyrhythm.cli; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_paper_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("pirate") == 2
    told = capsys.readouterr().err
    assert "unknown paper 'pirate'" in told
    assert "sdpipe, dt-fm, ada-grouper, prague, dear, or all" in told


def test_every_paper_has_its_function() -> None:
    for name in chosen("all"):
        module, _, function = PAPERS[name].function.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), name
