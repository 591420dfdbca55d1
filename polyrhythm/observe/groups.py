"""Count the groups that a run's workers logged: averages, group sizes and failures per worker."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.console import Console

from polyrhythm.events import Event
from polyrhythm.observe.report import pipeline_then_stage
from polyrhythm.tables import print_line, print_table
from polyrhythm.types import Worker

_LOST = re.compile(r"lost (s\d+p\d+) ")  # the start of a PeerError's text


@dataclass(slots=True, kw_only=True)
class Groups:
    sizes: dict[Worker, list[int]] = field(default_factory=lambda: defaultdict(list))
    groups: set[tuple[str | None, str]] = field(default_factory=set)  # (number, members)
    failed: Counter[Worker] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)  # workers lost in failed averages

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Groups":
        groups = cls()
        for event in events:
            if event.worker is None:
                continue
            if event.kind == "average":
                members = str(event.values.get("members", event.worker))
                groups.sizes[event.worker].append(len(members.split()))
                groups.groups.add((event.name, members))  # every member logs the group
            elif event.kind == "average_failed":
                groups.failed[event.worker] += 1
                if found := _LOST.match(event.why or ""):
                    groups.lost[found[1]] += 1
        return groups

    def show(self, console: Console) -> None:
        """Print a table of the averages; nothing if the run has none."""
        workers = sorted({*self.sizes, *self.failed}, key=pipeline_then_stage)
        if not workers:
            return
        print_line(console, "")
        header = ["worker", "averages", "mean size", "failed"]
        print_table(console, header, map(self._row, workers), title="groups", numbers=True)
        if self.groups:
            size = sum(len(members.split()) for _, members in self.groups) / len(self.groups)
            noun = "group" if len(self.groups) == 1 else "groups"
            print_line(console, f"{len(self.groups):,} {noun} of {size:.2f} workers on average")
        if self.failed:
            lost = f", lost {most_frequent(self.lost)}" if self.lost else ""
            print_line(console, f"averages that failed: {self.failed.total():,}{lost}")

    def _row(self, worker: Worker) -> list[str]:
        sizes = self.sizes.get(worker, [])
        mean = f"{sum(sizes) / len(sizes):.2f}" if sizes else "-"
        return [str(worker), f"{len(sizes):,}", mean, f"{self.failed[worker]:,}"]


def most_frequent(counts: Counter[str], limit: int = 5) -> str:
    """List the most frequent keys with their counts; sort equal counts by key."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    others = sum(count for _, count in ranked[limit:])
    return ", ".join(
        [f"{key} ({count:,})" for key, count in ranked[:limit]]
        + ([f"others ({others:,})"] if others else [])
    )
