"""`polyrhythm bench NAME`: both sides interleaved in one run, and the ratio that matters."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from polyrhythm.bench.registry import BENCHMARKS, names

if TYPE_CHECKING:
    from rich.console import Console

_NAMES = "\n".join(
    ["Which benchmark:", *(f"- {name}: {BENCHMARKS[name].about}" for name in names())]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Measure: a table, and as the last line one JSON object with the ratios."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME", help=_NAMES)]
    quick: bool = False
    """A smoke test in seconds, whose figures prove nothing."""
    out: Path | None = None
    """Folder for the result as a file too."""

    def run(self, console: "Console") -> int:
        from polyrhythm import bench

        bench.run(self.name, quick=self.quick, out=self.out, console=console)
        return 0
