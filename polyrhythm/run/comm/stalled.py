"""Addresses that TCP connections of this process reach no more: the kernel knows before a timeout.

A machine that is up confirms packets even if its processes are busy or stopped. So retransmissions
that nobody confirms mean that the link, or the machine, is gone. Linux only; elsewhere none is
known to be.
"""

import socket
import sys
from pathlib import Path
from typing import NamedTuple

from polyrhythm.types import Seconds

# Without any confirmation. A retransmission takes twice as long as the one before, from 0.2 s on.
_NUM_RETRANSMISSIONS, _SILENT_FOR = 5, Seconds(6.0)
_NUM_CONNECTION_REQUESTS = 3  # the first three take 7 s
_ESTABLISHED, _SYN_SENT = 1, 2


class _Connection(NamedTuple):
    address: str  # of the peer
    has_stalled: bool
    answers: bool  # the peer has sent something not long ago


def unreachable_addresses() -> set[str]:
    """Return the IPv4 addresses of hosts that confirm nothing that this process has sent.

    Not of a host that answers another connection: a script may talk to a port that nobody serves.
    """
    if sys.platform != "linux":
        return set()
    found = [each for path in Path("/proc/self/fd").iterdir() if (each := _connection(path))]
    stalled = {each.address for each in found if each.has_stalled}
    return stalled - {each.address for each in found if each.answers} - {""}


def _connection(path: Path) -> _Connection | None:
    """Return the TCP connection whose descriptor has this path; None if it is something else."""
    try:
        name = str(path.readlink())  # socket:[inode]
        if not name.startswith("socket:"):
            return None
        # With this flag Python leaves the socket as it is. Otherwise a default timeout, as a script
        # may set it, would make it and all its copies non-blocking.
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
        connection = socket.socket(socket.AF_INET, kind, fileno=int(path.name))
    except OSError:  # it has been closed meanwhile
        return None
    try:
        kinds = (socket.SO_DOMAIN, socket.AF_INET), (socket.SO_TYPE, socket.SOCK_STREAM)
        if any(connection.getsockopt(socket.SOL_SOCKET, what) != value for what, value in kinds):
            return None
        data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64)
        has_stalled = _has_stalled(data)
        if data[0] == _SYN_SENT:
            inode = name.removeprefix("socket:[").removesuffix("]")
            return _Connection(_requested_peer(inode), True, False) if has_stalled else None
        return _Connection(connection.getpeername()[0], has_stalled, _answers(data))
    except OSError:  # it listens, or has lost its peer
        return None
    finally:
        connection.detach()  # its descriptor belongs to others


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
    is_waiting = state == _ESTABLISHED and unacked > 0
    return is_waiting and backoff >= _NUM_RETRANSMISSIONS and not _answers(data)


def _answers(data: bytes) -> bool:
    """Whether data or a confirmation has arrived not long ago, by Linux's `struct tcp_info`."""
    arrived = (int.from_bytes(data[i : i + 4], sys.byteorder) / 1e3 for i in (52, 56))
    return data[0] == _ESTABLISHED and min(arrived) < _SILENT_FOR
