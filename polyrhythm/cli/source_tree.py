"""`polyrhythm bench` and `reproduce`: run benchmarks/ and reproduction/, which the wheel lacks."""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import tyro

import polyrhythm
from polyrhythm.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console


def import_from_source_tree(package: str, command: str) -> ModuleType:
    """Import a package next to `polyrhythm/` in a source checkout."""
    root = Path(polyrhythm.__file__).parents[1]
    if not (root / package / "registry.py").is_file():
        raise UserError(
            f"`polyrhythm {command}` needs the folder {package}/, which the wheel does not contain",
            expected="a source checkout of Polyrhythm",
            fix=f"in a checkout run `make venv`, then `.venv/bin/polyrhythm {command} ...`",
        )
    sys.path.insert(0, str(root))  # before any other package of this name
    return importlib.import_module(package)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Run a benchmark; print a table and, as the last line, one JSON object with the ratios."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")] = "list"
    """Name of the benchmark; `list` prints all names and what each measures."""
    quick: bool = False
    """Run a smoke test in seconds; its figures prove nothing."""
    out: Path | None = None
    """Also write the result to NAME.json in this folder."""
    soak: int | None = None
    """Number of random faults of `faults`, 60 by default."""

    def run(self, console: "Console") -> int:
        benchmarks = import_from_source_tree("benchmarks", "bench")
        if self.name == "list":
            benchmarks.print_names(console)
        else:
            result = benchmarks.run(
                self.name, quick=self.quick, out=self.out, soak=self.soak, console=console
            )
            return 1 if result.failures else 0
        return 0


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
