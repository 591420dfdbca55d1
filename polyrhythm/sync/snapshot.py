"""Snapshots: the whole state of a state machine as plain data, from which an equal one is made.

`take_snapshot` follows all references from one object and writes down each object once, so that
fields that share an object share it again after `restore`. A field that is added to a class is in
the next snapshot without further code. Equal states have equal snapshots: sets are sorted.

Objects are of registered classes, without names of code: `restore` calls no function that a
snapshot names, unlike pickle. It sets fields, and checks that they are those of the class now.

Source: none.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import fields
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import msgspec

from polyrhythm.errors import EventError

_MAX_INT = 1 << 63  # JSON numbers are not larger; sets of workers are bit masks of any length
_encode = msgspec.json.Encoder().encode
_Root = TypeVar("_Root")


class Snapshot(msgspec.Struct, frozen=True):
    """The state of an object: the first one of `objects`."""

    fields: dict[str, list[str]]  # of each class
    # Each a list, whose first item is a class or a tag. References are numbers of objects.
    objects: list[list[Any]]


class _Class(NamedTuple):
    kind: type[Any]
    is_value: bool  # its objects are immutable: they are written down where they are used
    slots: tuple[str, ...]  # its fields, without those of each object's `__dict__`

    @classmethod
    def of(cls, kind: Any) -> "_Class":
        if issubclass(kind, Enum):
            return cls(kind, True, ("name",))
        if issubclass(kind, msgspec.Struct):
            return cls(kind, True, tuple(kind.__struct_fields__))
        if issubclass(kind, tuple):
            return cls(kind, True, tuple(kind._fields))
        dataclass_params = getattr(kind, "__dataclass_params__", None)
        if dataclass_params is not None:
            return cls(kind, dataclass_params.frozen, tuple(each.name for each in fields(kind)))
        slots = [base.__dict__.get("__slots__", ()) for base in reversed(kind.__mro__)]
        return cls(kind, False, tuple(name for names in slots for name in names))


_classes: dict[str, _Class] = {}
_values: set[type] = set()  # classes whose objects are values
_functions: dict[str, Callable[..., Any]] = {}  # that are the value of a field


def register_state(*kinds: Any) -> None:
    """Allow classes in snapshots, and functions as values of fields; each under its name."""
    for kind in kinds:
        name = kind.__name__
        if not isinstance(kind, type):
            _functions[name] = kind
            continue
        assert name not in _classes, f"two classes are named {name}"
        _classes[name] = _Class.of(kind)
        if _classes[name].is_value:
            _values.add(kind)


def take_snapshot(root: object) -> Snapshot:
    """Return the state of `root`, which may change afterwards."""
    return _Encoder().encode(root)


def restore(snapshot: Snapshot, new: _Root) -> _Root:
    """Make an object with that state, of the class and with the fields of `new`, an initial one.

    Raises EventError if the snapshot is not valid, or of a version with other fields.
    """
    try:
        known = take_snapshot(new).fields
        for name, names in snapshot.fields.items():
            if names != known.get(name, [*_classes[name].slots]):
                raise ValueError(f"{name} has other fields: {', '.join(names)}")
        root = _Decoder(snapshot).decode()
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        if isinstance(root, type(new)):
            return root
        problem = f"it is a {type(root).__name__}"
    raise EventError(
        f"a state that cannot be restored: {problem}",
        expected=f"the state of a {type(new).__name__}, written by this version of polyrhythm",
        fix="use the version that wrote it",
    )


class _Encoder:
    def __init__(self) -> None:
        self._objects: list[object] = []
        self._numbers: dict[int, int] = {}  # by id
        self._fields: dict[str, list[str]] = {}

    def encode(self, root: object) -> Snapshot:
        self._reference(root)
        # Not recursive: chains of references are as long as the job has workers.
        encoded = [self._object(each) for each in self._objects]
        return Snapshot(dict(sorted(self._fields.items())), encoded)

    def _reference(self, value: object) -> list[Any]:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return ["@", number]

    def _value(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -_MAX_INT <= value < _MAX_INT else ["int", hex(value)]
        if kind is float:
            return value if math.isfinite(value) else ["float", str(value)]
        if kind is tuple:
            return ["tuple", *map(self._value, value)]
        if kind is frozenset:
            return ["frozenset", *self._sorted(value)]
        if kind in _values:
            return self._instance(value)
        if callable(value):
            name = value.__name__
            assert _functions.get(name) is value, f"{value} is not registered"
            return ["function", name]
        return self._reference(value)

    def _object(self, value: Any) -> list[Any]:
        kind = type(value)
        if kind is list:
            return ["list", *map(self._value, value)]
        if kind is dict or kind is Counter:
            items = [self._value(each) for item in value.items() for each in item]
            return [kind.__name__, *items]
        if kind is set:
            return ["set", *self._sorted(value)]
        if kind is deque:
            return ["deque", value.maxlen, *map(self._value, value)]
        if kind.__name__ == "ndarray":
            assert str(value.dtype) == "int64", "the only arrays are numbers of updates"
            return ["array", *value.tolist()]
        if kind is random.Random:
            version, words, gauss = value.getstate()
            return ["Random", version, list(words), gauss]
        return self._instance(value)

    def _instance(self, value: Any) -> list[Any]:
        name = type(value).__name__
        names = self._fields.get(name)
        if names is None:
            known = _classes.get(name)
            assert known is not None, f"{name} is not registered"
            assert known.kind is type(value), f"another {name} is registered"
            # Those of `__dict__` come in the order in which the constructor has set them.
            more = () if known.is_value else getattr(value, "__dict__", ())
            names = self._fields[name] = [*known.slots, *more]
        return [name, *[self._value(getattr(value, each)) for each in names]]

    def _sorted(self, values: Iterable[Any]) -> list[Any]:
        return sorted(map(self._value, values), key=_encode)


class _Decoder:
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._objects: list[Any] = []

    def decode(self) -> Any:
        # First all objects without contents: they may refer to one another in cycles.
        self._objects = [self._empty(*encoded) for encoded in self._snapshot.objects]
        for value, (tag, *items) in zip(self._objects, self._snapshot.objects, strict=True):
            self._fill(value, tag, items)
        return self._objects[0]

    def _empty(self, tag: str, *items: Any) -> Any:
        if tag in ("list", "set", "dict", "Counter"):
            return {"list": list, "set": set, "dict": dict, "Counter": Counter}[tag]()
        if tag == "deque":
            return deque[Any](maxlen=items[0])
        if tag == "array":
            import numpy as np  # half a second, and most commands need none

            return np.array(items, np.int64)
        if tag == "Random":
            version, words, gauss = items
            generator = random.Random()
            generator.setstate((version, tuple(words), gauss))
            return generator
        return object.__new__(_classes[tag].kind)

    def _fill(self, value: Any, tag: str, items: list[Any]) -> None:
        if tag in ("array", "Random"):
            return
        if tag == "deque":
            del items[0]
        decoded = [self._value(item) for item in items]
        if tag in ("list", "deque"):
            value.extend(decoded)
        elif tag == "set":
            value.update(decoded)
        elif tag in ("dict", "Counter"):
            for key, item in zip(decoded[::2], decoded[1::2], strict=True):
                value[key] = item
        else:
            for name, item in zip(self._snapshot.fields[tag], decoded, strict=True):
                setattr(value, name, item)

    def _value(self, encoded: Any) -> Any:
        if not isinstance(encoded, list):
            return encoded
        tag, *items = encoded
        if tag == "@":
            return self._objects[items[0]]
        if tag == "int":
            return int(items[0], 16)
        if tag == "float":
            return float(items[0])
        if tag == "function":
            return _functions[items[0]]
        decoded = [self._value(item) for item in items]
        if tag == "tuple":
            return tuple(decoded)
        if tag == "frozenset":
            return frozenset(decoded)
        kind = _classes[tag].kind
        if issubclass(kind, Enum):
            return kind[decoded[0]]
        return kind(**dict(zip(self._snapshot.fields[tag], decoded, strict=True)))
