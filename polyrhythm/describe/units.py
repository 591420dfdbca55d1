"""Parse and format quantities: "34ms" is 0.034 seconds, and back.

A `kind` is Seconds, Bytes or BytesPerSecond of `polyrhythm.types`: a number that carries a Unit.
"""

import math
import re
from decimal import Decimal
from typing import Annotated, get_args, get_origin

from polyrhythm.errors import DescriptionError
from polyrhythm.types import Unit

_WRITTEN = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*)", re.ASCII)

# People compare printed values, so a quantity is always printed in one family of units.
_SHOWN = {"size": ("B", "KiB", "MiB", "GiB"), "rate": ("kbit/s", "Mbit/s", "Gbit/s")}


def parse(text: str, kind: object) -> float:
    """Return the value of `text` in base units; an integer if `kind` is an integer quantity."""
    unit = unit_of(kind)
    written = _WRITTEN.fullmatch(text.strip())
    number, spelling = written.groups() if written else ("", "")
    if spelling not in unit.scale:
        # Suggest only another spelling of the same unit: the fix must not change the value.
        near = [u for u in unit.scale if spelling.lower() in (u.lower(), _ending(u))]
        lacks = "has no unit" if written and not spelling else f"is not a {unit.quantity}"
        raise DescriptionError(
            f"{text!r} {lacks}",
            expected=f"a number and one of {', '.join(unit.scale)}",
            fix=f'write "{number}{near[0]}"' if near else f'write it like "{unit.example}"',
        )
    return in_base_units(float(number), unit.scale[spelling], kind)


def in_base_units(number: float, scale: float, kind: object) -> float:
    """Return `number` units of size `scale`, via decimals: 9 ms is 0.009, but 9 * 1e-3 is not."""
    written = Decimal(number if isinstance(number, int) else repr(number))
    exact = written * Decimal(repr(scale))
    if not math.isfinite(float(exact)):
        raise DescriptionError(
            f"{written:.4g} is out of range",
            expected=f"a finite {unit_of(kind).quantity}",
            fix=f'write it like "{unit_of(kind).example}"',
        )
    return round(exact) if get_args(kind)[0] is int else float(exact)


def show(value: float, kind: object) -> str:
    """Format `value` with four digits in the unit that makes it shortest."""
    if not math.isfinite(value):
        return str(value)
    unit = unit_of(kind)
    spellings = _SHOWN.get(unit.quantity, unit.scale)
    return min((f"{value / unit.scale[spelling]:.4g}{spelling}" for spelling in spellings), key=len)


def check_amount(name: str, value: float | None, kind: object = None, *, zero: bool = True) -> None:
    """Refuse a negative or infinite amount; refuse 0 too unless `zero`. None is no amount."""
    if value is None or (math.isfinite(value) and (value > 0 or (zero and value == 0))):
        return
    raise DescriptionError(
        f"{name} is {show(value, kind) if kind else f'{value:g}'}",
        expected="a finite number, " + ("0 or more" if zero else "more than 0"),
        fix=f"correct {name}",
    )


def unit_of(kind: object) -> Unit:
    """Return the unit of a kind such as Seconds."""
    found: Unit = get_args(kind)[1]
    return found


def kind_in(hint: object) -> object | None:
    """Return the kind in a hint such as `Bytes | None` or a matrix of Seconds; None without one."""
    args = get_args(hint)
    if get_origin(hint) is Annotated:
        return hint if isinstance(args[1], Unit) else None
    return next((kind for kind in map(kind_in, args) if kind is not None), None)


def keys_with_unit(key: str, kind: object) -> dict[str, float]:
    """Return the spellings of `key` with a unit, and their scales: {"latency_ms": 1e-3, ...}.

    Bytes per second have none: next to `_gbps`, a `_gbs` would invite an error by a factor of 8.
    A key named x_bytes has a unit already: its other spellings are x_kib, x_mib, ...
    """
    stem = key.removesuffix("_bytes")
    return {
        f"{stem}_{_ending(spelling)}": scale
        for spelling, scale in unit_of(kind).scale.items()
        if not spelling.endswith("B/s")
    }


def both_ways(key: str, kind: object) -> str:
    """Return an example of the two spellings of a quantity, for an error's fix."""
    example = unit_of(kind).example
    written = _WRITTEN.fullmatch(example)
    assert written, f"the example {example!r} of a Unit must be one"
    stem = key.removesuffix("_bytes")
    return f'{key} = "{example}" or {stem}_{_ending(written[2])} = {written[1]}'


def _ending(spelling: str) -> str:
    return "bytes" if spelling == "B" else spelling.replace("bit/s", "bps").lower()
