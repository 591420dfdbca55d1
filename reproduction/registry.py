"""The papers by name; a paper's module is imported when it is asked for: some compile."""

import importlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from polyrhythm.errors import UserError
from polyrhythm.tables import print_line, print_table
from reproduction.claim import Reproduce, Reproduction

if TYPE_CHECKING:
    from rich.console import Console

ALL = "all"
_FOLDERS = (Path("docs/reproduction"), Path("reproduction"))


class Paper(NamedTuple):
    function: str  # module:function
    about: str


PAPERS = {
    "sdpipe": Paper(
        "reproduction.sdpipe.paper:reproduce",
        "semi-decentralised pipelines: M x N grids with stragglers, groups, time to a loss",
    ),
    "dt-fm": Paper(
        "reproduction.dtfm.paper:reproduce",
        "placement on five networks, against Megatron and random layouts",
    ),
    "ada-grouper": Paper(
        "reproduction.ada_grouper.paper:reproduce",
        "kFkB on preempted networks",
    ),
    "prague": Paper(
        "reproduction.prague.paper:reproduce",
        "partial all-reduce against all-reduce, parameter servers and AD-PSGD",
    ),
    "dear": Paper(
        "reproduction.dear.paper:reproduce",
        "decoupled all-reduce: five models on 10GbE and 100Gb InfiniBand",
    ),
}


def chosen(name: str) -> tuple[str, ...]:
    """The papers that `name` asks for: one, or all of them."""
    if name == ALL:
        return tuple(PAPERS)
    if name not in PAPERS:
        raise UserError(
            f"unknown paper {name!r}",
            expected=f"one of {', '.join(PAPERS)}, or {ALL}",
            fix="polyrhythm reproduce PAPER with one of these names",
        )
    return (name,)


def reproduce(name: str, say: Callable[[str], None]) -> Reproduction:
    """The figures of the paper of this name, computed now."""
    module, _, function = PAPERS[name].function.partition(":")
    run: Reproduce = getattr(importlib.import_module(module), function)
    return run(say)


def print_names(console: "Console") -> None:
    """Print each paper and what of it is reproduced."""
    rows = [(name, paper.about) for name, paper in PAPERS.items()]
    print_table(console, ["paper", "what is compared"], [*rows, (ALL, "one after the other")])


def run(paper: str, *, out: Path | None, console: "Console") -> None:
    """Reproduce one paper or all: print tables, write a page with plots per paper into `out`."""
    # The matrix products are too small for threads. OpenBLAS reads this when it is loaded.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from reproduction.page import counted, show, write

    folder = out or next((folder for folder in _FOLDERS if folder.is_dir()), _FOLDERS[-1])
    num_passed = num_rows = 0
    for name in chosen(paper):
        done = reproduce(name, partial(_print_progress, console, name))
        show(done, console)
        page = write(done, folder)
        num_plots = f"{len(done.plots)} plot{'' if len(done.plots) == 1 else 's'}"
        print_line(console, f"{page}, with {num_plots}")
        num_passed, num_rows = num_passed + done.num_passed, num_rows + len(done.counted)
    print_line(console, counted(num_passed, num_rows))


def _print_progress(console: "Console", name: str, message: str) -> None:
    print_line(console, f"{name}: {message}")
