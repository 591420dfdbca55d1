"""Tests in a real lab; a machine that cannot have one is skipped with the reason."""

from collections.abc import Generator
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from pytest_timeout import Settings

from polyrhythm.errors import LabError, PeerError
from polyrhythm.lab import abilities
from tests.lab.contention import CALM, HOPELESS, Contention, wait_for_calm

MISSING = [
    f.found
    for f in abilities.check_results()
    if f.ok is False and f.subject != "real-time priority"
]
ATTEMPTS = 3
EXCUSED = (AssertionError, LabError, PeerError)
TIMER = pytest.StashKey[Settings]()
RAISED = pytest.StashKey[BaseException]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if MISSING and item.path.name != "test_abilities.py" and _is_here(item):
            item.add_marker(pytest.mark.skip(reason=f"no lab here: {'; '.join(MISSING)}"))


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Settings) -> None:
    """Remember the timeout: each attempt gets all of it."""
    item.stash[TIMER] = settings


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None:
        item.stash[RAISED] = call.excinfo.value
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Repeat a test that failed while other work took the cores: the lab emulates real time.

    Every attempt has its own fixtures. On a calm machine the first failure stands. A test marked
    `alone` expects an idle machine; others run beside tests, so that only time stolen by the
    hypervisor excuses them.
    """
    if not _is_here(item):
        return None
    hooks, own_machine = item.ihook, item.get_closest_marker("alone") is not None
    hooks.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for attempt in range(1, ATTEMPTS + 1):
        contention = Contention(own_machine=own_machine)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        failed = next((report for report in reports if report.failed), None)
        share = contention.share()
        if failed is None or share < CALM or not isinstance(item.stash[RAISED], EXCUSED):
            break
        if attempt == ATTEMPTS:
            if share >= HOPELESS:
                reason = f"other work took {share:.0%} of this machine's CPU time: no real time"
                failed.outcome, failed.longrepr = "skipped", (*item.location[:2], reason)
            break
        hooks.pytest_timeout_cancel_timer(item=item)
        wait_for_calm(own_machine=own_machine)
        hooks.pytest_timeout_set_timer(item=item, settings=item.stash[TIMER])
        item._initrequest()  # new fixtures
    for report in reports:
        hooks.pytest_runtest_logreport(report=report)
    hooks.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _is_here(item: pytest.Item) -> bool:
    return Path(__file__).parent in item.path.parents
