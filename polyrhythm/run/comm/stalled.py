"""Addresses that TCP connections of this process reach no more: the kernel knows before a timeout.

A machine that is up confirms packets even if its processes are busy or stopped. So retransmissions
that nobody confirms mean that the link, or the machine, is gone. Linux only; elsewhere none is
known to be.
"""

import socket
import sys
from pathlib import Path

from polyrhythm.types import Seconds

# Without any confirmation. A retransmission takes twice as long as the one before, from 0.2 s on.
_NUM_RETRANSMISSIONS, _SILENT_FOR = 5, Seconds(6.0)
_NUM_CONNECTION_REQUESTS = 3  # the first three take 7 s
_ESTABLISHED, _SYN_SENT = 1, 2


def unreachable_addresses() -> set[str]:
    """Return the IPv4 addresses of hosts that confirm nothing that this process has sent."""
    if sys.platform != "linux":
        return set()
    found = set[str]()
    for path in Path("/proc/self/fd").iterdir():
        found.add(_unreachable_peer(path))
    return found - {""}


def _unreachable_peer(path: Path) -> str:
    """Return the peer's address if the file is a TCP connection that has stalled, else ''."""
    try:
        name = str(path.readlink())  # socket:[inode]
        if not name.startswith("socket:"):
            return ""
        # With this flag Python leaves the socket as it is. Otherwise a default timeout, as a script
        # may set it, would make it and all its copies non-blocking.
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
        connection = socket.socket(socket.AF_INET, kind, fileno=int(path.name))
    except OSError:  # it has been closed meanwhile
        return ""
    try:
        kinds = (socket.SO_DOMAIN, socket.AF_INET), (socket.SO_TYPE, socket.SOCK_STREAM)
        if any(connection.getsockopt(socket.SOL_SOCKET, what) != value for what, value in kinds):
            return ""
        data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64)
        if not _has_stalled(data):
            return ""
        if data[0] == _SYN_SENT:
            return _requested_peer(name.removeprefix("socket:[").removesuffix("]"))
        address: str = connection.getpeername()[0]
    except OSError:
        return ""
    finally:
        connection.detach()  # its descriptor belongs to others
    return address


def _requested_peer(inode: str) -> str:
    """Return the address that a socket is connecting to; only the kernel's table has it."""
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[9] == inode:
            packed = int(fields[2].partition(":")[0], 16).to_bytes(4, sys.byteorder)
            return socket.inet_ntoa(packed)
    return ""


def _has_stalled(data: bytes) -> bool:
    """Read Linux's `struct tcp_info`."""
    state, retransmits, backoff = data[0], data[2], data[4]
    if state == _SYN_SENT:
        return retransmits >= _NUM_CONNECTION_REQUESTS
    unacked = int.from_bytes(data[24:28], sys.byteorder)
    silent_for = int.from_bytes(data[56:60], sys.byteorder) / 1e3
    is_waiting = state == _ESTABLISHED and unacked > 0
    return is_waiting and backoff >= _NUM_RETRANSMISSIONS and silent_for >= _SILENT_FOR
