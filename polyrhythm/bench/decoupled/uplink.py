"""One line for all that a host sends, whoever it is for.

The lab gives each pair of hosts a line of its own: a worker that sends to three others at the same
time would have three times the bandwidth of one in a ring, which sends to its neighbour alone. With
an uplink both have the same, as in the paper's equations.
"""

from polyrhythm.errors import LabError
from polyrhythm.lab.namespace import DEVICE
from polyrhythm.types import BytesPerSecond

_HANDLE = 0x10000  # 1:, of the only queue there is
_BURST = 70_000  # bytes: a packet of 64 KB goes through in one piece
_LONGEST = "2s"  # that packets wait; TCP keeps few of them there


def set_uplink(bandwidth: BytesPerSecond | None) -> None:
    """Of the host that this process runs on; None takes it away."""
    from pyroute2 import IPRoute, NetlinkError  # type: ignore[import-untyped]

    with IPRoute() as netlink:
        (device,) = netlink.link_lookup(ifname=DEVICE)
        has_one = any(q.get_attr("TCA_KIND") == "tbf" for q in netlink.get_qdiscs(device))
        if bandwidth is None:
            if has_one:
                netlink.tc("del", "tbf", device, _HANDLE)
            return
        limits = {"rate": round(bandwidth), "burst": _BURST, "latency": _LONGEST}
        try:
            netlink.tc("replace", "tbf", device, _HANDLE, **limits)
        except NetlinkError as error:
            raise LabError(
                f"limiting what a host sends: {error}",
                expected="a kernel with the token bucket filter",
                fix="modprobe sch_tbf, as root",
            ) from None
