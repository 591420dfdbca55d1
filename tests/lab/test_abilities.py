"""Checks of the lab's needs try each operation, leave nothing behind, and work unprivileged."""

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from polyrhythm.lab import abilities
from polyrhythm.lab.namespace import NEWUSER

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="the lab needs Linux"),
]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop to another user")

NOBODY = 65534


def namespace(kind):
    return str(Path(f"/proc/self/ns/{kind}").readlink())


def state():
    """Return the visible state that a probe could change or leave behind."""
    return {
        "namespaces": [namespace("net"), namespace("user")],
        "children": psutil.Process().children(recursive=True),
        "policy": os.sched_getscheduler(0),
        "devices": socket.if_nameindex(),
        "files": psutil.Process().num_fds(),
    }


def network_namespaces_in_use():
    """Return the network namespaces of all processes that this one may inspect."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            found.add(str(path.readlink()))
    return found


def in_child(work):
    """Return the result of `work()` in a forked child; raise EOFError if it fails."""

    def child(sending):
        sending.send(work())

    fork = multiprocessing.get_context("fork")
    receiving, sending = fork.Pipe(duplex=False)
    process = fork.Process(target=child, args=(sending,))
    process.start()
    sending.close()
    try:
        return receiving.recv()
    finally:
        process.join()
        receiving.close()


def drop_privileges():
    resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def by_subject(check_results):
    return {result.subject: result for result in check_results}


def test_check_results_change_nothing():
    before = state()
    first = abilities.check_results()
    assert abilities.check_results() == first
    assert state() == before


def test_probe_namespace_ends_with_the_probe():
    def enter():
        abilities._enter_network()
        return namespace("net")

    outcome = abilities.attempt(enter)
    if not outcome.ok:
        pytest.skip(f"no network namespace here: {outcome.text}")
    assert namespace("net") in network_namespaces_in_use()
    # A namespace that another test has made since then may have the same number until that ends.
    deadline = time.monotonic() + 40
    while outcome.text in network_namespaces_in_use() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert outcome.text not in network_namespaces_in_use()


@needs_root
def test_unprivileged_user_gets_findings_with_advice():
    abilities.check_results()  # import all modules while the files are still readable
    found = by_subject(in_child(lambda: drop_privileges() or abilities.check_results()))
    may_open = Path(abilities.TUN).exists() and Path(abilities.TUN).stat().st_mode & 6 == 6
    assert found[abilities.TUN].ok == may_open
    if not may_open:
        assert found[abilities.TUN].found == "Permission denied"
        assert "chmod 0666 /dev/net/tun" in found[abilities.TUN].advice
        assert found["TUN in a namespace"].ok is False
        assert found["TUN in a namespace"].found == "not tried"
    network = found["network namespace"]
    assert "rootless" in network.found if network.ok else network.advice
    assert found["real-time priority"].ok is False
    assert "ulimit -r" in found["real-time priority"].advice


def test_unreadable_setting_is_named_as_a_possible_cause(monkeypatch):
    def refuse(path):
        raise (PermissionError if path.name == "unprivileged_userns_clone" else FileNotFoundError)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert "sysctl -w kernel.unprivileged_userns_clone=1" in abilities._network_advice()
    assert "max_user_namespaces" not in abilities._network_advice()


def test_forbidden_namespaces_are_reported_with_the_settings_that_forbid_them():
    """Namespace limits are per user namespace, so the test sets them to 0 in a new one."""
    user = os.getuid()

    def findings_where_forbidden():
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(NEWUSER) != 0:
            return None
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
        Path("/proc/sys/user/max_net_namespaces").write_text("0")
        return abilities.check_results()

    check_results = in_child(findings_where_forbidden)
    if check_results is None:
        pytest.skip("user namespaces are forbidden here, so none can be made to forbid them in")
    found = by_subject(check_results)
    assert found["network namespace"].ok is False
    for setting in ("user.max_user_namespaces", "user.max_net_namespaces"):
        assert f"{setting}=10000" in found["network namespace"].advice
    assert found["TUN in a namespace"].found == "not tried"


def test_probe_that_hangs_or_dies_is_an_outcome_and_leaves_no_process():
    before = psutil.Process().children(recursive=True)
    # Far longer than this test's timeout: `attempt` returns because of its own timeout.
    hung = abilities.attempt(lambda: time.sleep(10_000) or "", timeout=0.2)
    died = abilities.attempt(lambda: os.kill(os.getpid(), signal.SIGSYS) or "")
    assert (hung.ok, hung.text) == (False, "no answer within 0.2 s")
    assert (died.ok, died.text) == (False, "the attempt was ended by SIGSYS")
    assert psutil.Process().children(recursive=True) == before


@pytest.mark.parametrize(
    ("error", "advice"),
    [("ENOENT", "mknod"), ("ENODEV", "modprobe tun"), ("EACCES", "chmod"), ("EPERM", "--device")],
)
def test_advice_for_the_tun_device_fits_its_error(error, advice):
    assert advice in abilities._tun_advice(getattr(abilities.errno, error))


def test_other_operating_systems_get_one_finding(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    (result,) = abilities.check_results()
    assert result.ok is False
    assert "Linux" in result.advice


def test_missing_pyroute2_advises_how_to_install_it(monkeypatch):
    monkeypatch.setattr(abilities.importlib.util, "find_spec", lambda name: None)
    result = by_subject(abilities.check_results())["pyroute2"]
    assert result.ok is False
    assert "pip install 'polyrhythm[lab]'" in result.advice
