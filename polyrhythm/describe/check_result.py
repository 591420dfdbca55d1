"""A finding: one thing looked at on this machine, and what to do about it if it is not there."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckResult:
    """`ok` is None for a plain fact, which may still carry advice: nothing needs it to change."""

    subject: str
    found: str
    ok: bool | None
    advice: str = ""  # exactly what to do, and what works without doing it

    def __post_init__(self) -> None:
        assert self.ok is not False or self.advice, f"{self.subject} is missing: say what to do"
