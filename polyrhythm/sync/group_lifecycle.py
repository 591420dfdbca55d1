"""Progress: sees every group of a policy through, from its members' lines to commit or abort.

A group is assigned when it comes first in all its members' lines. It commits when all members say
Done. It is given up when one of them fails, dies or leaves, or when its time is over; members that
were ready are then ready again, for another group with another id, and go on alone when too many
groups of one step have failed. A group of one averages nothing and waits for no line: its worker is
told to go on. A worker is in the hands of the policy of its stage, or, while it gathers, of the
gathering of its stage (`average_all_timeout.py`); all this is the same for both.

Source: none; in SDPipe and Prague nobody is told whether a group has averaged.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from polyrhythm.sync.average_all import AverageAllPolicy
from polyrhythm.sync.group_queue import GroupQueue
from polyrhythm.sync.group_waits import GroupWait, GroupWaits
from polyrhythm.sync.late_join import LateJoins
from polyrhythm.sync.members import GroupRound, MemberState, MemberStatus, StagePolicy
from polyrhythm.sync.membership import Membership
from polyrhythm.sync.policy import Policy
from polyrhythm.sync.protocol import Abort, Assign, Command, Commit, Skip
from polyrhythm.sync.timeouts import LearnedTimeout, Limits
from polyrhythm.types import Group, Seconds


class GroupLifecycle:
    """Members come in, commands go to `out`; `now` is set by the scheduler."""

    def __init__(
        self, policies: Sequence[Policy], membership: Membership, limits: Limits, first_gid: int
    ) -> None:
        self.now: Seconds = 0.0
        self.out: list[Command] = []
        self.counters: Counter[str] = Counter()
        self.queue = GroupQueue(first_gid)
        self._membership, self._limits = membership, limits
        self._late_joins = LateJoins()
        self._timers: list[Seconds] = []  # of all deciders
        self._policies = [self._make_stage_policy(policy) for policy in policies]
        self._average_alls = [
            self._make_stage_policy(AverageAllPolicy(limits.average_all_timeout)) for _ in policies
        ]
        self._first_timer = min(self._timers)
        for member in membership.members.values():
            member.stage_policy = self._policies[member.worker.stage]
        self._group_waits = GroupWaits()
        self._early_members: list[
            MemberState
        ] = []  # those who told of a step before the last one ended

    def next_timer(self) -> Seconds:
        return min(self.queue.next_deadline(), self._group_waits.next_deadline(), self._first_timer)

    def fire_timers(self) -> None:
        """Do what is due: deadlines, then the timers of policies, by stage, then of gatherings."""
        for group_round in self.queue.expired(self.now):
            slow = " ".join(map(str, sorted(group_round.unready or group_round.pending)))
            if group_round.unready:
                for worker in group_round.unready:  # it asks again when it is ready after all
                    self._membership.members[worker].has_requested = False
                group_round.stage_policy.ready_timeout.record_timeout()
                reason = f"{slow} not ready within {self.now - group_round.opened:.3g} s"
            else:
                group_round.stage_policy.average_timeout.record_timeout()
                reason = f"{slow} not done within {self.now - group_round.started:.3g} s"
            self.fail(group_round, reason)
        for stage_policy in (*self._policies, *self._average_alls):
            if self._timers[stage_policy.timer] <= self.now:
                self._accept(stage_policy, stage_policy.policy.on_timer(self.now))
        while self._group_waits.next_deadline() <= self.now:
            self._skip_waiting(self._group_waits.pop_next())

    def handle_early(self) -> None:
        """Go on with what workers have told before their last step was over."""
        while self._early_members:
            member = self._early_members.pop(0)
            wants, ahead = member.has_early_request, member.has_early_ready
            member.has_early_request = member.has_early_ready = False
            if member.status is not MemberStatus.ALIVE:
                continue
            if wants and member.is_active:
                self.request_group(member)
            if ahead:
                self.mark_ready(member)
            if member.is_stopping:
                self.average_all(member)
        for joinable in self._late_joins.joinable():
            self.join_policy(joinable)

    def join_policy(self, member: MemberState) -> None:
        """A worker counts from now on."""
        if member.has_joined:
            return
        member.has_joined = True
        self._late_joins.forget(member)
        stage = member.worker.stage
        for stage_policy in (self._average_alls[stage], self._policies[stage]):
            self._accept(
                stage_policy, stage_policy.policy.on_join(member.worker, member.node, self.now)
            )

    def join_policy_after(self, member: MemberState, source: MemberState, clock: int) -> None:
        """It counts from when another one has ended the step of a clock."""
        if member.has_joined:  # when the one that it copied from before had ended a step
            self.drop(member, "the one that it copied from is gone")
        self._late_joins.wait(member, source, clock)

    def set_idle(self, member: MemberState) -> None:
        """A worker has nothing to do for now: nobody is to wait for it, as when it gathers."""
        if member.is_idle or member.is_ready or member.is_stopping or not member.has_joined:
            return
        head = member.queue[0] if member.queue else None
        if head is None or member.worker in head.unready or not head.is_open:
            member.end_step()
            member.is_stopping = True
            remaining = self._drain_queue(member, f"{member.worker} has nothing to do")
            member.is_stopping, member.is_idle = False, True
            self._exit(member, member.stage_policy)
            self._resubmit(remaining)

    def _clear_idle(self, member: MemberState) -> None:
        if member.is_idle:
            member.is_idle = False
            self._rejoin_policy(member)

    def request_group(self, member: MemberState) -> None:
        """A worker wants a group at the end of its step."""
        stage_policy = member.stage_policy
        self._clear_idle(member)
        if stage_policy.asks_ahead:
            self.join_policy(member)
        member.has_requested = member.is_ready or stage_policy.asks_ahead
        if stage_policy.asks_ahead:
            self._accept(stage_policy, stage_policy.policy.on_request(member.worker, self.now))

    def mark_ready(self, member: MemberState) -> None:
        """A local update is made: the worker wants to average now."""
        member.clock, member.is_ready, member.step_end = member.reported_clock, True, None
        if not member.is_active:
            missing = self._membership.missing(member)
            self._skip(member, f"its pipeline is not whole: {missing}", failed=True)
            return
        self._join_pipeline(member)
        self._clear_idle(member)
        self._submit_ready(member)
        head = member.queue[0] if member.queue else None
        if head is not None and member.worker in head.unready:
            head.unready.remove(member.worker)
            if not head.unready:
                self._start(head)

    def average_all(self, member: MemberState) -> None:
        """A worker has stopped: it leaves its policy, and is ready to average with all others.

        A step that it waits for, and an open group that it only answers to, end before that. A
        group that waits for it to be ready would wait in vain.
        """
        member.is_stopping = True
        if member.is_ready:
            return
        if member.is_active:
            self._join_pipeline(member)
        member.end_step()
        member.step_end = None
        head = member.queue[0] if member.queue else None
        answers = head is not None and head.is_open and member.worker not in head.unready
        remaining = self._drain_queue(member, f"{member.worker} gathers", down_to=int(answers))
        if not answers:
            member.is_stopping = False
            if member.is_active:
                self._leave_policy(member)
                member.stage_policy = self._average_alls[member.worker.stage]
        self._resubmit(remaining)
        if not answers:
            self.mark_ready(member)

    def done(self, member: MemberState, group_round: GroupRound) -> None:
        """A member has the average."""
        group_round.pending.remove(member.worker)
        if group_round.pending:
            return
        self.counters["committed"] += 1
        if not group_round.unready:
            group_round.stage_policy.average_timeout.record(self.now - group_round.started)
        end_clocks = tuple([other.clock if other.is_ready else -1 for other in group_round.members])
        commit = Commit(group_round.gid, group_round.group.members, end_clocks)
        self._send_end(group_round, commit)
        for other in _waiting_members(group_round):
            if other.is_ready:
                other.step_end = commit
            self._end_step(other)
        self._close(group_round, ok=True)

    def fail(self, group_round: GroupRound, reason: str) -> None:
        """A group has failed; those who were ready try another one, unless too many have failed."""
        self._abort(group_round, reason)
        concerned = _waiting_members(group_round)
        for member in concerned:
            member.num_failures += member.is_ready
        most = max((member.num_failures for member in concerned), default=0)
        for member in concerned:
            if (
                group_round.stage_policy.is_average_all
            ):  # all go on, or none: who came last would be alone
                member.num_failures = most
            if member.num_failures > self._limits.max_retries and not member.queue:
                why = f"{member.num_failures} groups failed, the last one: {reason}"
                self._skip(member, why, failed=True)
        self._resubmit(concerned)

    def drop(self, member: MemberState, reason: str) -> None:
        """A worker is active no more; its groups are given up before the policy hears of it."""
        was_ready, stopped = member.is_ready, member.is_stopping
        member.end_step()
        member.is_stopping = True
        remaining = self._drain_queue(member, reason)
        member.is_stopping = stopped
        if member.has_joined:
            if not member.stage_policy.is_average_all:  # else it has left its policy before
                self._leave_policy(member)
            self._exit(member, self._average_alls[member.worker.stage])
        self._late_joins.forget(member)
        member.has_joined = False
        member.stage_policy = self._policies[member.worker.stage]
        if was_ready and member.status is MemberStatus.ALIVE:
            self._skip(member, reason, failed=True)
        self._resubmit(remaining)

    def _make_stage_policy(self, policy: Policy) -> StagePolicy:
        asks_ahead = type(policy).on_request is not Policy.on_request
        is_average_all = isinstance(policy, AverageAllPolicy)
        self._timers.append(policy.next_timer())
        timer = len(self._timers) - 1
        limits = self._limits
        average_timeout = LearnedTimeout(
            limits.timeout_factor, limits.floor, limits.ceiling, limits.ceiling
        )
        ready_timeout = LearnedTimeout(
            limits.timeout_factor, limits.floor, limits.ready_timeout, limits.ready_timeout
        )
        wait_timeout = None
        if limits.group_timeout < math.inf:
            # By the quickest step: others may contain such waits, and patience would feed itself.
            most = max(limits.group_timeout, limits.ready_timeout)
            wait_timeout = LearnedTimeout(
                limits.group_timeout_steps,
                limits.group_timeout,
                most,
                limits.group_timeout,
                usual=min,
            )
        return StagePolicy(
            policy, average_timeout, ready_timeout, wait_timeout, asks_ahead, is_average_all, timer
        )

    def _join_pipeline(self, member: MemberState) -> None:
        """A step of a pipeline needs all its stages: they have copied what they wanted to."""
        if not member.has_joined:
            for fellow in self._membership.pipeline(member):
                if fellow.is_active:
                    self.join_policy(fellow)

    def _rejoin_policy(self, member: MemberState) -> None:
        """A worker is back in its policy, in the same life."""
        groups = member.stage_policy.policy.on_return(member.worker, member.node, self.now)
        self._accept(member.stage_policy, groups)

    def _leave_policy(self, member: MemberState) -> None:
        if not member.is_idle:
            self._exit(member, member.stage_policy)
        member.is_idle = False

    def _exit(self, member: MemberState, stage_policy: StagePolicy) -> None:
        """The policy hears that a worker is gone; a group of one that it gave out is void."""
        self._accept(stage_policy, stage_policy.policy.on_leave(member.worker, self.now))
        member.solo_group = None

    def _drain_queue(
        self, member: MemberState, reason: str, down_to: int = 0
    ) -> dict[MemberState, None]:
        """Give up the groups of a worker that stops, but the first ones; who was in them."""
        remaining: dict[MemberState, None] = {}
        while len(member.queue) > down_to:  # the end of one may be the beginning of another
            last = member.queue[-1]
            self._abort(last, reason)
            remaining.update(dict.fromkeys(_waiting_members(last)))
        return remaining

    def _submit_ready(self, member: MemberState) -> None:
        """Tell the policy that a worker is ready; if it has not asked ahead, it asks now."""
        if not member.has_requested:
            self.request_group(member)
        if member.solo_group is not None:
            self._finish_solo(member)
        if member.is_ready:
            stage_policy = member.stage_policy
            self._accept(stage_policy, stage_policy.policy.on_ready(member.worker, self.now))
            if stage_policy.wait_timeout is not None:
                self._group_waits.add(member, self.now, stage_policy.wait_timeout.current)

    def _skip_waiting(self, wait: GroupWait) -> None:
        """Take a worker out of its policy, and back in: it goes on alone, and waits for nobody."""
        member = wait.member
        self._skip(member, f"no group within {wait.wait_timeout:.3g} s", failed=True)
        self._exit(member, member.stage_policy)
        self._rejoin_policy(member)

    def _accept(self, stage_policy: StagePolicy, groups: Iterable[Group]) -> None:
        """Put new groups in line, and open those whose turn it is; after every call of a policy."""
        for group in groups:
            members = [self._membership.members[worker] for worker in group.members]
            if len(members) > 1:
                self._open_if_first(self.queue.add(group, members, stage_policy))
                continue
            members[0].solo_group = group
            if members[0].is_ready:
                self._finish_solo(members[0])
        timer = stage_policy.policy.next_timer()
        if timer != self._timers[stage_policy.timer]:
            self._timers[stage_policy.timer] = timer
            self._first_timer = min(self._timers)

    def _finish_solo(self, member: MemberState) -> None:
        group, stage_policy = member.solo_group, member.stage_policy
        assert group is not None, f"{member.worker} has a group of one"
        policy = stage_policy.policy
        self._skip(
            member, group.why, failed=isinstance(policy, AverageAllPolicy) and policy.has_others
        )
        self._accept(stage_policy, policy.on_done(group, True, self.now))

    def _open_if_first(self, group_round: GroupRound) -> None:
        if group_round.is_open or not self.queue.is_first(group_round):
            return
        group_round.is_open, group_round.opened = True, self.now
        for member in group_round.members:
            if member.has_requested and not member.is_ready:
                group_round.unready.add(member.worker)
        epoch, timeout = self._membership.epoch, group_round.stage_policy.average_timeout.current
        members, why = group_round.group
        weights = (1 / len(members),) * len(members)
        incarnations = tuple([member.incarnation for member in group_round.members])
        assign = Assign(group_round.gid, epoch, members, weights, incarnations, timeout, why)
        group_round.assign = assign
        self.out.append(assign)
        if group_round.unready:
            self.queue.set_deadline(
                group_round, self.now + group_round.stage_policy.max_ready_wait()
            )
        else:
            self._start(group_round)

    def _start(self, group_round: GroupRound) -> None:
        """Whoever has asked for the group is ready: its deadline runs."""
        group_round.started = self.now
        self.queue.set_deadline(
            group_round, self.now + group_round.stage_policy.average_timeout.current
        )

    def _abort(self, group_round: GroupRound, reason: str) -> None:
        if group_round.is_open:
            self.counters["aborted"] += 1
            self._send_end(group_round, Abort(group_round.gid, group_round.group.members, reason))
            for member in group_round.members:
                if member.worker in group_round.pending:
                    member.aborted_gid = group_round.gid
        self._close(group_round, ok=False)

    def _close(self, group_round: GroupRound, *, ok: bool) -> None:
        """A group is over: those behind it in line may have their turn, and the policy hears."""
        self.queue.remove(group_round)
        for member in group_round.members:
            if member.queue:
                self._open_if_first(member.queue[0])
            if member.is_stopping:
                self._early_members.append(member)
        stage_policy = group_round.stage_policy
        self._accept(stage_policy, stage_policy.policy.on_done(group_round.group, ok, self.now))

    def _resubmit(self, members: Iterable[MemberState]) -> None:
        """Members of a group that is no more tell the policy again what they had told it.

        All ask before one of them is ready: so a policy finds all of them for another group.
        """
        ready = []
        for member in members:
            if not member.is_active or member.queue:
                continue
            if member.is_ready:
                ready.append(member)
                self.request_group(member)
            elif member.has_requested:
                self.request_group(member)
        for member in ready:
            if member.is_ready:  # else it was told to go on alone when it asked
                self._submit_ready(member)

    def _skip(self, member: MemberState, why: str, *, failed: bool) -> None:
        self.counters["skipped"] += 1
        member.step_end = Skip(member.worker, member.clock, why, failed)
        self.out.append(member.step_end)
        self._end_step(member)

    def _end_step(self, member: MemberState) -> None:
        """A worker goes on; if it has gathered, it is back in its policy before anything else."""
        member.end_step()
        if not member.has_early_request:  # else it has begun its next step before
            member.began = self.now
        if member.stage_policy.is_average_all:
            member.stage_policy = self._policies[member.worker.stage]
            self._rejoin_policy(member)
        if member.has_early_ready or member.has_early_request or member.is_stopping:
            self._early_members.append(member)

    def _send_end(self, group_round: GroupRound, command: Commit | Abort) -> None:
        self.out.append(command)
        for member in group_round.members:
            member.group_end = command


def _waiting_members(group_round: GroupRound) -> list[MemberState]:
    """Those whose step a group ends: by contract, a ready worker in a group waits for that one."""
    unready = group_round.unready
    return [member for member in group_round.members if member.is_ready or member.worker in unready]
