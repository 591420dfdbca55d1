"""Operations of other processes on a running lab: status, enter a host, change links, faults."""

import os

from rich.console import Console

from polyrhythm.describe.read import unknown
from polyrhythm.describe.units import parse, show
from polyrhythm.errors import LabError
from polyrhythm.lab import namespace
from polyrhythm.lab.commands import (
    ChangeLinks,
    GetHosts,
    GetReport,
    HostEntry,
    KillHost,
    PauseHost,
    ReviveHost,
)
from polyrhythm.lab.control import Control
from polyrhythm.tables import print_line, print_table
from polyrhythm.types import Bytes, BytesPerSecond, Seconds


def enter_host(control: Control, host: str) -> None:
    """Move this process, and those that it starts later, into the host's network namespace."""
    hosts = control.request(GetHosts()).hosts
    path = hosts[_number(hosts, host)].namespace
    try:
        namespace.enter_by_path(path)
    except OSError as error:
        raise LabError(
            f"entering {host!r}: {error.strerror}",
            expected="the user who started the lab, or root",
            fix="run this as that user",
        ) from None
    os.environ["GLOO_SOCKET_IFNAME"] = namespace.DEVICE


def change_link(
    control: Control,
    source: str,
    target: str,
    *,
    latency: str | None,
    bandwidth: str | None,
    up: bool | None,
    one_way: bool,
) -> None:
    hosts = control.request(GetHosts()).hosts
    pair = (_number(hosts, source), _number(hosts, target))
    if pair[0] == pair[1] or (latency, bandwidth, up) == (None, None, None):
        raise LabError(
            f"nothing to change from {source!r} to {target!r}",
            expected="two hosts, and --latency, --bandwidth or --up",
            fix="for example --bandwidth 10Mbit/s",
        )
    command = ChangeLinks(
        pairs=(pair,) if one_way else (pair, pair[::-1]),
        latency=None if latency is None else parse(latency, Seconds),
        bandwidth=None if bandwidth is None else parse(bandwidth, BytesPerSecond),
        lost=None if up is None else not up,
    )
    if (command.latency or 0) < 0 or (command.bandwidth is not None and command.bandwidth <= 0):
        raise LabError(
            f"latency {latency}, bandwidth {bandwidth}",
            expected="a latency of 0 or more, a bandwidth above 0",
            fix="use --up False to take the link down",
        )
    control.request(command)


def kill(control: Control, host: str) -> str:
    """Kill the host; like `revive`, `pause` and `resume`, return a message for the user."""
    number, entry = _entry(control, host)
    if entry.killed:
        return f"{host} is killed already"
    control.request(KillHost(host=number))
    return f"{host} is killed"


def revive(control: Control, host: str) -> str:
    number, entry = _entry(control, host)
    if not entry.killed:
        return f"{host} is alive"
    control.request(ReviveHost(host=number))
    return f"{host} can be reached again; nothing runs on it yet"


def pause(control: Control, host: str) -> str:
    number, entry = _entry(control, host)
    if entry.pauses:
        return f"{host} is paused already"
    control.request(PauseHost(host=number, paused=True))
    return f"{host} is paused"


def resume(control: Control, host: str) -> str:
    number, entry = _entry(control, host)
    for _ in range(entry.pauses):  # a scenario may have paused it more than once
        control.request(PauseHost(host=number, paused=False))
    return f"{host} is resumed" if entry.pauses else f"{host} was not paused"


def show_status(control: Control, console: Console) -> None:
    hosts = control.request(GetHosts()).hosts
    report = control.request(GetReport()).report
    assert report is not None, "the reply to GetReport has a report"
    print_table(
        console,
        ["host", "address", "processes", ""],
        [[host.name, host.address, str(host.processes), _state(host)] for host in hosts],
    )
    rows = [
        [
            hosts[pair.source].name,
            hosts[pair.target].name,
            show(pair.wire_bytes, Bytes),
            f"{pair.drops} packets",
            show(pair.backlog, Bytes),
            show(pair.peak_backlog, Bytes),
        ]
        for pair in report.pairs
    ]
    print_table(console, ["from", "to", "sent", "dropped", "waiting", "at most"], rows)
    late = report.switch_timing
    print_line(
        console,
        f"switch: {late}; half of them at most {1e3 * late.late_p50:.2f} ms, "
        f"the latest {1e3 * late.late_max:.2f} ms; "
        f"{report.strays} packets to addresses outside the lab",
    )
    if trouble := report.switch_timing.trouble:
        print_line(console, f"measurements are unreliable: {trouble}")


def _state(host: HostEntry) -> str:
    return "killed" if host.killed else "paused" if host.pauses else ""


def _entry(control: Control, host: str) -> tuple[int, HostEntry]:
    hosts = control.request(GetHosts()).hosts
    number = _number(hosts, host)
    return number, hosts[number]


def _number(hosts: tuple[HostEntry, ...], name: str) -> int:
    names = [host.name for host in hosts]
    if name not in names:
        error = unknown("host", name, names)
        raise LabError(error.wrong, expected=error.expected, fix=error.fix)
    return names.index(name)
