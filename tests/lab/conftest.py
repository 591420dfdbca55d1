"""Tests in a real lab; a machine that cannot have one is skipped with the reason."""

import pytest
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
TIMER = pytest.StashKey[Settings]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if MISSING and "test_abilities" not in str(item.path) and "/lab/" in str(item.path):
            item.add_marker(pytest.mark.skip(reason=f"no lab here: {'; '.join(MISSING)}"))


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Settings) -> None:
    """Remember the timeout: each attempt gets all of it."""
    item.stash[TIMER] = settings


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Repeat a test that failed while other work took the cores: the lab emulates real time.

    On a calm machine the first failure stands. A test marked `alone` expects an idle machine;
    others run beside tests, so that only time stolen by the hypervisor excuses them.
    """
    hooks = pyfuncitem.ihook
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    own_machine = pyfuncitem.get_closest_marker("alone") is not None
    for attempt in range(1, ATTEMPTS + 1):
        contention = Contention(own_machine=own_machine)
        try:
            pyfuncitem.obj(**arguments)
        except (AssertionError, LabError, PeerError) as error:
            share = contention.share()
            if share < CALM or (attempt == ATTEMPTS and share < HOPELESS):
                raise
            print(f"attempt {attempt}: {error!r} while other work took {share:.0%} of the CPU time")
        else:
            return True
        hooks.pytest_timeout_cancel_timer(item=pyfuncitem)
        wait_for_calm(own_machine=own_machine)
        hooks.pytest_timeout_set_timer(item=pyfuncitem, settings=pyfuncitem.stash[TIMER])
    pytest.skip(f"other work took {share:.0%} of this machine's CPU time: the lab cannot keep time")
