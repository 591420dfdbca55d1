"""Choose the micro-batch size to measure next: each once, and again when the network has changed.

Times of one size do not predict another, so a size is a candidate only after a step with it. Such
a step costs time. It is repeated for a size only if its times are old and the size in use, which is
measured continuously, shows that transfers have changed since.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from polyrhythm.cost.pipeline import PipelineTimes
from polyrhythm.types import Seconds

_CHANGED = 0.2  # of a mean transfer time
_MATTERS = 0.02  # of the slowest stage's work: changes of faster links are ignored


@dataclass(slots=True)
class Freshness:
    stale_after: int  # decisions
    _decisions: int = field(default=0, init=False)
    _seen: dict[int, PipelineTimes] = field(default_factory=dict, init=False)
    _seen_at: dict[int, int] = field(default_factory=dict, init=False)
    # By size: the mean transfers of every size when this one was measured.
    _then: dict[int, dict[int, tuple[Seconds, ...]]] = field(default_factory=dict, init=False)

    def record(self, times: Mapping[int, PipelineTimes]) -> None:
        """Record the times of a decision; those that differ from the last were measured again."""
        self._decisions += 1
        transfers = {size: measured.transfers for size, measured in times.items()}
        for size, measured in times.items():
            if self._seen.get(size) != measured:
                self._seen[size] = measured
                self._seen_at[size] = self._decisions
                self._then[size] = dict(transfers)
        for then in self._then.values():  # a size measured later is compared from now on
            for size, transfer in transfers.items():
                then.setdefault(size, transfer)

    def wanted(
        self, sizes: Sequence[int], times: Mapping[int, PipelineTimes], in_use: int
    ) -> int | None:
        """Return the first of `sizes` without times, or with old times that are likely wrong."""
        for size in sizes:
            if size not in times:
                return size
        return next((size for size in sizes if size != in_use and self._is_old(size, in_use)), None)

    def _is_old(self, size: int, in_use: int) -> bool:
        if in_use not in self._seen or size not in self._seen:
            return False
        if self._decisions - self._seen_at[size] <= self.stale_after:
            return False
        measured = self._seen[in_use]
        pairs = zip(self._then[size][in_use], measured.transfers, strict=True)
        return any(
            abs(now - then) > _CHANGED * then and max(now, then) > _MATTERS * measured.period
            for then, now in pairs
        )
