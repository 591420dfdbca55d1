"""A benchmark's last line is one JSON object, whatever the terminal is like."""

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
from benchmarks.result import Result
from polyrhythm import cli
from polyrhythm.errors import UserError


@dataclass
class Row:
    name: str
    value: float


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("example")

    def run(*, quick: bool, console: Console) -> Result:
        console.print("a table")
        ratios = {f"a_long_name_of_a_ratio_{i}": i / 3 for i in range(20)}
        return Result(bench="example", ratios=ratios, figures={"rounds": 3}, rows=[Row("a", 1.5)])

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(registry.BENCHMARKS, "example", registry.Benchmark("example", "a test"))
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
    for name, benchmark in registry.BENCHMARKS.items():
        assert any(line.split() == [name, *benchmark.about.split()] for line in shown), name
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
    module, about = registry.BENCHMARKS[name]
    assert importlib.util.find_spec(module) is not None
    assert 0 < len(about) <= 90
    assert "\n" not in about
