"""Tests in a real lab; a machine that cannot have one says why."""

import pytest

from polyrhythm.lab import abilities

MISSING = [
    f.found for f in abilities.findings() if f.ok is False and f.subject != "real-time priority"
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if MISSING and "test_abilities" not in str(item.path) and "/lab/" in str(item.path):
            item.add_marker(pytest.mark.skip(reason=f"no lab here: {'; '.join(MISSING)}"))
