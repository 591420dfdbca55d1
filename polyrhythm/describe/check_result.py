"""The result of one check of this machine, with advice if something is missing."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One result; `ok` is None for a plain fact, which may have optional advice."""

    subject: str
    found: str
    ok: bool | None
    advice: str = ""  # exact steps, and what works without them

    def __post_init__(self) -> None:
        assert self.ok is not False or self.advice, f"{self.subject} is missing: say what to do"
