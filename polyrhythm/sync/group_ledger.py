"""The group ledger: which workers are present, which wait for a group, which groups are open.

Several policies keep these three facts, and a driver can violate them in the same ways (a report
from an unknown worker, a second report, the end of a group that was never formed). The ledger
keeps them in one place and refuses such calls; a worker is never in two open groups. A group of
one is a local step: it is over once it is formed, whether or not it is reported as done.
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
                f"worker {worker} leaves during group {format_group(self._group_of[worker])}",
                expected="on_done for its group before on_leave",
                fix="report the group as done with ok=False first",
            )
        self._workers.remove(worker)
        self._waiting.discard(worker)

    def wait(self, worker: Worker) -> None:
        """Register that a worker waits for a group."""
        self.check(worker)
        if worker in self._waiting or worker in self._group_of:
            raise PolicyError(
                f"worker {worker} asks for a group before its last one is done",
                expected="one report per worker and step",
                fix="wait for the group of the first report before reporting again",
            )
        self._waiting.add(worker)

    def open(self, members: Iterable[Worker], why: str) -> Group:
        """Open a group: its members no longer wait, and are in no other group until it closes."""
        group = Group(tuple(sorted(members)), why)
        self._waiting.difference_update(group.members)
        if len(group.members) > 1:
            for member in group.members:
                assert member not in self._group_of, f"{member} is in two open groups"
                self._group_of[member] = group
        return group

    def close(self, group: Group) -> None:
        """Close a group of two or more, whether it has averaged or failed."""
        if not group.members or self._group_of.get(group.members[0]) != group:
            raise PolicyError(
                f"group {format_group(group)} is done, but is not open",
                expected="one on_done per group that the policy returned, with the same members",
                fix="report a group as done once",
            )
        for member in group.members:
            del self._group_of[member]

    def check(self, worker: Worker) -> None:
        """Raise PolicyError if a worker has not joined."""
        if worker not in self._workers:
            raise PolicyError(
                f"worker {worker} has not joined",
                expected="on_join before any other call for a worker",
                fix="call on_join for it first",
            )

    def is_waiting(self, worker: Worker) -> bool:
        return worker in self._waiting

    def is_in_group(self, worker: Worker) -> bool:
        return worker in self._group_of

    def workers(self) -> list[Worker]:
        return sorted(self._workers)


def format_group(group: Group) -> str:
    return "{" + ", ".join(map(str, group.members)) + "}"
