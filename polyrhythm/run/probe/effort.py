"""How thoroughly a probe measures, and its timeouts. No torch."""

from dataclasses import dataclass

from polyrhythm.errors import LaunchError
from polyrhythm.types import Seconds

_MAX_SECONDS: Seconds = 86_400.0  # a day; timers overflow at some point beyond
# A stream that is too short is doubled: it lasts 2 times as long as intended, 2.5 with its start.
_OVERSHOOT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeEffort:
    seconds: Seconds = 0.2  # minimum duration of the transfer that measures a bandwidth
    repeat: int = 5  # measurements per value
    pair_timeout: Seconds = 20.0  # for one pair: after it, only required measurements start
    timeout: Seconds = 60.0  # for one message, or for all messages of one stream

    def __post_init__(self) -> None:
        for name in ("seconds", "pair_timeout", "timeout"):
            value = getattr(self, name)
            flag = "--" + name.replace("_", "-")
            if not 0 < value <= _MAX_SECONDS:
                raise LaunchError(
                    f"{flag} {value:g}",
                    expected=f"seconds, above 0 and up to {_MAX_SECONDS:g}",
                    fix=f"omit {flag} for {type(self).__dataclass_fields__[name].default:g}",
                )
        if not 1 <= self.repeat <= 1000:
            raise LaunchError(
                f"--repeat {self.repeat}", expected="1 to 1000", fix="omit --repeat for 5"
            )

        if self.timeout < _OVERSHOOT * self.seconds:
            raise LaunchError(
                f"--timeout {self.timeout:g} with --seconds {self.seconds:g}: a transfer would "
                "time out before it ends",
                expected=f"--timeout of at least {_OVERSHOOT} times --seconds",
                fix=f"--timeout {_OVERSHOOT * self.seconds:g}, "
                f"or --seconds {self.timeout / _OVERSHOOT:g}",
            )

    @property
    def longest_stream(self) -> Seconds:
        """Longest intended duration of a transfer, which may take longer but within `timeout`."""
        return self.timeout / _OVERSHOOT

    @property
    def round_timeout(self) -> Seconds:
        """For a process to finish its pair: longer than all waits of that process together.

        These are echoes within `pair_timeout` and two more; streams within `pair_timeout`, one
        started just before its end and three required ones; and the message that ends them. A
        process with a silent peer has therefore timed out and reported it before.
        """
        return 8 * self.timeout + 2 * self.pair_timeout

    @property
    def speed_timeout(self) -> Seconds:
        """For a process to measure its device, at most a second per measurement."""
        return self.round_timeout + 2 * self.repeat

    @property
    def stall_timeout(self) -> Seconds:
        """Without a new round: longer than any process waits before it reports a lost peer."""
        return 3 * self.speed_timeout
