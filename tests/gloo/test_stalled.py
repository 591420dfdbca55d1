"""Looking for stalled connections finds TCP over IPv4 alone, and changes no socket."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyrhythm.run.comm import stalled
from polyrhythm.run.comm.stalled import unreachable_addresses


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return both ends of a connection, which block."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with client, accepted:
            yield client, accepted


@pytest.mark.parametrize("timeout", [0.0, 30.0])
def test_the_default_timeout_of_a_script_does_not_reach_connections(
    connection: tuple[socket.socket, socket.socket], timeout: float
) -> None:
    """It would make gloo's sockets non-blocking, as all that share a file description."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    socket.setdefaulttimeout(timeout)
    try:
        assert unreachable_addresses() == set()
    finally:
        socket.setdefaulttimeout(None)
    assert [os.get_blocking(end.fileno()) for end in connection] == [True, True]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    connection[0].sendall(b"x")
    assert connection[1].recv(1) == b"x"


def test_only_tcp_connections_over_ipv4_are_looked_at(
    connection: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unreachable_addresses() == set()
    monkeypatch.setattr(stalled, "_has_stalled", lambda data: len(data) >= 60)
    assert unreachable_addresses() == set(), "the peer has answered a moment ago"
    monkeypatch.setattr(stalled, "_SILENT_FOR", 0.0)
    pair = socket.socketpair()
    with pair[0], pair[1], socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        datagrams.connect(("127.0.0.2", 9))
        assert unreachable_addresses() == {"127.0.0.1"}
