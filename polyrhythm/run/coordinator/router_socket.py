"""The coordinator's socket: encrypted, and open to clients with the job's keys only.

A client chooses a random routing id for its connection, and keeps it when libzmq reconnects after
TCP breaks. A message is received as bytes with a routing id. A send to a routing id that is not
connected fails at once (ROUTER_MANDATORY), which proves that the client is gone; the socket's
monitor only reports the file descriptor of a connection that may have closed.
"""

import math
import resource
import struct
from collections import Counter

import zmq
from zmq.utils import z85

from polyrhythm.errors import LaunchError
from polyrhythm.run.coordinator.dealer_socket import check_address
from polyrhythm.run.coordinator.keys import JobKeys
from polyrhythm.run.coordinator.wire import MAX_HELLO_BYTES
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

    def __init__(self, bind: str, keys: JobKeys, *, num_peers: int) -> None:
        check_address(bind, label="bind")
        _raise_file_limit(num_peers)
        self.counters: Counter[str] = Counter()
        self.closed_fds: list[int] = []  # of closed connections; the server clears it
        self._client_key = z85.decode(keys.client_public)
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")  # libzmq's address for authentication
        self._router = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.CURVE_SERVER, 1),
            (zmq.CURVE_SECRETKEY, keys.server_secret.encode()),
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
        for socket, _ in self._poller.poll(max(0, math.ceil(1e3 * timeout))):
            if socket is self._zap:
                self._authenticate()
            elif socket is self._monitor:
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
        is_valid = is_valid and key == self._client_key
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
