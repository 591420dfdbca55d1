"""`polyrhythm bench NAME`: run a benchmark of the source tree."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from polyrhythm.cli.source_tree import import_from_source_tree

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Run a benchmark; print a table and, as the last line, one JSON object with the ratios."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")] = "list"
    """Name of the benchmark; `list` prints all names and what each measures."""
    quick: bool = False
    """Run a smoke test in seconds; its figures prove nothing."""
    out: Path | None = None
    """Also write the result to NAME.json in this folder."""

    def run(self, console: "Console") -> int:
        benchmarks = import_from_source_tree("benchmarks", "bench")
        if self.name == "list":
            benchmarks.print_names(console)
        else:
            benchmarks.run(self.name, quick=self.quick, out=self.out, console=console)
        return 0
