"""The scheduler: hears what workers say, asks the policy of each stage, answers with commands.

`step` takes one event and returns commands; `next_timer` says when to send a Timer if nothing else
happens. There is no clock, no thread and no randomness here: a log of events gives the same
commands again. For any policy:
- Group ids are one total order; a worker has its groups in that order, one at a time (`lines.py`).
- A group commits for all of its members or for none, within a deadline (`progress.py`).
- A worker that is lost takes its pipeline with it, and one that joins late, without a model, copies
  it from another one (`membership.py`), and counts from its first step on (`entering.py`).
- Positions of samples are dealt to whoever asks, if it has a dispenser (`dispensing.py`).
- What comes twice or late changes nothing: it is counted, and answered as before. What comes early
  waits for its turn. What cannot be right is refused, with a reason.

Source: Miao et al., "SDPipe", PVLDB 16(9), 2023, section 3.1 (ready signals in, groups out), and
Luo et al., "Prague", ASPLOS 2020, section 4.1 (requests ahead, one order of groups). Departures:
groups are acknowledged, workers come and go, and nothing waits for ever.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from polyrhythm.errors import PolicyError
from polyrhythm.sync.deadlines import Limits
from polyrhythm.sync.dispenser import Dispenser
from polyrhythm.sync.dispensing import Dispensing
from polyrhythm.sync.member import Life, Member
from polyrhythm.sync.membership import Membership
from polyrhythm.sync.messages import (
    Command,
    Dead,
    Done,
    Event,
    Gather,
    Heal,
    Join,
    Leave,
    Ready,
    Refuse,
    Request,
    Take,
    Tally,
    Timer,
    Used,
)
from polyrhythm.sync.policy import Policy
from polyrhythm.sync.progress import Progress
from polyrhythm.types import Seconds, Worker

_Asks = Request | Ready | Gather | Take | Tally  # which have an answer, and be it a refusal
_Said = _Asks | Done | Used | Dead | Leave


class Scheduler:
    def __init__(
        self,
        policies: Sequence[Policy],  # one per stage
        num_pipelines: int,
        *,
        limits: Limits | None = None,
        pipelines_die_whole: bool = True,
        first_gid: int = 1,  # above all that an earlier scheduler of the job has used
        dispenser: Dispenser | None = None,
    ) -> None:
        if not policies or num_pipelines < 1:
            raise PolicyError(
                f"{len(policies)} policies for {num_pipelines} pipelines",
                expected="one policy per stage, and at least one pipeline",
                fix="make them with make_policies",
            )
        self.policies = tuple(policies)
        self.membership = Membership(
            len(policies), num_pipelines, pipelines_die_whole=pipelines_die_whole
        )
        self._progress = Progress(self.policies, self.membership, limits or Limits(), first_gid)
        self._dispensing: Dispensing | None = None
        if dispenser is not None:
            self._dispensing = Dispensing(dispenser, self.membership, self.counters)
        self._has_begun = False  # somebody has a model that was trained
        self._healing: dict[Worker, Heal] = {}  # what those were told who copy
        self._now, self._timer = -math.inf, self._progress.next_timer()
        self._hear: dict[type[Event], Callable[[Any], None]] = {
            Join: self._join,
            Request: self._request,
            Ready: self._ready,
            Gather: self._gather,
            Done: self._done,
            Take: self._deal,
            Used: self._deal,
            Tally: self._deal,
            Timer: lambda event: None,
            Dead: self._dead,
            Leave: self._leave,
        }

    @property
    def epoch(self) -> int:
        """How often it has changed who takes part."""
        return self.membership.epoch

    @property
    def counters(self) -> Counter[str]:
        """Groups by how they ended; messages that were refused, ignored or early, by kind."""
        return self._progress.counters

    def step(self, event: Event) -> list[Command]:
        """What to do now that `event` has happened; what is due by then comes before it."""
        progress = self._progress
        out: list[Command] = []
        progress.out = out
        if event.now >= self._now:
            progress.now = self._now = event.now
        else:
            self.counters["time_backwards"] += 1
        if self._now >= self._timer:
            progress.fire()
        self._hear[type(event)](event)
        if self._dispensing is not None:
            for idle in self._dispensing.idle():
                progress.rest(idle)
        progress.catch_up()
        self._timer = progress.next_timer()
        return out

    def next_timer(self) -> Seconds:
        """When to send Timer if nothing happens before; inf for never."""
        return self._timer

    def _join(self, event: Join) -> None:
        member = self.membership.members.get(event.worker)
        if member is None:
            self._refuse(event.worker, event.clock, "stranger", "is not in the plan")
        elif event.incarnation <= member.incarnation:
            self.counters["duplicate"] += 1
            if event.incarnation == member.incarnation and event.worker in self._healing:
                self._progress.out.append(self._healing[event.worker])
        else:
            if member.life is Life.ALIVE:  # it has died and nobody noticed
                self._lose(member, Life.DEAD, f"{event.worker} has started anew")
            self._restart(event.worker, f"{event.worker} has started anew")
            member.node, member.incarnation = event.node, event.incarnation
            member.start_over(event.clock)
            joined = self.membership.change(member, Life.ALIVE)
            copying: list[Member] = []
            if self._has_begun and any(other.clock == 0 for other in joined):
                copying = self._heal(joined, "its pipeline joins a job that has begun")
            for other in joined:
                if other not in copying:
                    self._progress.enter(other)
            self._has_begun |= event.clock > 0

    def _request(self, event: Request) -> None:
        member = self._sender(event, event.clock)
        if member is None:
            return
        if event.clock <= member.asked or event.clock <= member.heard:
            self.counters["duplicate" if event.clock == member.asked else "late"] += 1
            return
        member.asked, member.began = event.clock, self._now
        if member.is_ready or member.has_asked:
            member.wants = True
        elif member.active:
            self._progress.ask(member)

    def _ready(self, event: Ready) -> None:
        member = self._sender(event, event.clock)
        if member is None:
            return
        if event.clock <= member.heard:
            self._hear_again(member, event.clock)
            return
        member.heard, self._has_begun = event.clock, True
        self._is_healed(member)
        if member.is_ready:
            member.ahead = True
            self.counters["early"] += 1
        else:
            if member.began < math.inf:
                member.decider.stepped(self._now - member.began)
            self._progress.begin(member)

    def _gather(self, event: Gather) -> None:
        """Clocks go as with Ready, but a gather may be at the clock of the last Ready, or Join.

        No step is made for it. So there is one step and after it one gather at each clock: a Ready
        or Gather that repeats the clock of a Gather has come twice, and is answered as before.
        """
        member = self._sender(event, event.clock)
        if member is None:
            return
        if event.clock < member.heard or event.clock == member.gathered:
            self._hear_again(member, event.clock)
            return
        member.heard = member.gathered = event.clock
        self._is_healed(member)
        self._progress.gather(member)

    def _done(self, event: Done) -> None:
        member = self._sender(event, -1)
        if member is None:
            return
        assigned = self._progress.lines.groups.get(event.gid)
        if assigned is None:
            self.counters["late"] += 1
            self._tell_the_end_again(member, event.gid)
        elif event.worker not in assigned.pending or not assigned.is_open:
            is_member = assigned.is_open and event.worker in assigned.group.members
            self.counters["duplicate" if is_member else "out_of_turn"] += 1
        elif event.ok:
            self._progress.done(member, assigned)
        else:
            assigned.pending.remove(event.worker)
            self._progress.fail(assigned, f"{event.worker} failed")

    def _deal(self, event: Take | Used | Tally) -> None:
        if self._sender(event, -1) is None:
            return
        if self._dispensing is not None:
            self._progress.out.extend(self._dispensing.hear(event))
        else:
            why = "asks for positions, and this job deals none"
            self._refuse(event.worker, -1, "no_dispenser", why)

    def _dead(self, event: Dead) -> None:
        member = self._sender(event, -1)
        if member is not None:
            self._lose(member, Life.DEAD, f"{event.worker} died")

    def _leave(self, event: Leave) -> None:
        member = self._sender(event, -1)
        if member is not None:
            self._lose(member, Life.LEFT, f"{event.worker} left")

    def _sender(self, event: _Said, clock: int) -> Member | None:
        """Who says so, if it takes part in the life it speaks of."""
        member = self.membership.members.get(event.worker)
        if member is None:
            self._refuse(event.worker, clock, "stranger", "is not in the plan")
        elif event.incarnation == member.incarnation and member.life is Life.ALIVE:
            return member
        elif event.incarnation < member.incarnation or not isinstance(event, _Asks):
            self.counters["late"] += 1
        else:
            is_known = event.incarnation == member.incarnation
            why = f"{member.life.value}, and has to join anew" if is_known else "has not joined"
            self._refuse(event.worker, clock, "stranger", why)
        return None

    def _hear_again(self, member: Member, clock: int) -> None:
        if clock < member.heard:
            why = f"goes back from clock {member.heard} to {clock}: it has to join anew"
            self._refuse(member.worker, clock, "clock_backwards", why)
            return
        self.counters["duplicate"] += 1
        answer: Command | None = member.step_end
        if member.is_ready and member.line:
            answer = member.line[0].assign
        if answer is not None:
            self._progress.out.append(answer)

    def _tell_the_end_again(self, member: Member, gid: int) -> None:
        end = member.group_end
        if member.crosses == gid:  # it had not heard of the end when it said so
            member.crosses = -1
        elif end is not None and end.gid == gid:
            self._progress.out.append(end)

    def _refuse(self, worker: Worker, clock: int, kind: str, why: str) -> None:
        self.counters[kind] += 1
        self._progress.out.append(Refuse(worker, clock, f"{worker} {why}"))

    def _lose(self, member: Member, life: Life, reason: str) -> None:
        """A worker dies or leaves, perhaps with its whole pipeline."""
        for lost in self.membership.change(member, life):
            self._progress.drop(lost, reason)
        if life is Life.DEAD:
            self._restart(member.worker, reason)
        elif self._dispensing is not None:
            self._progress.out.extend(self._dispensing.leave(member, reason))
        self._healing.pop(member.worker, None)
        members, stranded = self.membership.members, dict[int, list[Member]]()
        for worker, heal in list(self._healing.items()):
            if not members[heal.source].active:
                del self._healing[worker]
                stranded.setdefault(worker.pipeline, []).append(members[worker])
        for behind in stranded.values():
            self._heal(behind, "the one it copied from is gone")

    def _restart(self, worker: Worker, reason: str) -> None:
        """The life of a pipeline is over, as far as positions are concerned."""
        if self._dispensing is not None:
            self._progress.out.extend(self._dispensing.restart(worker.pipeline, reason))

    def _is_healed(self, member: Member) -> None:
        """A step of a pipeline needs all its stages: none of them copies any more."""
        if self._healing:
            for fellow in self.membership.pipeline(member):
                self._healing.pop(fellow.worker, None)

    def _heal(self, behind: list[Member], why: str) -> list[Member]:
        """Tell workers of a pipeline whom to copy from, and when; those who have somebody."""
        pairs = self.membership.sources(behind)
        for member, source in pairs:
            clock = -1
            if self.policies[member.worker.stage].lockstep:
                clock = max(other.heard for other in self.membership.pipeline(source))
                self._progress.enter_after(member, source, clock)
            heal = Heal(member.worker, source.worker, why, clock)
            self._healing[member.worker] = heal
            self._progress.out.append(heal)
        return [member for member, _ in pairs]
