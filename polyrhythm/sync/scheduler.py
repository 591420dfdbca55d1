"""The scheduler: takes events of workers, consults the policy of each stage, returns commands.

`step` takes one event and returns commands; `next_timer` is when to send a Timer if nothing else
happens. There is no clock, thread or randomness here: replaying a log of events gives the same
commands. For any policy:
- Group ids are one total order; a worker runs its groups in that order, one at a time
  (`group_queue.py`).
- A group commits for all of its members or for none, within a timeout (`group_lifecycle.py`).
- A lost worker deactivates its pipeline. A worker that joins late without a model copies one from
  a peer and takes part from its first step on (`membership.py`).
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
from collections.abc import Callable, Sequence
from typing import Any

from polyrhythm.errors import PolicyError
from polyrhythm.sync.dispatch import SampleLedger
from polyrhythm.sync.dispatch_handler import DispatchHandler
from polyrhythm.sync.group_lifecycle import GroupLifecycle
from polyrhythm.sync.members import MemberState, MemberStatus
from polyrhythm.sync.membership import Membership
from polyrhythm.sync.policy import Policy
from polyrhythm.sync.protocol import (
    Acknowledge,
    Acquire,
    AverageAll,
    Command,
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
    Timer,
)
from polyrhythm.sync.timeouts import Limits
from polyrhythm.types import Seconds, Worker

# These are always answered, if only by a refusal.
_AnsweredEvent = Request | Ready | AverageAll | Acquire | QueryProgress
_WorkerEvent = _AnsweredEvent | Done | Acknowledge | Dead | Leave


class Scheduler:
    def __init__(
        self,
        policies: Sequence[Policy],  # one per stage
        num_pipelines: int,
        *,
        waits_for_all: bool = False,  # each average is one of all workers: see SyncMode
        limits: Limits | None = None,
        pipelines_die_whole: bool = True,
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
        self._lifecycle = GroupLifecycle(
            self.policies, self.membership, limits or Limits(), first_gid
        )
        self._dispatch: DispatchHandler | None = None
        if dispatcher is not None:
            self._dispatch = DispatchHandler(dispatcher, self.membership, self.counters)
        self._has_started = False  # at least one worker has a trained model
        self._copying: dict[Worker, CopyFrom] = {}  # pending copies, by receiver
        self._now, self._timer = -math.inf, self._lifecycle.next_timer()
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            Join: self._join,
            Request: self._request,
            Ready: self._ready,
            AverageAll: self._average_all,
            Done: self._done,
            Acquire: self._dispatch_samples,
            Acknowledge: self._dispatch_samples,
            QueryProgress: self._dispatch_samples,
            Timer: lambda event: None,
            Dead: self._dead,
            Leave: self._leave,
        }

    @property
    def epoch(self) -> int:
        """Number of changes of the active workers."""
        return self.membership.epoch

    @property
    def counters(self) -> Counter[str]:
        """Counts of groups by outcome, and of refused, ignored and early messages by kind."""
        return self._lifecycle.counters

    def step(self, event: Event) -> list[Command]:
        """Handle `event`, after all timers that are due by then, and return the commands."""
        lifecycle = self._lifecycle
        out: list[Command] = []
        lifecycle.out = out
        if event.now >= self._now:
            lifecycle.now = self._now = event.now
        else:
            self.counters["time_backwards"] += 1
        if self._now >= self._timer:
            lifecycle.fire_timers()
        self._handlers[type(event)](event)
        if self._dispatch is not None:
            for idle in self._dispatch.idle():
                lifecycle.set_idle(idle)
        lifecycle.handle_early()
        self._timer = lifecycle.next_timer()
        return out

    def next_timer(self) -> Seconds:
        """Time at which to send Timer if nothing happens before; inf for never."""
        return self._timer

    def _join(self, event: Join) -> None:
        member = self.membership.members.get(event.worker)
        if member is None:
            self._refuse(event.worker, event.clock, "unknown_worker", "is not in the plan")
        elif event.incarnation <= member.incarnation:
            self.counters["duplicate"] += 1
            if event.incarnation == member.incarnation and event.worker in self._copying:
                self._lifecycle.out.append(self._copying[event.worker])
        else:
            if member.status is MemberStatus.ACTIVE:  # it died unnoticed
                self._remove(member, MemberStatus.DEAD, f"{event.worker} has restarted")
            self._reset_pipeline(event.worker, f"{event.worker} has restarted")
            member.node, member.incarnation = event.node, event.incarnation
            member.start_over(event.clock)
            joined = self.membership.change(member, MemberStatus.ACTIVE)
            copying: list[MemberState] = []
            if self._has_started and any(other.clock == 0 for other in joined):
                copying = self._order_copies(joined, "its pipeline joins a running job")
            for other in joined:
                if other not in copying:
                    self._lifecycle.join_policy(other)
            self._has_started |= event.clock > 0

    def _request(self, event: Request) -> None:
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
            self._lifecycle.request_group(member)

    def _ready(self, event: Ready) -> None:
        member = self._sender(event, event.clock)
        if member is None:
            return
        if event.clock <= member.reported_clock:
            self._answer_duplicate(member, event.clock)
            return
        member.reported_clock, self._has_started = event.clock, True
        self._end_copying(member)
        if member.is_ready:
            member.has_early_ready = True
            self.counters["early"] += 1
        else:
            if member.step_start < math.inf:
                member.stage_policy.record_step(self._now - member.step_start)
            self._lifecycle.mark_ready(member)

    def _average_all(self, event: AverageAll) -> None:
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
        self._end_copying(member)
        self._lifecycle.average_all(member)

    def _done(self, event: Done) -> None:
        member = self._sender(event, -1)
        if member is None:
            return
        group_round = self._lifecycle.queue.groups.get(event.gid)
        if group_round is None:
            self.counters["late"] += 1
            self._resend_end(member, event.gid)
        elif event.worker not in group_round.pending or not group_round.is_open:
            is_member = group_round.is_open and event.worker in group_round.group.members
            self.counters["duplicate" if is_member else "out_of_order"] += 1
        elif event.ok:
            self._lifecycle.done(member, group_round)
        else:
            group_round.pending.remove(event.worker)
            self._lifecycle.fail(group_round, f"{event.worker} failed")

    def _dispatch_samples(self, event: Acquire | Acknowledge | QueryProgress) -> None:
        if self._sender(event, -1) is None:
            return
        if self._dispatch is not None:
            self._lifecycle.out.extend(self._dispatch.handle(event))
        else:
            why = "asks for positions, but this job has no sample dispatcher"
            self._refuse(event.worker, -1, "no_dispatcher", why)

    def _dead(self, event: Dead) -> None:
        member = self._sender(event, -1)
        if member is not None:
            self._remove(member, MemberStatus.DEAD, f"{event.worker} died")

    def _leave(self, event: Leave) -> None:
        member = self._sender(event, -1)
        if member is not None:
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
            self._lifecycle.out.append(answer)

    def _resend_end(self, member: MemberState, gid: int) -> None:
        end = member.group_end
        if member.aborted_gid == gid:  # it sent Done before it received the Abort
            member.aborted_gid = -1
        elif end is not None and end.gid == gid:
            self._lifecycle.out.append(end)

    def _refuse(self, worker: Worker, clock: int, kind: str, why: str) -> None:
        self.counters[kind] += 1
        self._lifecycle.out.append(Refuse(worker, clock, f"{worker} {why}"))

    def _remove(self, member: MemberState, status: MemberStatus, reason: str) -> None:
        """Remove a worker that died or left, and its pipeline if that becomes inactive."""
        for lost in self.membership.change(member, status):
            self._lifecycle.drop(lost, reason)
        if status is MemberStatus.DEAD:
            self._reset_pipeline(member.worker, reason)
        elif self._dispatch is not None:
            self._lifecycle.out.extend(self._dispatch.leave(member, reason))
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
            self._lifecycle.out.extend(self._dispatch.reset_pipeline(worker.pipeline, reason))

    def _end_copying(self, member: MemberState) -> None:
        """Forget copies of the member's pipeline: its step shows that all stages have finished."""
        if self._copying:
            for fellow in self.membership.pipeline(member):
                self._copying.pop(fellow.worker, None)

    def _order_copies(self, behind: list[MemberState], why: str) -> list[MemberState]:
        """Send CopyFrom to workers of one pipeline; return those for which a source exists."""
        pairs = self.membership.sources(behind)
        for member, source in pairs:
            clock = -1
            if self._waits_for_all:
                clock = max(other.reported_clock for other in self.membership.pipeline(source))
                self._lifecycle.join_policy_after(member, source, clock)
            copy_from = CopyFrom(member.worker, source.worker, why, clock)
            self._copying[member.worker] = copy_from
            self._lifecycle.out.append(copy_from)
        return [member for member, _ in pairs]
