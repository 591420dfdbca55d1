"""The coordinator's door: one encrypted socket that lets in whoever has the job's keys.

A connection has a name that its client made up (a routing id of many random bytes), and keeps it
when TCP breaks and libzmq connects again. What comes in is bytes from a name. A message to a name
that is not connected is refused at once (ROUTER_MANDATORY), which is how we know for sure; that a
connection may have closed, the socket's monitor tells by its file descriptor.
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
_OVERHEAD = 1024  # of CURVE and ZMTP, and more than they need
_BACKLOG = 4096  # workers of a large job connect all at once
_OTHER_FILES = 256  # that a process has open besides its connections
_LINGER_MS = 500  # for the last words to those who still listen

_BROKEN = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS = zmq.EVENT_DISCONNECTED | _BROKEN
# Plain numbers: an enum costs more than the call it is passed to.
_NOW, _MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)

Received = tuple[bytes, zmq.Frame]  # the name of a connection, and what it said


class RouterSocket:
    """Used by one thread at a time. `counters`: what was turned away here, by kind."""

    def __init__(self, bind: str, keys: JobKeys, *, num_peers: int) -> None:
        check_address(bind, label="bind")
        _raise_file_limit(num_peers)
        self.counters: Counter[str] = Counter()
        self.closed_fds: list[int] = []  # descriptors of connections, for whoever looks after them
        self._client_key = z85.decode(keys.client_public)
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")  # where libzmq asks, in this context
        self._router = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.CURVE_SERVER, 1),
            (zmq.CURVE_SECRETKEY, keys.server_secret.encode()),
            (zmq.ZAP_DOMAIN, _DOMAIN),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),  # the same name connects again: the old connection is over
            (zmq.MAXMSGSIZE, MAX_HELLO_BYTES + _OVERHEAD),
            (zmq.BACKLOG, _BACKLOG),
            (zmq.IPV6, int("[" in bind)),
            (zmq.LINGER, _LINGER_MS),
        ):
            self._router.setsockopt(option, value)
        # Without the wrapper, which looks at options of draft sockets: half the time of a send.
        self._send = super(zmq.Socket, self._router).send
        self._monitor = self._router.get_monitor_socket(_EVENTS)
        self._poller = zmq.Poller()
        for each in (self._router, self._zap, self._monitor):
            self._poller.register(each, zmq.POLLIN)
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
        assert isinstance(endpoint, bytes), "libzmq gives addresses as bytes"
        self.address = endpoint.rstrip(b"\0").decode()

    def wait(self, timeout: Seconds) -> None:
        """Until something happens, or `timeout` has passed; connections are seen to here."""
        for socket, _ in self._poller.poll(max(0, math.ceil(1e3 * timeout))):
            if socket is self._zap:
                self._authenticate()
            elif socket is self._monitor:
                self._read_monitor()

    def receive(self, max_messages: int) -> list[Received]:
        """What has come in, up to `max_messages` messages; those of more than one part are dropped."""
        # A frame knows whether another one follows; asking the socket costs more than all else.
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
        """Whether it is on its way; False if nobody has that name, or does not take it in."""
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
        """What was sent is delivered to those who take it in at once."""
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._zap.close(linger=0)
        self._router.close()
        self._context.term()

    def _authenticate(self) -> None:
        """Answer libzmq (ZAP, RFC 27): whether this key may come in."""
        version, request, domain, *_, mechanism, key = [*self._zap.recv_multipart(), b""][:7]
        good = version == b"1.0" and domain == _DOMAIN and mechanism == b"CURVE"
        good = good and key == self._client_key
        if not good:
            self.counters["unauthenticated"] += 1
        status, text = (b"200", b"OK") if good else (b"400", b"not a key of this job")
        self._zap.send_multipart([b"1.0", request, status, text, b"", b""])

    def _read_monitor(self) -> None:
        while self._monitor.poll(0):
            event, value = struct.unpack("=Hi", self._monitor.recv_multipart()[0])
            if event == zmq.EVENT_DISCONNECTED:
                self.closed_fds.append(value)
            elif event & _BROKEN:  # without CURVE, or without the server's key
                self.counters["unauthenticated"] += 1


def _raise_file_limit(num_peers: int) -> None:
    """Let this process have as many open files as it will need."""
    needed = num_peers + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise LaunchError(
            f"{num_peers} workers, and at most {hard} open files for a process",
            expected=f"at least {needed}: each worker has a connection",
            fix=f"ulimit -n {needed}, or what your system has instead",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
