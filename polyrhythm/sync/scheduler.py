"""The scheduler: takes events of workers, consults the policy of each stage, returns commands.

`step` takes one event and returns commands; `next_timer` is when to send a Timer if nothing else
happens. There is no clock, thread or randomness here: replaying a log of events gives the same
commands. For any policy:
- Group ids are one total order; a worker runs its groups in that order, one at a time. A group is
  assigned when it is first in the queues of all its members.
- A group commits for all of its members, when all send Done, or for none: it aborts when a member
  fails, dies or leaves, or when it times out. Members that were ready are then ready again, for
  another group with another id, and skip the average when too many groups of one step have failed.
- A group of one averages nothing and is not queued: its worker is sent a Skip.
- All members of a group have equal weights, whatever the number of their samples. The averages are
  then doubly stochastic: the mean over all workers is kept, which the proofs of both papers need.
- A worker belongs to the policy of its stage or, during a global average, to the AverageAllPolicy
  of its stage; groups of both have the same life cycle.
- A lost worker deactivates its pipeline. A worker that joins late without a model copies one from
  a peer and takes part from its first step on.
- Positions of samples are dispatched on request, if the job has a dispatcher
  (`dispatch_handler.py`).
- Duplicate and late messages change nothing: they are counted, and answered as before. Early
  messages are deferred. Invalid messages are refused with a reason.

Source: Miao et al., "SDPipe", PVLDB 16(9), 2023, section 3.1 (ready signals in, groups out), and
Luo et al., "Prague", ASPLOS 2020, section 4.1 (requests ahead, one order of groups). Departures:
groups are acknowledged, workers join and leave, and every wait is bounded.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from polyrhythm.errors import PolicyError
from polyrhythm.sync.deadlock import deadlocked
from polyrhythm.sync.dispatch import SampleLedger
from polyrhythm.sync.dispatch_handler import DispatchHandler
from polyrhythm.sync.members import (
    BrokenLinks,
    GroupQueue,
    GroupRound,
    GroupWait,
    GroupWaits,
    Limits,
    Membership,
    MemberState,
    MemberStatus,
    StagePolicy,
)
from polyrhythm.sync.policies.all_reduce import AverageAllPolicy
from polyrhythm.sync.policy import Policy
from polyrhythm.sync.protocol import (
    Abort,
    Acknowledge,
    Acquire,
    Assign,
    AverageAll,
    Command,
    Commit,
    CopyFrom,
    Dead,
    Done,
    Event,
    Join,
    Leave,
    QueryProgress,
    Ready,
    Refuse,
    Request,
    Skip,
    Timer,
)
from polyrhythm.sync.snapshot import register_state
from polyrhythm.types import Group, Seconds, Worker

# These are always answered, if only by a refusal.
_AnsweredEvent = Request | Ready | AverageAll | Acquire | QueryProgress
_WorkerEvent = _AnsweredEvent | Done | Acknowledge | Dead | Leave


class Scheduler:
    """One scheduler of a job.

    Its methods in order: events; duplicate, early and invalid messages; workers that join, copy a
    model and leave; a step of a worker; a group, from the policy's decision to its end; timers.
    """

    def __init__(
        self,
        policies: Sequence[Policy],  # one per stage
        num_pipelines: int,
        *,
        waits_for_all: bool = False,  # each average is one of all workers: see SyncMode
        limits: Limits | None = None,
        pipelines_die_whole: bool = True,
        steps_ahead: float = math.inf,  # see `deadlocked`; inf for timeouts alone
        first_gid: int = 1,  # above all group ids of an earlier scheduler of the job
        dispatcher: SampleLedger | None = None,
    ) -> None:
        if not policies or num_pipelines < 1:
            raise PolicyError(
                f"{len(policies)} policies for {num_pipelines} pipelines",
                expected="one policy per stage, and at least one pipeline",
                fix="create the policies with make_policies",
            )
        self.policies, self._waits_for_all = tuple(policies), waits_for_all
        self.membership = Membership(
            len(policies), num_pipelines, pipelines_die_whole=pipelines_die_whole
        )
        # Groups by outcome, and refused, ignored and early messages by kind.
        self.counters: Counter[str] = Counter()
        self._limits, self._steps_ahead = limits or Limits(), steps_ahead
        self._queue, self._waits = GroupQueue(first_gid), GroupWaits()
        self._links = BrokenLinks()
        self._timers: list[Seconds] = []  # of all policies and global averages
        self._stage_policies = [self._make_stage_policy(policy) for policy in policies]
        self._average_alls = [
            self._make_stage_policy(AverageAllPolicy(self._limits.average_all_timeout))
            for _ in policies
        ]
        self._first_timer = min(self._timers)
        for member in self.membership.members.values():
            member.stage_policy = self._stage_policies[member.worker.stage]
        self._dispatch: DispatchHandler | None = None
        if dispatcher is not None:
            self._dispatch = DispatchHandler(dispatcher, self.membership, self.counters)
        self._has_started = False  # at least one worker has a trained model
        self._copying: dict[Worker, CopyFrom] = {}  # pending copies, by receiver
        # Workers that join once their source has ended the step of a clock.
        self._late_joins: dict[MemberState, tuple[MemberState, int]] = {}
        self._early_members: list[MemberState] = []  # with messages that came before a step ended
        self._out: list[Command] = []  # of the current event
        self._now, self._timer = -math.inf, self._first_timer

    def step(self, event: Event) -> list[Command]:
        """Handle `event`, after all timers that are due by then, and return the commands."""
        out: list[Command] = []
        self._out = out
        if event.now >= self._now:
            self._now = event.now
        else:
            self.counters["time_backwards"] += 1
        if self._now >= self._timer:
            self._fire_timers()
        _HANDLERS[type(event)](self, event)
        if self._dispatch is not None:
            for idle in self._dispatch.idle():
                self._set_idle(idle)
        if self._early_members:
            self._handle_early()
        if self._late_joins:
            self._join_late()
        if self._steps_ahead < math.inf:
            self._end_deadlocks()
        self._timer = min(
            self._queue.next_deadline(), self._waits.next_deadline(), self._first_timer
        )
        return out

    def next_timer(self) -> Seconds:
        """Time at which to send Timer if nothing happens before; inf for never."""
        return self._timer

    def _on_join(self, event: Join) -> None:
        member = self.membership.members.get(event.worker)
        if member is None:
            self._refuse(event.worker, event.clock, "unknown_worker", "is not in the plan")
        elif event.incarnation <= member.incarnation:
            self.counters["duplicate"] += 1
            if event.incarnation == member.incarnation and event.worker in self._copying:
                self._out.append(self._copying[event.worker])
        else:
            if member.status is MemberStatus.ACTIVE:  # it died unnoticed
                self._remove(member, MemberStatus.DEAD, f"{event.worker} has restarted")
            self._reset_pipeline(event.worker, f"{event.worker} has restarted")
            member.node, member.incarnation = event.node, event.incarnation
            member.start_over(event.clock)
            self._forget_connections(member)
            joined = self.membership.change(member, MemberStatus.ACTIVE)
            copying: list[MemberState] = []
            if self._has_started and any(other.clock == 0 for other in joined):
                copying = self._order_copies(joined, "its pipeline joins a running job")
            for other in joined:
                if other not in copying:
                    self._join_policy(other)
            self._has_started |= event.clock > 0

    def _on_request(self, event: Request) -> None:
        member = self._sender(event, event.clock)
        if member is None:
            return
        if event.clock <= member.requested_clock or event.clock <= member.reported_clock:
            self.counters["duplicate" if event.clock == member.requested_clock else "late"] += 1
            return
        member.requested_clock, member.step_start = event.clock, self._now
        if member.is_ready or member.has_requested:
            member.has_early_request = True
        elif member.is_active:
            self._request_group(member)

    def _on_ready(self, event: Ready) -> None:
        member = self._sender(event, event.clock)
        if member is None:
            return
        if event.clock <= member.reported_clock:
            self._answer_duplicate(member, event.clock)
            return
        member.reported_clock, self._has_started = event.clock, True
        if self._copying:
            self._end_copying(member)
        if member.is_ready:
            member.has_early_ready = True
            self.counters["early"] += 1
        else:
            if member.step_start < math.inf:
                member.stage_policy.record_step(self._now - member.step_start)
            self._mark_ready(member)

    def _on_average_all(self, event: AverageAll) -> None:
        """Check the clock as for Ready, except that it may equal that of the last Ready or Join.

        A global average takes no step. So each clock has one step and then one AverageAll: a Ready
        or AverageAll that repeats the clock of an AverageAll is a duplicate.
        """
        member = self._sender(event, event.clock)
        if member is None:
            return
        if event.clock < member.reported_clock or event.clock == member.average_all_clock:
            self._answer_duplicate(member, event.clock)
            return
        member.reported_clock = member.average_all_clock = event.clock
        if self._copying:
            self._end_copying(member)
        self._move_to_average_all(member)

    def _on_done(self, event: Done) -> None:
        member = self._sender(event, -1)
        if member is None:
            return
        if (event.lost or event.slow) and not event.ok:
            self._report_lost(member, event)
        group_round = self._queue.groups.get(event.gid)
        if group_round is None:
            self.counters["late"] += 1
            self._resend_end(member, event.gid)
        elif event.worker not in group_round.pending or not group_round.is_open:
            is_member = group_round.is_open and event.worker in group_round.group.members
            self.counters["duplicate" if is_member else "out_of_order"] += 1
        else:
            group_round.pending.remove(event.worker)
            if not event.ok:
                lost = " and ".join(map(str, event.lost))
                self._fail(group_round, f"{event.worker} " + (f"lost {lost}" if lost else "failed"))
            elif not group_round.pending:
                self._commit(group_round)

    def _report_lost(self, member: MemberState, event: Done) -> None:
        """Find out whether links are broken, and end groups that use them."""
        stage = self.membership.stages[event.worker.stage]
        for other in (*event.lost, *event.slow):
            if other.stage == event.worker.stage and other.pipeline < len(stage):
                member.met &= ~(1 << other.pipeline)
                stage[other.pipeline].met &= ~(1 << event.worker.pipeline)
        broken = self._links.report(event.worker, event.gid, event.lost, self._now, slow=event.slow)
        for pair in broken:
            self.counters["broken_links"] += 1
            for group_round in self._queue.using(pair):
                if group_round.gid != event.gid:
                    self._fail(group_round, self._links.reason([pair]), is_retried=True)

    def _forget_connections(self, member: MemberState) -> None:
        """Forget with which workers an earlier incarnation was connected, or was not."""
        self._links.forget(member.worker)
        for other in self.membership.stages[member.worker.stage]:
            other.met &= ~(1 << member.worker.pipeline)

    def _on_sample_event(self, event: Acquire | Acknowledge | QueryProgress) -> None:
        if self._sender(event, -1) is None:
            return
        if self._dispatch is not None:
            self._out.extend(self._dispatch.handle(event))
        else:
            why = "asks for positions, but this job has no sample dispatcher"
            self._refuse(event.worker, -1, "no_dispatcher", why)

    def _on_end(self, event: Dead | Leave) -> None:
        member = self._sender(event, -1)
        if member is not None and isinstance(event, Dead):
            self._remove(member, MemberStatus.DEAD, f"{event.worker} died")
        elif member is not None:
            self._remove(member, MemberStatus.LEFT, f"{event.worker} left")

    def _sender(self, event: _WorkerEvent, clock: int) -> MemberState | None:
        """Return the sender if it is alive in the incarnation that the event names."""
        member = self.membership.members.get(event.worker)
        if member is None:
            self._refuse(event.worker, clock, "unknown_worker", "is not in the plan")
        elif event.incarnation == member.incarnation and member.status is MemberStatus.ACTIVE:
            return member
        elif event.incarnation < member.incarnation or not isinstance(event, _AnsweredEvent):
            self.counters["late"] += 1
        else:
            is_known = event.incarnation == member.incarnation
            why = f"{member.status.value}, and must join again" if is_known else "has not joined"
            self._refuse(event.worker, clock, "unknown_worker", why)
        return None

    def _answer_duplicate(self, member: MemberState, clock: int) -> None:
        if clock < member.reported_clock:
            why = f"goes back from clock {member.reported_clock} to {clock}: it must join again"
            self._refuse(member.worker, clock, "clock_backwards", why)
            return
        self.counters["duplicate"] += 1
        answer: Command | None = member.step_end
        if member.is_ready and member.queue:
            answer = member.queue[0].assign
        if answer is not None:
            self._out.append(answer)

    def _resend_end(self, member: MemberState, gid: int) -> None:
        end = member.group_end
        if member.aborted_gid == gid:  # it sent Done before it received the Abort
            member.aborted_gid = -1
        elif end is not None and end.gid == gid:
            self._out.append(end)

    def _refuse(self, worker: Worker, clock: int, kind: str, why: str) -> None:
        self.counters[kind] += 1
        self._out.append(Refuse(worker, clock, f"{worker} {why}"))

    def _handle_early(self) -> None:
        """Handle messages that came before the last step of their sender ended."""
        while self._early_members:
            member = self._early_members.pop(0)
            has_request, has_ready = member.has_early_request, member.has_early_ready
            member.has_early_request = member.has_early_ready = False
            if member.status is not MemberStatus.ACTIVE:
                continue
            if has_request and member.is_active:
                self._request_group(member)
            if has_ready:
                self._mark_ready(member)
            if member.is_stopping:
                self._move_to_average_all(member)

    def _remove(self, member: MemberState, status: MemberStatus, reason: str) -> None:
        """Remove a worker that died or left, and its pipeline if that becomes inactive."""
        for lost in self.membership.change(member, status):
            self._drop(lost, reason)
        if status is MemberStatus.DEAD:
            self._reset_pipeline(member.worker, reason)
        elif self._dispatch is not None:
            self._out.extend(self._dispatch.leave(member, reason))
        self._copying.pop(member.worker, None)
        members, stranded = self.membership.members, dict[int, list[MemberState]]()
        for worker, copy_from in list(self._copying.items()):
            if not members[copy_from.source].is_active:
                del self._copying[worker]
                stranded.setdefault(worker.pipeline, []).append(members[worker])
        for behind in stranded.values():
            self._order_copies(behind, "the worker it copied from is gone")

    def _reset_pipeline(self, worker: Worker, reason: str) -> None:
        """End the incarnation of a pipeline in the sample dispatcher."""
        if self._dispatch is not None:
            self._out.extend(self._dispatch.reset_pipeline(worker.pipeline, reason))

    def _order_copies(self, behind: list[MemberState], why: str) -> list[MemberState]:
        """Send CopyFrom to workers of one pipeline; return those for which a source exists.

        If each average is one of all workers, a late worker needs the others' weights, at each
        stage of its pipeline after the same step: one that no worker has ended when it joins. So
        this names a step of the source pipeline, and each stage copies and joins when its source
        has ended it; if one stage joined a step later, all workers would wait twice in every
        further step. Otherwise no group waits for a late worker before its first step.
        """
        pairs = self.membership.sources(behind)
        for member, source in pairs:
            clock = -1
            if self._waits_for_all:
                clock = max(other.reported_clock for other in self.membership.pipeline(source))
                if member.has_joined:  # because its previous source had ended a step
                    self._drop(member, "the worker it copied from is gone")
                self._late_joins[member] = source, clock
            copy_from = CopyFrom(member.worker, source.worker, why, clock)
            self._copying[member.worker] = copy_from
            self._out.append(copy_from)
        return [member for member, _ in pairs]

    def _end_copying(self, member: MemberState) -> None:
        """Forget copies of the member's pipeline: its step shows that all stages have finished."""
        for fellow in self.membership.pipeline(member):
            self._copying.pop(fellow.worker, None)

    def _join_late(self) -> None:
        """Let workers join whose source has ended the step that they copy."""
        for member, (source, clock) in list(self._late_joins.items()):
            if source.clock > clock or (source.clock == clock and not source.is_ready):
                del self._late_joins[member]
                self._join_policy(member)

    def _join_pipeline(self, member: MemberState) -> None:
        """Let the whole pipeline join: its first step shows that all stages have copied."""
        for peer in self.membership.pipeline(member):
            if peer.is_active:
                self._join_policy(peer)

    def _join_policy(self, member: MemberState) -> None:
        """Add a worker to the policy and the global average of its stage."""
        if member.has_joined:
            return
        member.has_joined = True
        self._late_joins.pop(member, None)
        stage = member.worker.stage
        for stage_policy in (self._average_alls[stage], self._stage_policies[stage]):
            groups = stage_policy.policy.on_join(member.worker, member.node, self._now)
            self._accept(stage_policy, groups)

    def _rejoin_policy(self, member: MemberState) -> None:
        """Return a worker to its policy in the same incarnation."""
        groups = member.stage_policy.policy.on_return(member.worker, member.node, self._now)
        self._accept(member.stage_policy, groups)

    def _leave_policy(self, member: MemberState, stage_policy: StagePolicy) -> None:
        """Take a worker out of a policy; its pending group of one is void."""
        self._accept(stage_policy, stage_policy.policy.on_leave(member.worker, self._now))
        member.solo_group = None

    def _drop(self, member: MemberState, reason: str) -> None:
        """Deactivate a worker: abort its groups, then take it out of its policy."""
        was_ready, was_stopping = member.is_ready, member.is_stopping
        member.end_step()
        member.is_stopping = True
        remaining = self._drain_queue(member, reason)
        member.is_stopping = was_stopping
        if member.has_joined:
            # It is in no group policy while it is idle, or in a global average.
            if not (member.is_idle or member.stage_policy.is_average_all):
                self._leave_policy(member, member.stage_policy)
            member.is_idle = False
            self._leave_policy(member, self._average_alls[member.worker.stage])
        self._late_joins.pop(member, None)
        member.has_joined = False
        member.stage_policy = self._stage_policies[member.worker.stage]
        if was_ready and member.status is MemberStatus.ACTIVE:
            self._skip(member, reason, failed=True)
        self._resubmit(remaining)

    def _set_idle(self, member: MemberState) -> None:
        """Take a worker without samples out of its policy, so that no group waits for it."""
        if member.is_idle or member.is_ready or member.is_stopping or not member.has_joined:
            return
        head = member.queue[0] if member.queue else None
        if head is None or member.worker in head.unready or not head.is_open:
            member.end_step()
            member.is_stopping = True
            remaining = self._drain_queue(member, f"{member.worker} has no samples")
            member.is_stopping, member.is_idle = False, True
            self._leave_policy(member, member.stage_policy)
            self._resubmit(remaining)

    def _end_idle(self, member: MemberState) -> None:
        member.is_idle = False
        self._rejoin_policy(member)

    def _request_group(self, member: MemberState) -> None:
        """Register that a worker needs a group at the end of its step."""
        stage_policy = member.stage_policy
        if member.is_idle:
            self._end_idle(member)
        if not stage_policy.takes_requests:
            member.has_requested = member.is_ready
            return
        self._join_policy(member)
        member.has_requested = True
        self._accept(stage_policy, stage_policy.policy.on_request(member.worker, self._now))

    def _mark_ready(self, member: MemberState) -> None:
        """Submit a worker that has finished its local update and can average now."""
        member.clock, member.is_ready, member.step_end = member.reported_clock, True, None
        if self._dispatch is not None:
            self._dispatch.publish(member.worker)
        if not member.is_active:
            missing = self.membership.missing(member)
            self._skip(member, f"its pipeline is incomplete: {missing}", failed=True)
            return
        if not member.has_joined:
            self._join_pipeline(member)
        if member.is_idle:
            self._end_idle(member)
        self._submit_ready(member)
        head = member.queue[0] if member.queue else None
        if head is not None and member.worker in head.unready:
            head.unready.remove(member.worker)
            if not head.unready:
                self._start(head)

    def _submit_ready(self, member: MemberState) -> None:
        """Report a worker as ready to its policy, after its request if it made none."""
        if not member.has_requested:
            self._request_group(member)
        if member.solo_group is not None:
            self._finish_solo(member)
        if member.is_ready:
            stage_policy = member.stage_policy
            self._accept(stage_policy, stage_policy.policy.on_ready(member.worker, self._now))
            if stage_policy.wait_timeout is not None:
                self._waits.add(member, self._now, stage_policy.wait_timeout.current)

    def _move_to_average_all(self, member: MemberState) -> None:
        """Move a worker from its policy to the global average of its stage, as ready.

        A step that it waits for, and an open group in which it is passive, end before that. Groups
        that wait for it to become ready are aborted: it runs no further step.
        """
        member.is_stopping = True
        if member.is_ready:
            return
        if member.is_active and not member.has_joined:
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
                if not member.is_idle:
                    self._leave_policy(member, member.stage_policy)
                member.is_idle = False
                member.stage_policy = self._average_alls[member.worker.stage]
        self._resubmit(remaining)
        if not is_passive:
            self._mark_ready(member)

    def _finish_solo(self, member: MemberState) -> None:
        group, stage_policy = member.solo_group, member.stage_policy
        assert group is not None, f"{member.worker} has a group of one"
        policy = stage_policy.policy
        failed = isinstance(policy, AverageAllPolicy) and policy.has_others
        self._skip(member, group.why, failed=failed)
        self._accept(stage_policy, policy.on_done(group, True, self._now))

    def _skip(self, member: MemberState, why: str, *, failed: bool) -> None:
        self.counters["skipped"] += 1
        member.step_end = Skip(member.worker, member.clock, why, failed)
        self._out.append(member.step_end)
        self._end_step(member)

    def _skip_waiting(self, wait: GroupWait, why: str) -> None:
        """Skip a worker that waits for a group, and reset it in its policy."""
        member = wait.member
        self._skip(member, why, failed=True)
        self._leave_policy(member, member.stage_policy)
        self._rejoin_policy(member)

    def _end_step(self, member: MemberState) -> None:
        """End a worker's step; after a global average it first returns to its policy."""
        member.end_step()
        if not member.has_early_request:  # else its next step has started earlier
            member.step_start = self._now
        if member.stage_policy.is_average_all:
            member.stage_policy = self._stage_policies[member.worker.stage]
            self._rejoin_policy(member)
        if member.has_early_ready or member.has_early_request or member.is_stopping:
            self._early_members.append(member)

    def _accept(self, stage_policy: StagePolicy, groups: Iterable[Group]) -> None:
        """Queue the groups that a policy returned, open those that are first, update its timer."""
        for group in groups:
            members = [self.membership.members[worker] for worker in group.members]
            if len(members) > 1:
                self._open_if_first(self._queue.add(group, members, stage_policy))
                continue
            members[0].solo_group = group
            if members[0].is_ready:
                self._finish_solo(members[0])
        timer = stage_policy.policy.next_timer()
        if timer != self._timers[stage_policy.timer]:
            self._timers[stage_policy.timer] = timer
            self._first_timer = min(self._timers)

    def _open_if_first(self, group_round: GroupRound) -> None:
        if group_round.is_open or not self._queue.is_first(group_round):
            return
        group_round.is_open, group_round.opened = True, self._now
        for member in group_round.members:
            if not member.is_ready:
                computing = group_round.unready if member.has_requested else group_round.passive
                computing.add(member.worker)
        stage_policy = group_round.stage_policy
        members, why = group_round.group
        apart = self._links.among(members, self._now)
        if apart:
            if len({worker for pair in apart for worker in pair}) == len(members):
                if self._skip_group(group_round, self._links.reason(apart)):
                    return
                apart = self._links.worst(apart, members)  # all workers need this average
            if apart:
                why = f"{why}; {self._links.reason(apart)}"
        assign = Assign(
            group_round.gid,
            self.membership.epoch,
            members,
            tuple([member.incarnation for member in group_round.members]),
            stage_policy.average_timeout.current,
            why,
            apart,
        )
        group_round.assign = assign
        self._out.append(assign)
        if group_round.unready:
            self._queue.set_deadline(group_round, self._now + stage_policy.max_ready_wait())
        else:
            self._start(group_round)

    def _start(self, group_round: GroupRound) -> None:
        """Start the average: all members with a request are ready."""
        group_round.started = self._now
        timeout = group_round.stage_policy.average_timeout.current
        if not _have_met(group_round):
            timeout = min(timeout + self._limits.connect_timeout, self._limits.ceiling)
        self._queue.set_deadline(group_round, self._now + timeout)

    def _skip_group(self, group_round: GroupRound, reason: str) -> bool:
        """Skip a group that cannot average; False if its members must."""
        if self._waits_for_all or group_round.stage_policy.is_average_all:
            return False
        self._fail(group_round, reason, is_final=True)
        return True

    def _commit(self, group_round: GroupRound) -> None:
        """Commit a group: all members are done."""
        self.counters["committed"] += 1
        if not group_round.unready:
            group_round.stage_policy.average_timeout.record(self._now - group_round.started)
        end_clocks = tuple([other.clock if other.is_ready else -1 for other in group_round.members])
        commit = Commit(group_round.gid, group_round.group.members, end_clocks)
        self._send_end(group_round, commit)
        assert group_round.assign is not None, "it was open"
        self._links.restore(group_round.assign)
        met = _bits(group_round.members)
        for member in group_round.members:
            member.met |= met
        if self._dispatch is not None:
            for member in group_round.members:
                # A passive member may have become ready since it has exchanged an older model.
                if not (member.worker in group_round.passive and member.is_ready):
                    self._dispatch.commit(member.worker)
        for member in group_round.waiting_members():
            if member.is_ready:
                member.step_end = commit
            self._end_step(member)
        self._close(group_round, ok=True)

    def _fail(
        self,
        group_round: GroupRound,
        reason: str,
        *,
        is_retried: bool = False,
        is_final: bool = False,
    ) -> None:
        """Abort a group; its ready members try another one, unless too many have failed.

        `is_retried`: in any case. `is_final`: in no case.
        """
        self._abort(group_round, reason)
        waiting = group_round.waiting_members()
        for member in waiting:
            member.num_failures += member.is_ready and not is_retried
            if is_final and not member.queue:
                self._skip(member, reason, failed=True)
        waiting = [member for member in waiting if member.is_ready or not is_final]
        max_failures = max((member.num_failures for member in waiting), default=0)
        for member in waiting:
            # All skip or none: else the last one would wait for the global average alone.
            if group_round.stage_policy.is_average_all:
                member.num_failures = max_failures
            if member.num_failures > self._limits.max_retries and not member.queue:
                why = f"{member.num_failures} groups failed, the last one: {reason}"
                self._skip(member, why, failed=True)
        self._resubmit(waiting)

    def _fail_unready(self, group_round: GroupRound, reason: str) -> None:
        """Abort a group whose members are not all ready; the others request again when they are."""
        for worker in group_round.unready:
            self.membership.members[worker].has_requested = False
        self._fail(group_round, reason)

    def _abort(self, group_round: GroupRound, reason: str) -> None:
        if group_round.is_open:
            self.counters["aborted"] += 1
            is_late = not group_round.unready and group_round.deadline <= self._now
            members = group_round.group.members
            self._send_end(group_round, Abort(group_round.gid, members, reason, is_late))
            for member in group_round.members:
                if member.worker in group_round.pending:
                    member.aborted_gid = group_round.gid
        self._close(group_round, ok=False)

    def _send_end(self, group_round: GroupRound, command: Commit | Abort) -> None:
        self._out.append(command)
        for member in group_round.members:
            member.group_end = command

    def _close(self, group_round: GroupRound, *, ok: bool) -> None:
        """Remove a group, open the groups queued behind it, and notify the policy."""
        self._queue.remove(group_round)
        for member in group_round.members:
            if member.queue:
                self._open_if_first(member.queue[0])
            if member.is_stopping:
                self._early_members.append(member)
        stage_policy = group_round.stage_policy
        self._accept(stage_policy, stage_policy.policy.on_done(group_round.group, ok, self._now))

    def _drain_queue(
        self, member: MemberState, reason: str, down_to: int = 0
    ) -> dict[MemberState, None]:
        """Abort queued groups of a worker until `down_to` are left; return their members."""
        remaining: dict[MemberState, None] = {}
        while len(member.queue) > down_to:  # an abort may make the policy form a new group
            last = member.queue[-1]
            self._abort(last, reason)
            remaining.update(dict.fromkeys(last.waiting_members()))
        return remaining

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
                self._request_group(member)
            elif member.has_requested:
                self._request_group(member)
        for member in ready:
            if member.is_ready:  # else its request was answered by a Skip
                self._submit_ready(member)

    def _make_stage_policy(self, policy: Policy) -> StagePolicy:
        self._timers.append(policy.next_timer())
        return StagePolicy.of(
            policy,
            self._limits,
            timer=len(self._timers) - 1,
            is_average_all=isinstance(policy, AverageAllPolicy),
        )

    def _fire_timers(self) -> None:
        """Handle what is due: group deadlines, then timers of policies, then long waits."""
        for group_round in self._queue.expired(self._now):
            slow = " ".join(map(str, sorted(group_round.unready or group_round.pending)))
            if group_round.unready:
                group_round.stage_policy.ready_timeout.record_timeout()
                why = f"{slow} not ready within {self._now - group_round.opened:.3g} s"
                self._fail_unready(group_round, why)
            else:
                group_round.stage_policy.average_timeout.record_timeout()
                why = f"{slow} not done within {self._now - group_round.started:.3g} s"
                self._fail(group_round, why)
        for stage_policy in (*self._stage_policies, *self._average_alls):
            if self._timers[stage_policy.timer] <= self._now:
                self._accept(stage_policy, stage_policy.policy.on_timer(self._now))
        while self._waits.next_deadline() <= self._now:
            wait = self._waits.pop_next()
            self._skip_waiting(wait, f"no group within {wait.wait_timeout:.3g} s")

    def _end_deadlocks(self) -> None:
        """Skip the oldest wait, or abort the oldest group, until no deadlock is left."""
        why = "stages wait for one another's groups"
        while True:
            workers = deadlocked(self.membership.stages, self._steps_ahead)
            if (wait := self._waits.oldest(workers)) is not None:
                self._skip_waiting(wait, why)
            elif (group_round := self._queue.oldest_unready(workers)) is not None:
                self._fail_unready(group_round, why)
            else:
                return
            self.counters["deadlocks"] += 1
            if self._early_members:
                self._handle_early()


def _bits(members: Iterable[MemberState]) -> int:
    """Return a bit for the pipeline of each member."""
    bits = 0
    for member in members:
        bits |= 1 << member.worker.pipeline
    return bits


def _have_met(group_round: GroupRound) -> bool:
    """Whether all members are connected with one another."""
    bits = _bits(group_round.members)
    return all(not bits & ~member.met for member in group_round.members)


_HANDLERS: dict[type[Event], Callable[[Scheduler, Any], None]] = {
    Join: Scheduler._on_join,
    Request: Scheduler._on_request,
    Ready: Scheduler._on_ready,
    AverageAll: Scheduler._on_average_all,
    Done: Scheduler._on_done,
    Acquire: Scheduler._on_sample_event,
    Acknowledge: Scheduler._on_sample_event,
    QueryProgress: Scheduler._on_sample_event,
    Timer: lambda scheduler, event: None,
    Dead: Scheduler._on_end,
    Leave: Scheduler._on_end,
}
register_state(Scheduler)
