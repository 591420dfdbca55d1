"""What counts as faster: a difference that nobody would see is none."""

VISIBLE = 1.001


def is_faster(gain: float) -> bool:
    """Whether a plan with `gain` times the throughput of another is ahead of it."""
    return gain >= VISIBLE
