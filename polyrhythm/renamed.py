"""Old public names: using one raises an error that gives the new name."""

import functools
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def renamed_arguments(**new_names: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Reject the old names of a function's keyword arguments; raises TypeError."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def check_names(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for old in kwargs.keys() & new_names.keys():
                raise TypeError(
                    f"{function.__qualname__}: {old}= is now {new_names[old]}\n"
                    f"  expected: {new_names[old]}\n  fix: rename the argument"
                )
            return function(*args, **kwargs)

        return check_names

    return decorate


class RenamedAttribute:
    """An attribute or method that has a new name; raises AttributeError when it is read."""

    def __init__(self, new_name: str) -> None:
        self._new_name = new_name

    def __set_name__(self, owner: type, name: str) -> None:
        self._old_name = f"{owner.__name__}.{name}"

    def __get__(self, instance: object, owner: type | None = None) -> NoReturn:
        raise AttributeError(f"{self._old_name} is now {self._new_name}\n  fix: rename it")
