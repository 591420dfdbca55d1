"""The public surface: the package's names, the command, and refused input."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import polyrhythm
from polyrhythm import cli

ROOT = Path(polyrhythm.__file__).parents[1]
TEXTS = {
    path.name: path.read_text()
    for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.py"))
}


def test_exported_names_exist_and_are_documented() -> None:
    assert all(hasattr(polyrhythm, name) for name in polyrhythm.__all__)
    text = "".join(TEXTS.values())
    missing = [name for name in polyrhythm.__all__ if not re.search(rf"\b{name}\b", text)]
    assert missing == []


@pytest.mark.parametrize("name", TEXTS)
def test_documentation_imports_only_exported_names(name: str) -> None:
    assert re.findall(r"^ *(?:from|import) polyrhythm\.\S+", TEXTS[name], re.MULTILINE) == []
    used = set(re.findall(r"\bpr\.(\w+)", TEXTS[name]))
    assert used - set(polyrhythm.__all__) == set()


def test_simulate_can_be_called_whether_its_modules_are_loaded_or_not() -> None:
    import polyrhythm.simulate.result

    assert callable(polyrhythm.simulate)
    assert polyrhythm.simulate.result.SimulationResult


def test_old_names_give_an_error_with_the_new_one() -> None:
    with pytest.raises(AttributeError, match=r"polyrhythm\.predict is now polyrhythm\.simulate"):
        polyrhythm.predict  # noqa: B018
    with pytest.raises(AttributeError, match=r"polyrhythm\.StepEnd is now polyrhythm\.StepInfo"):
        polyrhythm.StepEnd  # noqa: B018
    with pytest.raises(TypeError, match="batch= is now batch_size="):
        polyrhythm.make_plan("cluster.toml", "profile.json", batch=8)
    with pytest.raises(TypeError, match=r"num_stages= is now options=PlanOptions"):
        polyrhythm.make_plan("cluster.toml", "profile.json", batch_size=8, num_stages=2)


@pytest.mark.parametrize("start", ["import polyrhythm", "import polyrhythm.cli"])
def test_neither_the_package_nor_the_command_line_imports_torch(start: str) -> None:
    check = f"{start}, sys; assert 'torch' not in sys.modules; print('light')"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "light\n"


def run_cli(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("--version") == 0
    assert capsys.readouterr().out == f"polyrhythm {polyrhythm.__version__}\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("--help") == 0
    text = capsys.readouterr().out
    commands = (
        "bench coordinator demo doctor export lab plan probe profile replay report reproduce show "
        "simulate train"
    )
    assert all(name in text for name in commands.split())


@pytest.mark.parametrize("arguments", [[], ["dmeo"], ["show", "cluster"], ["show", "car", "x"]])
def test_a_wrong_command_line_has_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(*arguments) == 2
    assert capsys.readouterr().err


GOOD = """
name = "two sites"
regions = ["a", "b"]
latency_ms = [[1, 20], [20, 1]]
bandwidth_mbps = [[1000, 50], [50, 1000]]
[[devices]]
region = "a"
count = 2
[[devices]]
region = "b"
count = 2
"""


def test_a_good_cluster_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text(GOOD)
    assert run_cli("show", "cluster", str(tmp_path / "c.toml")) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert "two sites: 4 devices, 2 regions" in out
    assert ["a", "1", "20"] in rows  # one-way latency, ms
    assert ["b", "50", "1000"] in rows  # bandwidth, Mbit/s


def test_a_bundled_network_is_shown_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("show", "cluster", "case5_worldwide") == 0
    out = capsys.readouterr().out
    assert "64 devices" in out
    assert "Frankfurt" in out
    assert "arXiv:2206.01288" in out


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("latency_ms", "latencyms", "latencyms"),
        ("latency_ms = [[1, 20], [20, 1]]", "latency_ms = [[1, 20], [20]]", "2 x 2"),
        ("[[1000, 50], [50, 1000]]", "[[1000, -50], [50, 1000]]", "-50"),
        ("bandwidth_mbps = [", "bandwidth = [", "unit"),
        ('region = "b"', 'region = "c"', "'c'"),
        ("count = 2", "count = ", "line"),
    ],
)
def test_a_bad_cluster_is_refused_with_the_value_and_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    assert old in GOOD
    (tmp_path / "c.toml").write_text(GOOD.replace(old, new, 1))
    assert run_cli("show", "cluster", str(tmp_path / "c.toml")) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert "expected:" in error
    assert "fix:" in error


@pytest.mark.parametrize("kind", ["cluster", "model", "scenario"])
def test_a_missing_file_is_refused(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("show", kind, "nowhere/x.toml") == 2
    assert "nowhere/x.toml" in capsys.readouterr().err
