"""Commands to the switch and its replies, as JSON lines. The switch knows hosts by number."""

from typing import Annotated

import msgspec

from polyrhythm.types import Seconds

HostNumber = Annotated[int, msgspec.Meta(ge=0)]
ProcessId = Annotated[int, msgspec.Meta(gt=0, lt=2**22)]  # Linux's upper limit
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class SwitchCommand(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A command to run at time `at` of time.monotonic() (shared machine-wide); None is now."""

    at: Seconds | None = None


class ChangeLinks(SwitchCommand, frozen=True, kw_only=True):
    """Change the links of these ordered pairs of hosts; fields that are None change nothing."""

    pairs: tuple[tuple[HostNumber, HostNumber], ...]
    latency: NotNegative | None = None  # seconds
    bandwidth: Positive | None = None  # bytes per second
    lost: bool | None = None


class KillHost(SwitchCommand, frozen=True, kw_only=True):
    """Kill the host's processes. `silent`: disconnect the host first, as in a power failure."""

    host: HostNumber
    silent: bool = True


class ReviveHost(SwitchCommand, frozen=True, kw_only=True):
    """Connect the host to the network again; the lab's owner starts its processes."""

    host: HostNumber


class PauseHost(SwitchCommand, frozen=True, kw_only=True):
    """Pause the host's processes and hold packets from and to it, or undo one pause.

    Pauses are counted: a host that is paused twice resumes after two commands to resume.
    """

    host: HostNumber
    paused: bool  # False: undo one pause


class RegisterProcess(SwitchCommand, frozen=True, kw_only=True):
    """Register a process that is about to enter the host's namespace."""

    pid: ProcessId
    host: HostNumber


class EndLab(SwitchCommand, frozen=True, kw_only=True):
    """Kill all host processes and end the switch."""


class GetHosts(SwitchCommand, frozen=True, kw_only=True):
    """Ask for all hosts, with the paths of their namespaces."""


class ResetReport(SwitchCommand, frozen=True, kw_only=True):
    """Set all counters to zero."""


class GetReport(SwitchCommand, frozen=True, kw_only=True):
    """Ask for the traffic and the lateness since the last reset."""


AnySwitchCommand = (
    ChangeLinks
    | KillHost
    | ReviveHost
    | PauseHost
    | RegisterProcess
    | EndLab
    | GetHosts
    | ResetReport
    | GetReport
)


class HostEntry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    address: str
    namespace: str  # path of its network namespace in /proc
    processes: int  # number of running processes
    killed: bool
    pauses: int  # above 0: paused


class PairCounters(msgspec.Struct, frozen=True, kw_only=True):
    source: int
    target: int
    packets: int
    wire_bytes: int  # with headers
    drops: int
    backlog: int  # bytes that have not left yet
    peak_backlog: int


class SwitchTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Lateness of deliveries (delivery minus due time): shows whether to trust the emulation."""

    late_p50: Seconds
    late_p99: Seconds
    late_max: Seconds
    busy: float  # share of one core

    def __str__(self) -> str:
        return f"99% of packets at most {1e3 * self.late_p99:.2f} ms late, busy {self.busy:.0%}"

    # 2 ms distort links of milliseconds; above 0.9 of a core real-time work is throttled.
    LATE = 2e-3
    BUSY = 0.9

    @property
    def trouble(self) -> str | None:
        """Why measurements of this period are unreliable; None if they are reliable."""
        if self.late_p99 > self.LATE:
            return f"1% of the packets were more than {1e3 * self.LATE:g} ms late"
        if self.busy > self.BUSY:
            return f"the switch was busy {self.busy:.0%} of the time"
        return None


class SwitchReport(msgspec.Struct, frozen=True, kw_only=True):
    elapsed: Seconds
    strays: int  # packets to addresses outside the lab
    pairs: tuple[PairCounters, ...]  # pairs with traffic or drops
    switch_timing: SwitchTiming


class CommandReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to one command; `refused` is the reason if the command was not executed."""

    refused: str | None = None
    report: SwitchReport | None = None
    hosts: tuple[HostEntry, ...] = ()


decode_command = msgspec.json.Decoder(AnySwitchCommand).decode
decode_reply = msgspec.json.Decoder(CommandReply).decode
encode = msgspec.json.Encoder().encode
