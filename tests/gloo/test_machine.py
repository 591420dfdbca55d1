"""The checks really run, and a broken torch becomes a check result, not a crash."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from polyrhythm.run import machine

pytestmark = pytest.mark.timeout(120)

ROOT = Path(machine.__file__).parents[2]
REPORT = "from polyrhythm.run import machine\nfor result in machine.check_results(): print(result)"


def by_subject(check_results):
    return {result.subject: result for result in check_results}


def results_with_torch(folder, source):
    """Print the check results in a process whose `torch` consists of `source`."""
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", REPORT], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
def test_no_check_fails_on_this_machine(tmp_path):
    before = psutil.Process().children(recursive=True)
    found = by_subject(machine.check_results(tmp_path / "not" / "yet" / "runs"))
    assert not [result for result in found.values() if result.ok is False]
    assert found["all-reduce (gloo)"].ok
    assert found["backends"].found.startswith("gloo, ")
    assert {"Python", "torch", "GPUs", "loopback port", "CPU cores", "memory"} <= found.keys()
    assert found["run folder"].found.endswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert psutil.Process().children(recursive=True) == before


def test_failing_all_reduce_is_reported_with_reason(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    result = machine._gloo()
    assert result.ok is False
    assert "nowhere0" in result.found
    assert "GLOO_SOCKET_IFNAME" in result.advice


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (r"raise ImportError('libtorch.so is lost\nSee our pages.')", "fails: libtorch.so is lost"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "crashed with SIGILL"),
        ("", "has no attribute"),
    ],
    ids=["import-error", "crash", "empty"],
)
def test_broken_torch_is_reported_as_check_result(tmp_path, source, message):
    lines = results_with_torch(tmp_path, source)
    (torch,) = [line for line in lines if "subject='torch'" in line]
    assert message in torch
    assert "ok=False" in torch
    assert "pip install" in torch
    assert [line for line in lines if "subject='memory'" in line]


def test_hanging_torch_import_times_out(monkeypatch, tmp_path):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("import time; time.sleep(100)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(machine, "TORCH_TIMEOUT", 1.0)
    before = psutil.Process().children(recursive=True)
    found = by_subject(machine.check_results())
    assert found["torch"].found == "no answer within 1 s"
    assert found["torch"].ok is False
    assert psutil.Process().children(recursive=True) == before


def test_old_torch_is_refused_with_required_version(tmp_path):
    source = (
        "import types; __version__ = '2.9.1+cu126'\n"
        "distributed = types.SimpleNamespace(is_available=lambda: False)\n"
        "def init(): raise AssertionError('no CUDA')\n"
        "cuda = types.SimpleNamespace(init=init)"
    )
    lines = results_with_torch(tmp_path, source)
    (torch,) = [line for line in lines if "subject='torch'" in line]
    (backends,) = [line for line in lines if "subject='backends'" in line]
    assert "ok=False" in torch
    assert "torch>=2.11" in torch
    assert "ok=False" in backends


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop to another user")
def test_unwritable_folder_is_reported(tmp_path):
    source = (
        "import os, sys, pathlib\n"
        "from polyrhythm.run import machine\n"
        "os.setresuid(65534, 65534, 65534)\n"
        "for folder in sys.argv[1:]: print(machine._disk(pathlib.Path(folder)))"
    )
    folders = [str(tmp_path / "runs"), "/runs"]  # in an unreadable and in a readable folder
    done = subprocess.run(
        [sys.executable, "-c", source, *folders], capture_output=True, text=True, timeout=60
    )
    hidden, readable = done.stdout.splitlines()
    for line in (hidden, readable):
        assert "Permission denied" in line
        assert "ok=False" in line
        assert "--out" in line


def test_memory_limits_of_parent_cgroups_count(monkeypatch, tmp_path):
    root = tmp_path / "cgroup"
    (root / "job" / "step").mkdir(parents=True)
    (root / "job" / "memory.max").write_text("1073741824\n")
    (root / "job" / "step" / "memory.max").write_text("max\n")
    (tmp_path / "own").write_text("1:cpu:/elsewhere\n0::/job/step\n")
    assert machine._cgroup_limit(tmp_path / "own", root) == 2**30
    (tmp_path / "own").write_text("0::/\n")
    assert machine._cgroup_limit(tmp_path / "own", root) == float("inf")
    assert machine._cgroup_limit(tmp_path / "absent", root) == float("inf")
