"""How much of this machine's CPU time a test did not get: stolen by the host, or used by others."""

import os
import time
from pathlib import Path

import psutil

CALM, HOPELESS = 0.03, 0.2  # shares of all CPU time
_WINDOW, _TIMEOUT = 2.0, 60.0


class Contention:
    """Measures the share of CPU time that went elsewhere since this object was made.

    `own_machine`: nothing but this test is expected to run, so that the CPU time of every process
    that does not descend from this one counts, too. Without it only time that the hypervisor gave
    to other machines counts.
    """

    def __init__(self, *, own_machine: bool) -> None:
        self._own_machine = own_machine
        self._before = self._lost(), _total()

    def share(self) -> float:
        lost, total = self._lost() - self._before[0], _total() - self._before[1]
        return max(0.0, lost / total) if total else 0.0

    def _lost(self) -> float:
        """Seconds since boot."""
        fields = _cpu_times()
        steal = fields[7]
        if not self._own_machine:
            return steal
        busy = sum(fields[:3])  # irq and softirq serve this test's own packets, too
        return steal + busy - _descendants_time()


def wait_for_calm(*, own_machine: bool) -> None:
    """Return once a window of seconds shows almost no contention, or after a minute."""
    deadline = time.monotonic() + _TIMEOUT
    while time.monotonic() < deadline:
        window = Contention(own_machine=own_machine)
        time.sleep(_WINDOW)
        if window.share() < CALM:
            return


def _cpu_times() -> list[float]:
    """user, nice, system, idle, iowait, irq, softirq, steal of all cores, in seconds."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0]
    tick = os.sysconf("SC_CLK_TCK")
    return [int(field) / tick for field in first.split()[1:9]]


def _total() -> float:
    return sum(_cpu_times())


def _descendants_time() -> float:
    """CPU seconds of this process, of the children it has waited for, and of those that run."""
    own = os.times()
    spent = own.user + own.system + own.children_user + own.children_system
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        spent += times.user + times.system + times.children_user + times.children_system
    return spent
