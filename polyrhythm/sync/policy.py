"""The policy interface, and the records that policies share: a roster and a ledger of groups.

A policy decides for the workers of one stage, with one method per event. It has no clock, no
threads and no hidden randomness: `now` is an argument, groups are returned, and `next_timer` is
when to call `on_timer` if nothing else happens. For each ready report (or request, if the policy
takes requests) a worker gets exactly one group, and is in no other until that group is done.

A policy can rely on this:
- `on_join` is the first call for a worker. `on_ready` always follows `on_request` for a policy that
  overrides `on_request`, perhaps at once; other policies get no requests.
- A group of two or more is done exactly once. After `ok=False` its members report again, as if for
  the first time: members that were ready at once, the others when they are ready, and a skipped
  member with its next step. An update that was not averaged is reported again, and must not count
  twice.
- A group of one is a local step, and done at once: whether `on_done` is called for it makes no
  difference, and its worker may report again right after.
- A worker that leaves is in no group: its groups are done before, with `ok=False`, and so are those
  that the policy forms with it meanwhile. It may come back: `on_join` in another incarnation, or
  `on_return` in the same one, after a wait that timed out or after a global average of its stage.
  For a global average all workers leave before one returns (if it fails, some may have stayed).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from polyrhythm.errors import PolicyError
from polyrhythm.sync.snapshot import register_state
from polyrhythm.types import Group, Seconds, Worker

MAX_NAMED = 4  # a reason names at most this many missing workers


class Policy:
    """Base class; every method does nothing unless a policy overrides it."""

    def on_join(self, worker: Worker, node: str, now: Seconds) -> list[Group]:
        """A worker joins; `node` is the machine it runs on."""
        return []

    def on_return(self, worker: Worker, node: str, now: Seconds) -> list[Group]:
        """A worker that left returns in the same incarnation; most policies treat it as a join."""
        return self.on_join(worker, node, now)

    def on_request(self, worker: Worker, now: Seconds) -> list[Group]:
        """A worker starts a step, at the end of which it will need a group (Prague)."""
        return []

    def on_ready(self, worker: Worker, now: Seconds) -> list[Group]:
        """A worker has updated its weights and can average at once (SDPipe)."""
        return []

    def on_done(self, group: Group, ok: bool, now: Seconds) -> list[Group]:
        """A group has averaged (`ok`) or failed."""
        return []

    def on_timer(self, now: Seconds) -> list[Group]:
        """The time `next_timer` is reached."""
        return []

    def on_leave(self, worker: Worker, now: Seconds) -> list[Group]:
        """A worker leaves; its groups are done before."""
        return []

    def next_timer(self) -> Seconds:
        """Time at which to call `on_timer` if nothing happens before; inf for never."""
        return math.inf


@dataclass(slots=True)
class Roster:
    """Which workers of a stage are present, which are ready, and whether all are.

    A job starts with workers that join one after another. "All" means the announced number until
    that many are present at once; from then on it means the present workers, so that a worker that
    left or died is not waited for, and a late one counts from its join. A worker that never joins
    is waited for until `startup_timeout` seconds after the first join. (The workers of SDPipe and
    Prague are present from start to end.)
    """

    num_workers: int  # announced
    startup_timeout: Seconds = 60.0  # longest wait of the first worker for the last
    present: dict[Worker, None] = field(default_factory=dict, init=False)
    ready: dict[Worker, Seconds] = field(default_factory=dict, init=False)  # times, ascending
    assembly_deadline: Seconds = field(default=math.inf, init=False)  # -inf once assembled

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise PolicyError(
                f"num_workers={self.num_workers}",
                expected="at least one worker per stage",
                fix="pass the number of pipelines",
            )
        if not self.startup_timeout >= 0:
            raise PolicyError(
                f"startup_timeout={self.startup_timeout:g}",
                expected="0 seconds or more",
                fix="use 0 to start with the workers that are present",
            )

    def join(self, worker: Worker, now: Seconds) -> None:
        if worker in self.present:
            raise _joins_twice(worker)
        if not self.present and self.assembly_deadline == math.inf:
            self.assembly_deadline = now + self.startup_timeout
        self.present[worker] = None
        if len(self.present) >= self.num_workers:
            self.assembly_deadline = -math.inf

    def add_ready(self, worker: Worker, now: Seconds) -> None:
        if worker not in self.present:
            raise _has_not_joined(worker)
        if worker in self.ready:
            raise PolicyError(
                f"worker {worker} is already ready, since t={self.ready[worker]:g}s",
                expected="one ready report per worker and step",
                fix="wait for the group of the first report before reporting again",
            )
        self.ready[worker] = now

    def leave(self, worker: Worker) -> None:
        if worker not in self.present:
            raise _has_not_joined(worker)
        del self.present[worker]
        self.ready.pop(worker, None)

    def is_assembling(self, now: Seconds) -> bool:
        if now >= self.assembly_deadline:
            self.assembly_deadline = -math.inf
        return self.assembly_deadline > -math.inf

    def all_ready(self, now: Seconds) -> bool:
        """Whether all workers are ready, and at least one is."""
        num_ready = len(self.ready)
        if not num_ready or num_ready < len(self.present):
            return False
        return num_ready >= self.num_workers or not self.is_assembling(now)

    def next_timer(self) -> Seconds:
        """Time at which the ready workers become all workers if nothing happens; inf for never."""
        waits = self.assembly_deadline > -math.inf and 0 < len(self.ready) == len(self.present)
        return self.assembly_deadline if waits else math.inf

    def next_assembly_deadline(self) -> Seconds:
        """Time from which ready workers no longer wait for missing ones; inf for never."""
        waits = self.ready and self.assembly_deadline > -math.inf
        return self.assembly_deadline if waits else math.inf

    def pop_ready(self) -> tuple[Worker, ...]:
        """Remove and return all ready workers, sorted: every member then has the same tuple."""
        members = tuple(sorted(self.ready))
        self.ready.clear()
        return members

    def waiting_since(self) -> Seconds:
        """Time at which the first ready worker became ready; inf if none is."""
        return next(iter(self.ready.values()), math.inf)


class RosterPolicy(Policy, ABC):
    """A policy that keeps a roster, and releases the groups that are due."""

    _roster: Roster

    def on_join(self, worker: Worker, node: str, now: Seconds) -> list[Group]:
        self._roster.join(worker, now)
        return []

    def on_ready(self, worker: Worker, now: Seconds) -> list[Group]:
        self._roster.add_ready(worker, now)
        return self._release(now)

    def on_timer(self, now: Seconds) -> list[Group]:
        return self._release(now)

    def on_leave(self, worker: Worker, now: Seconds) -> list[Group]:
        self._roster.leave(worker)
        return self._release(now)

    @abstractmethod
    def _release(self, now: Seconds) -> list[Group]:
        """Return the groups that are due."""


@dataclass(slots=True)
class GroupLedger:
    """Which workers are present, which wait for a group, and which groups are open.

    It refuses calls that violate these facts (a report from an unknown worker, a second report, the
    end of a group that was never formed); a worker is never in two open groups. A group of one is a
    local step: it is over once it is formed, whether or not it is reported as done.
    """

    _workers: set[Worker] = field(default_factory=set, init=False)
    _waiting: set[Worker] = field(default_factory=set, init=False)
    _group_of: dict[Worker, Group] = field(default_factory=dict, init=False)

    def join(self, worker: Worker) -> None:
        if worker in self._workers:
            raise _joins_twice(worker)
        self._workers.add(worker)

    def leave(self, worker: Worker) -> None:
        self.check(worker)
        if worker in self._group_of:
            raise PolicyError(
                f"worker {worker} leaves during group {_format_group(self._group_of[worker])}",
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
                f"group {_format_group(group)} is done, but is not open",
                expected="one on_done per group that the policy returned, with the same members",
                fix="report a group as done once",
            )
        for member in group.members:
            del self._group_of[member]

    def check(self, worker: Worker) -> None:
        """Raise PolicyError if a worker has not joined."""
        if worker not in self._workers:
            raise _has_not_joined(worker)

    def is_waiting(self, worker: Worker) -> bool:
        return worker in self._waiting

    def is_in_group(self, worker: Worker) -> bool:
        return worker in self._group_of

    def workers(self) -> list[Worker]:
        return sorted(self._workers)


def format_workers(workers: Sequence[Worker]) -> str:
    return format_items([str(worker) for worker in workers])


def format_items(texts: Sequence[str]) -> str:
    """List the first `MAX_NAMED` texts and the number of the others."""
    named = " ".join(texts[:MAX_NAMED])
    return named + (f" and {len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else "")


def _format_group(group: Group) -> str:
    return "{" + ", ".join(map(str, group.members)) + "}"


def _joins_twice(worker: Worker) -> PolicyError:
    return PolicyError(
        f"worker {worker} joins twice",
        expected="one join per worker, until it leaves",
        fix="report that it left before it joins again",
    )


def _has_not_joined(worker: Worker) -> PolicyError:
    return PolicyError(
        f"worker {worker} has not joined",
        expected="on_join before any other call for a worker",
        fix="call on_join for it first",
    )


register_state(Roster, GroupLedger)
