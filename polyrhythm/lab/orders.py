"""What the switch can be told and asked, as JSON lines. Hosts are numbers; names stay outside."""

import msgspec

from polyrhythm.types import BytesPerSecond, Seconds


class Order(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`at` is a time of time.monotonic(), which all processes of a machine share; None is now."""

    at: Seconds | None = None


class ChangeLinks(Order, frozen=True, kw_only=True):
    """These directed pairs of hosts are different from now on; what is None stays."""

    pairs: tuple[tuple[int, int], ...]
    latency: Seconds | None = None
    bandwidth: BytesPerSecond | None = None
    lost: bool | None = None


class KillHost(Order, frozen=True, kw_only=True):
    """Kill what runs on the host. `silent`: cut it off first, as when the power fails."""

    host: int
    silent: bool = True


class ReviveHost(Order, frozen=True, kw_only=True):
    """The host is joined to the network again; starting something on it is the owner's part."""

    host: int


class PauseHost(Order, frozen=True, kw_only=True):
    """What runs on the host stands still, and packets from and to it wait, without loss."""

    host: int
    paused: bool  # False: it goes on


class OwnProcess(Order, frozen=True, kw_only=True):
    """This process, and the session that it leads, runs on the host, and ends with the lab."""

    pid: int
    host: int


class GetHosts(Order, frozen=True, kw_only=True):
    """Who is there, and how to get in."""


class ResetReport(Order, frozen=True, kw_only=True):
    """Count from here."""


class GetReport(Order, frozen=True, kw_only=True):
    """What was carried since the last reset, and how punctually."""


AnyOrder = (
    ChangeLinks
    | KillHost
    | ReviveHost
    | PauseHost
    | OwnProcess
    | GetHosts
    | ResetReport
    | GetReport
)


class HostEntry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    address: str
    namespace: str  # path in /proc of its network namespace
    processes: int  # that run on it


class PairCounters(msgspec.Struct, frozen=True, kw_only=True):
    source: int
    target: int
    packets: int
    wire_bytes: int  # headers counted
    drops: int
    backlog: int  # bytes that have not left
    peak_backlog: int


class Punctuality(msgspec.Struct, frozen=True, kw_only=True):
    """Is the emulation to be believed? `late` is how long after its time a packet was delivered."""

    late_p50: Seconds
    late_p99: Seconds
    late_max: Seconds
    busy: float  # share of one core
    longest_turn: Seconds  # without looking at the devices: what hides in front of the switch

    def __str__(self) -> str:
        return f"99% of packets at most {1e3 * self.late_p99:.2f} ms late, busy {self.busy:.0%}"

    # A network of milliseconds is spoilt by them; above 0.9 of a core real-time work is throttled.
    LATE = 2e-3
    BUSY = 0.9

    @property
    def trouble(self) -> str | None:
        """Why figures measured meanwhile are not to be trusted; None if they are."""
        if self.late_p99 > self.LATE:
            return f"1% of the packets were more than {1e3 * self.LATE:g} ms late"
        if self.busy > self.BUSY:
            return f"the switch was busy {self.busy:.0%} of the time"
        return None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    elapsed: Seconds
    strays: int  # packets for nobody in the lab
    pairs: tuple[PairCounters, ...]  # those that carried or dropped something
    punctuality: Punctuality


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """To every order one answer; `refused` says why it was not obeyed."""

    refused: str | None = None
    report: Report | None = None
    hosts: tuple[HostEntry, ...] = ()


decode_order = msgspec.json.Decoder(AnyOrder).decode
decode_answer = msgspec.json.Decoder(Answer).decode
encode = msgspec.json.Encoder().encode
