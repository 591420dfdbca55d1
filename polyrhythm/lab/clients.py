"""Non-blocking connections of the processes that send commands to the switch.

A client that does not read its replies, or sends an endless line, is disconnected.
"""

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_BYTES = 1 << 20  # of one command, and of unread replies
MAX_LINES = 16  # of one client per `serve`


@dataclass(slots=True)
class _Client:
    socket: socket.socket
    unread: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


class Clients:
    """All connections; `reply_to` maps a line with a command to a line with its reply."""

    def __init__(self, listening: socket.socket, reply_to: Callable[[bytes], bytes]) -> None:
        self._listening, self._reply_to = listening, reply_to
        self._listening.setblocking(False)
        self._clients: dict[int, _Client] = {}

    def add(self, client: socket.socket) -> None:
        client.setblocking(False)
        self._clients[client.fileno()] = _Client(client)

    @property
    def reading(self) -> list[int]:
        return [self._listening.fileno(), *self._clients]

    @property
    def writing(self) -> list[int]:
        return [file for file, client in self._clients.items() if client.unsent]

    def serve(self, file: int) -> None:
        """Accept or exchange data on one file of `reading` or `writing` that is ready."""
        if file == self._listening.fileno():
            with contextlib.suppress(OSError):  # closed again, or out of descriptors
                self.add(self._listening.accept()[0])
            return
        if (client := self._clients.get(file)) is None:
            return
        try:
            self._exchange_lines(client)
        except BlockingIOError:
            pass
        except (OSError, EOFError):
            client.socket.close()
            del self._clients[file]

    def _exchange_lines(self, client: _Client) -> None:
        self._send(client)
        received = client.socket.recv(1 << 16)
        if not received:
            raise EOFError
        client.unread += received
        *lines, rest = bytes(client.unread).split(b"\n", MAX_LINES)
        client.unread[:] = rest
        for line in lines:
            client.unsent += self._reply_to(line) + b"\n"
        if max(len(client.unread), len(client.unsent)) > MAX_BYTES:
            raise EOFError
        self._send(client)

    def _send(self, client: _Client) -> None:
        if client.unsent:
            with contextlib.suppress(BlockingIOError):
                del client.unsent[: client.socket.send(client.unsent)]
