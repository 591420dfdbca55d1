"""Grids of cases: `make test` runs a few of each, `make test-all` all."""

from collections.abc import Sequence
from typing import Any

import pytest


def long_except(cases: Sequence[Any], *kept: int) -> list[Any]:
    """Mark all cases `long` but those with these indices."""
    return [
        case
        if number in kept
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for number, case in enumerate(cases)
    ]
