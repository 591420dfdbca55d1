"""Run commands of polyrhythm, and code without it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from polyrhythm.cli import main
from polyrhythm.processes import Child


def run_forked(
    *arguments: str, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command in a fork, which has torch loaded: a new interpreter takes seconds."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]

        def command() -> None:
            os.chdir(cwd)
            os.environ |= env or {}
            for stream, path in enumerate(outputs, start=1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
            sys.stdout = os.fdopen(1, "w", buffering=1)
            sys.stderr = os.fdopen(2, "w", buffering=1)
            try:
                main(arguments)
            except SystemExit as end:
                sys.stdout.flush()
                os._exit(end.code if isinstance(end.code, int) else 1)

        child = Child(command)
        try:
            status = child.wait(90)
            assert status is not None, "not done in time"
        finally:
            child.end()
        out, err = (path.read_text() for path in outputs)
    return subprocess.CompletedProcess(arguments, status, out, err)


def run_export(*arguments: str | Path) -> int:
    """Run `polyrhythm export` in this process and return its exit status."""
    with pytest.raises(SystemExit) as caught:
        main(["export", *map(str, arguments)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def run_without_polyrhythm(code: str, folder: Path) -> str:
    """Return the output of a new process that can import torch, but not polyrhythm."""
    blocked = f"import sys; sys.modules['polyrhythm'] = None\n{code}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", blocked],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
