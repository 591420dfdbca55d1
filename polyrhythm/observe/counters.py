"""What a coordinator has counted, in words for people."""

from collections.abc import Mapping
from typing import NamedTuple


class _CounterText(NamedTuple):
    """Of some kinds of count: what one and many of all of them are called, and what each kind."""

    one: str
    many: str
    kinds: Mapping[str, str]  # without a word where there is but one


_WORDS = (
    _CounterText("group averaged", "groups averaged", {"committed": ""}),
    _CounterText("group given up", "groups given up", {"aborted": ""}),
    _CounterText("step without an average", "steps without an average", {"skipped": ""}),
    _CounterText(
        "message refused",
        "messages refused",
        {
            "unauthenticated": "unauthenticated",
            "malformed": "malformed",
            "oversized": "too long",
            "frames": "in several parts",
            "unknown_worker": "of strangers",
            "hello_protocol": "of another version",
            "hello_outside": "not in the plan",
            "hello_policy": "of another policy",
            "hello_shape": "of another model",
            "hello_incarnation": "of an earlier life",
            "clock_backwards": "going back in time",
        },
    ),
    _CounterText(
        "message ignored",
        "messages ignored",
        {"duplicate": "repeated", "late": "late", "out_of_order": "out of turn"},
    ),
    _CounterText(
        "message not delivered",
        "messages not delivered",
        {"unreachable": "to nobody", "full": "not taken in"},
    ),
    _CounterText("message ahead of its turn", "messages ahead of their turn", {"early": ""}),
    _CounterText("connection made again", "connections made again", {"reconnected": ""}),
    _CounterText("standstill of this process", "standstills of this process", {"stalled": ""}),
)


def counters_text(counters: Mapping[str, int]) -> str:
    """In one line; a kind that has no words here is named as it is."""
    left = {kind: count for kind, count in counters.items() if count}
    parts = []
    for one, many, kinds in _WORDS:
        counted = {word: left.pop(kind) for kind, word in kinds.items() if kind in left}
        if counted:
            total = sum(counted.values())
            each = ", ".join(f"{word} {count:,}" for word, count in counted.items() if word)
            what = f"{total:,} {one if total == 1 else many}"
            parts.append(f"{what} ({each})" if each else what)
    parts += [f"{left[kind]:,} {kind.replace('_', ' ')}" for kind in sorted(left)]
    return ", ".join(parts) or "nothing happened"
