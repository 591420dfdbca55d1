"""What a benchmark found: ratios that matter, figures beside them, rows that they come from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from polyrhythm.types import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Percentages are fractions. `rows` are dataclasses, and go to the file only."""

    bench: str
    ratios: Mapping[str, float]
    figures: Mapping[str, float] = field(default_factory=dict)
    rows: Sequence[object] = ()

    def line(self, *, quick: bool, took: Seconds) -> str:
        """One JSON object on one line."""
        return msgspec.json.encode(self._content(quick, took)).decode()

    def save(self, folder: Path, *, quick: bool, took: Seconds) -> Path:
        """The same object with the rows, as NAME.json in the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.bench}.json"
        content = {**self._content(quick, took), "rows": self.rows}
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
        return path

    def _content(self, quick: bool, took: Seconds) -> dict[str, object]:
        return {
            "bench": self.bench,
            "ratios": {name: _rounded(value) for name, value in self.ratios.items()},
            "figures": {name: _rounded(value) for name, value in self.figures.items()},
            "quick": quick,
            "seconds": round(took, 1),
        }


def _rounded(value: float) -> float:
    """To the digits that a measurement has; a count stays one."""
    return value if isinstance(value, int) else float(f"{value:.5g}")
