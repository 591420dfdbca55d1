"""Run scripts as python, torchrun and `polyrhythm train` do, but in forks, which start fast."""

import importlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from polyrhythm.cli import main
from polyrhythm.lab.program import run_program
from polyrhythm.processes import Child, end_all, reserve_port


def import_before_fork(*modules: str) -> None:
    """Import what scripts import and takes seconds, in the one process that runs the tests."""
    trainer = ("polyrhythm.run.trainer.trainer", "rich.progress")
    for module in (*trainer, "accelerate", "datasets", "lightning_fabric", *modules):
        importlib.import_module(module)


def run_script(
    script: Path, *arguments: str, num_processes: int | None = None, folder: Path
) -> list[str]:
    """Return the outputs by rank, as of torchrun; without `num_processes`, as of python."""
    program = [sys.executable, str(script), *arguments]
    if num_processes is None:
        return _run([partial(run_program, program, {})], folder)
    with reserve_port() as reserved:
        address, port = reserved.getsockname()
        environments: list[Mapping[str, str]] = [
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_processes),
                "LOCAL_WORLD_SIZE": str(num_processes),
                "GROUP_RANK": "0",
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "test",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            for rank in range(num_processes)
        ]
        return _run([partial(run_program, program, each) for each in environments], folder)


def run_train(script: Path, *arguments: str, folder: Path) -> str:
    """Return the output of `polyrhythm train`."""
    (output,) = _run([partial(main, ["train", str(script), *arguments])], folder)
    return output


def printed_losses(output: str) -> list[float]:
    """Return the numbers after "loss" in the output."""
    return [float(number) for number in re.findall(r"^loss (\S+)$", output, re.MULTILINE)]


def _run(programs: list[Callable[[], object]], folder: Path) -> list[str]:
    def work(program: Callable[[], object]) -> None:
        os.chdir(folder)
        warnings.simplefilter("ignore")  # pytest turns warnings into errors
        program()

    paths = [folder / f"output{number}.txt" for number in range(len(programs))]
    children = [
        Child(partial(work, program), output=path)
        for program, path in zip(programs, paths, strict=True)
    ]
    try:
        statuses = [child.wait(80) for child in children]
        assert statuses == [0] * len(children), "\n\n".join(path.read_text() for path in paths)
    finally:
        end_all(children)
    return [path.read_text() for path in paths]
