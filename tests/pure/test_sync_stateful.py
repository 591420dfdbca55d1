"""The scheduler under random messages: it keeps its invariants, and loses no update.

A stateful test plays workers that send any message, in order or not, twice or late, that request
global averages, die, leave and rejoin at any time, and that may miss a command and repeat their
message. Limits are those of a real job. The test also keeps the weights that the commands imply.
"""

import math

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polyrhythm.sync.members import Limits
from polyrhythm.sync.modes import POLICIES, SyncMode, make_policies
from polyrhythm.sync.protocol import (
    Abort,
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
    Ready,
    Refuse,
    Request,
    Skip,
    Timer,
)
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Worker
from tests.grids import num_examples

NUM_STAGES, NUM_PIPELINES = 2, 3
WORKERS = [Worker(s, p) for s in range(NUM_STAGES) for p in range(NUM_PIPELINES)]
NAMES = [name for name in POLICIES if name not in ("balanced", "local")]  # both are all_reduce
LEASE, MAX_WINDOW = 6.0, 4.0
OPTIONS: dict[str, dict[str, object]] = {
    "adaptive": {"last_groups": 2, "max_window": MAX_WINDOW},
    "age": {"max_age": 1, "max_window": MAX_WINDOW},
    "partial_reduce": {"group_size": 2},
}
LIMITS = Limits(ceiling=5.0, ready_timeout=40.0, average_all_timeout=60.0)


class RandomMessages(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(NAMES))
    def start(self, name: str) -> None:
        policies = make_policies(
            name,
            num_stages=NUM_STAGES,
            num_pipelines=NUM_PIPELINES,
            lease=LEASE,
            options=OPTIONS.get(name),
        )
        mode = SyncMode.named(name)
        limits = mode.limits(NUM_STAGES, LIMITS)
        self.scheduler = Scheduler(
            policies, NUM_PIPELINES, waits_for_all=mode.waits_for_all, limits=limits
        )
        self.tries_without_end = limits.max_retries == math.inf
        # Waits grow with steps, up to `ready_timeout`.
        self.longest_wait = max(limits.group_timeout, limits.ready_timeout)
        if name in ("adaptive", "age"):
            self.longest_wait = MAX_WINDOW + LEASE
        self.now = 0.0
        self.log: list[Event] = []
        self.clock = dict.fromkeys(WORKERS, 0)
        self.incarnation = dict.fromkeys(WORKERS, 0)
        self.alive = dict.fromkeys(WORKERS, True)
        self.waits = dict.fromkeys(WORKERS, False)
        self.averages_all: set[Worker] = set()
        self.open: dict[int, Assign] = {}
        self.reported_done: dict[int, set[Worker]] = {}
        self.closed: dict[int, Command] = {}
        self.last_gid = dict.fromkeys(WORKERS, 0)
        # A worker's initial weight is its index; averages mix the weights.
        self.weights = {worker: float(n) for n, worker in enumerate(WORKERS)}
        self.since: dict[Worker, float] = {}
        self.last_average_all: dict[tuple[Worker, int], int] = {}  # clock, by incarnation
        self.sent: dict[Worker, Ready | AverageAll] = {}  # the last message
        self.will_miss_end: set[Worker] = set()  # they will miss the end of a step
        self.missed: dict[Worker, Command] = {}  # the missed end of a step
        self.last_end: dict[Worker, Commit | Abort] = {}  # of its groups, in this incarnation
        for worker in WORKERS:
            self.deliver(Join(worker, f"node{worker.pipeline}", 0, 0, self.now))

    def deliver(self, event: Event) -> list[Command]:
        self.log.append(event)
        commands = self.scheduler.step(event)
        for command in commands:
            self.apply(command)
        return commands

    def apply(self, command: Command) -> None:
        if isinstance(command, Assign):
            if command.gid in self.open:
                assert command == self.open[command.gid]  # sent again
                return
            assert command.gid not in self.closed
            assert list(command.members) == sorted(command.members)
            assert len({worker.stage for worker in command.members}) == 1
            assert command.why
            assert list(command.incarnations) == [
                self.incarnation[worker] for worker in command.members
            ]
            if command.why == "average_all":
                self.check_average_all(command)
            busy = {worker for assign in self.open.values() for worker in assign.members}
            assert not busy & set(command.members), "two open groups share a worker"
            for worker in command.members:
                assert self.alive[worker]
                assert self.last_gid[worker] < command.gid, "out of order"
                self.last_gid[worker] = command.gid
                self.since.pop(worker, None)
            self.open[command.gid] = command
            self.reported_done[command.gid] = set()
        elif isinstance(command, Commit | Abort):
            if command.gid in self.closed:
                assert command == self.closed[command.gid]
                return
            assign = self.open.pop(command.gid)
            self.closed[command.gid] = command
            for worker, incarnation in zip(assign.members, assign.incarnations, strict=True):
                if incarnation == self.incarnation[worker]:
                    self.last_end[worker] = command
            if isinstance(command, Commit):
                assert self.reported_done[command.gid] == set(assign.members)
                self.average(assign, command)
        elif isinstance(command, Skip):
            if command.clock == self.clock[command.worker]:
                self.release(command.worker, command)
        elif isinstance(command, CopyFrom):
            assert command.worker.stage == command.source.stage
            assert command.worker != command.source

    def check_average_all(self, assign: Assign) -> None:
        """Check that the members are all active workers, and that each sent AverageAll."""
        stage = self.scheduler.membership.stages[assign.members[0].stage]
        active = {member.worker for member in stage if member.has_joined}
        event = self.log[-1]
        if isinstance(event, Join):  # a restarted worker is lost first, which may form the group
            active -= {worker for worker in active if worker.pipeline == event.worker.pipeline}
        assert set(assign.members) == active
        assert self.averages_all.issuperset(assign.members)

    def release(self, worker: Worker, command: Command) -> None:
        """Send the end of a step to a worker, which may miss it."""
        self.since.pop(worker, None)
        self.averages_all.discard(worker)
        if worker in self.will_miss_end:
            self.will_miss_end.remove(worker)
            self.missed[worker] = command
        else:
            self.waits[worker] = False
            self.missed.pop(worker, None)

    def average(self, assign: Assign, commit: Commit) -> None:
        before = sum(self.weights.values())
        mean = sum(self.weights[worker] for worker in assign.members) / len(assign.members)
        for worker, clock in zip(assign.members, commit.end_clocks, strict=True):
            self.weights[worker] = mean
            assert clock in (-1, self.clock[worker])
            assert clock == -1 or self.waits[worker]
            if clock != -1:  # else it was passive
                self.release(worker, commit)
        assert math.isclose(sum(self.weights.values()), before)

    @rule(worker=st.sampled_from(WORKERS))
    def become_ready(self, worker: Worker) -> None:
        if self.alive[worker] and not self.waits[worker]:
            self.clock[worker] += 1
            self.waits[worker] = True
            self.since[worker] = self.now
            self.sent[worker] = Ready(
                worker, self.clock[worker], self.incarnation[worker], self.now
            )
            self.deliver(self.sent[worker])

    @rule(worker=st.sampled_from(WORKERS), num_steps=st.sampled_from([0, 0, 1, 5]))
    def average_all(self, worker: Worker, num_steps: int) -> None:
        """Request a global average, after steps that were not reported."""
        clock = self.clock[worker] + num_steps
        is_new = clock > self.last_average_all.get((worker, self.incarnation[worker]), -1)
        if self.alive[worker] and not self.waits[worker] and is_new:
            self.clock[worker] = self.last_average_all[worker, self.incarnation[worker]] = clock
            self.waits[worker] = True
            self.averages_all.add(worker)
            self.sent[worker] = AverageAll(worker, clock, self.incarnation[worker], self.now)
            self.deliver(self.sent[worker])

    @rule(worker=st.sampled_from(WORKERS))
    def miss_the_end(self, worker: Worker) -> None:
        if worker not in self.missed:
            self.will_miss_end.add(worker)

    @rule(worker=st.sampled_from(WORKERS))
    def ask_for_the_end_of_a_step(self, worker: Worker) -> None:
        """A repeated message is answered with the missed end, whatever happened in between."""
        if self.waits[worker]:
            missed = self.missed.pop(worker, None)
            commands = self.deliver(msgspec.structs.replace(self.sent[worker], now=self.now))
            assert missed is None or missed in commands
            if missed is not None:
                self.waits[worker] = False

    @rule(worker=st.sampled_from(WORKERS))
    def ask_for_the_end_of_a_group(self, worker: Worker) -> None:
        if self.alive[worker] and worker in self.last_end:
            end = self.last_end[worker]
            done = Done(worker, end.gid, True, self.incarnation[worker], self.now)
            self.deliver(done)  # it may cross the end on the wire, and needs no answer
            assert end in self.deliver(done)

    @rule(worker=st.sampled_from(WORKERS))
    def ask_ahead(self, worker: Worker) -> None:
        if self.alive[worker]:
            self.deliver(
                Request(worker, self.clock[worker] + 1, self.incarnation[worker], self.now)
            )

    @precondition(lambda self: self.open)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def report_done(self, data: st.DataObject, ok: bool) -> None:
        gid = data.draw(st.sampled_from(sorted(self.open)))
        worker = data.draw(st.sampled_from(self.open[gid].members))
        if self.alive[worker]:
            if ok:
                self.reported_done[gid].add(worker)
            self.deliver(Done(worker, gid, ok, self.incarnation[worker], self.now))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def finish_a_group(self, data: st.DataObject) -> None:
        gid = data.draw(st.sampled_from(sorted(self.open)))
        for worker in self.open[gid].members:
            self.reported_done[gid].add(worker)
            self.deliver(Done(worker, gid, True, self.incarnation[worker], self.now))
        assert gid in self.closed

    def forget(self, worker: Worker) -> None:
        """Forget the state of an ended incarnation."""
        self.waits[worker] = False
        self.averages_all.discard(worker)
        self.will_miss_end.discard(worker)
        for by_worker in (self.since, self.missed, self.last_end):
            by_worker.pop(worker, None)

    @rule(worker=st.sampled_from(WORKERS), leaves=st.booleans())
    def leave_or_die(self, worker: Worker, leaves: bool) -> None:
        if self.alive[worker]:
            self.alive[worker] = False
            self.forget(worker)
            self.deliver((Leave if leaves else Dead)(worker, self.incarnation[worker], self.now))

    @rule(worker=st.sampled_from(WORKERS))
    def rejoin(self, worker: Worker) -> None:
        self.incarnation[worker] += 1
        self.alive[worker] = True
        self.forget(worker)
        clock, incarnation = self.clock[worker], self.incarnation[worker]
        self.deliver(Join(worker, "node", clock, incarnation, self.now))

    @rule(data=st.data())
    def repeat_something_old(self, data: st.DataObject) -> None:
        """An old message starts and ends no group."""
        old = data.draw(st.sampled_from(self.log))
        if isinstance(old, Timer):
            return
        kind = type(old)
        values = {name: getattr(old, name) for name in old.__struct_fields__}
        if isinstance(old, Dead | Leave) and old.incarnation == self.incarnation[old.worker]:
            return  # still valid
        if isinstance(old, Request) and self.clock[old.worker] < old.clock:
            return
        if isinstance(old, Done) and old.gid in self.open:
            return
        before = set(self.open)
        self.deliver(kind(**{**values, "now": self.now}))
        assert set(self.open) == before

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 10.0, 100.0]))
    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while (timer := self.scheduler.next_timer()) <= end:
            assert timer >= self.now, "a timer in the past"
            self.now = timer
            self.deliver(Timer(timer))
        self.now = end

    @rule(worker=st.sampled_from(WORKERS), clock=st.integers(-1, 3), incarnation=st.integers(0, 3))
    def send_nonsense(self, worker: Worker, clock: int, incarnation: int) -> None:
        if incarnation < self.incarnation[worker] or clock < self.clock[worker]:
            commands = self.deliver(Ready(worker, clock, incarnation, self.now))
            assert all(isinstance(command, Refuse) for command in commands)
        self.deliver(Done(worker, 10**9, True, self.incarnation[worker], self.now))

    @invariant()
    def no_worker_waits_too_long(self) -> None:
        """A ready worker without a group is answered within the longest wait."""
        for worker, since in self.since.items():
            assert self.now - since <= self.longest_wait + 1e-6, worker

    def teardown(self) -> None:
        """Without further messages every group ends; global averages release all workers."""
        if not hasattr(self, "scheduler"):
            return
        self.run_timers()
        assert not self.open
        self.will_miss_end.clear()
        for worker in list(self.missed):
            self.ask_for_the_end_of_a_step(worker)
        for _ in range(3):
            for worker in WORKERS:
                self.average_all(worker, 1)
            self.finish_all_groups()
            self.run_timers()
        assert not self.averages_all
        assert not any(self.waits.values())

    def finish_all_groups(self) -> None:
        while self.open:
            for worker in (assign := self.open[min(self.open)]).members:
                self.reported_done[assign.gid].add(worker)
                self.deliver(Done(worker, assign.gid, True, self.incarnation[worker], self.now))

    def run_timers(self) -> None:
        for _ in range(200):
            if self.tries_without_end:  # a group is retried until all members send Done
                self.finish_all_groups()
            if (timer := self.scheduler.next_timer()) == math.inf:
                break
            self.now = timer
            self.deliver(Timer(timer))
        assert self.scheduler.next_timer() == math.inf


TestRandomMessages = RandomMessages.TestCase
TestRandomMessages.settings = settings(max_examples=num_examples(150), stateful_step_count=60)
