"""Hugging Face models in the Trainer: as few lines, the same losses and as fast as elsewhere.

Against transformers.Trainer and a Lightning Fabric loop, on one process and on 2 stages x 2
pipelines; the data loader against torch's; and what progress, metrics and events cost.
"""

import ast
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.harness.child import in_child
from benchmarks.harness.report import Bar, Result, print_bars, print_rows, progress_printer
from benchmarks.models import hf_parity, loader, overhead, progress
from polyrhythm.types import Seconds

_TIMEOUT: Seconds = 400.0  # of a part
_EXAMPLE = Path(__file__).parents[2] / "examples" / "hugging_face.py"
BARS = (
    Bar("hf_lines", "<=", 10, "lines of examples/hugging_face.py, from the imports to fit"),
    Bar("hf_parity", "<=", 1e-6, "losses against transformers.Trainer, on 1 and on 2 x 2"),
    Bar("overhead_vs_hf", ">=", 1.0, "samples/s against transformers.Trainer"),
    Bar("overhead_vs_fabric", ">=", 0.98, "samples/s against a Lightning Fabric loop"),
    Bar("loader", ">=", 0.98, "samples/s of 8 worker processes against torch's DataLoader"),
    Bar("progress_overhead_100ms", "<=", 0.01, "of a step of 100 ms: progress, metrics, events"),
    Bar("progress_overhead_15ms", "<=", 0.02, "likewise, of a step of 15 ms"),
)


def _count_lines(*, quick: bool) -> dict[str, float]:
    """Count the lines of code of the example; comments and docstrings are none."""
    tree = ast.parse(_EXAMPLE.read_text(encoding="utf-8"))
    texts = [node for node in tree.body if not _is_docstring(node)]
    lines = {line for node in texts for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    return {"hf_lines": len(lines)}


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


_PARTS: Mapping[str, Callable[..., dict[str, float]]] = {
    "hf_lines": _count_lines,
    "hf_parity": hf_parity.measure,
    "overhead": overhead.measure,
    "loader": loader.measure,
    "progress": progress.measure,
}


class Figure(msgspec.Struct, frozen=True):
    name: str
    value: float


def run(*, quick: bool, console: Console) -> Result:
    show, found = progress_printer(console), dict[str, float]()
    for name, measure in _PARTS.items():
        show(f"measuring {name}")
        found |= in_child(name, partial(measure, quick=quick), dict[str, float], _TIMEOUT)
    rows = [Figure(name, value) for name, value in found.items()]
    columns: dict[str, Callable[[Figure], str]] = {
        "figure": lambda row: row.name,
        "value": lambda row: f"{row.value:.4g}",
    }
    print_rows(console, rows, columns)
    names = [bar.name for bar in BARS]
    ratios = {name: found[name] for name in names}
    print_bars(console, BARS, ratios, quick=quick)
    figures = {name: value for name, value in found.items() if name not in names}
    return Result(bench="models", ratios=ratios, figures=figures, rows=rows)
