"""Grids and numbers of cases: `make test` runs some of them, `make test-all` all."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings


def long_except(cases: Sequence[Any], *kept: int) -> list[Any]:
    """Mark all cases `long` but those with these indices."""
    return [
        case
        if number in kept
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for number, case in enumerate(cases)
    ]


def num_examples(thorough: int) -> int:
    """Return how many examples hypothesis draws: a third of them unless in `make test-all`."""
    is_thorough = settings.get_current_profile_name() == "thorough"
    return thorough if is_thorough else -(-thorough // 3)
