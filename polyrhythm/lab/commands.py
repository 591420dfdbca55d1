"""What the switch can be told and asked, as JSON lines. Hosts are numbers; names stay outside."""

from typing import Annotated

import msgspec

from polyrhythm.types import Seconds

HostNumber = Annotated[int, msgspec.Meta(ge=0)]
ProcessId = Annotated[int, msgspec.Meta(gt=0, lt=2**22)]  # no Linux gives a higher one
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class SwitchCommand(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`at` is a time of time.monotonic(), which all processes of a machine share; None is now."""

    at: Seconds | None = None


class ChangeLinks(SwitchCommand, frozen=True, kw_only=True):
    """These directed pairs of hosts are different from now on; what is None stays."""

    pairs: tuple[tuple[HostNumber, HostNumber], ...]
    latency: NotNegative | None = None  # seconds
    bandwidth: Positive | None = None  # bytes per second
    lost: bool | None = None


class KillHost(SwitchCommand, frozen=True, kw_only=True):
    """Kill what runs on the host. `silent`: cut it off first, as when the power fails."""

    host: HostNumber
    silent: bool = True


class ReviveHost(SwitchCommand, frozen=True, kw_only=True):
    """The host is joined to the network again; starting something on it is the owner's part."""

    host: HostNumber


class PauseHost(SwitchCommand, frozen=True, kw_only=True):
    """What runs on the host stands still, and packets from and to it wait.

    A host that was paused twice goes on when it was let go on twice.
    """

    host: HostNumber
    paused: bool  # False: it goes on


class OwnProcess(SwitchCommand, frozen=True, kw_only=True):
    """This process is about to move to the host."""

    pid: ProcessId
    host: HostNumber


class EndLab(SwitchCommand, frozen=True, kw_only=True):
    """Kill what runs on the hosts and stop."""


class GetHosts(SwitchCommand, frozen=True, kw_only=True):
    """Who is there, and how to get in."""


class ResetReport(SwitchCommand, frozen=True, kw_only=True):
    """Count from here."""


class GetReport(SwitchCommand, frozen=True, kw_only=True):
    """What was carried since the last reset, and how punctually."""


AnySwitchCommand = (
    ChangeLinks
    | KillHost
    | ReviveHost
    | PauseHost
    | OwnProcess
    | EndLab
    | GetHosts
    | ResetReport
    | GetReport
)


class HostEntry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    address: str
    namespace: str  # path in /proc of its network namespace
    processes: int  # that run on it
    killed: bool
    pauses: int  # above 0: it stands still


class PairCounters(msgspec.Struct, frozen=True, kw_only=True):
    source: int
    target: int
    packets: int
    wire_bytes: int  # headers counted
    drops: int
    backlog: int  # bytes that have not left
    peak_backlog: int


class SwitchTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Is the emulation to be believed? `late` is how long after its time a packet was delivered."""

    late_p50: Seconds
    late_p99: Seconds
    late_max: Seconds
    busy: float  # share of one core

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


class SwitchReport(msgspec.Struct, frozen=True, kw_only=True):
    elapsed: Seconds
    strays: int  # packets for nobody in the lab
    pairs: tuple[PairCounters, ...]  # those that carried or dropped something
    switch_timing: SwitchTiming


class CommandReply(msgspec.Struct, frozen=True, kw_only=True):
    """To every order one answer; `refused` says why it was not obeyed."""

    refused: str | None = None
    report: SwitchReport | None = None
    hosts: tuple[HostEntry, ...] = ()


decode_command = msgspec.json.Decoder(AnySwitchCommand).decode
decode_reply = msgspec.json.Decoder(CommandReply).decode
encode = msgspec.json.Encoder().encode
