"""Start a program quickly: a Python script runs in a fork of this interpreter with loaded modules.

Sixteen interpreters that each import torch take half a minute and 200 MB each on two cores; sixteen
forks of an interpreter with torch take a second and share its memory. Other programs use exec.
"""

import atexit
import importlib
import importlib.util
import os
import runpy
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyrhythm.errors import LabError

# Every torch optimizer imports torch._dynamo: a second and 100 MB.
PRELOADED = ("torch", "torch._dynamo")

# The globals of scripts that have ended, kept until the process exits, as by an interpreter. Freed
# earlier, a DistributedDataParallel among them never returns from its destructor (torch 2.13).
_finished: list[dict[str, object]] = []


def preload(program: Sequence[str], modules: Sequence[str] = PRELOADED) -> None:
    """Import the modules in this process if `program` is a Python script that runs in forks."""
    if _is_this_python(program[0]):
        for name in modules:
            if importlib.util.find_spec(name.partition(".")[0]) is not None:
                importlib.import_module(name)


def run_program(program: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run the program in this process: a Python script in this interpreter, others by exec."""
    script = _script(program)
    if script is None:
        exec_program(program, environment)
        return
    os.environ.update(environment)
    option, target, arguments = script
    sys.argv = [target, *arguments]
    atexit._clear()  # exit handlers of the parent process must not run here
    try:
        if option == "-m":
            sys.path.insert(0, str(Path.cwd()))
            _finished.append(runpy.run_module(target, run_name="__main__", alter_sys=True))
        else:
            sys.path.insert(0, str(Path(target).absolute().parent))
            _finished.append(runpy.run_path(target, run_name="__main__"))
    finally:  # as at the end of an interpreter, or of a process of multiprocessing
        # It ends the threads of executors, which wait for work, and joins all others.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _script(program: Sequence[str]) -> tuple[str, str, Sequence[str]] | None:
    """Return ("-m", module, arguments) or ("", file, arguments); None if it cannot be forked."""
    if not _is_this_python(program[0]) or len(program) < 2:
        return None
    if program[1] == "-m" and len(program) > 2:
        return "-m", program[2], program[3:]
    if program[1].endswith(".py") and Path(program[1]).is_file():
        return "", program[1], program[2:]
    return None


def _is_this_python(command: str) -> bool:
    found, here = shutil.which(command), Path(sys.executable)
    if found is None or Path(found).parent != here.parent:  # another environment
        return False
    return Path(found).resolve() == here.resolve()  # not another version in the same folder


def is_on_path(command: str) -> bool:
    return shutil.which(command) is not None


def exec_program(program: Sequence[str], environment: Mapping[str, str]) -> None:
    """Replace this process by the program."""
    try:
        os.execvpe(program[0], list(program), {**os.environ, **environment})
    except OSError as error:
        raise LabError(
            f"{program[0]}: {error.strerror}",
            expected="an executable program",
            fix="check its name and the PATH",
        ) from None
