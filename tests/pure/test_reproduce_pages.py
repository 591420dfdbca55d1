"""Pages of reproductions show every row with its verdict, and overwrite no other files."""

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
from reproduction.page import INDEX, format_number, index, page, show, write
from reproduction.paper_row import PaperRow, Plot, Reproduction, always, ordered, sometimes
from reproduction.registry import PAPERS, Paper, select

NEAR = PaperRow("Fig. 1", "fast | slow", 2.0, 2.4)
FAR = PaperRow("Table II", "sum", 1234.5, 12.0, why="no\ncache")
TURNED = PaperRow("Fig. 2", "best", 1.0, 1.0, printed_order=("a", "b"), our_order=("b", "a"))
PLOT = Plot(name="k", title="over k", x="k", y="s", series={"ours": [(1, 1.0), (2, 2.0)]})
DONE = Reproduction(
    paper="zeno",
    title="Zeno: faster\nthan a tortoise",
    source="Achilles, 450 BC",
    setup="- a race\n- of two",
    rows=(NEAR, FAR, TURNED),
    plots=(PLOT,),
)


def reproduce(log) -> Reproduction:  # type: ignore[no-untyped-def]
    log("running")
    return DONE


@pytest.fixture
def zeno(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make zeno the only paper."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")  # restored when the test ends
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    monkeypatch.setattr(registry, "PAPERS", {"zeno": Paper(__name__, "a race")})


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
    row = PaperRow("", "", printed, ours)
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
        (1.0, 1.1, True),  # no gain and no loss is printed
        (61.1, 64.0, True),
    ],
)
def test_a_printed_gain_or_loss_is_kept_by_a_tenth_of_it(
    printed: float, ours: float, passes: bool
) -> None:
    row = PaperRow("", "", printed, ours)
    assert row.is_near
    assert row.keeps_gain is row.passes is passes
    text = page(replace(DONE, rows=(row,)))
    assert ("near, but the printed" in text) is not passes


def test_a_choice_passes_only_if_it_is_equal() -> None:
    row = PaperRow("", "k", 5, 5, is_exact=True)
    assert row.passes
    assert not replace(row, ours=4).passes
    assert replace(row, ours=4, is_exact=False).passes


@pytest.mark.parametrize("is_given", [False, True])
def test_a_reason_is_shown_only_if_the_row_does_not_pass(is_given: bool) -> None:
    passing = PaperRow("Fig. 1", "a", 2.0, 2.1, why="the reason", is_given=is_given)
    assert "the reason" not in page(replace(DONE, rows=(passing,)))
    assert "the reason" in page(replace(DONE, rows=(replace(passing, ours=3.0),)))


def test_always_needs_every_case_and_sometimes_needs_one() -> None:
    assert always("Fig. 1", "a", [True] * 10).passes
    almost = always("Fig. 1", "a", [True] * 9 + [False], why="so")
    assert (almost.printed, almost.ours, almost.why) == (10, 9, "so")
    assert not almost.passes, "nine of ten is near, but not always"
    assert sometimes("Fig. 1", "a", [False, True]).passes
    assert not sometimes("Fig. 1", "a", [False, False]).passes


def test_given_rows_are_shown_and_not_counted() -> None:
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
    assert any(
        line.startswith("**1 of 3 rows pass**. A row passes if ours is within 20 %")
        for line in lines
    )
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
    assert "<svg " in (folder / "zeno-k.svg").read_text()
    lines = (folder / INDEX).read_text().splitlines()
    assert "**3 of 5 rows pass**" in lines
    assert lines[-2:] == [
        "| [Other](other.md) | 2 of 2 |",
        "| [Zeno: faster than a tortoise](zeno.md) | 1 of 3 |",
    ]
    before = {path: path.read_bytes() for path in folder.iterdir()}
    write(DONE, folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_rewritten_page_updates_its_count(tmp_path: Path) -> None:
    write(DONE, tmp_path)
    write(replace(DONE, rows=(NEAR,)), tmp_path)
    assert "**1 of 1 rows pass**" in index(tmp_path)


@pytest.mark.parametrize("name", [INDEX, "zeno.md"])
def test_files_of_other_origin_are_never_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("# mine\n\n**3 of 4 rows pass**\n")
    with pytest.raises(UserError, match=name):
        write(DONE, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text().startswith("# mine")


def test_pages_of_other_origin_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# notes\n\n**3 of 4 rows pass**\n")
    write(DONE, tmp_path)
    assert "**1 of 3 rows pass**" in (tmp_path / INDEX).read_text()
    assert "notes" not in (tmp_path / INDEX).read_text()


@pytest.mark.usefixtures("zeno")
@pytest.mark.parametrize("has_docs", [False, True])
def test_the_command_prints_the_table_and_ends_with_the_count(
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
    assert words[0] == words[1], "no word is broken"
    reason = next(i for i, line in enumerate(lines) if line.startswith("Table II, a race"))
    assert all(line.startswith("  ") for line in lines[reason + 1 :])
    whole = f"Table II, {what.strip()}: {why.strip()}"
    assert shown[False].splitlines()[-1] == whole, "a pipe gets one line"


@pytest.mark.usefixtures("zeno")
def test_all_papers_are_written_into_the_given_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(registry.PAPERS, "again", registry.PAPERS["zeno"])
    assert run_cli("all", "--out", tmp_path / "out") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 6 rows pass"
    assert (tmp_path / "out" / "zeno.md").exists()


@pytest.mark.usefixtures("zeno")
@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("2", "2")])
def test_blas_runs_one_thread_unless_the_environment_sets_another_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None, after: str
) -> None:
    if before is not None:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", before)
    assert run_cli("zeno", "--out", tmp_path / "out") == 0
    assert os.environ["OPENBLAS_NUM_THREADS"] == after


def test_numpy_is_not_loaded_before_the_command_runs() -> None:
    """OpenBLAS reads its number of threads when numpy is loaded."""
    code = "import sys, polyrhythm.cli; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.usefixtures("zeno")
def test_without_matplotlib_the_command_stops_before_the_computation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run_cli("zeno", "--out", tmp_path) == 2
    printed = capsys.readouterr()
    assert "matplotlib" in printed.err
    assert "running" not in printed.out


def test_an_unknown_paper_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("pirate") == 2
    error = capsys.readouterr().err
    assert "unknown paper 'pirate'" in error
    assert "sdpipe, dt-fm, ada-grouper, prague, dear, or all" in error


def test_every_paper_has_a_function_reproduce() -> None:
    for name in select("all"):
        assert callable(importlib.import_module(PAPERS[name].module).reproduce), name


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1.5, "1.5"),
        (1.234, "1.23"),
        (0.01234, "0.0123"),
        (12345.6, "12,346"),
        (100, "100"),
        (-2.5, "-2.5"),
        (1e-7, "1e-07"),
        (3e12, "3e+12"),
        (99.96, "100"),
    ],
)
def test_numbers_have_three_digits_and_rarely_exponents(value: float, text: str) -> None:
    assert format_number(value) == text
