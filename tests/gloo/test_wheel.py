"""The built wheel is complete: installed into an empty environment, it runs the demo."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path, timeout: float) -> str:
    # Hide this environment's packages and the checkout.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(400)  # installs torch
def test_the_wheel_runs_the_demo_from_another_folder(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    build = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT)
    run(*pip, *build, cwd=tmp_path, timeout=60)
    (wheel,) = tmp_path.glob("polyrhythm-*.whl")

    empty = tmp_path / "empty"
    venv.create(empty)
    # Most of torch is never imported here: compiling it would take as long as installing it. The
    # wheel requires torch>=2.11; the constraint selects the version that this project pins.
    pins = ("--constraint", ROOT / "requirements-dev.txt")
    install = ("--python", empty, "install", "--no-compile", *pins, wheel)
    run(*pip, *install, cwd=tmp_path, timeout=300)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = empty / "bin" / "polyrhythm"
    demo = ("demo", "--steps", "3", "--width", "32", "--context", "32")
    printed = run(command, *demo, cwd=elsewhere, timeout=120)  # compiles the imported modules
    assert "run folder: runs/demo-" in printed
    assert list(elsewhere.glob("runs/demo-*/events.jsonl"))
    assert "case5_worldwide" in run(
        command, "show", "cluster", "case5_worldwide", cwd=elsewhere, timeout=30
    )
