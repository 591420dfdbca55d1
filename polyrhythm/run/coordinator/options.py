"""Parse a policy's options from a command line: name=value, or a JSON object."""

from collections.abc import Sequence

import msgspec

from polyrhythm.errors import PolicyError


def parse_options(texts: Sequence[str], *, flag: str) -> dict[str, object]:
    """Return the options as keyword arguments of a policy; errors name `flag`."""
    options: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        is_object = text.startswith("{")
        try:
            if is_object:
                options |= msgspec.json.decode(text, type=dict[str, object])
            else:
                options[name] = msgspec.json.decode(value)
            problem = ""
        except msgspec.MsgspecError as error:
            options[name] = value  # a string needs no quotes
            problem = str(error) if is_object else ""
        if problem or not (is_object or (name and equals)):
            raise PolicyError(
                f"{flag} {text!r}" + (f": {problem}" if problem else ""),
                expected="name=value, or a JSON object",
                fix=f"{flag} group_size=4 window=rate",
            )
    return options


def at_flag(error: PolicyError, *, flag: str) -> PolicyError:
    """Return the error with a fix for the command line instead of Python."""
    fix = error.fix.replace("options={...}", flag)
    return PolicyError(error.wrong, expected=error.expected, fix=fix)
