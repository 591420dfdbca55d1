"""The vocabulary: the few types that all other files share.

Quantities are plain numbers in base units (seconds, bytes, bytes per second). Their types carry the
unit, so that a signature shows it and the file reader knows how to read "34ms".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, NamedTuple, Self

from polyrhythm.errors import ScheduleError


@dataclass(frozen=True, slots=True, eq=False)  # eq by identity: a unit is hashed inside Annotated
class Unit:
    """How a quantity is written; one unit `suffix` is `scale[suffix]` base units."""

    quantity: str
    scale: Mapping[str, float]
    example: str


AUTO = "auto"  # an option that is chosen from measurements
Seconds = Annotated[
    float, Unit("time", {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}, "34ms")
]
Bytes = Annotated[
    int,
    Unit(
        "size",
        {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30},
        "24GiB",
    ),
]
BytesPerSecond = Annotated[
    float,
    Unit(
        "rate",
        {
            "kbit/s": 125.0,
            "Mbit/s": 125e3,
            "Gbit/s": 125e6,
            "kB/s": 1e3,
            "MB/s": 1e6,
            "GB/s": 1e9,
        },
        "100Mbit/s",
    ),
]


class Worker(NamedTuple):
    """One process: it runs one stage of one pipeline (one replica of all stages)."""

    stage: int
    pipeline: int

    def __str__(self) -> str:
        return f"s{self.stage}p{self.pipeline}"


class Group(NamedTuple):
    """Workers of one stage that average together; a single member skips the average."""

    members: tuple[Worker, ...]  # sorted, so that all members name the group alike
    why: str


class AverageTimings(NamedTuple):
    """Time spent on averages since the last query."""

    waited: Seconds  # by training
    exchange: Seconds  # the last one, from when all members were ready, waited for or not
    num_members: int  # of the last exchange; 1 if there was none


class Op(StrEnum):
    F = "F"  # forward of one micro-batch through one stage
    B = "B"  # its backward


class Action(NamedTuple):
    """The forward or backward of one micro-batch; a schedule is a list of actions."""

    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Self:
        op, number = text[:1], text[1:]
        if op not in set(Op) or not (number.isascii() and number.isdigit()):
            raise ScheduleError(
                f"action {text!r}",
                expected="F or B and a micro-batch number",
                fix="write it like F0 or B12",
            )
        return cls(Op(op), int(number))
