"""`polyrhythm reproduce PAPER`: a paper's figures, ours beside them, and the verdict per row."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from polyrhythm.simulate.reproduce.registry import ALL, PAPERS

if TYPE_CHECKING:
    from rich.console import Console

_PLACES = (Path("docs/reproduction"), Path("reproduction"))
_NAMES = "\n".join(
    [
        "Which paper:",
        *(f"- {name}: {paper.about}" for name, paper in PAPERS.items()),
        f"- {ALL}: one after the other",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproduceCommand:
    """Simulate what a paper has measured: a table, a page with plots, and how many rows pass.

    A row passes within 20 % of the printed figure, with a printed gain or loss kept and methods in
    the printed order.
    """

    paper: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PAPER", help=_NAMES)]
    out: Path | None = None
    """Folder for the page and its plots; docs/reproduction if it is here, else reproduction."""

    def run(self, console: "Console") -> int:
        # Products here are too small to be worth threads. OpenBLAS reads this when it is loaded.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        from polyrhythm.simulate.reproduce.page import counted, show, write
        from polyrhythm.simulate.reproduce.registry import chosen, reproduce
        from polyrhythm.tables import print_line

        names = chosen(self.paper)
        folder = self.out or next((place for place in _PLACES if place.is_dir()), _PLACES[-1])
        num_passed = num_rows = 0
        for name in names:
            done = reproduce(name, partial(_say, console, name))
            show(done, console)
            page = write(done, folder)
            num_plots = f"{len(done.plots)} plot{'' if len(done.plots) == 1 else 's'}"
            print_line(console, f"{page}, with {num_plots}")
            num_passed, num_rows = num_passed + done.num_passed, num_rows + len(done.counted)
        print_line(console, counted(num_passed, num_rows))
        return 0


def _say(console: "Console", name: str, what: str) -> None:
    from polyrhythm.tables import print_line

    print_line(console, f"{name}: {what}")
