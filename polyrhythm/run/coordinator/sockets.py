"""The two ends of a connection: the coordinator's socket and a worker's, encrypted with CURVE.

The coordinator's socket is open to clients with the job's keys only. A client chooses a random
routing id for its connection, and keeps it when libzmq reconnects after TCP breaks and sends the
queued messages. A send to a routing id that is not connected fails at once (ROUTER_MANDATORY),
which proves that the client is gone; the coordinator's monitor only reports the file descriptor of
a connection that may have closed, the worker's (`connection_events`) the state of its connection.
"""

import contextlib
import math
import resource
import secrets
import socket
import struct
from collections import Counter
from enum import Enum

import zmq
from zmq.utils import z85

from polyrhythm.errors import LaunchError
from polyrhythm.run.coordinator.keys import ClientKeys, ServerKeys
from polyrhythm.run.coordinator.sessions import MAX_HELLO_BYTES
from polyrhythm.types import Seconds

_DOMAIN = b"polyrhythm"
_OVERHEAD = 1024  # bytes, more than CURVE and ZMTP need
_BACKLOG = 4096  # workers of a large job connect all at once
_OTHER_FILES = 256  # that a process has open in addition to its connections
_LINGER_MS = 500  # for the last messages on close

_BROKEN = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS = zmq.EVENT_DISCONNECTED | _BROKEN
# Plain numbers: an enum costs more than the call it is passed to.
_NOW, _MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)

Received = tuple[bytes, zmq.Frame]  # routing id, message


class RouterSocket:
    """A ROUTER socket for one thread at a time. `counters`: refused messages and peers by kind."""

    def __init__(self, bind: str, keys: ServerKeys, *, num_peers: int) -> None:
        check_address(bind, label="bind")
        _raise_file_limit(num_peers)
        self.counters: Counter[str] = Counter()
        self.closed_fds: list[int] = []  # of closed connections; the server clears it
        self._client_keys = {z85.decode(key) for key in keys.clients}
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")  # libzmq's address for authentication
        self._router = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.CURVE_SERVER, 1),
            (zmq.CURVE_SECRETKEY, keys.pair.secret.encode()),
            (zmq.ZAP_DOMAIN, _DOMAIN),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),  # a reconnect replaces the old connection of its routing id
            (zmq.MAXMSGSIZE, MAX_HELLO_BYTES + _OVERHEAD),
            (zmq.BACKLOG, _BACKLOG),
            (zmq.IPV6, int("[" in bind)),
            (zmq.LINGER, _LINGER_MS),
        ):
            self._router.setsockopt(option, value)
        # Without pyzmq's wrapper, which checks options of draft sockets: half the time of a send.
        self._send = super(zmq.Socket, self._router).send
        self._monitor = self._router.get_monitor_socket(_EVENTS)
        self._poller = zmq.Poller()
        for pollable in (self._router, self._zap, self._monitor):
            self._poller.register(pollable, zmq.POLLIN)
        try:
            self._router.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            raise LaunchError(
                f"bind={bind!r}: {error.strerror}",
                expected="an address of this machine and a free port, as tcp://0.0.0.0:29600",
                fix="choose another port (0 for any), or one of this machine's addresses",
            ) from None
        endpoint = self._router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes), "libzmq returns addresses as bytes"
        self.address = endpoint.rstrip(b"\0").decode()

    def wait(self, timeout: Seconds) -> None:
        """Wait for messages up to `timeout`; authenticate clients and read the monitor."""
        for ready, _ in self._poller.poll(max(0, math.ceil(1e3 * timeout))):
            if ready is self._zap:
                self._authenticate()
            elif ready is self._monitor:
                self._read_monitor()

    def receive(self, max_messages: int) -> list[Received]:
        """Return up to `max_messages` received messages; multi-frame messages are dropped."""
        # frame.more is cheap; asking the socket for RCVMORE costs more than everything else here.
        receive = self._router.recv
        received = []
        try:
            for _ in range(max_messages):
                routing_id = receive(_NOW)
                frame = receive(_NOW, False)
                if frame.more:
                    self.counters["frames"] += 1
                    while receive(_NOW, False).more:
                        pass
                else:
                    received.append((routing_id, frame))
        except zmq.Again:
            pass
        return received

    def send(self, routing_id: bytes, data: bytes) -> bool:
        """Send, or drop the message if the client's queue is full; False if it is not connected."""
        try:
            self._send(routing_id, _MORE)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.counters["unreachable" if error.errno == zmq.EHOSTUNREACH else "full"] += 1
            return error.errno == zmq.EAGAIN
        self._send(data, _NOW)
        return True

    def close(self) -> None:
        """Close; sent messages are delivered to clients that receive them at once."""
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._zap.close(linger=0)
        self._router.close()
        self._context.term()

    def _authenticate(self) -> None:
        """Reply to libzmq (ZAP, RFC 27) whether a client's key is accepted."""
        version, request, domain, *_, mechanism, key = [*self._zap.recv_multipart(), b""][:7]
        is_valid = version == b"1.0" and domain == _DOMAIN and mechanism == b"CURVE"
        is_valid = is_valid and key in self._client_keys
        if not is_valid:
            self.counters["unauthenticated"] += 1
        status, text = (b"200", b"OK") if is_valid else (b"400", b"not a key of this job")
        self._zap.send_multipart([b"1.0", request, status, text, b"", b""])

    def _read_monitor(self) -> None:
        while self._monitor.poll(0):
            event, value = struct.unpack("=Hi", self._monitor.recv_multipart()[0])
            if event == zmq.EVENT_DISCONNECTED:
                self.closed_fds.append(value)
            elif event & _BROKEN:  # without CURVE, or without the server's key
                self.counters["unauthenticated"] += 1


def _raise_file_limit(num_peers: int) -> None:
    """Raise this process's limit of open files for `num_peers` connections."""
    needed = num_peers + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise LaunchError(
            f"{num_peers} workers, and at most {hard} open files per process",
            expected=f"at least {needed}: each worker has a connection",
            fix=f"ulimit -n {needed}, or the equivalent of your system",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


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

    def __init__(self, address: str, keys: ClientKeys) -> None:
        check_address(address, label="coordinator")
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.ROUTING_ID, b"polyrhythm" + secrets.token_bytes(16)),  # kept over reconnects
            (zmq.CURVE_SERVERKEY, keys.server.encode()),
            (zmq.CURVE_PUBLICKEY, keys.pair.public.encode()),
            (zmq.CURVE_SECRETKEY, keys.pair.secret.encode()),
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
