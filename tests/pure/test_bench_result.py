"""A benchmark's last line is one JSON object, whatever the terminal is like."""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from polyrhythm import bench
from polyrhythm.bench import registry
from polyrhythm.bench.result import Result
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
    monkeypatch.setitem(registry._MODULES, "example", "example")
    monkeypatch.setattr(registry.importlib, "import_module", lambda name: module)


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize("width", [20, 80, 1000])
def test_the_last_line_is_json_at_any_width(width: int, tmp_path: Path) -> None:
    text = io.StringIO()
    bench.run("example", quick=True, out=tmp_path / "new", console=Console(file=text, width=width))
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
        bench.run("lba", console=Console(file=io.StringIO()))
    assert all(name in refused.value.expected for name in bench.names())
    assert "lab" in bench.names()
