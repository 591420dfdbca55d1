"""The busy time of a link is recovered from message times, for any send and post times."""

from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.cost.pipeline import MessageTiming, busy_times

# Integers add up without rounding, so that computed and true times can be compared exactly.
moments = st.integers(0, 10_000)
amounts = st.integers(0, 300)
messages = st.lists(st.tuples(moments, moments, amounts), max_size=30)  # sent, posted, busy


def carried(
    sent: list[int], posted: list[int], busy: list[int], *, latency: int
) -> list[MessageTiming]:
    """Simulate a link that carries one message at a time, in order, each when both ends are ready.

    The sender is ready when it has sent the message and knows that the receive is posted.
    """
    seen, free = [], 0
    for sent_at, posted_at, takes in zip(sent, posted, busy, strict=True):
        begins = max(sent_at, posted_at + latency, free)
        free = begins + takes
        seen.append(MessageTiming(sent_at, posted_at, free + latency))
    return seen


@given(messages, amounts)
def test_the_time_on_the_link_is_recovered_exactly(
    drawn: list[tuple[int, int, int]], latency: int
) -> None:
    busy = [takes for _, _, takes in drawn]
    sent = sorted(moment for moment, _, _ in drawn)
    posted = sorted(moment for _, moment, _ in drawn)
    seen = carried(sent, posted, busy, latency=latency)
    assert busy_times(seen, latency=latency) == busy


@given(messages, amounts)
def test_receives_posted_early_enough_do_not_count(
    drawn: list[tuple[int, int, int]], latency: int
) -> None:
    """Receives are posted at least one latency before the message is sent."""
    busy = [takes for _, _, takes in drawn]
    sent = sorted(moment for moment, _, _ in drawn)
    posted = [at - latency - ahead for at, (_, ahead, _) in zip(sent, drawn, strict=True)]
    seen = carried(sent, posted, busy, latency=latency)
    long_before = [message._replace(posted=float("-inf")) for message in seen]
    assert busy_times(seen, latency=latency) == busy_times(long_before, latency=latency) == busy


@given(messages, st.integers(1, 50), amounts)
def test_a_constant_rate_is_recovered_from_messages_of_any_size(
    drawn: list[tuple[int, int, int]], bytes_per_tick: int, latency: int
) -> None:
    sent = sorted(moment for moment, _, _ in drawn)
    sizes = [bytes_per_tick * takes for _, _, takes in drawn]
    seen = carried(
        sent, [0] * len(sent), [size // bytes_per_tick for size in sizes], latency=latency
    )
    found = busy_times(seen, latency=latency)
    assert [takes * bytes_per_tick for takes in found] == sizes


@given(messages, amounts, amounts)
def test_no_time_is_negative_when_the_latency_was_measured_too_high(
    drawn: list[tuple[int, int, int]], latency: int, excess: int
) -> None:
    busy = [takes for _, _, takes in drawn]
    sent = sorted(moment for moment, _, _ in drawn)
    seen = carried(sent, [0] * len(sent), busy, latency=latency)
    found = busy_times(seen, latency=latency + excess)
    assert all(0 <= low <= true for low, true in zip(found, busy, strict=True))


def test_idle_gap_between_messages_is_not_counted() -> None:
    """The first message leaves at 5 and arrives at 25; the link is idle from 5 to 15."""
    seen = carried([0, 15], [-100, -100], [5, 5], latency=20)
    assert [message.arrived for message in seen] == [25, 40]
    assert busy_times(seen, latency=20) == [5, 5]


def test_a_receive_posted_late_costs_two_crossings_and_no_time_on_the_link() -> None:
    (message,) = carried([0], [100], [5], latency=20)
    assert message.arrived == 145
    assert busy_times([message], latency=20) == [5]
