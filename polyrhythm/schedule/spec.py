"""A schedule by name, before the number of micro-batches is known.

Users, the tuner and the event log write specs as `1f1b`, `gpipe`, `kfkb:2`, `bounded:7,5,3,1`. A
spec prints as that text and parses it; `build` turns it into lists of actions.
"""

import re
from dataclasses import dataclass
from typing import Self

from polyrhythm.errors import ScheduleError
from polyrhythm.schedule.builders import BUILDERS, Schedule, build
from polyrhythm.types import Action

_WRITTEN = re.compile(r"(\w+)\s*(?::([\d\s,]*))?", re.ASCII)
_EXAMPLES = "1f1b, gpipe, kfkb:2 or bounded:7,5,3,1"


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    name: str
    k: int | None = None  # of kfkb: micro-batches per group
    limits: tuple[int, ...] | None = None  # of bounded: most micro-batches in flight, per stage

    def __post_init__(self) -> None:
        # Building one micro-batch checks all fields.
        self.build(num_stages=1 if self.limits is None else len(self.limits), num_microbatches=1)

    def __str__(self) -> str:
        if self.limits is not None:
            return f"{self.name}:{','.join(map(str, self.limits))}"
        return self.name if self.k is None else f"{self.name}:{self.k}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the output of `str`; spaces and capitals do not matter."""
        written = _WRITTEN.fullmatch(text.strip().lower())
        if written is None or written[1] not in BUILDERS:
            raise _unreadable(text, _EXAMPLES, _nearest(text))
        name, inside = written.groups()
        try:
            numbers = [int(number) for number in (inside or "").split(",")] if inside else []
        except ValueError:
            raise _unreadable(text, _EXAMPLES, "put commas between the numbers") from None
        if name == "kfkb" and len(numbers) == 1:
            return cls(name, k=numbers[0])
        if name == "bounded" and numbers:
            return cls(name, limits=tuple(numbers))
        if name not in ("kfkb", "bounded") and inside is None:
            return cls(name)
        raise _unreadable(text, *_INSIDE.get(name, (f"{name} alone", f"write {name}")))

    def build(self, *, num_stages: int, num_microbatches: int) -> Schedule:
        """Return the actions of every stage."""
        return build(
            self.name,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            k=self.k,
            limits=self.limits,
        )


@dataclass(frozen=True, slots=True)
class ExplicitSchedule:
    """A schedule as lists, for one number of stages and micro-batches: for example torch's CSV."""

    actions: tuple[tuple[Action, ...], ...]

    @classmethod
    def of(cls, schedule: Schedule) -> Self:
        return cls(tuple(map(tuple, schedule)))

    def __str__(self) -> str:
        return f"written:{len(self.actions)} stages x {self._num_microbatches} micro-batches"

    @property
    def _num_microbatches(self) -> int:
        return 1 + max((a.microbatch for actions in self.actions for a in actions), default=-1)

    def build(self, *, num_stages: int, num_microbatches: int) -> Schedule:
        """Return the actions of every stage; refuse other numbers of stages or micro-batches."""
        if (num_stages, num_microbatches) != (len(self.actions), self._num_microbatches):
            raise ScheduleError(
                f"a schedule of {len(self.actions)} stages and {self._num_microbatches} "
                f"micro-batches for {num_stages} and {num_microbatches}",
                expected="as many of both as it was written for",
                fix=f"use n_microbatches={self._num_microbatches}, or a schedule by name",
            )
        return [list(actions) for actions in self.actions]


_INSIDE = {
    "kfkb": ("kfkb with one number", "write kfkb:2 to run two forwards, then two backwards"),
    "bounded": ("bounded with one limit per stage", "write bounded:7,5,3,1 for four stages"),
}


def _unreadable(text: str, expected: str, fix: str) -> ScheduleError:
    return ScheduleError(f"schedule {text!r}", expected=expected, fix=fix)


def _nearest(text: str) -> str:
    """Return a fix for spellings such as 2f2b, which means kfkb:2 (and 1f1b for k=1)."""
    if (spoken := re.fullmatch(r"(\d+)f(\d+)b", text.strip().lower())) and spoken[1] == spoken[2]:
        return f"write kfkb:{spoken[1]}"
    return "write 1f1b"
