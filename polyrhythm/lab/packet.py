"""Read a packet's destination host and its length on a real wire from its headers."""

from polyrhythm.lab.namespace import VNET_HEADER

MAX_BYTES = VNET_HEADER + 65535

_IP = VNET_HEADER
_VERSION = _IP
_LAST_BYTE_OF_DESTINATION = _IP + 19
_LEAST = _IP + 20


def destination(packet: bytes, num_hosts: int) -> int | None:
    """Return the number of the target host; None for an address outside the lab."""
    if len(packet) < _LEAST or packet[_VERSION] >> 4 != 4:
        return None
    host = packet[_LAST_BYTE_OF_DESTINATION] - 1
    return host if 0 <= host < num_hosts else None


def wire_bytes(packet: bytes) -> int:
    """Return the length as if split to the MTU: a TCP burst counts the headers of each segment."""
    length = len(packet) - _IP
    if packet[1] == 0:  # gso_type of the virtio header: one ordinary packet
        return length
    ip_header = (packet[_IP] & 15) * 4
    tcp_header = (packet[_IP + ip_header + 12] >> 4) * 4
    headers = ip_header + tcp_header
    segment = packet[4] | packet[5] << 8
    extra_segments = max(0, length - headers - 1) // segment
    return length + extra_segments * headers
