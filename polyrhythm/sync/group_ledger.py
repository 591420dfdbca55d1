"""Turns: who is here, who waits for a group, and which groups are open.

Several policies keep these three facts, and a driver can get them wrong in the same few ways (a
report from a stranger, a second report, a group that was never handed out). Here is the one place
that keeps them and refuses those mistakes; a worker is never in two open groups. A group of one is
a local step: it is over when it is handed out, whether or not it is reported as done.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from polyrhythm.errors import PolicyError
from polyrhythm.types import Group, Worker


@dataclass(slots=True)
class GroupLedger:
    _workers: set[Worker] = field(default_factory=set, init=False)
    _waiting: set[Worker] = field(default_factory=set, init=False)
    _group_of: dict[Worker, Group] = field(default_factory=dict, init=False)

    def join(self, worker: Worker) -> None:
        if worker in self._workers:
            raise PolicyError(
                f"worker {worker} joins twice",
                expected="one join per worker, until it leaves",
                fix="report that it left before it joins again",
            )
        self._workers.add(worker)

    def leave(self, worker: Worker) -> None:
        self.check(worker)
        if worker in self._group_of:
            raise PolicyError(
                f"worker {worker} leaves in the middle of group {format_group(self._group_of[worker])}",
                expected="that its group is done, or has given up",
                fix="report the group as done with ok=False first",
            )
        self._workers.remove(worker)
        self._waiting.discard(worker)

    def wait(self, worker: Worker) -> None:
        """A worker asks for a group, and has none until it gets one."""
        self.check(worker)
        if worker in self._waiting or worker in self._group_of:
            raise PolicyError(
                f"worker {worker} asks for a group before its last one is done",
                expected="one report per worker and step",
                fix="wait for the group of the first report before reporting again",
            )
        self._waiting.add(worker)

    def open(self, members: Iterable[Worker], why: str) -> Group:
        """Hand out a group: its members wait no longer, and no other has them before it is done."""
        group = Group(tuple(sorted(members)), why)
        self._waiting.difference_update(group.members)
        if len(group.members) > 1:
            for member in group.members:
                assert member not in self._group_of, f"{member} is in two open groups"
                self._group_of[member] = group
        return group

    def close(self, group: Group) -> None:
        """A group of two or more is done, or has given up."""
        if not group.members or self._group_of.get(group.members[0]) != group:
            raise PolicyError(
                f"group {format_group(group)} is done, but is not open",
                expected="each group that was handed out, once, as it was handed out",
                fix="report a group as done once",
            )
        for member in group.members:
            del self._group_of[member]

    def check(self, worker: Worker) -> None:
        """Refuse a worker that has not joined."""
        if worker not in self._workers:
            raise PolicyError(
                f"worker {worker} is not here",
                expected="that a worker joins before it takes part",
                fix="report that it joined first",
            )

    def is_waiting(self, worker: Worker) -> bool:
        return worker in self._waiting

    def is_in_group(self, worker: Worker) -> bool:
        return worker in self._group_of

    def workers(self) -> list[Worker]:
        return sorted(self._workers)


def format_group(group: Group) -> str:
    return "{" + ", ".join(map(str, group.members)) + "}"
