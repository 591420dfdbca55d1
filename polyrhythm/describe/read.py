"""Read a TOML or JSON file into a frozen dataclass; report errors with their location.

The dataclass is the format: its fields are the keys (`field(metadata={"key": "from"})` renames
one), its type hints define the values, and its `__post_init__` checks them.

A quantity carries its unit in the value (`latency = "34ms"`) or in the key (`latency_ms = 34`,
`latency_ms = [[5, 67], [67, 5]]`). A bare number is refused: nobody remembers which unit it was.
"""

import dataclasses
import difflib
import json
import math
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from polyrhythm.describe.units import (
    both_ways,
    in_base_units,
    keys_with_unit,
    kind_in,
    parse,
    unit_of,
)
from polyrhythm.errors import DescriptionError, UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

# Names of Python's and msgspec's types for people who write TOML.
_WORDS = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "list": "a list",
    "object": "a table",
    "dict": "a table",
    "NoneType": "null",
}


def read(path: Path, kind: type[T]) -> T:
    """Return the `kind` that the file describes."""
    try:
        return build(parse_file(path), kind)
    except UserError as error:
        raise error.at(str(path)) from None


def unknown(
    what: str, name: str, known: Iterable[str], near: Iterable[str] = ()
) -> DescriptionError:
    """Return the error for an unknown name; `near` has further spellings to suggest."""
    known = list(known)
    best = difflib.get_close_matches(name, [*known, *near], n=1)
    listed = ", ".join(known[:8]) + (f" ... ({len(known)} in all)" if len(known) > 8 else "")
    return DescriptionError(
        f"unknown {what} {name!r}",
        expected=f"one of {listed}" if known else f"no {what} here",
        fix=f"did you mean {best[0]!r}?" if best else f"correct or remove {name!r}",
    )


def parse_file(path: Path) -> object:
    """Parse a file without interpreting it; errors do not name the file."""
    parsers: dict[str, Callable[[str], object]] = {".toml": tomllib.loads, ".json": _parse_json}
    if path.suffix not in parsers and path.is_file():
        raise DescriptionError(
            f"unknown file type {path.suffix!r}", expected=".toml or .json", fix="rename the file"
        )
    try:
        text = path.read_bytes().decode("utf-8-sig")  # editors on Windows write a byte order mark
    except OSError as error:
        raise DescriptionError(
            f"cannot read it: {error.strerror}",
            expected="a readable .toml or .json file",
            fix="check the path and its permissions",
        ) from None
    except UnicodeDecodeError as error:
        raise DescriptionError(
            f"byte {error.start} is not UTF-8", expected="UTF-8 text", fix="save the file as UTF-8"
        ) from None
    try:
        return parsers[path.suffix](text)
    except (ValueError, RecursionError) as error:  # both parsers' own errors are ValueErrors
        end = f"at line {text.count(chr(10)) + 1}, the end of the file"
        raise DescriptionError(
            f"syntax error: {str(error).replace('at end of document', end)}",
            expected=f"valid {path.suffix[1:].upper()}",
            fix="correct that line",
        ) from None


def _parse_json(text: str) -> object:
    return json.loads(text, object_pairs_hook=_refuse_duplicates)


def _refuse_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Refuse duplicate keys, as TOML does: JSON would silently take the last one."""
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f"the key {key!r} appears twice in one object")
    return dict(pairs)


@dataclass(frozen=True, slots=True)
class _Key:
    """One spelling of a field's key: `latency` and `latency_ms` are two."""

    field: str
    main: str  # the key without a unit in it
    written: str
    hint: Any
    quantity: object | None  # Seconds, Bytes, ... or None
    scale: float | None = None  # base units of a bare number, if the key names a unit


def _keys(kind: type[T]) -> dict[str, _Key]:
    hints = get_type_hints(kind, include_extras=True)
    keys: dict[str, _Key] = {}
    for field in dataclasses.fields(kind):
        main, hint = _main_key(field), hints[field.name]
        quantity = kind_in(hint)
        keys[main] = _Key(field.name, main, main, hint, quantity)
        if quantity is not None:
            for key, scale in keys_with_unit(main, quantity).items():
                keys[key] = _Key(field.name, main, key, hint, quantity, scale)
    return keys


def _main_key(field: dataclasses.Field[Any]) -> str:
    key: str = field.metadata.get("key", field.name)
    return key


def build(table: object, kind: type[T], where: str = "") -> T:
    """Return the `kind` that a table describes; `where` is its location in the file."""
    if not isinstance(table, dict):
        raise _misfit(where, expected="dict", got=type(table).__name__)
    keys = _keys(kind)
    given: dict[str, _Key] = {}
    values: dict[str, object] = {}
    for name, value in table.items():
        if name not in keys:
            main = dict.fromkeys(key.main for key in keys.values())
            raise _at(where, unknown("key", name, main, near=keys))
        key = keys[name]
        if key.field in given:
            raise _at(where, _twice(given[key.field], key))
        given[key.field] = key
        values[key.field] = _value(value, key, f"{where}.{name}" if where else name)
    for field in dataclasses.fields(kind):
        required = field.default is MISSING and field.default_factory is MISSING
        if required and field.name not in given:
            raise _at(where, _missing(keys[_main_key(field)]))
    try:
        return kind(**values)
    except UserError as error:
        raise _at(where, error) from None


def _value(value: object, key: _Key, where: str) -> object:
    if _is_optional(key.hint) and value is None:
        return None
    if (table_kind := _table_kind(key.hint)) is not None:
        return build(value, table_kind, where)
    if get_origin(key.hint) is tuple and (item_kind := _table_kind(get_args(key.hint)[0])):
        if not isinstance(value, list):
            raise _misfit(where, expected="a list of tables", got=type(value).__name__)
        return tuple(build(item, item_kind, f"{where}[{i}]") for i, item in enumerate(value))
    try:
        return msgspec.convert(_numbers(value, key, where), key.hint)
    except msgspec.ValidationError as error:  # such as "Expected `float`, got `str` - at `$[0][1]`"
        message, _, place = str(error).replace("`", "").partition(" - at $")
        expected, _, got = message.removeprefix("Expected ").partition(", got ")
        expected = expected.removesuffix(" | null")
        if key.quantity is not None and expected in ("int", "float"):
            raise _not_a_quantity(f"got {_WORDS.get(got, got)}", key).at(where + place) from None
        raise _misfit(where + place, expected, got or message) from None


def _is_optional(hint: Any) -> bool:
    return NoneType in get_args(hint)


def _table_kind(hint: Any) -> Any:
    """Return the dataclass in a hint such as `Wire` or `Wire | None`; None without one."""
    kinds = [each for each in get_args(hint) if each is not NoneType]
    kind = kinds[0] if _is_optional(hint) and len(kinds) == 1 else hint
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def _numbers(value: object, key: _Key, where: str) -> object:
    """Convert quantities in `value` to base units; other values are left for the type check."""
    if isinstance(value, list):
        return [_numbers(item, key, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise DescriptionError(
            f"{where}: {value}", expected="a finite number", fix=f"correct {key.written}"
        )
    if key.quantity is None or isinstance(value, bool):
        return value
    try:
        if isinstance(value, str) and key.written == key.main:
            return parse(value, key.quantity)
        if isinstance(value, int | float):
            if key.scale is None:
                raise _not_a_quantity(f"{value} has no unit", key)
            return in_base_units(value, key.scale, key.quantity)
    except DescriptionError as error:
        raise error.at(where) from None
    return value


def _twice(first: _Key, second: _Key) -> DescriptionError:
    return DescriptionError(
        f"{first.main} is given twice, as {first.written} and as {second.written}",
        expected="one of them",
        fix=f"remove {second.written}",
    )


def _missing(key: _Key) -> DescriptionError:
    return DescriptionError(
        f"the key {key.main!r} is missing",
        expected=f"{key.main!r} in this table",
        fix=f"add {key.main if key.quantity is None else both_ways(key.main, key.quantity)}",
    )


def _not_a_quantity(wrong: str, key: _Key) -> DescriptionError:
    return DescriptionError(
        wrong,
        expected=f"a {unit_of(key.quantity).quantity} with its unit",
        fix=f"write {both_ways(key.main, key.quantity)}",
    )


def _misfit(where: str, expected: str, got: str) -> UserError:
    expected = _WORDS.get(expected, expected)
    return _at(
        where,
        DescriptionError(
            f"got {_WORDS.get(got, got)}", expected=expected, fix=f"write {expected} there"
        ),
    )


def _at(where: str, error: UserError) -> UserError:
    return error.at(where) if where else error
