"""Compute how long messages occupied a link, from times measured at the receiver.

A message starts to leave at the latest of three times: when it is sent, when the sender learns that
its receive is posted, and when the previous message has left. The receiver sees each one latency
later: the notice of the posted receive also crosses the link, and data arrives one latency after it
has left.
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
    """Return how long each message, in order of arrival, occupied the link."""
    durations = []
    previous = float("-inf")
    for sent, posted, arrived in messages:
        start = max(sent + latency, posted + 2 * latency, previous)
        durations.append(max(0.0, arrived - start))
        previous = arrived
    return durations
