"""A benchmark's last line is one JSON object at any terminal width; bars judge its ratios."""

import importlib.util
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

import benchmarks
import polyrhythm
from benchmarks import registry
from benchmarks.harness.report import (
    Bar,
    Result,
    median_of,
    print_bars,
    print_rows,
    ratio_over_rounds,
    select,
)
from polyrhythm import cli
from polyrhythm.errors import UserError


@dataclass
class Row:
    name: str
    value: float


@dataclass
class Round:
    side: str
    round: int
    seconds: float
    network: str = "fast"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("example")

    def run(*, quick: bool, console: Console) -> Result:
        console.print("a table")
        ratios = {f"a_long_name_of_a_ratio_{i}": i / 3 for i in range(20)}
        return Result(bench="example", ratios=ratios, figures={"rounds": 3}, rows=[Row("a", 1.5)])

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(registry.BENCHMARKS, "example", "a test")
    monkeypatch.setattr(registry.importlib, "import_module", lambda name: module)


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize("width", [20, 80, 1000])
def test_the_last_line_is_json_at_any_width(width: int, tmp_path: Path) -> None:
    text = io.StringIO()
    benchmarks.run(
        "example", quick=True, out=tmp_path / "new", console=Console(file=text, width=width)
    )
    last = json.loads(text.getvalue().splitlines()[-1])
    assert last["bench"] == "example"
    assert last["quick"] is True
    assert last["ratios"]["a_long_name_of_a_ratio_1"] == pytest.approx(1 / 3, rel=1e-4)
    assert last["figures"] == {"rounds": 3}
    saved = json.loads((tmp_path / "new" / "example.json").read_text())
    assert saved.pop("rows") == [{"name": "a", "value": 1.5}]
    assert saved == last


def test_an_unknown_benchmark_is_refused_with_all_the_names() -> None:
    with pytest.raises(UserError, match="unknown benchmark 'lba'") as refused:
        benchmarks.run("lba", console=Console(file=io.StringIO()))
    assert all(name in refused.value.expected for name in benchmarks.names())
    assert "lab" in benchmarks.names()


def test_out_that_is_a_file_is_refused_before_the_measurement(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shown = io.StringIO()
    with pytest.raises(UserError, match="is a file"):
        benchmarks.run("lab", quick=True, out=tmp_path / "file", console=Console(file=shown))
    assert shown.getvalue() == ""


def test_list_shows_each_benchmark_in_a_line_without_importing_one() -> None:
    code = (
        "import sys; from polyrhythm import cli\n"
        "try: cli.main(['bench'])\n"
        "except SystemExit: pass\n"
        "print(*(name for name in ('torch', 'zmq') if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
        check=True,
    )
    *shown, loaded = done.stdout.splitlines()
    for name, about in registry.BENCHMARKS.items():
        assert any(line.split() == [name, *about.split()] for line in shown), name
    assert loaded == "", "slow to load"


def test_a_wheel_without_benchmarks_says_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = tmp_path / "site-packages" / "polyrhythm" / "__init__.py"
    monkeypatch.setattr(polyrhythm, "__file__", str(installed))
    for command, folder in (("bench", "benchmarks/"), ("reproduce", "reproduction/")):
        with pytest.raises(SystemExit) as ended:
            cli.main([command])
        assert ended.value.code == 2
        printed = capsys.readouterr().err
        assert folder in printed
        assert "source checkout" in printed


@pytest.mark.parametrize("name", benchmarks.names())
def test_every_benchmark_has_its_module_and_a_line_about_it(name: str) -> None:
    about = registry.BENCHMARKS[name]
    assert importlib.util.find_spec(f"benchmarks.{name}.bench") is not None
    assert 0 < len(about) <= 90
    assert "\n" not in about


def test_a_bar_judges_by_its_sign() -> None:
    for sign, below, equal, above in (
        (">=", False, True, True),
        (">", False, False, True),
        ("<=", True, True, False),
    ):
        bar = Bar("a", sign, 2.0)  # type: ignore[arg-type]
        assert [bar.is_met(ratio) for ratio in (1.9, 2.0, 2.1)] == [below, equal, above]
        assert bar.verdict(2.1) == ("met" if above else "MISSED")
        assert str(bar) == f"{sign} 2"
    assert Bar("a", ">=", None).verdict(0.0) == "reported"


def test_bars_are_printed_with_their_ratios_except_in_a_quick_run() -> None:
    bars = (
        Bar("fast", ">=", 1.5, "ours over torch"),
        Bar("small", "<=", 0.5),
        Bar("c", ">=", None),
    )
    text = io.StringIO()
    console = Console(file=text, width=200)
    ratios = {"fast": 1.2, "small": 0.25, "c": 7.0}
    print_bars(console, bars, ratios, quick=False, notes={"small": "a note"})
    lines = [line.split() for line in text.getvalue().splitlines()]
    assert ["fast", "1.2", ">=", "1.5", "MISSED", "ours", "over", "torch"] in lines
    assert ["small", "0.25", "<=", "0.5", "met", "a", "note"] in lines
    assert ["c", "7", "reported"] in lines
    text.truncate(text.seek(0))
    print_bars(console, bars, ratios, quick=True)
    assert "MISSED" not in text.getvalue()


def test_a_column_is_a_header_and_a_function_of_the_row() -> None:
    text = io.StringIO()
    columns = {"name": lambda row: row.name, "twice": lambda row: f"{2 * row.value:.1f}"}
    print_rows(Console(file=text, width=80), [Row("a", 1.5), Row("b", 2.0)], columns)
    cells = [line.split() for line in text.getvalue().splitlines()]
    assert cells[0] == ["name", "twice"]
    assert cells[2:] == [["a", "3.0"], ["b", "4.0"]]


def test_a_ratio_is_the_median_over_the_rounds_that_both_sides_have() -> None:
    rows = [Round("ours", number, 1.0) for number in range(3)]
    rows += [Round("torch", 0, 2.0), Round("torch", 1, 5.0), Round("torch", 7, 90.0)]
    rows += [Round("torch", 0, 100.0, network="slow")]
    assert ratio_over_rounds(rows, "seconds", "torch", "ours", network="fast") == 3.5
    assert median_of(rows, "seconds", side="torch", network="fast") == 5.0
    assert select(rows, network="slow") == [rows[-1]]
