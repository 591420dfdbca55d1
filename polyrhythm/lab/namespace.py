"""A host of the lab: an unnamed network namespace with one TUN device that the switch reads.

No cleanup is needed: the kernel removes a namespace and its devices with its last process and open
file. A process that is not root first enters its own user namespace (`enter_user_namespace`).
"""

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from polyrhythm.errors import LabError

DEVICE = "lab0"
PREFIX = "10.77.0"  # visible only inside the namespaces
MAX_HOSTS = 253
TUN = "/dev/net/tun"
VNET_HEADER = 10  # bytes of struct virtio_net_hdr in front of every packet

NEWUSER, NEWNET = 0x10000000, 0x40000000
TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
IFF_TUN, IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_KERNEL, _LINK_SCOPE = 2, 253  # a route's origin (RTPROT_KERNEL) and scope (RT_SCOPE_LINK)

# Per namespace: buffers for fast, long links; fewer and larger bursts at low rates, since the
# switch pays per packet; no cached metrics of earlier connections and no slow start after each
# pause of a training step, so that runs are repeatable.
_SYSCTLS = {
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv4/tcp_no_metrics_save": "1",
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_rmem": "4096 131072 67108864",
    "net/ipv4/tcp_wmem": "4096 65536 67108864",
    "net/ipv4/tcp_min_tso_segs": "8",
}

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Host:
    """A host's address and two open files, which the caller of `make_host` closes."""

    address: str
    namespace: int  # file descriptor of the network namespace
    tun: int  # file descriptor of the TUN device


def make_host(number: int) -> Host:
    """Make a host with its device up and its address set; the caller stays in its own network."""
    address = f"{PREFIX}.{number + 1}"
    with ExitStack() as undo, _restore_namespace():
        if _libc.unshare(NEWNET):
            raise _refused("making a network namespace")
        namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        undo.callback(os.close, namespace)
        _set_sysctls()
        tun = _open_tun()
        undo.callback(os.close, tun)
        _configure(address)
        undo.pop_all()  # success: the host keeps both files
    return Host(address, namespace, tun)


def _set_sysctls() -> None:
    for name, value in _SYSCTLS.items():
        path = Path("/proc/sys", name)
        try:
            if path.exists():  # older kernels lack some
                path.write_text(value)
        except OSError as error:
            raise LabError(
                f"{path}: {error.strerror}",
                expected="writable settings in a new network namespace",
                fix="in a container, mount /proc/sys writable: docker run --privileged",
            ) from None


def enter(namespace: int) -> None:
    if _libc.setns(namespace, NEWNET):
        raise _refused("entering a network namespace")


def enter_by_path(path: str) -> None:
    """Enter the network namespace of another process, and its user namespace if it differs."""
    user_namespace = Path(path).parents[1] / "ns" / "user"
    if not user_namespace.samefile("/proc/self/ns/user"):
        user = os.open(user_namespace, os.O_RDONLY)
        if _libc.setns(user, NEWUSER):
            raise _refused("entering the lab's user namespace")
        os.close(user)
    network = os.open(path, os.O_RDONLY)
    enter(network)
    os.close(network)


def enter_user_namespace() -> None:
    """Unless root: move this process permanently into a new user and network namespace, as root.

    Outside, the process keeps its user and files; it cannot reach the machine's network any more.
    """
    if os.geteuid() == 0:
        return
    user, group = os.geteuid(), os.getegid()
    if _libc.unshare(NEWUSER | NEWNET):
        if ctypes.get_errno() == errno.EINVAL:
            raise LabError(
                "a process with threads cannot make a user namespace",
                expected="a lab that starts before any thread, for example before importing torch",
                fix="set OMP_NUM_THREADS=1, or run as root",
            )
        raise _refused("making a user namespace")
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except OSError as error:
        raise _refused("becoming root in a user namespace", error.errno) from None


@contextmanager
def _restore_namespace() -> Iterator[None]:
    original = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        yield
    finally:
        enter(original)
        os.close(original)


def _open_tun() -> int:
    """Open a TUN device with offload: TCP sends bursts of up to 64 KB, so that Python keeps up."""
    try:
        tun = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(f"opening {TUN}", error.errno) from None
    try:
        flags = IFF_TUN | IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
        fcntl.ioctl(tun, _TUNSETVNETHDRSZ, struct.pack("i", VNET_HEADER))
        fcntl.ioctl(tun, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    except OSError as error:
        os.close(tun)
        raise _refused("making a TUN device", error.errno) from None
    return tun


def _configure(address: str) -> None:
    from pyroute2 import IPRoute, NetlinkError  # type: ignore[import-untyped]

    try:
        with IPRoute() as netlink:
            (loopback,) = netlink.link_lookup(ifname="lo")
            (device,) = netlink.link_lookup(ifname=DEVICE)
            netlink.link("set", index=loopback, state="up")
            # A long queue in front of the switch: only the channel may drop packets.
            netlink.link("set", index=device, mtu=1500, txqlen=10000, state="up")
            netlink.addr("add", index=device, address=address, prefixlen=24)
            # Set the algorithm on the kernel's route: the sysctl of a namespace accepts only
            # algorithms that the machine allows, and machines differ.
            netlink.route(
                "replace",
                dst=f"{PREFIX}.0/24",
                oif=device,
                prefsrc=address,
                proto=_KERNEL,
                scope=_LINK_SCOPE,
                metrics={"cc_algo": "cubic"},
            )
    except NetlinkError as error:
        raise _refused(f"setting up {DEVICE}", error.code) from None


def _refused(action: str, number: int | None = None) -> LabError:
    number = ctypes.get_errno() if number is None else number
    return LabError(
        f"{action}: {os.strerror(number)}",
        expected="root, or user namespaces and a /dev/net/tun that every user may open",
        fix="run `polyrhythm doctor`: it lists what is missing and how to install it",
    )
