"""How long messages really occupied a link, from the times its receiver saw.

A message begins to leave when it was sent, when the sender has heard that its receive was posted,
and when the one before it has left, whichever comes last. Each of these is seen here one latency
later: the word of the posting crosses the link too, and what has left arrives one latency after.
"""

from collections.abc import Iterable
from typing import NamedTuple

from polyrhythm.types import Seconds


class MessageTiming(NamedTuple):
    """One message; all three times on the receiver's clock."""

    sent: Seconds
    posted: Seconds
    arrived: Seconds


def busy_times(messages: Iterable[MessageTiming], *, latency: Seconds) -> list[Seconds]:
    """How long each message, in order of arrival, occupied the link."""
    found = []
    previous = float("-inf")
    for sent, posted, arrived in messages:
        begins = max(sent + latency, posted + 2 * latency, previous)
        found.append(max(0.0, arrived - begins))
        previous = arrived
    return found
