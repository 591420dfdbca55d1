"""The papers by name. A paper's module is imported when it runs: some compile code."""

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from polyrhythm.errors import UserError
from polyrhythm.tables import print_line, print_table
from reproduction.paper_row import Reproduce, Reproduction

if TYPE_CHECKING:
    from rich.console import Console

ALL = "all"
_FOLDERS = (Path("docs/reproduction"), Path("reproduction"))


class Paper(NamedTuple):
    module: str  # with a function `reproduce`
    about: str


PAPERS = {
    "sdpipe": Paper(
        "reproduction.sdpipe.paper",
        "semi-decentralised pipelines: M x N grids with stragglers, groups, time to a loss",
    ),
    "dt-fm": Paper(
        "reproduction.dtfm.paper",
        "placement on five networks, against Megatron and random layouts",
    ),
    "ada-grouper": Paper("reproduction.ada_grouper.paper", "kFkB on preempted networks"),
    "prague": Paper(
        "reproduction.prague.paper",
        "partial all-reduce against all-reduce, parameter servers and AD-PSGD",
    ),
    "dear": Paper(
        "reproduction.dear.paper",
        "decoupled all-reduce: five models on 10GbE and 100Gb InfiniBand",
    ),
}


def select(name: str) -> tuple[str, ...]:
    """Return the papers that `name` stands for: one of them, or all."""
    if name == ALL:
        return tuple(PAPERS)
    if name not in PAPERS:
        raise UserError(
            f"unknown paper {name!r}",
            expected=f"one of {', '.join(PAPERS)}, or {ALL}",
            fix="polyrhythm reproduce PAPER with one of these names",
        )
    return (name,)


def reproduce(name: str, log: Callable[[str], None]) -> Reproduction:
    """Compute the figures of one paper; `log` receives the progress."""
    function: Reproduce = importlib.import_module(PAPERS[name].module).reproduce
    return function(log)


def print_names(console: "Console") -> None:
    """Print each paper and which part of it is reproduced."""
    rows = [(name, paper.about) for name, paper in PAPERS.items()]
    print_table(console, ["paper", "what is compared"], [*rows, (ALL, "all papers in turn")])


def run(paper: str, *, out: Path | None, console: "Console") -> None:
    """Reproduce one paper or all: print tables, write a page with plots per paper into `out`."""
    if importlib.util.find_spec("matplotlib") is None:  # refuse before the long computation
        raise UserError(
            "matplotlib is not installed",
            expected="the packages for development, of which matplotlib draws the plots",
            fix="pip install -r requirements-dev.txt",
        )
    # The matrix products are too small for threads. OpenBLAS reads the variable when it is loaded.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from reproduction.page import format_count, show, write

    folder = out or next((folder for folder in _FOLDERS if folder.is_dir()), _FOLDERS[-1])
    num_passed = num_rows = 0
    for name in select(paper):
        done = reproduce(name, partial(_print_progress, console, name))
        show(done, console)
        page = write(done, folder)
        num_plots = f"{len(done.plots)} plot{'' if len(done.plots) == 1 else 's'}"
        print_line(console, f"{page}, with {num_plots}")
        num_passed, num_rows = num_passed + done.num_passed, num_rows + len(done.counted)
    print_line(console, format_count(num_passed, num_rows))


def _print_progress(console: "Console", name: str, message: str) -> None:
    print_line(console, f"{name}: {message}")
