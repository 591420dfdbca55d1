"""The life cycle of a group: from the queues of its members to commit or abort.

A group is assigned when it is first in the queues of all its members. It commits when all members
send Done. It aborts when a member fails, dies or leaves, or when it times out; members that were
ready are then ready again, for another group with another id, and skip the average when too many
groups of one step have failed. A group of one averages nothing and is not queued: its worker is
sent a Skip. A worker belongs to the policy of its stage or, during a global average, to the
AverageAllPolicy of its stage (`average_all.py`); the life cycle is the same for both.

Source: none; SDPipe and Prague do not report whether a group has averaged.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from polyrhythm.sync.average_all import AverageAllPolicy
from polyrhythm.sync.group_queue import GroupQueue, GroupWait, GroupWaits
from polyrhythm.sync.members import GroupRound, MemberState, MemberStatus, StagePolicy
from polyrhythm.sync.membership import LateJoins, Membership
from polyrhythm.sync.policy import Policy
from polyrhythm.sync.protocol import Abort, Assign, Command, Commit, Skip
from polyrhythm.sync.timeouts import LearnedTimeout, Limits
from polyrhythm.types import Group, Seconds


class GroupLifecycle:
    """Drives all groups; appends commands to `out`. The scheduler sets `now`."""

    def __init__(
        self, policies: Sequence[Policy], membership: Membership, limits: Limits, first_gid: int
    ) -> None:
        self.now: Seconds = 0.0
        self.out: list[Command] = []
        self.counters: Counter[str] = Counter()
        self.queue = GroupQueue(first_gid)
        self._membership, self._limits = membership, limits
        self._late_joins = LateJoins()
        self._timers: list[Seconds] = []  # of all policies and global averages
        self._policies = [self._make_stage_policy(policy) for policy in policies]
        self._average_alls = [
            self._make_stage_policy(AverageAllPolicy(limits.average_all_timeout)) for _ in policies
        ]
        self._first_timer = min(self._timers)
        for member in membership.members.values():
            member.stage_policy = self._policies[member.worker.stage]
        self._group_waits = GroupWaits()
        self._early_members: list[MemberState] = []  # with messages that came before a step ended

    def next_timer(self) -> Seconds:
        return min(self.queue.next_deadline(), self._group_waits.next_deadline(), self._first_timer)

    def fire_timers(self) -> None:
        """Handle what is due: group deadlines, then timers of policies, then global averages."""
        for group_round in self.queue.expired(self.now):
            slow = " ".join(map(str, sorted(group_round.unready or group_round.pending)))
            if group_round.unready:
                for worker in group_round.unready:  # it requests again when it becomes ready
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
        """Handle messages that came before the last step of their sender ended."""
        while self._early_members:
            member = self._early_members.pop(0)
            has_request, has_ready = member.has_early_request, member.has_early_ready
            member.has_early_request = member.has_early_ready = False
            if member.status is not MemberStatus.ACTIVE:
                continue
            if has_request and member.is_active:
                self.request_group(member)
            if has_ready:
                self.mark_ready(member)
            if member.is_stopping:
                self.average_all(member)
        for joinable in self._late_joins.joinable():
            self.join_policy(joinable)

    def join_policy(self, member: MemberState) -> None:
        """Add a worker to the policy and the global average of its stage."""
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
        """Add a worker to its policy when `source` has ended the step of `clock`."""
        if member.has_joined:  # because its previous source had ended a step
            self.drop(member, "the worker it copied from is gone")
        self._late_joins.wait(member, source, clock)

    def set_idle(self, member: MemberState) -> None:
        """Take a worker without samples out of its policy, so that no group waits for it."""
        if member.is_idle or member.is_ready or member.is_stopping or not member.has_joined:
            return
        head = member.queue[0] if member.queue else None
        if head is None or member.worker in head.unready or not head.is_open:
            member.end_step()
            member.is_stopping = True
            remaining = self._drain_queue(member, f"{member.worker} has no samples")
            member.is_stopping, member.is_idle = False, True
            self._exit(member, member.stage_policy)
            self._resubmit(remaining)

    def _clear_idle(self, member: MemberState) -> None:
        if member.is_idle:
            member.is_idle = False
            self._rejoin_policy(member)

    def request_group(self, member: MemberState) -> None:
        """Register that a worker needs a group at the end of its step."""
        stage_policy = member.stage_policy
        self._clear_idle(member)
        if stage_policy.takes_requests:
            self.join_policy(member)
        member.has_requested = member.is_ready or stage_policy.takes_requests
        if stage_policy.takes_requests:
            self._accept(stage_policy, stage_policy.policy.on_request(member.worker, self.now))

    def mark_ready(self, member: MemberState) -> None:
        """Submit a worker that has finished its local update and can average now."""
        member.clock, member.is_ready, member.step_end = member.reported_clock, True, None
        if not member.is_active:
            missing = self._membership.missing(member)
            self._skip(member, f"its pipeline is incomplete: {missing}", failed=True)
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
        """Move a worker from its policy to the global average of its stage, as ready.

        A step that it waits for, and an open group in which it is passive, end before that. Groups
        that wait for it to become ready are aborted: it runs no further step.
        """
        member.is_stopping = True
        if member.is_ready:
            return
        if member.is_active:
            self._join_pipeline(member)
        member.end_step()
        member.step_end = None
        head = member.queue[0] if member.queue else None
        is_passive = head is not None and head.is_open and member.worker not in head.unready
        reason = f"{member.worker} waits for the global average"
        remaining = self._drain_queue(member, reason, down_to=int(is_passive))
        if not is_passive:
            member.is_stopping = False
            if member.is_active:
                self._leave_policy(member)
                member.stage_policy = self._average_alls[member.worker.stage]
        self._resubmit(remaining)
        if not is_passive:
            self.mark_ready(member)

    def done(self, member: MemberState, group_round: GroupRound) -> None:
        """Register the Done of a member; commit the group if it is the last one."""
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
        """Abort a group; its ready members try another one, unless too many have failed."""
        self._abort(group_round, reason)
        waiting = _waiting_members(group_round)
        for member in waiting:
            member.num_failures += member.is_ready
        max_failures = max((member.num_failures for member in waiting), default=0)
        for member in waiting:
            # All skip or none: else the last one would wait for the global average alone.
            if group_round.stage_policy.is_average_all:
                member.num_failures = max_failures
            if member.num_failures > self._limits.max_retries and not member.queue:
                why = f"{member.num_failures} groups failed, the last one: {reason}"
                self._skip(member, why, failed=True)
        self._resubmit(waiting)

    def drop(self, member: MemberState, reason: str) -> None:
        """Deactivate a worker: abort its groups, then take it out of its policy."""
        was_ready, was_stopping = member.is_ready, member.is_stopping
        member.end_step()
        member.is_stopping = True
        remaining = self._drain_queue(member, reason)
        member.is_stopping = was_stopping
        if member.has_joined:
            if not member.stage_policy.is_average_all:  # else it has already left its policy
                self._leave_policy(member)
            self._exit(member, self._average_alls[member.worker.stage])
        self._late_joins.forget(member)
        member.has_joined = False
        member.stage_policy = self._policies[member.worker.stage]
        if was_ready and member.status is MemberStatus.ACTIVE:
            self._skip(member, reason, failed=True)
        self._resubmit(remaining)

    def _make_stage_policy(self, policy: Policy) -> StagePolicy:
        takes_requests = type(policy).on_request is not Policy.on_request
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
            # From the shortest step: others may contain such waits, and the timeout would grow
            # by itself.
            ceiling = max(limits.group_timeout, limits.ready_timeout)
            wait_timeout = LearnedTimeout(
                limits.group_timeout_steps,
                limits.group_timeout,
                ceiling,
                limits.group_timeout,
                usual=min,
            )
        return StagePolicy(
            policy,
            average_timeout,
            ready_timeout,
            wait_timeout,
            takes_requests,
            is_average_all,
            timer,
        )

    def _join_pipeline(self, member: MemberState) -> None:
        """Let the whole pipeline join: its first step shows that all stages have copied."""
        if not member.has_joined:
            for peer in self._membership.pipeline(member):
                if peer.is_active:
                    self.join_policy(peer)

    def _rejoin_policy(self, member: MemberState) -> None:
        """Return a worker to its policy in the same incarnation."""
        groups = member.stage_policy.policy.on_return(member.worker, member.node, self.now)
        self._accept(member.stage_policy, groups)

    def _leave_policy(self, member: MemberState) -> None:
        if not member.is_idle:
            self._exit(member, member.stage_policy)
        member.is_idle = False

    def _exit(self, member: MemberState, stage_policy: StagePolicy) -> None:
        """Take a worker out of a policy; its pending group of one is void."""
        self._accept(stage_policy, stage_policy.policy.on_leave(member.worker, self.now))
        member.solo_group = None

    def _drain_queue(
        self, member: MemberState, reason: str, down_to: int = 0
    ) -> dict[MemberState, None]:
        """Abort queued groups of a worker until `down_to` are left; return their members."""
        remaining: dict[MemberState, None] = {}
        while len(member.queue) > down_to:  # an abort may make the policy form a new group
            last = member.queue[-1]
            self._abort(last, reason)
            remaining.update(dict.fromkeys(_waiting_members(last)))
        return remaining

    def _submit_ready(self, member: MemberState) -> None:
        """Report a worker as ready to its policy, after its request if it made none."""
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
        """Skip a worker whose wait timed out, and reset it in its policy."""
        member = wait.member
        self._skip(member, f"no group within {wait.wait_timeout:.3g} s", failed=True)
        self._exit(member, member.stage_policy)
        self._rejoin_policy(member)

    def _accept(self, stage_policy: StagePolicy, groups: Iterable[Group]) -> None:
        """Queue the groups that a policy returned, open those that are first, update its timer."""
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
        """Start the average: all members with a request are ready."""
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
        """Remove a group, open the groups queued behind it, and notify the policy."""
        self.queue.remove(group_round)
        for member in group_round.members:
            if member.queue:
                self._open_if_first(member.queue[0])
            if member.is_stopping:
                self._early_members.append(member)
        stage_policy = group_round.stage_policy
        self._accept(stage_policy, stage_policy.policy.on_done(group_round.group, ok, self.now))

    def _resubmit(self, members: Iterable[MemberState]) -> None:
        """Re-submit the pending requests of an aborted group's members.

        All requests come before the first ready report, so that the policy can group all of them.
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
            if member.is_ready:  # else its request was answered by a Skip
                self._submit_ready(member)

    def _skip(self, member: MemberState, why: str, *, failed: bool) -> None:
        self.counters["skipped"] += 1
        member.step_end = Skip(member.worker, member.clock, why, failed)
        self.out.append(member.step_end)
        self._end_step(member)

    def _end_step(self, member: MemberState) -> None:
        """End a worker's step; after a global average it first returns to its policy."""
        member.end_step()
        if not member.has_early_request:  # else its next step has started earlier
            member.step_start = self.now
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
    """Members whose step the group ends: a ready worker in a group waits for that group."""
    unready = group_round.unready
    return [member for member in group_round.members if member.is_ready or member.worker in unready]
