"""Progress: sees every group of a policy through, from its members' lines to commit or abort.

A group is assigned when it comes first in all its members' lines. It commits when all members say
Done. It is given up when one of them fails, dies or leaves, or when its time is over; members that
were ready are then ready again, for another group with another id, and go on alone when too many
groups of one step have failed. A group of one averages nothing and waits for no line: its worker is
told to go on.

Source: none; in SDPipe and Prague nobody is told whether a group has averaged.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from polyrhythm.sync.deadlines import Deadlines, Limits
from polyrhythm.sync.lines import Lines
from polyrhythm.sync.member import Assigned, Life, Member
from polyrhythm.sync.membership import Membership
from polyrhythm.sync.messages import Abort, Assign, Command, Commit, Skip
from polyrhythm.sync.policy import Policy
from polyrhythm.types import Group, Seconds


class Progress:
    """Members come in, commands go to `out`; `now` is set by the scheduler."""

    def __init__(
        self, policies: Sequence[Policy], membership: Membership, limits: Limits, first_gid: int
    ) -> None:
        self.now: Seconds = 0.0
        self.out: list[Command] = []
        self.counters: Counter[str] = Counter()
        self.lines = Lines(first_gid)
        self._policies, self._membership, self._limits = policies, membership, limits
        self._deadlines = [Deadlines(limits) for _ in policies]
        self._asks_ahead = [type(p).on_request is not Policy.on_request for p in policies]
        self._timers = [policy.next_timer() for policy in policies]
        self._waits: deque[tuple[Seconds, int, Member]] = deque()  # until when, at which clock
        self._early: list[Member] = []  # those who told of a step before the last one ended

    def next_timer(self) -> Seconds:
        return min(self.lines.next_due(), self._next_wait(), *self._timers)

    def fire(self) -> None:
        """Do what is due: deadlines first, then the timers of policies, by stage."""
        for assigned in self.lines.overdue(self.now):
            slow = " ".join(map(str, sorted(assigned.unready or assigned.pending)))
            if assigned.unready:
                for worker in assigned.unready:  # it asks again when it is ready after all
                    self._membership.members[worker].has_asked = False
                reason = f"{slow} not ready within {self._limits.readiness:g} s"
            else:
                self._deadlines[assigned.stage].missed()
                reason = f"{slow} not done within {self.now - assigned.started:.3g} s"
            self.fail(assigned, reason)
        for stage, timer in enumerate(self._timers):
            if timer <= self.now:
                self._accept(stage, self._policies[stage].on_timer(self.now))
        while self._next_wait() <= self.now:
            self._send_on(self._waits.popleft()[2])

    def catch_up(self) -> None:
        """Go on with what workers have told before their last step was over."""
        while self._early:
            member = self._early.pop(0)
            wants, ahead = member.wants, member.ahead
            member.wants = member.ahead = False
            if member.life is not Life.ALIVE:
                continue
            if wants and member.active:
                self.ask(member)
            if ahead:
                self.begin(member)

    def welcome(self, member: Member) -> None:
        """A worker is active from now on."""
        worker, policy = member.worker, self._policies[member.worker.stage]
        self._accept(worker.stage, policy.on_join(worker, member.node, self.now))

    def ask(self, member: Member) -> None:
        """A worker wants a group at the end of its step."""
        worker, policy = member.worker, self._policies[member.worker.stage]
        member.has_asked = member.is_ready or self._asks_ahead[worker.stage]
        if self._asks_ahead[worker.stage]:
            self._accept(worker.stage, policy.on_request(worker, self.now))

    def begin(self, member: Member) -> None:
        """A local update is made: the worker wants to average now."""
        member.clock, member.is_ready, member.answer = member.heard, True, None
        if not member.active:
            self._skip(member, f"its pipeline is not whole: {self._membership.missing(member)}")
            return
        self._offer(member)
        head = member.line[0] if member.line else None
        if head is not None and member.worker in head.unready:
            head.unready.remove(member.worker)
            if not head.unready:
                self._start(head)

    def done(self, member: Member, assigned: Assigned) -> None:
        """A member has the average."""
        assigned.pending.remove(member.worker)
        if assigned.pending:
            return
        self.counters["committed"] += 1
        if not assigned.unready:
            self._deadlines[assigned.stage].made(self.now - assigned.started)
        self._tell(assigned, Commit(assigned.gid, assigned.group.members))
        for other in _concerned(assigned):
            self._end_step(other)
        self._close(assigned, ok=True)

    def fail(self, assigned: Assigned, reason: str) -> None:
        """A group has failed; those who were ready try another one, unless too many have failed."""
        self._give_up(assigned, reason)
        concerned = _concerned(assigned)
        for member in concerned:
            member.failures += member.is_ready
            if member.failures > self._limits.retries and not member.line:
                self._skip(member, f"{member.failures} groups failed, the last one: {reason}")
        self._again(concerned)

    def drop(self, member: Member, reason: str) -> None:
        """A worker is active no more; its groups are given up before the policy hears of it."""
        was_ready = member.is_ready
        member.end_step()
        left_behind: dict[Member, None] = {}
        while member.line:
            last = member.line[-1]  # the last one first, so that none is opened that has to go
            self._give_up(last, reason)
            left_behind.update(dict.fromkeys(_concerned(last)))
        worker, policy = member.worker, self._policies[member.worker.stage]
        self._accept(worker.stage, policy.on_leave(worker, self.now))
        member.alone = None
        if was_ready and member.life is Life.ALIVE:
            self._skip(member, reason)
        self._again(left_behind)

    def _offer(self, member: Member) -> None:
        """Tell the policy that a worker is ready; if it has not asked ahead, it asks now."""
        if not member.has_asked:
            self.ask(member)
        if member.alone is not None:
            self._go_alone(member)
        if member.is_ready:
            worker, policy = member.worker, self._policies[member.worker.stage]
            self._accept(worker.stage, policy.on_ready(worker, self.now))
            if self._limits.waiting < math.inf:
                self._waits.append((self.now + self._limits.waiting, member.clock, member))

    def _next_wait(self) -> Seconds:
        """When a worker will have waited too long for a policy; inf for never."""
        while self._waits:
            until, clock, member = self._waits[0]
            if member.is_ready and member.clock == clock and not member.line:
                return until
            self._waits.popleft()
        return math.inf

    def _send_on(self, member: Member) -> None:
        """Take a worker out of its policy, and back in: it goes on alone, and all is forgotten."""
        worker, policy = member.worker, self._policies[member.worker.stage]
        self._skip(member, f"no group within {self._limits.waiting:g} s")
        self._accept(worker.stage, policy.on_leave(worker, self.now))
        self.welcome(member)

    def _accept(self, stage: int, groups: Iterable[Group]) -> None:
        """Put new groups in line, and open those whose turn it is; after every call of a policy."""
        for group in groups:
            members = [self._membership.members[worker] for worker in group.members]
            if len(members) > 1:
                self._open_if_first(self.lines.add(group, members))
                continue
            members[0].alone = group
            if members[0].is_ready:
                self._go_alone(members[0])
        self._timers[stage] = self._policies[stage].next_timer()

    def _go_alone(self, member: Member) -> None:
        group, stage = member.alone, member.worker.stage
        assert group is not None, f"{member.worker} has a group of one"
        self._skip(member, group.why)
        self._accept(stage, self._policies[stage].on_done(group, True, self.now))

    def _open_if_first(self, assigned: Assigned) -> None:
        if assigned.is_open or not self.lines.is_first(assigned):
            return
        assigned.is_open = True
        for member in assigned.members:
            if member.has_asked and not member.is_ready:
                assigned.unready.add(member.worker)
        epoch, deadline = self._membership.epoch, self._deadlines[assigned.stage].current
        members, why = assigned.group
        weights = (1 / len(members),) * len(members)
        self._tell(assigned, Assign(assigned.gid, epoch, members, weights, deadline, why))
        if assigned.unready:
            self.lines.set_due(assigned, self.now + self._limits.readiness)
        else:
            self._start(assigned)

    def _start(self, assigned: Assigned) -> None:
        """Whoever has asked for the group is ready: its deadline runs."""
        assigned.started = self.now
        self.lines.set_due(assigned, self.now + self._deadlines[assigned.stage].current)

    def _give_up(self, assigned: Assigned, reason: str) -> None:
        if assigned.is_open:
            self.counters["aborted"] += 1
            self._tell(assigned, Abort(assigned.gid, assigned.group.members, reason))
        self._close(assigned, ok=False)

    def _close(self, assigned: Assigned, *, ok: bool) -> None:
        """A group is over: those behind it in line may have their turn, and the policy hears."""
        self.lines.remove(assigned)
        for member in assigned.members:
            if member.line:
                self._open_if_first(member.line[0])
        stage = assigned.stage
        self._accept(stage, self._policies[stage].on_done(assigned.group, ok, self.now))

    def _again(self, members: Iterable[Member]) -> None:
        """Members of a group that is no more tell the policy again what they had told it."""
        for member in members:
            if not member.active or member.line:
                continue
            if member.is_ready:
                member.has_asked = False
                self._offer(member)
            elif member.has_asked:
                self.ask(member)

    def _skip(self, member: Member, why: str) -> None:
        self.counters["skipped"] += 1
        member.answer = Skip(member.worker, member.clock, why)
        self.out.append(member.answer)
        self._end_step(member)

    def _end_step(self, member: Member) -> None:
        member.end_step()
        if member.ahead or member.wants:
            self._early.append(member)

    def _tell(self, assigned: Assigned, command: Command) -> None:
        self.out.append(command)
        for member in assigned.members:
            member.answer = command


def _concerned(assigned: Assigned) -> list[Member]:
    """Those whose step a group ends: by contract, a ready worker in a group waits for that one."""
    unready = assigned.unready
    return [member for member in assigned.members if member.is_ready or member.worker in unready]
