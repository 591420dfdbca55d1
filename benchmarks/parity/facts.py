"""What a part of this benchmark reports: facts that are counted, not timed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fact:
    """One checked case and its figure, such as a relative difference or a number of errors."""

    case: str  # unique within its part, such as "gpt2 on 2x2"
    value: float
    detail: str = ""  # why a case fails, or what was compared
