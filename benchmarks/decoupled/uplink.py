"""One line for all that a host sends to certain others, whichever of them it is for.

The lab gives each pair of hosts a line of its own: a worker that sends to three others at the same
time would have three times the bandwidth of one in a ring, which sends to its neighbour alone. With
an uplink both have the same, as in the paper's equations. What stays inside of a node does not use
it.
"""

import ipaddress
from collections.abc import Sequence

from polyrhythm.errors import LabError
from polyrhythm.lab.namespace import DEVICE
from polyrhythm.types import BytesPerSecond

_QUEUE, _LINE = 0x10000, 0x10001  # 1: and 1:1; what no filter sends to the line is not limited
_BURST = 70_000  # bytes: a packet of 64 KB goes through in one piece
_IPV4 = 0x0800
_TARGET = 16  # where the address is in a header


def set_uplink(bandwidth: BytesPerSecond | None, targets: Sequence[str]) -> None:
    """From the host that this process runs on, to these addresses; None takes it away."""
    from pyroute2 import IPRoute, NetlinkError  # type: ignore[import-untyped]

    with IPRoute() as netlink:
        (device,) = netlink.link_lookup(ifname=DEVICE)
        if any(q.get_attr("TCA_KIND") == "htb" for q in netlink.get_qdiscs(device)):
            netlink.tc("del", "htb", device, _QUEUE)
        if bandwidth is None:
            return
        limits = {"rate": round(bandwidth), "burst": _BURST, "cburst": _BURST}
        try:
            netlink.tc("add", "htb", device, _QUEUE, default=0)
            netlink.tc("add-class", "htb", device, _LINE, parent=_QUEUE, **limits)
            for target in targets:
                key = f"{int(ipaddress.IPv4Address(target)):#010x}/0xffffffff+{_TARGET}"
                to_line = {"protocol": _IPV4, "prio": 1, "target": _LINE, "keys": [key]}
                netlink.tc("add-filter", "u32", device, parent=_QUEUE, **to_line)
        except NetlinkError as error:
            raise LabError(
                f"limiting what a host sends: {error}",
                expected="a kernel with hierarchical token buckets and the u32 classifier",
                fix="modprobe sch_htb cls_u32, as root",
            ) from None
