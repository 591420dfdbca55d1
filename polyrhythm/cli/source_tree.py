"""Import benchmarks/ and reproduction/: packages of the source tree that the wheel lacks."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import polyrhythm
from polyrhythm.errors import UserError


def import_from_source_tree(package: str, command: str) -> ModuleType:
    """Import a package next to `polyrhythm/` in a source checkout."""
    root = Path(polyrhythm.__file__).parents[1]
    if not (root / package / "__init__.py").is_file():
        raise UserError(
            f"`polyrhythm {command}` needs the folder {package}/, which the wheel does not contain",
            expected="a source checkout of Polyrhythm",
            fix=f"in a checkout run `make venv`, then `.venv/bin/polyrhythm {command} ...`",
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(package)
