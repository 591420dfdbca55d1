"""Check what the lab needs on this machine by trying each operation in a short-lived child.

The child may leave this process's namespaces. Nothing remains after it ends: an unnamed namespace
and a TUN device inside it exist only while a process holds them.
"""

import ctypes
import errno
import importlib.metadata
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from polyrhythm.describe.check_result import CheckResult
from polyrhythm.lab.namespace import IFF_NO_PI, IFF_TUN, NEWNET, NEWUSER, TUN, TUNSETIFF
from polyrhythm.lab.switch import REAL_TIME_PRIORITY
from polyrhythm.processes import signal_name
from polyrhythm.types import Seconds

TIMEOUT: Seconds = 5.0  # for one attempt; each takes milliseconds

_ONLY_LAB = "; only the lab needs it"

# Settings that disable namespaces: the name, the value that disables, the value that enables.
_NAMESPACE_SETTINGS = (
    ("user.max_net_namespaces", "0", "10000"),
    ("user.max_user_namespaces", "0", "10000"),
    ("kernel.unprivileged_userns_clone", "0", "1"),  # Debian
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),  # Ubuntu since 23.10
)
_IN_CONTAINER = "docker run --privileged"  # less leaves /proc/sys read-only


class ProbeOutcome(NamedTuple):
    """The outcome of an attempt; `error` is 0 after success, None if the child sent nothing."""

    text: str
    error: int | None = 0

    @property
    def ok(self) -> bool:
        return self.error == 0


def check_results() -> list[CheckResult]:
    """Try everything that the lab needs; nothing remains and nothing changes here."""
    if sys.platform != "linux":
        return [CheckResult("lab", f"this is {sys.platform}", False, "use Linux" + _ONLY_LAB)]
    tun, network = attempt(_open_tun), attempt(_enter_network)
    both = (
        attempt(_make_tun_in_network) if tun.ok and network.ok else ProbeOutcome("not tried", None)
    )
    real_time = attempt(_set_real_time_priority)
    return [
        _finding(TUN, tun, _tun_advice(tun.error)),
        _finding("network namespace", network, _network_advice()),
        _finding(
            "TUN in a namespace",
            both,
            f"in a container: {_IN_CONTAINER}"
            if tun.ok and network.ok
            else "first make the two above work",
        ),
        _finding(
            "real-time priority",
            real_time,
            f"{_unless_root()}ulimit -r {REAL_TIME_PRIORITY}, or in a container: "
            "docker run --cap-add SYS_NICE",
            consequence="; without it the lab's packets may be milliseconds late on busy cores",
        ),
        _pyroute2(),
    ]


def attempt(probe: Callable[[], str], timeout: Seconds = TIMEOUT) -> ProbeOutcome:
    """Run `probe` in a forked child; return its text or OSError after the child has ended."""
    fork = multiprocessing.get_context("fork")
    receiving, sending = fork.Pipe(duplex=False)
    child = fork.Process(target=_run_probe, args=(probe, sending), daemon=True)
    child.start()
    sending.close()  # only the child holds it open: its death reads as end of file
    try:
        if not receiving.poll(timeout):
            return ProbeOutcome(f"no answer within {timeout:g} s", None)
        error, _, text = receiving.recv_bytes().decode().partition(" ")
        return ProbeOutcome(text, int(error))
    except EOFError:
        child.join()
        code = child.exitcode or 0
        how = signal_name(-code) if code < 0 else f"exit status {code}"
        return ProbeOutcome(f"the attempt was ended by {how}", None)
    finally:
        child.kill()
        child.join()
        child.close()
        receiving.close()


def _open_tun() -> str:
    os.close(os.open(TUN, os.O_RDWR | os.O_NONBLOCK))
    return "opens for reading and writing"


def _enter_network() -> str:
    """Move this process into a new network namespace; raise OSError if not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEWNET) == 0:
        return "made with this process's own privileges"
    if libc.unshare(NEWUSER | NEWNET) == 0:
        return "made rootless, inside a user namespace"
    number = ctypes.get_errno()
    raise OSError(number, f"unshare: {os.strerror(number)}")


def _make_tun_in_network() -> str:
    import fcntl  # not on every platform, and only needed in the child

    _enter_network()
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)  # belongs to the current namespace
    name = b"probe0"
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name, IFF_TUN | IFF_NO_PI))
    socket.if_nametoindex(name.decode())  # raises OSError unless the device exists
    Path("/proc/sys/net/ipv4/tcp_no_metrics_save").write_text("1")  # the lab adjusts its hosts
    return "created"


def _set_real_time_priority() -> str:
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(REAL_TIME_PRIORITY))
    return f"may be set (SCHED_RR {REAL_TIME_PRIORITY})"


def _run_probe(probe: Callable[[], str], sending: "multiprocessing.connection.Connection") -> None:
    try:
        sending.send_bytes(f"0 {probe()}".encode())
    except OSError as error:
        sending.send_bytes(f"{error.errno or -1} {error.strerror or error}".encode())


def _finding(
    subject: str, outcome: ProbeOutcome, advice: str, consequence: str = _ONLY_LAB
) -> CheckResult:
    advice = "" if outcome.ok else advice + consequence
    return CheckResult(subject, outcome.text, outcome.ok, advice)


def _tun_advice(error: int | None) -> str:
    if error in (errno.ENOENT, errno.ENODEV, errno.ENXIO):
        return (
            f"as root: modprobe tun; mkdir -p /dev/net; mknod -m 0666 {TUN} c 10 200 "
            f"(in a container: docker run --device {TUN})"
        )
    if error == errno.EPERM:  # the file mode permits it, the container's device list does not
        return f"docker run --device {TUN}"
    return f"as root: chmod 0666 {TUN}; or run as root"


def _unless_root() -> str:
    return "run as root, or " if os.geteuid() else ""


def _network_advice() -> str:
    """Name the setting that forbids namespaces, if any: the error number does not show it."""
    forbidding = [
        f"{setting}={allowing}"
        for setting, forbids, allowing in _NAMESPACE_SETTINGS
        if _may_equal(setting, forbids)
    ]
    if forbidding:
        return f"{_unless_root()}once as root: sysctl -w {' '.join(forbidding)}"
    return f"{_unless_root()}in a container: {_IN_CONTAINER}"


def _may_equal(setting: str, value: str) -> bool:
    try:
        return Path("/proc/sys", *setting.split(".")).read_text().strip() == value
    except FileNotFoundError:
        return False
    except PermissionError:  # the setting exists, and only root may read its value
        return True


def _pyroute2() -> CheckResult:
    if importlib.util.find_spec("pyroute2") is None:
        advice = "pip install 'polyrhythm[lab]'" + _ONLY_LAB
        return CheckResult("pyroute2", "not installed", False, advice)
    return CheckResult("pyroute2", importlib.metadata.version("pyroute2"), True)
