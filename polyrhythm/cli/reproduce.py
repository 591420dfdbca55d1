"""`polyrhythm reproduce PAPER`: compare a paper's figures with simulated ones."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from polyrhythm.cli.source_tree import import_from_source_tree

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproduceCommand:
    """Simulate a paper's measurements: print a table and the number of rows that pass; plot them.

    A row passes if it is within 20 % of the printed figure, keeps a printed gain or loss, and
    ranks the methods in the printed order.
    """

    paper: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PAPER")] = "list"
    """Name of the paper, or `all`; `list` prints the papers."""
    out: Path | None = None
    """Folder for the page and its plots; docs/reproduction if it exists, else reproduction."""

    def run(self, console: "Console") -> int:
        reproduction = import_from_source_tree("reproduction", "reproduce")
        if self.paper == "list":
            reproduction.print_names(console)
        else:
            reproduction.run(self.paper, out=self.out, console=console)
        return 0
