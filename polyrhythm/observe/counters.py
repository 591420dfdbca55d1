"""Format a coordinator's counters for people."""

from collections.abc import Mapping
from typing import NamedTuple


class _CounterText(NamedTuple):
    """The text for the sum of some counters, and a label for each; "" if there is only one."""

    singular: str
    plural: str
    kinds: Mapping[str, str]


_TEXTS = (
    _CounterText("group averaged", "groups averaged", {"committed": ""}),
    _CounterText("group aborted", "groups aborted", {"aborted": ""}),
    _CounterText("step without an average", "steps without an average", {"skipped": ""}),
    _CounterText(
        "message refused",
        "messages refused",
        {
            "unauthenticated": "unauthenticated",
            "malformed": "malformed",
            "oversized": "too long",
            "frames": "several frames",
            "unknown_worker": "unknown worker",
            "hello_protocol": "other protocol version",
            "hello_outside": "not in the plan",
            "hello_policy": "other policy",
            "hello_shape": "other model",
            "hello_incarnation": "earlier incarnation",
            "clock_backwards": "clock went backwards",
        },
    ),
    _CounterText(
        "message ignored",
        "messages ignored",
        {"duplicate": "duplicate", "late": "late", "out_of_order": "out of order"},
    ),
    _CounterText(
        "message not delivered",
        "messages not delivered",
        {"unreachable": "unreachable", "full": "queue full"},
    ),
    _CounterText("early message", "early messages", {"early": ""}),
    _CounterText("reconnection", "reconnections", {"reconnected": ""}),
    _CounterText("stall of this process", "stalls of this process", {"stalled": ""}),
)


def counters_text(counters: Mapping[str, int]) -> str:
    """Format all counters in one line; unknown kinds are shown by their names."""
    rest = {kind: count for kind, count in counters.items() if count}
    parts = []
    for singular, plural, kinds in _TEXTS:
        counts = {label: rest.pop(kind) for kind, label in kinds.items() if kind in rest}
        if counts:
            total = sum(counts.values())
            details = ", ".join(f"{label} {count:,}" for label, count in counts.items() if label)
            text = f"{total:,} {singular if total == 1 else plural}"
            parts.append(f"{text} ({details})" if details else text)
    parts += [f"{rest[kind]:,} {kind.replace('_', ' ')}" for kind in sorted(rest)]
    return ", ".join(parts) or "nothing happened"
