"""How thoroughly a probe measures, and how long it waits. No torch."""

from dataclasses import dataclass

from polyrhythm.errors import LaunchError
from polyrhythm.types import Seconds

_MAX_SECONDS: Seconds = 86_400.0  # a day; timers overflow at some point beyond
# A stream that was too short is doubled: 2 times as long as meant, with its first piece 2.5 times.
_OVERSHOOT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeEffort:
    seconds: Seconds = 0.2  # that the transfer from which a bandwidth is taken lasts, at the least
    repeat: int = 5  # measurements of each thing
    pair_timeout: Seconds = 20.0  # for one pair: beyond it, no more is begun than must be
    timeout: Seconds = 60.0  # for one message, or for those of one stream

    def __post_init__(self) -> None:
        for name in ("seconds", "pair_timeout", "timeout"):
            value = getattr(self, name)
            flag = "--" + name.replace("_", "-")
            if not 0 < value <= _MAX_SECONDS:
                raise LaunchError(
                    f"{flag} {value:g}",
                    expected="seconds, above 0 and within a day",
                    fix=f"leave {flag} out for {type(self).__dataclass_fields__[name].default:g}",
                )
        if not 1 <= self.repeat <= 1000:
            raise LaunchError(
                f"--repeat {self.repeat}", expected="1 to 1000", fix="leave --repeat out for 5"
            )

        if self.timeout < _OVERSHOOT * self.seconds:
            raise LaunchError(
                f"--timeout {self.timeout:g} with --seconds {self.seconds:g}: a transfer would "
                "be given up as lost before it ends",
                expected=f"a timeout of {_OVERSHOOT} times --seconds at the least",
                fix=f"--timeout {_OVERSHOOT * self.seconds:g}, "
                f"or --seconds {self.timeout / _OVERSHOOT:g}",
            )

    @property
    def longest_stream(self) -> Seconds:
        """What a transfer may be meant to last: it may last longer, but not over the deadline."""
        return self.timeout / _OVERSHOOT

    @property
    def round_timeout(self) -> Seconds:
        """For a process to be done with its pair: longer than all that it may wait for there.

        Those are echoes while it has patience and two more, streams while it has patience, one
        begun just before and three that must be, and the word that it was the last. So who is
        waited for here has given up a silent partner before, and says so.
        """
        return 8 * self.timeout + 2 * self.pair_timeout

    @property
    def speed_timeout(self) -> Seconds:
        """For a process to have measured its device, a second or less at a time."""
        return self.round_timeout + 2 * self.repeat

    @property
    def stall_timeout(self) -> Seconds:
        """Without a new round: longer than all may wait for one another, and nobody complain."""
        return 3 * self.speed_timeout
