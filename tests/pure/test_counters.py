"""The text of a coordinator's counters contains all of them."""

import pytest

from polyrhythm.observe.counters import counters_text


@pytest.mark.parametrize(
    ("counters", "words"),
    [
        ({}, "nothing happened"),
        ({"committed": 0, "late": 0}, "nothing happened"),
        ({"committed": 1}, "1 group averaged"),
        (
            {"unauthenticated": 1, "malformed": 1, "aborted": 3, "committed": 1204},
            "1,204 groups averaged, 3 groups aborted, "
            "2 messages refused (unauthenticated 1, malformed 1)",
        ),
        ({"late": 1}, "1 message ignored (late 1)"),
        ({"stalled": 2, "skipped": 5}, "5 steps without an average, 2 stalls of this process"),
        ({"early": 1, "full": 2}, "2 messages not delivered (queue full 2), 1 early message"),
        ({"some_new_kind": 1000, "committed": 2}, "2 groups averaged, 1,000 some new kind"),
    ],
)
def test_counters_text(counters: dict[str, int], words: str) -> None:
    assert counters_text(counters) == words
