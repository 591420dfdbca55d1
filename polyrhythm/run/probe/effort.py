"""How thoroughly a probe measures, and how long it waits. No torch."""

from dataclasses import dataclass

from polyrhythm.errors import LaunchError
from polyrhythm.types import Seconds

_LONGEST: Seconds = 86_400.0  # a day; timers overflow at some point beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    seconds: Seconds = 0.2  # that the transfer from which a bandwidth is taken lasts, at the least
    repeat: int = 5  # measurements of each thing
    patience: Seconds = 20.0  # for one pair: beyond it, no more is begun than must be
    deadline: Seconds = 60.0  # for one message, or for several that belong together

    def __post_init__(self) -> None:
        for name in ("seconds", "patience", "deadline"):
            value = getattr(self, name)
            if not 0 < value <= _LONGEST:
                raise LaunchError(
                    f"--{name} {value:g}",
                    expected="seconds, above 0 and within a day",
                    fix=f"leave --{name} out for {type(self).__dataclass_fields__[name].default:g}",
                )
        if not 1 <= self.repeat <= 1000:
            raise LaunchError(
                f"--repeat {self.repeat}", expected="1 to 1000", fix="leave --repeat out for 5"
            )

    @property
    def round_deadline(self) -> Seconds:
        """For a process to be done with its pair: longer than all that it may wait for there.

        Those are round trips, one stream begun while it had patience, and three that must be. So
        who is waited for here has given up a silent partner before, and says so.
        """
        return 6 * self.deadline + self.patience
