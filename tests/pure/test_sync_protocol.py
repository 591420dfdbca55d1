"""The scheduler under any storm of messages: nothing breaks, and nothing of value is lost.

A stateful test plays workers that may send anything, in order or not, twice or late, and gather,
die, leave and return at any time; and they may miss a command, and ask again. Limits are those of a
real job. Beside the scheduler it keeps the weights that its commands imply.
"""

import math

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polyrhythm.sync.deadlines import Limits
from polyrhythm.sync.messages import (
    Abort,
    Assign,
    Command,
    Commit,
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
    Skip,
    Timer,
)
from polyrhythm.sync.registry import POLICIES, limits_for, make_policies
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Worker

NUM_STAGES, NUM_PIPELINES = 2, 3
WORKERS = [Worker(s, p) for s in range(NUM_STAGES) for p in range(NUM_PIPELINES)]
NAMES = [name for name in POLICIES if name not in ("balanced", "local")]  # both are all_reduce
LEASE, MAX_WINDOW = 6.0, 4.0
OPTIONS: dict[str, dict[str, object]] = {
    "adaptive": {"last_groups": 2, "max_window": MAX_WINDOW},
    "age": {"max_age": 1, "max_window": MAX_WINDOW},
    "partial_reduce": {"group_size": 2},
}
LIMITS = Limits(ceiling=5.0, readiness=40.0, gathering=60.0)


class Storm(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(NAMES))
    def start(self, name: str) -> None:
        policies = make_policies(
            name,
            num_stages=NUM_STAGES,
            num_pipelines=NUM_PIPELINES,
            lease=LEASE,
            options=OPTIONS.get(name),
        )
        limits = limits_for(name, NUM_STAGES, LIMITS)
        self.scheduler = Scheduler(policies, NUM_PIPELINES, limits=limits)
        self.tries_without_end = limits.retries == math.inf
        # If steps are long, waits are: up to `readiness`.
        self.longest_wait = max(limits.waiting, limits.readiness)
        if name in ("adaptive", "age"):
            self.longest_wait = MAX_WINDOW + LEASE
        self.now = 0.0
        self.log: list[Event] = []
        self.clock = dict.fromkeys(WORKERS, 0)
        self.life = dict.fromkeys(WORKERS, 0)
        self.alive = dict.fromkeys(WORKERS, True)
        self.waits = dict.fromkeys(WORKERS, False)
        self.gathers: set[Worker] = set()
        self.open: dict[int, Assign] = {}
        self.said_done: dict[int, set[Worker]] = {}
        self.closed: dict[int, Command] = {}
        self.last_gid = dict.fromkeys(WORKERS, 0)
        # A worker's weight is its own number; averages mix them.
        self.weights = {worker: float(n) for n, worker in enumerate(WORKERS)}
        self.since: dict[Worker, float] = {}
        self.last_gather: dict[tuple[Worker, int], int] = {}  # its clock, by life
        self.said: dict[Worker, Ready | Gather] = {}  # the last one
        self.deaf: set[Worker] = set()  # they will miss the end of a step,
        self.missed: dict[Worker, Command] = {}  # and these have: this one
        self.last_end: dict[Worker, Commit | Abort] = {}  # of its groups, in this life
        for worker in WORKERS:
            self.tell(Join(worker, f"node{worker.pipeline}", 0, 0, self.now))

    def tell(self, event: Event) -> list[Command]:
        self.log.append(event)
        commands = self.scheduler.step(event)
        for command in commands:
            self.obey(command)
        return commands

    def obey(self, command: Command) -> None:
        if isinstance(command, Assign):
            if command.gid in self.open:
                assert command == self.open[command.gid]  # told again
                return
            assert command.gid not in self.closed
            assert list(command.members) == sorted(command.members)
            assert len({worker.stage for worker in command.members}) == 1
            assert math.isclose(sum(command.weights), 1)
            assert command.why
            assert list(command.lives) == [self.life[worker] for worker in command.members]
            if command.why == "consolidate":
                self.check_all_gather(command)
            busy = {worker for assign in self.open.values() for worker in assign.members}
            assert not busy & set(command.members), "two open groups share a worker"
            for worker in command.members:
                assert self.alive[worker]
                assert self.last_gid[worker] < command.gid, "out of order"
                self.last_gid[worker] = command.gid
                self.since.pop(worker, None)
            self.open[command.gid] = command
            self.said_done[command.gid] = set()
        elif isinstance(command, Commit | Abort):
            if command.gid in self.closed:
                assert command == self.closed[command.gid]
                return
            assign = self.open.pop(command.gid)
            self.closed[command.gid] = command
            for worker, life in zip(assign.members, assign.lives, strict=True):
                if life == self.life[worker]:
                    self.last_end[worker] = command
            if isinstance(command, Commit):
                assert self.said_done[command.gid] == set(assign.members)
                self.average(assign, command)
        elif isinstance(command, Skip):
            if command.clock == self.clock[command.worker]:
                self.release(command.worker, command)
        elif isinstance(command, Heal):
            assert command.worker.stage == command.source.stage
            assert command.worker != command.source

    def check_all_gather(self, assign: Assign) -> None:
        """All that take part in the stage, and each has asked for it."""
        stage = self.scheduler.membership.stages[assign.members[0].stage]
        active = {member.worker for member in stage if member.has_entered}
        event = self.log[-1]
        if isinstance(event, Join):  # whoever starts anew is lost first, and that may be all
            active -= {worker for worker in active if worker.pipeline == event.worker.pipeline}
        assert set(assign.members) == active
        assert self.gathers.issuperset(assign.members)

    def release(self, worker: Worker, command: Command) -> None:
        """The end of a step is sent to a worker, which may miss it."""
        self.since.pop(worker, None)
        self.gathers.discard(worker)
        if worker in self.deaf:
            self.deaf.remove(worker)
            self.missed[worker] = command
        else:
            self.waits[worker] = False
            self.missed.pop(worker, None)

    def average(self, assign: Assign, commit: Commit) -> None:
        before = sum(self.weights.values())
        pairs = zip(assign.members, assign.weights, strict=True)
        mean = sum(self.weights[worker] * weight for worker, weight in pairs)
        for worker, clock in zip(assign.members, commit.ends, strict=True):
            self.weights[worker] = mean
            assert clock in (-1, self.clock[worker])
            assert clock == -1 or self.waits[worker]
            if clock != -1:  # else it only answered
                self.release(worker, commit)
        assert math.isclose(sum(self.weights.values()), before)

    @rule(worker=st.sampled_from(WORKERS))
    def become_ready(self, worker: Worker) -> None:
        if self.alive[worker] and not self.waits[worker]:
            self.clock[worker] += 1
            self.waits[worker] = True
            self.since[worker] = self.now
            self.said[worker] = Ready(worker, self.clock[worker], self.life[worker], self.now)
            self.tell(self.said[worker])

    @rule(worker=st.sampled_from(WORKERS), num_steps=st.sampled_from([0, 0, 1, 5]))
    def gather(self, worker: Worker, num_steps: int) -> None:
        """After steps that nobody was told of."""
        clock = self.clock[worker] + num_steps
        is_new = clock > self.last_gather.get((worker, self.life[worker]), -1)
        if self.alive[worker] and not self.waits[worker] and is_new:
            self.clock[worker] = self.last_gather[worker, self.life[worker]] = clock
            self.waits[worker] = True
            self.gathers.add(worker)
            self.said[worker] = Gather(worker, clock, self.life[worker], self.now)
            self.tell(self.said[worker])

    @rule(worker=st.sampled_from(WORKERS))
    def miss_the_end(self, worker: Worker) -> None:
        if worker not in self.missed:
            self.deaf.add(worker)

    @rule(worker=st.sampled_from(WORKERS))
    def ask_for_the_end_of_a_step(self, worker: Worker) -> None:
        """Whatever else has happened meanwhile, a worker that asks again is told what it missed."""
        if self.waits[worker]:
            missed = self.missed.pop(worker, None)
            commands = self.tell(msgspec.structs.replace(self.said[worker], now=self.now))
            assert missed is None or missed in commands
            if missed is not None:
                self.waits[worker] = False

    @rule(worker=st.sampled_from(WORKERS))
    def ask_for_the_end_of_a_group(self, worker: Worker) -> None:
        if self.alive[worker] and worker in self.last_end:
            end = self.last_end[worker]
            done = Done(worker, end.gid, True, self.life[worker], self.now)
            self.tell(done)  # this one may cross the end, and needs no answer
            assert end in self.tell(done)

    @rule(worker=st.sampled_from(WORKERS))
    def ask_ahead(self, worker: Worker) -> None:
        if self.alive[worker]:
            self.tell(Request(worker, self.clock[worker] + 1, self.life[worker], self.now))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def be_done(self, data: st.DataObject, ok: bool) -> None:
        gid = data.draw(st.sampled_from(sorted(self.open)))
        worker = data.draw(st.sampled_from(self.open[gid].members))
        if self.alive[worker]:
            if ok:
                self.said_done[gid].add(worker)
            self.tell(Done(worker, gid, ok, self.life[worker], self.now))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def finish_a_group(self, data: st.DataObject) -> None:
        gid = data.draw(st.sampled_from(sorted(self.open)))
        for worker in self.open[gid].members:
            self.said_done[gid].add(worker)
            self.tell(Done(worker, gid, True, self.life[worker], self.now))
        assert gid in self.closed

    def forget(self, worker: Worker) -> None:
        """A life is over: nothing of it is waited for, and nothing told again."""
        self.waits[worker] = False
        self.gathers.discard(worker)
        self.deaf.discard(worker)
        for of in (self.since, self.missed, self.last_end):
            of.pop(worker, None)

    @rule(worker=st.sampled_from(WORKERS), leaves=st.booleans())
    def be_lost(self, worker: Worker, leaves: bool) -> None:
        if self.alive[worker]:
            self.alive[worker] = False
            self.forget(worker)
            self.tell((Leave if leaves else Dead)(worker, self.life[worker], self.now))

    @rule(worker=st.sampled_from(WORKERS))
    def return_anew(self, worker: Worker) -> None:
        self.life[worker] += 1
        self.alive[worker] = True
        self.forget(worker)
        clock, life = self.clock[worker], self.life[worker]
        self.tell(Join(worker, "node", clock, life, self.now))

    @rule(data=st.data())
    def repeat_something_old(self, data: st.DataObject) -> None:
        """A message from the past changes nothing: no group begins or ends by it."""
        old = data.draw(st.sampled_from(self.log))
        if isinstance(old, Timer):
            return
        kind = type(old)
        values = {name: getattr(old, name) for name in old.__struct_fields__}
        if isinstance(old, Dead | Leave) and old.incarnation == self.life[old.worker]:
            return  # not old: it would be true
        if isinstance(old, Request) and self.clock[old.worker] < old.clock:
            return
        if isinstance(old, Done) and old.gid in self.open:
            return
        before = set(self.open)
        self.tell(kind(**{**values, "now": self.now}))
        assert set(self.open) == before

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 10.0, 100.0]))
    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while (timer := self.scheduler.next_timer()) <= end:
            assert timer >= self.now, "a timer in the past"
            self.now = timer
            self.tell(Timer(timer))
        self.now = end

    @rule(worker=st.sampled_from(WORKERS), clock=st.integers(-1, 3), life=st.integers(0, 3))
    def say_nonsense(self, worker: Worker, clock: int, life: int) -> None:
        if life < self.life[worker] or clock < self.clock[worker]:
            commands = self.tell(Ready(worker, clock, life, self.now))
            assert all(isinstance(command, Refuse) for command in commands)
        self.tell(Done(worker, 10**9, True, self.life[worker], self.now))

    @invariant()
    def nobody_starves(self) -> None:
        """Alive, ready, and in no group: an answer comes within the longest wait there is."""
        for worker, since in self.since.items():
            assert self.now - since <= self.longest_wait + 1e-6, worker

    def teardown(self) -> None:
        """When all is quiet, every group ends; and when all have gathered, all are free."""
        if not hasattr(self, "scheduler"):
            return
        self.calm_down()
        assert not self.open
        self.deaf.clear()
        for worker in list(self.missed):
            self.ask_for_the_end_of_a_step(worker)
        for _ in range(3):
            for worker in WORKERS:
                self.gather(worker, 1)
            self.finish_all_groups()
            self.calm_down()
        assert not self.gathers
        assert not any(self.waits.values())

    def finish_all_groups(self) -> None:
        while self.open:
            for worker in (assign := self.open[min(self.open)]).members:
                self.said_done[assign.gid].add(worker)
                self.tell(Done(worker, assign.gid, True, self.life[worker], self.now))

    def calm_down(self) -> None:
        for _ in range(200):
            if self.tries_without_end:  # a group ends when somebody says so, or is lost
                self.finish_all_groups()
            if (timer := self.scheduler.next_timer()) == math.inf:
                break
            self.now = timer
            self.tell(Timer(timer))
        assert self.scheduler.next_timer() == math.inf


TestStorm = Storm.TestCase
TestStorm.settings = settings(max_examples=150, stateful_step_count=60)
