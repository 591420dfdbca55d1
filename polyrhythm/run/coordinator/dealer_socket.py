"""A worker's socket to the coordinator: one encrypted connection, and a socket pair to wake it.

When TCP breaks, libzmq reconnects by itself under the same routing id and sends the queued
messages; `connection_events` reports the state of the connection.
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
    """A change of the connection, from the socket's monitor."""

    CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
    KEY_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
    HANDSHAKE_CLOSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL  # before the peer was authenticated
    PROTOCOL_ERROR = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    CONNECT_RETRIED = zmq.EVENT_CONNECT_RETRIED
    CLOSED = zmq.EVENT_DISCONNECTED


def check_address(address: str, *, label: str) -> None:
    """Refuse addresses that libzmq accepts and fails on later; it takes a port modulo 65536."""
    transport, _, endpoint = address.partition("://")
    host, _, port = endpoint.rpartition(":")
    if transport != "tcp" or not host or not port.isdecimal() or int(port) > 65535:
        raise LaunchError(
            f"{label} {address!r}",
            expected="tcp://, a host and a port up to 65535, as tcp://10.0.0.1:29600",
            fix="use this form; put an IPv6 address in brackets",
        )


class DealerSocket:
    """A DEALER socket for one thread at a time; any thread may call `wake`."""

    def __init__(self, address: str, keys: JobKeys) -> None:
        check_address(address, label="coordinator")
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.ROUTING_ID, b"polyrhythm" + secrets.token_bytes(16)),  # kept over reconnects
            (zmq.CURVE_SERVERKEY, keys.server_public.encode()),
            (zmq.CURVE_PUBLICKEY, keys.client_public.encode()),
            (zmq.CURVE_SECRETKEY, keys.client_secret.encode()),
            (zmq.RECONNECT_IVL_MAX, 1000),
            (zmq.IPV6, int("[" in address)),
            (zmq.SNDHWM, 0),  # a send never blocks; a worker waits for answers, so few are queued
        ):
            self._dealer.setsockopt(option, value)
        self._monitor = self._dealer.get_monitor_socket(
            sum(event.value for event in ConnectionEvent)
        )
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._wake_receiver.setblocking(False)
        self._poller = zmq.Poller()
        for pollable in (self._dealer, self._monitor, self._wake_receiver):
            self._poller.register(pollable, zmq.POLLIN)
        try:
            self._dealer.connect(address)
        except zmq.ZMQError as error:
            self.close(0.0)
            raise LaunchError(
                f"coordinator {address!r}: {error.strerror}",
                expected="the address that `polyrhythm coordinator` prints: tcp://10.0.0.1:29600",
                fix="pass host and port of the coordinator",
            ) from None

    def wake(self) -> None:
        """End the current `wait`, or the next one."""
        with contextlib.suppress(OSError):  # full of wake-ups already, or closed
            self._wake_sender.send(b"\0")

    def wait(self, timeout: Seconds) -> None:
        """Wait for a message, a connection event or `wake`, up to `timeout`."""
        self._poller.poll(max(0, math.ceil(1e3 * timeout)))
        with contextlib.suppress(BlockingIOError):
            self._wake_receiver.recv(4096)

    def receive(self) -> bytes | None:
        """Return the next message, or None."""
        try:
            return self._dealer.recv(_NOW)
        except zmq.Again:
            return None

    def send(self, data: bytes) -> None:
        self._dealer.send(data, _NOW)

    def connection_events(self) -> list[ConnectionEvent]:
        events = []
        while self._monitor.poll(0):
            event, _ = struct.unpack("=Hi", self._monitor.recv_multipart()[0])
            events.append(ConnectionEvent(event))
        return events

    def close(self, linger: Seconds) -> None:
        """Close; messages not delivered within `linger` are lost."""
        self._dealer.disable_monitor()
        self._monitor.close(linger=0)
        self._dealer.close(linger=int(1e3 * linger))
        self._context.term()
        self._wake_sender.close()
        self._wake_receiver.close()
