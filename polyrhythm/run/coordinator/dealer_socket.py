"""The line from a worker to the coordinator: one encrypted connection, and a bell to wake by.

libzmq connects again by itself when TCP breaks, under the same name, and sends what was not sent
yet; what becomes of the connection is told by `connection_events`.
"""

import contextlib
import math
import secrets
import socket
import struct
from enum import Enum

import zmq

from polyrhythm.errors import LaunchError
from polyrhythm.run.coordinator.keys import JobKeys
from polyrhythm.types import Seconds

_NOW = int(zmq.DONTWAIT)


class ConnectionEvent(Enum):
    """What has become of a connection."""

    CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
    KEY_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
    HANDSHAKE_CLOSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL  # before the other side was known
    PROTOCOL_ERROR = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    CONNECT_RETRIED = zmq.EVENT_CONNECT_RETRIED
    CLOSED = zmq.EVENT_DISCONNECTED


def check_address(address: str, *, label: str) -> None:
    """libzmq would take a port modulo 65536, and find out about others only when they are used."""
    transport, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if transport != "tcp" or not host or not port.isdecimal() or int(port) > 65535:
        raise LaunchError(
            f"{label} {address!r}",
            expected="tcp://, a host and a port up to 65535, as tcp://10.0.0.1:29600",
            fix="write it like that; an address of IPv6 stands in brackets",
        )


class DealerSocket:
    """Used by one thread at a time; only `wake` may be called by any."""

    def __init__(self, address: str, keys: JobKeys) -> None:
        check_address(address, label="coordinator")
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.ROUTING_ID, b"polyrhythm" + secrets.token_bytes(16)),  # its name, for good
            (zmq.CURVE_SERVERKEY, keys.server_public.encode()),
            (zmq.CURVE_PUBLICKEY, keys.client_public.encode()),
            (zmq.CURVE_SECRETKEY, keys.client_secret.encode()),
            (zmq.RECONNECT_IVL_MAX, 1000),
            (zmq.IPV6, int("[" in address)),
            (zmq.SNDHWM, 0),  # to send never blocks; a worker waits for answers, so it is not much
        ):
            self._dealer.setsockopt(option, value)
        self._monitor = self._dealer.get_monitor_socket(
            sum(event.value for event in ConnectionEvent)
        )
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._wake_receiver.setblocking(False)
        self._poller = zmq.Poller()
        for each in (self._dealer, self._monitor, self._wake_receiver):
            self._poller.register(each, zmq.POLLIN)
        try:
            self._dealer.connect(address)
        except zmq.ZMQError as error:
            self.close(0.0)
            raise LaunchError(
                f"coordinator {address!r}: {error.strerror}",
                expected="the address that `polyrhythm coordinator` shows, as tcp://10.0.0.1:29600",
                fix="give host and port of the coordinator",
            ) from None

    def wake(self) -> None:
        """End a `wait`, or the next one."""
        with contextlib.suppress(OSError):  # rung often enough; or over
            self._wake_sender.send(b"\0")

    def wait(self, timeout: Seconds) -> None:
        """Until something happens, or `timeout` has passed."""
        self._poller.poll(max(0, math.ceil(1e3 * timeout)))
        with contextlib.suppress(BlockingIOError):
            self._wake_receiver.recv(4096)

    def receive(self) -> bytes | None:
        """The next message, if there is one."""
        try:
            return self._dealer.recv(_NOW)
        except zmq.Again:
            return None

    def send(self, data: bytes) -> None:
        self._dealer.send(data, _NOW)

    def connection_events(self) -> list[ConnectionEvent]:
        found = []
        while self._monitor.poll(0):
            event, _ = struct.unpack("=Hi", self._monitor.recv_multipart()[0])
            found.append(ConnectionEvent(event))
        return found

    def close(self, linger: Seconds) -> None:
        """What was sent is delivered within `linger`, or lost."""
        self._dealer.disable_monitor()
        self._monitor.close(linger=0)
        self._dealer.close(linger=int(1e3 * linger))
        self._context.term()
        self._wake_sender.close()
        self._wake_receiver.close()
