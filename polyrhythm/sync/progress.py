"""Progress: sees every group of a policy through, from its members' lines to commit or abort.

A group is assigned when it comes first in all its members' lines. It commits when all members say
Done. It is given up when one of them fails, dies or leaves, or when its time is over; members that
were ready are then ready again, for another group with another id, and go on alone when too many
groups of one step have failed. A group of one averages nothing and waits for no line: its worker is
told to go on. A worker is in the hands of the policy of its stage, or, while it gathers, of the
gathering of its stage (`gathering.py`); all this is the same for both.

Source: none; in SDPipe and Prague nobody is told whether a group has averaged.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from polyrhythm.sync.deadlines import Deadlines, Limits
from polyrhythm.sync.entering import Entering
from polyrhythm.sync.gathering import Gathering
from polyrhythm.sync.lines import Lines
from polyrhythm.sync.member import Assigned, Decider, Life, Member
from polyrhythm.sync.membership import Membership
from polyrhythm.sync.messages import Abort, Assign, Command, Commit, Skip
from polyrhythm.sync.policy import Policy
from polyrhythm.sync.waits import Wait, Waits
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
        self._membership, self._limits = membership, limits
        self._entering = Entering()
        self._timers: list[Seconds] = []  # of all deciders
        self._policies = [self._decider(policy) for policy in policies]
        self._gatherings = [self._decider(Gathering(limits.gathering)) for _ in policies]
        self._first_timer = min(self._timers)
        for member in membership.members.values():
            member.decider = self._policies[member.worker.stage]
        self._waits = Waits()
        self._early: list[Member] = []  # those who told of a step before the last one ended

    def next_timer(self) -> Seconds:
        return min(self.lines.next_due(), self._waits.next_end(), self._first_timer)

    def fire(self) -> None:
        """Do what is due: deadlines, then the timers of policies, by stage, then of gatherings."""
        for assigned in self.lines.overdue(self.now):
            slow = " ".join(map(str, sorted(assigned.unready or assigned.pending)))
            if assigned.unready:
                for worker in assigned.unready:  # it asks again when it is ready after all
                    self._membership.members[worker].has_asked = False
                assigned.decider.readiness.missed()
                reason = f"{slow} not ready within {self.now - assigned.opened:.3g} s"
            else:
                assigned.decider.deadlines.missed()
                reason = f"{slow} not done within {self.now - assigned.started:.3g} s"
            self.fail(assigned, reason)
        for decider in (*self._policies, *self._gatherings):
            if self._timers[decider.timer] <= self.now:
                self._accept(decider, decider.policy.on_timer(self.now))
        while self._waits.next_end() <= self.now:
            self._send_on(self._waits.take_next())

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
            if member.stops:
                self.gather(member)
        for entered in self._entering.entered():
            self.enter(entered)

    def enter(self, member: Member) -> None:
        """A worker counts from now on."""
        if member.has_entered:
            return
        member.has_entered = True
        self._entering.forget(member)
        stage = member.worker.stage
        for decider in (self._gatherings[stage], self._policies[stage]):
            self._accept(decider, decider.policy.on_join(member.worker, member.node, self.now))

    def enter_after(self, member: Member, source: Member, clock: int) -> None:
        """It counts from when another one has ended the step of a clock."""
        if member.has_entered:  # when the one that it copied from before had ended a step
            self.drop(member, "the one that it copied from is gone")
        self._entering.wait(member, source, clock)

    def rest(self, member: Member) -> None:
        """A worker has nothing to do for now: nobody is to wait for it, as when it gathers."""
        if member.rests or member.is_ready or member.stops or not member.has_entered:
            return
        head = member.line[0] if member.line else None
        if head is None or member.worker in head.unready or not head.is_open:
            member.end_step()
            member.stops = True
            left_behind = self._empty_line(member, f"{member.worker} has nothing to do")
            member.stops, member.rests = False, True
            self._exit(member, member.decider)
            self._again(left_behind)

    def _wake(self, member: Member) -> None:
        if member.rests:
            member.rests = False
            self._return(member)

    def ask(self, member: Member) -> None:
        """A worker wants a group at the end of its step."""
        decider = member.decider
        self._wake(member)
        if decider.asks_ahead:
            self.enter(member)
        member.has_asked = member.is_ready or decider.asks_ahead
        if decider.asks_ahead:
            self._accept(decider, decider.policy.on_request(member.worker, self.now))

    def begin(self, member: Member) -> None:
        """A local update is made: the worker wants to average now."""
        member.clock, member.is_ready, member.step_end = member.heard, True, None
        if not member.active:
            missing = self._membership.missing(member)
            self._skip(member, f"its pipeline is not whole: {missing}", failed=True)
            return
        self._enter_whole(member)
        self._wake(member)
        self._offer(member)
        head = member.line[0] if member.line else None
        if head is not None and member.worker in head.unready:
            head.unready.remove(member.worker)
            if not head.unready:
                self._start(head)

    def gather(self, member: Member) -> None:
        """A worker has stopped: it leaves its policy, and is ready to average with all others.

        A step that it waits for, and an open group that it only answers to, end before that. A
        group that waits for it to be ready would wait in vain.
        """
        member.stops = True
        if member.is_ready:
            return
        if member.active:
            self._enter_whole(member)
        member.end_step()
        member.step_end = None
        head = member.line[0] if member.line else None
        answers = head is not None and head.is_open and member.worker not in head.unready
        left_behind = self._empty_line(member, f"{member.worker} gathers", down_to=int(answers))
        if not answers:
            member.stops = False
            if member.active:
                self._leave_policy(member)
                member.decider = self._gatherings[member.worker.stage]
        self._again(left_behind)
        if not answers:
            self.begin(member)

    def done(self, member: Member, assigned: Assigned) -> None:
        """A member has the average."""
        assigned.pending.remove(member.worker)
        if assigned.pending:
            return
        self.counters["committed"] += 1
        if not assigned.unready:
            assigned.decider.deadlines.made(self.now - assigned.started)
        ends = tuple([other.clock if other.is_ready else -1 for other in assigned.members])
        commit = Commit(assigned.gid, assigned.group.members, ends)
        self._tell_the_end(assigned, commit)
        for other in _concerned(assigned):
            if other.is_ready:
                other.step_end = commit
            self._end_step(other)
        self._close(assigned, ok=True)

    def fail(self, assigned: Assigned, reason: str) -> None:
        """A group has failed; those who were ready try another one, unless too many have failed."""
        self._give_up(assigned, reason)
        concerned = _concerned(assigned)
        for member in concerned:
            member.failures += member.is_ready
        most = max((member.failures for member in concerned), default=0)
        for member in concerned:
            if assigned.decider.is_gathering:  # all go on, or none: who came last would be alone
                member.failures = most
            if member.failures > self._limits.retries and not member.line:
                why = f"{member.failures} groups failed, the last one: {reason}"
                self._skip(member, why, failed=True)
        self._again(concerned)

    def drop(self, member: Member, reason: str) -> None:
        """A worker is active no more; its groups are given up before the policy hears of it."""
        was_ready, stopped = member.is_ready, member.stops
        member.end_step()
        member.stops = True
        left_behind = self._empty_line(member, reason)
        member.stops = stopped
        if member.has_entered:
            if not member.decider.is_gathering:  # else it has left its policy before
                self._leave_policy(member)
            self._exit(member, self._gatherings[member.worker.stage])
        self._entering.forget(member)
        member.has_entered = False
        member.decider = self._policies[member.worker.stage]
        if was_ready and member.life is Life.ALIVE:
            self._skip(member, reason, failed=True)
        self._again(left_behind)

    def _decider(self, policy: Policy) -> Decider:
        asks_ahead = type(policy).on_request is not Policy.on_request
        is_gathering = isinstance(policy, Gathering)
        self._timers.append(policy.next_timer())
        timer = len(self._timers) - 1
        limits = self._limits
        deadlines = Deadlines(limits.slower, limits.floor, limits.ceiling, limits.ceiling)
        readiness = Deadlines(limits.slower, limits.floor, limits.readiness, limits.readiness)
        patience = None
        if limits.waiting < math.inf:
            # By the quickest step: others may contain such waits, and patience would feed itself.
            most = max(limits.waiting, limits.readiness)
            patience = Deadlines(limits.steps, limits.waiting, most, limits.waiting, usual=min)
        return Decider(policy, deadlines, readiness, patience, asks_ahead, is_gathering, timer)

    def _enter_whole(self, member: Member) -> None:
        """A step of a pipeline needs all its stages: they have copied what they wanted to."""
        if not member.has_entered:
            for fellow in self._membership.pipeline(member):
                if fellow.active:
                    self.enter(fellow)

    def _return(self, member: Member) -> None:
        """A worker is back in its policy, in the same life."""
        groups = member.decider.policy.on_return(member.worker, member.node, self.now)
        self._accept(member.decider, groups)

    def _leave_policy(self, member: Member) -> None:
        if not member.rests:
            self._exit(member, member.decider)
        member.rests = False

    def _exit(self, member: Member, decider: Decider) -> None:
        """The policy hears that a worker is gone; a group of one that it gave out is void."""
        self._accept(decider, decider.policy.on_leave(member.worker, self.now))
        member.alone = None

    def _empty_line(self, member: Member, reason: str, down_to: int = 0) -> dict[Member, None]:
        """Give up the groups of a worker that stops, but the first ones; who was in them."""
        left_behind: dict[Member, None] = {}
        while len(member.line) > down_to:  # the end of one may be the beginning of another
            last = member.line[-1]
            self._give_up(last, reason)
            left_behind.update(dict.fromkeys(_concerned(last)))
        return left_behind

    def _offer(self, member: Member) -> None:
        """Tell the policy that a worker is ready; if it has not asked ahead, it asks now."""
        if not member.has_asked:
            self.ask(member)
        if member.alone is not None:
            self._go_alone(member)
        if member.is_ready:
            decider = member.decider
            self._accept(decider, decider.policy.on_ready(member.worker, self.now))
            if decider.patience is not None:
                self._waits.add(member, self.now, decider.patience.current)

    def _send_on(self, wait: Wait) -> None:
        """Take a worker out of its policy, and back in: it goes on alone, and waits for nobody."""
        member = wait.member
        self._skip(member, f"no group within {wait.patience:.3g} s", failed=True)
        self._exit(member, member.decider)
        self._return(member)

    def _accept(self, decider: Decider, groups: Iterable[Group]) -> None:
        """Put new groups in line, and open those whose turn it is; after every call of a policy."""
        for group in groups:
            members = [self._membership.members[worker] for worker in group.members]
            if len(members) > 1:
                self._open_if_first(self.lines.add(group, members, decider))
                continue
            members[0].alone = group
            if members[0].is_ready:
                self._go_alone(members[0])
        timer = decider.policy.next_timer()
        if timer != self._timers[decider.timer]:
            self._timers[decider.timer] = timer
            self._first_timer = min(self._timers)

    def _go_alone(self, member: Member) -> None:
        group, decider = member.alone, member.decider
        assert group is not None, f"{member.worker} has a group of one"
        policy = decider.policy
        self._skip(member, group.why, failed=isinstance(policy, Gathering) and policy.has_others)
        self._accept(decider, policy.on_done(group, True, self.now))

    def _open_if_first(self, assigned: Assigned) -> None:
        if assigned.is_open or not self.lines.is_first(assigned):
            return
        assigned.is_open, assigned.opened = True, self.now
        for member in assigned.members:
            if member.has_asked and not member.is_ready:
                assigned.unready.add(member.worker)
        epoch, deadline = self._membership.epoch, assigned.decider.deadlines.current
        members, why = assigned.group
        weights = (1 / len(members),) * len(members)
        lives = tuple([member.incarnation for member in assigned.members])
        assign = Assign(assigned.gid, epoch, members, weights, lives, deadline, why)
        assigned.assign = assign
        self.out.append(assign)
        if assigned.unready:
            self.lines.set_due(assigned, self.now + assigned.decider.longest_wait())
        else:
            self._start(assigned)

    def _start(self, assigned: Assigned) -> None:
        """Whoever has asked for the group is ready: its deadline runs."""
        assigned.started = self.now
        self.lines.set_due(assigned, self.now + assigned.decider.deadlines.current)

    def _give_up(self, assigned: Assigned, reason: str) -> None:
        if assigned.is_open:
            self.counters["aborted"] += 1
            self._tell_the_end(assigned, Abort(assigned.gid, assigned.group.members, reason))
            for member in assigned.members:
                if member.worker in assigned.pending:
                    member.crosses = assigned.gid
        self._close(assigned, ok=False)

    def _close(self, assigned: Assigned, *, ok: bool) -> None:
        """A group is over: those behind it in line may have their turn, and the policy hears."""
        self.lines.remove(assigned)
        for member in assigned.members:
            if member.line:
                self._open_if_first(member.line[0])
            if member.stops:
                self._early.append(member)
        decider = assigned.decider
        self._accept(decider, decider.policy.on_done(assigned.group, ok, self.now))

    def _again(self, members: Iterable[Member]) -> None:
        """Members of a group that is no more tell the policy again what they had told it.

        All ask before one of them is ready: so a policy finds all of them for another group.
        """
        ready = []
        for member in members:
            if not member.active or member.line:
                continue
            if member.is_ready:
                ready.append(member)
                self.ask(member)
            elif member.has_asked:
                self.ask(member)
        for member in ready:
            if member.is_ready:  # else it was told to go on alone when it asked
                self._offer(member)

    def _skip(self, member: Member, why: str, *, failed: bool) -> None:
        self.counters["skipped"] += 1
        member.step_end = Skip(member.worker, member.clock, why, failed)
        self.out.append(member.step_end)
        self._end_step(member)

    def _end_step(self, member: Member) -> None:
        """A worker goes on; if it has gathered, it is back in its policy before anything else."""
        member.end_step()
        if not member.wants:  # else it has begun its next step before
            member.began = self.now
        if member.decider.is_gathering:
            member.decider = self._policies[member.worker.stage]
            self._return(member)
        if member.ahead or member.wants or member.stops:
            self._early.append(member)

    def _tell_the_end(self, assigned: Assigned, command: Commit | Abort) -> None:
        self.out.append(command)
        for member in assigned.members:
            member.group_end = command


def _concerned(assigned: Assigned) -> list[Member]:
    """Those whose step a group ends: by contract, a ready worker in a group waits for that one."""
    unready = assigned.unready
    return [member for member in assigned.members if member.is_ready or member.worker in unready]
