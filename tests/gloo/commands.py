"""Run commands of polyrhythm, and code without it."""

import faulthandler
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

from polyrhythm.cli import main
from polyrhythm.processes import Child

_LONGEST = 90.0  # seconds that a command may take


class ForkedCommand:
    """A command in a fork, which has torch loaded: a new interpreter takes seconds."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        env: dict[str, str] | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._outputs = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        for path in self._outputs:
            path.touch()

        def command() -> None:
            os.chdir(cwd)
            os.environ |= env or {}
            for stream, path in enumerate(self._outputs, start=1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream)
            sys.stdout = os.fdopen(1, "w", buffering=1)
            sys.stderr = os.fdopen(2, "w", buffering=1)
            faulthandler.dump_traceback_later(_LONGEST - 10)  # into stderr: where it waits
            before()
            main(arguments)

        self.child = Child(command)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.end()
        self._folder.cleanup()

    @property
    def stdout(self) -> str:
        return self._outputs[0].read_text()

    @property
    def stderr(self) -> str:
        return self._outputs[1].read_text()


def run_forked(
    *arguments: str,
    cwd: Path,
    env: dict[str, str] | None = None,
    before: Callable[[], object] = lambda: None,
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; `before` may change modules in its process."""
    with ForkedCommand(*arguments, cwd=cwd, env=env, before=before) as command:
        status = command.child.wait(_LONGEST)
        assert status is not None, f"not done in time:\n{command.stderr}"
        return subprocess.CompletedProcess(arguments, status, command.stdout, command.stderr)


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
