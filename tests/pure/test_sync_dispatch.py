"""Sample dispatch by a scheduler: all stages get the same samples, each position is used once."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PolicyError
from polyrhythm.sync.decision_log import DecisionLog
from polyrhythm.sync.dispatch import Ranges, SamplerState
from polyrhythm.sync.log_reader import DecisionReader, replay
from polyrhythm.sync.protocol import (
    Acknowledge,
    Acquire,
    Acquired,
    Assign,
    AverageAll,
    Command,
    Commit,
    Dead,
    Done,
    Event,
    Join,
    Leave,
    QueryProgress,
    Ready,
    Refuse,
    Request,
    SampleProgress,
    Skip,
    Timer,
)
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Worker


def positions(ranges: Ranges) -> list[int]:
    return [position for start, end in ranges for position in range(start, end)]


def setup_of(stages: int = 1, pipelines: int = 2, **sampler_state: object) -> Setup:
    return Setup(
        policy="age",
        num_stages=stages,
        num_pipelines=pipelines,
        sampler_state=SamplerState(**sampler_state),
    )


def joined(setup: Setup) -> Scheduler:
    scheduler = setup.scheduler()
    for worker in setup.workers:
        assert scheduler.step(Join(worker, "node", 0, 1, 0.0)) == []
    return scheduler


A, B = Worker(0, 0), Worker(0, 1)


def test_stages_of_a_pipeline_acquire_the_same_samples() -> None:
    scheduler = joined(setup_of(stages=2, limit=10))
    other = Worker(1, 0)
    assert scheduler.step(Acquire(A, 0, 4, None, 1)) == [Acquired(A, 0, None, ((0, 4),))]
    assert scheduler.step(Acquire(B, 0, 4, None, 1)) == [Acquired(B, 0, None, ((4, 8),))]
    assert scheduler.step(Acquire(other, 0, 4, None, 1)) == [Acquired(other, 0, None, ((0, 4),))]
    assert scheduler.step(Acquire(A, 0, 4, None, 1)) == [Acquired(A, 0, None, ((0, 4),))]
    assert scheduler.step(Acknowledge(A, 0, 1)) == []
    [progress] = scheduler.step(QueryProgress(B, 5, 1))
    assert progress == SampleProgress(B, 5, SamplerState(limit=10, next=8, outstanding=((0, 8),)))
    scheduler.step(Acquire(A, 0, 4, None, 1))  # by a stage that has used it: no effect
    scheduler.step(Acknowledge(other, 0, 1))  # the last stage that requested it
    [progress] = scheduler.step(QueryProgress(B, 6, 1))
    assert progress.sampler_state.outstanding == ((4, 8),)
    assert scheduler.counters["late"] == 0
    scheduler.step(Acknowledge(other, 0, 1))
    assert scheduler.counters["late"] == 1


def test_acknowledge_covers_all_earlier_chunks() -> None:
    scheduler = joined(setup_of())
    for number in range(3):
        scheduler.step(Acquire(A, number, 4, None, 1))
    scheduler.step(Acknowledge(A, 1, 1))
    [progress] = scheduler.step(QueryProgress(A, 0, 1))
    assert progress.sampler_state.outstanding == ((8, 12),)


def test_acquire_waits_while_others_hold_the_last_samples() -> None:
    scheduler = joined(setup_of(limit=8))
    scheduler.step(Acquire(A, 0, 4, None, 1))
    scheduler.step(Acquire(B, 0, 4, None, 1))
    assert scheduler.step(Acknowledge(B, 0, 1)) == []
    assert scheduler.step(Acquire(B, 1, 4, None, 1)) == []
    assert scheduler.step(Acquire(B, 1, 4, None, 1)) == []  # a repeated request
    assert scheduler.step(Acquire(A, 1, 4, None, 1)) == [Acquired(A, 1, None, ())]  # has the rest
    assert scheduler.step(Acknowledge(A, 0, 1)) == [Acquired(B, 1, None, ())]


def test_last_chunk_of_a_dead_pipeline_goes_to_a_waiting_one() -> None:
    scheduler = joined(setup_of(pipelines=3, limit=12))
    waiting = Worker(0, 2)
    for worker in (A, B, waiting):
        scheduler.step(Acquire(worker, 0, 4, None, 1))
    scheduler.step(Acknowledge(waiting, 0, 1))
    assert scheduler.step(Acquire(waiting, 1, 3, None, 1)) == []
    acquired = scheduler.step(Dead(B, 1, 1.0))
    assert acquired == [Acquired(waiting, 1, None, ((4, 7),))]
    assert scheduler.step(Acquire(A, 1, 3, None, 1)) == [Acquired(A, 1, None, ((7, 8),))]


@pytest.mark.parametrize("is_last", [True, False])
def test_leaving_pipeline_returns_its_unused_samples(is_last: bool) -> None:
    scheduler = joined(setup_of(stages=2))
    for stage in (0, 1):
        scheduler.step(Acquire(Worker(stage, 0), 0, 4, None, 1))
    scheduler.step(Leave(Worker(1, 0), 1))
    if is_last:
        scheduler.step(Leave(Worker(0, 0), 1))
    [progress] = scheduler.step(QueryProgress(B, 0, 1))
    assert (progress.sampler_state.pool, progress.sampler_state.outstanding)[not is_last] == (
        (0, 4),
    )


def test_broken_pipeline_gets_a_reason_and_restarts_its_chunk_numbers() -> None:
    scheduler = joined(setup_of(stages=2, limit=4))
    neighbour = Worker(1, 0)
    scheduler.step(Acquire(B, 0, 4, None, 1))
    assert scheduler.step(Acquire(A, 0, 4, None, 1)) == []
    [acquired] = scheduler.step(Dead(neighbour, 1, 1.0))
    assert (acquired.worker, acquired.ranges, acquired.why) == (A, (), "s1p0 died")
    [acquired] = scheduler.step(Acquire(A, 0, 4, None, 1))
    assert acquired.why == "its pipeline is incomplete: s1p0 is dead"
    scheduler.step(Join(neighbour, "node", 0, 2, 2.0))
    [acquired] = scheduler.step(Acquire(A, 1, 4, None, 1))
    assert acquired.why == "it requests chunk 1; its pipeline has acquired 0"
    scheduler.step(Dead(Worker(1, 1), 1, 3.0))
    assert scheduler.step(Acquire(A, 0, 4, None, 1)) == [Acquired(A, 0, None, ((0, 4),))]
    assert scheduler.step(Acquire(neighbour, 0, 4, None, 2)) == [
        Acquired(neighbour, 0, None, ((0, 4),))
    ]


def test_restarted_worker_returns_its_samples() -> None:
    scheduler = joined(setup_of())
    scheduler.step(Acquire(A, 0, 4, None, 1))
    scheduler.step(Join(A, "node", 0, 2, 1.0))
    assert scheduler.step(Acknowledge(A, 0, 1)) == []  # of its former incarnation
    assert scheduler.step(Acquire(A, 1, 4, None, 1)) == []
    assert scheduler.counters["late"] == 2
    assert scheduler.step(Acquire(A, 0, 3, None, 2)) == [Acquired(A, 0, None, ((0, 3),))]


def test_rejoined_stage_resets_its_pipeline() -> None:
    scheduler = joined(setup_of(stages=2))
    neighbour = Worker(1, 0)
    for number in range(2):
        scheduler.step(Acquire(A, number, 4, None, 1))
    scheduler.step(Leave(neighbour, 1))
    scheduler.step(Join(neighbour, "node", 0, 2, 1.0))
    assert scheduler.step(Acquire(neighbour, 0, 4, None, 2)) == [
        Acquired(neighbour, 0, None, ((0, 4),))
    ]
    [progress] = scheduler.step(QueryProgress(B, 0, 1))
    assert progress.sampler_state == SamplerState(next=8, pool=((4, 8),), outstanding=((0, 4),))


def test_acquire_of_unknown_workers_or_without_dispatcher_is_refused() -> None:
    scheduler = joined(setup_of())
    for unknown, incarnation in ((Worker(0, 7), 1), (A, 2)):
        for event in (
            Acquire(unknown, 0, 4, None, incarnation),
            QueryProgress(unknown, 0, incarnation),
        ):
            [refuse] = scheduler.step(event)
            assert (type(refuse), refuse.worker, refuse.clock) == (Refuse, unknown, -1)
    scheduler.step(Dead(A, 1, 1.0))
    [refuse] = scheduler.step(Acquire(A, 0, 4, None, 1))
    assert "is dead, and must join again" in refuse.why
    without = joined(Setup(policy="age", num_stages=1, num_pipelines=2))
    [refuse] = without.step(Acquire(A, 0, 4, None, 1))
    assert "no sample dispatcher" in refuse.why


def test_acquire_of_an_acknowledged_chunk_gets_a_reason() -> None:
    scheduler = joined(setup_of(stages=2))
    scheduler.step(Acquire(A, 0, 4, None, 1))
    scheduler.step(Acknowledge(A, 0, 1))
    [acquired] = scheduler.step(Acquire(Worker(1, 0), 0, 4, None, 1))
    assert acquired.why == "chunk 0 of its pipeline was used already"


class RandomJob:
    """Workers that acquire, acknowledge and are lost in random order, with a real scheduler."""

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self.setup, self.rng, self.scheduler = setup, rng, setup.scheduler()
        self.log: list[tuple[Event, list[Command]]] = []
        self.incarnations = dict.fromkeys(setup.workers, 0)
        self.sent: dict[Worker, list[Event]] = {}
        self.acquired: dict[Worker, dict[int, Ranges]] = {}  # in this incarnation
        self.requested: dict[Worker, set[int]] = {}
        self.used: dict[Worker, int] = {}
        self.over: set[Worker] = set()
        self.counted_by: dict[int, list[int]] = {}  # by pipeline: they never average
        self.ahead = rng.randint(0, 2)
        for pipeline in range(setup.num_pipelines):
            self.begin(pipeline)

    def deliver(self, event: Event) -> None:
        commands = self.scheduler.step(event)
        self.log.append((event, commands))
        for command in commands:
            assert isinstance(command, Acquired), command
            if command.why:  # answers to the other stages of a broken pipeline
                assert isinstance(event, Dead)
                assert command.worker.pipeline == event.worker.pipeline
                continue
            self.acquired[command.worker][command.number] = command.ranges
            if not command.ranges:
                self.over.add(command.worker)

    def send(self, worker: Worker, event: Event) -> None:
        self.sent[worker].append(event)
        self.deliver(event)

    def workers(self, pipeline: int) -> list[Worker]:
        return [worker for worker in self.setup.workers if worker.pipeline == pipeline]

    def begin(self, pipeline: int) -> None:
        """Let all stages of a pipeline join in a new incarnation; what it has used is lost."""
        self.counted_by[pipeline] = []
        for worker in self.workers(pipeline):
            self.incarnations[worker] += 1
            self.sent[worker], self.acquired[worker], self.requested[worker] = [], {}, set()
            self.used[worker] = -1
            self.over.discard(worker)
        for worker in self.workers(pipeline):
            self.deliver(Join(worker, "node", 0, self.incarnations[worker], 0.0))

    @property
    def counted(self) -> list[int]:
        return sorted(position for each in self.counted_by.values() for position in each)

    @property
    def is_over(self) -> bool:
        return all(self.has_ended(worker) for worker in self.setup.workers)

    def has_ended(self, worker: Worker) -> bool:
        """Whether the worker has nothing left to acquire or to acknowledge."""
        has = [number for number, found in self.acquired[worker].items() if found]
        return worker in self.over and self.used[worker] == max(has, default=-1)

    def act(self) -> None:
        """Let a random worker do something that it may do now."""
        worker = self.rng.choice([w for w in self.setup.workers if not self.has_ended(w)])
        incarnation, next_number = self.incarnations[worker], len(self.requested[worker])
        could_use = self.used[worker] + 1
        all_have = all(self.acquired[w].get(could_use) for w in self.workers(worker.pipeline))
        choice = self.rng.random()
        if choice < 0.04:
            stages = self.workers(worker.pipeline)
            kind = Dead if choice < 0.02 else Leave
            for stage in stages:
                self.deliver(kind(stage, self.incarnations[stage], 0.0))
            self.begin(worker.pipeline)
        elif choice < 0.1 and self.sent[worker]:
            self.deliver(self.sent[worker][-1])
        elif choice < 0.5 and all_have:
            self.used[worker] += 1
            slowest = min(self.used[w] for w in self.workers(worker.pipeline))
            if slowest == could_use:
                found = positions(self.acquired[worker][could_use])
                self.counted_by[worker.pipeline] += found
            self.send(worker, Acknowledge(worker, could_use, incarnation))
        elif next_number <= could_use + self.ahead and worker not in self.over:
            self.requested[worker].add(next_number)
            self.send(
                worker, Acquire(worker, next_number, self.rng.randint(1, 6), None, incarnation)
            )


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 40), st.integers(0, 10**6))
def test_every_position_is_used_once_despite_losses(
    stages: int, pipelines: int, limit: int, seed: int
) -> None:
    setup = setup_of(stages, pipelines, limit=limit)
    job = RandomJob(setup, random.Random(seed))
    for _ in range(20_000):
        if job.is_over:
            break
        job.act()
    assert job.counted == list(range(limit))
    for pipeline in range(pipelines):
        acquired = [job.acquired[worker] for worker in job.workers(pipeline)]
        first, *others = [{n: found for n, found in each.items() if found} for each in acquired]
        assert all(other == first for other in others)
    [progress] = job.scheduler.step(QueryProgress(A, 0, job.incarnations[A]))
    assert progress.sampler_state == SamplerState(limit=limit, next=limit)


@pytest.mark.parametrize("average_all", [False, True])
def test_samples_of_a_dead_pipeline_count_from_the_first_commit_on(average_all: bool) -> None:
    scheduler = joined(setup_of())
    for worker in (A, B):
        scheduler.step(Acquire(worker, 0, 4, None, 1))
        scheduler.step(Acknowledge(worker, 0, 1))
    kind = AverageAll if average_all else Ready
    scheduler.step(kind(A, 1, 1, 1.0))
    commands = scheduler.step(kind(B, 1, 1, 1.0))
    if not any(isinstance(command, Assign) for command in commands):
        commands = scheduler.step(Timer(scheduler.next_timer()))
    [assign] = [command for command in commands if isinstance(command, Assign)]
    scheduler.step(Done(A, assign.gid, True, 1, 2.0))
    [commit] = scheduler.step(Done(B, assign.gid, True, 1, 2.0))
    assert isinstance(commit, Commit)
    scheduler.step(Acquire(A, 1, 4, None, 1))
    scheduler.step(Acknowledge(A, 1, 1))  # the update of positions 8 to 11
    assert progress_of(scheduler, B).num_used == 12
    scheduler.step(Dead(A, 1, 3.0))
    assert progress_of(scheduler, B) == SamplerState(next=12, pool=((8, 12),))


def test_samples_of_an_aborted_average_do_not_count() -> None:
    scheduler = joined(setup_of())
    scheduler.step(Acquire(A, 0, 4, None, 1))
    scheduler.step(Acknowledge(A, 0, 1))
    scheduler.step(Ready(A, 1, 1, 1.0))
    scheduler.step(Ready(B, 1, 1, 1.0))
    scheduler.step(Dead(A, 1, 2.0))
    assert progress_of(scheduler, B) == SamplerState(next=4, pool=((0, 4),))


def progress_of(scheduler: Scheduler, worker: Worker) -> SamplerState:
    [progress] = scheduler.step(QueryProgress(worker, 9, 1))
    assert isinstance(progress, SampleProgress)
    return progress.sampler_state


def test_dispatch_replays_from_the_decision_log(tmp_path: Path) -> None:
    setup = setup_of(2, 3, limit=60, next=20, pool=((3, 5),), outstanding=((8, 9),))
    job = RandomJob(setup, random.Random(5))
    while not job.is_over:
        job.act()
    assert job.counted == [3, 4, 8, *range(20, 60)]
    log = DecisionLog(tmp_path / "log", setup, setup.scheduler())
    for event, commands in job.log:
        log.add(event, commands)
    log.close()
    assert DecisionReader(tmp_path / "log").setup == setup
    assert replay(tmp_path / "log") is None
    text = (tmp_path / "log").read_text()
    assert text.count('"pool":[[3,5]]') == 1
    (tmp_path / "log").write_text(text.replace('"pool":[[3,5]]', '"pool":[[3,4]]'))
    assert replay(tmp_path / "log") is not None


def test_setup_text_includes_the_sampler_state() -> None:
    texts = {setup_of(limit=limit, next=used).text for limit in (None, 4) for used in (0, 2)}
    texts |= {Setup(policy="age", num_stages=1, num_pipelines=2).text}
    assert len(texts) == 5
    assert "age every=1 seed=0 samples=2:4" in texts


def test_static_policy_refuses_sample_dispatch() -> None:
    with pytest.raises(PolicyError, match="sampler_state under static"):
        Setup(policy="static", num_stages=1, num_pipelines=2, sampler_state=SamplerState())


@pytest.mark.parametrize("policy", ["all_reduce", "partial_reduce", "smart"])
def test_no_group_waits_for_an_idle_worker(policy: str) -> None:
    """The worker with the last positions averages before it uses them; then both continue."""
    options = {"group_size": 2} if policy == "partial_reduce" else {}
    sampler_state = SamplerState(limit=12)
    scheduler = joined(
        Setup(
            policy=policy,
            num_stages=1,
            num_pipelines=2,
            options=options,
            sampler_state=sampler_state,
        )
    )
    assert positions_of(scheduler, A, 0) == 4
    assert positions_of(scheduler, B, 0) == positions_of(scheduler, B, 1) == 4
    for worker in (A, B):  # both have requested a group ahead, if the policy takes requests
        scheduler.step(Request(worker, 1, 1))
    scheduler.step(Acknowledge(A, 0, 1))
    scheduler.step(Acknowledge(B, 0, 1))
    assert scheduler.step(Acquire(A, 1, 4, None, 1, 1.0)) == []  # B has the last positions
    commands = scheduler.step(Ready(B, 1, 1, 2.0))
    assert [type(command) for command in commands] == [Skip]
    commands = scheduler.step(Acknowledge(B, 1, 1, 3.0))
    assert commands == [Acquired(A, 1, None, ())]
    assert scheduler.step(AverageAll(B, 1, 1, 4.0)) == []
    (assign,) = scheduler.step(AverageAll(A, 1, 1, 5.0))
    assert isinstance(assign, Assign)
    assert assign.members == (A, B)


def test_idle_worker_rejoins_its_policy_with_its_next_step() -> None:
    scheduler = joined(
        Setup(
            policy="all_reduce", num_stages=1, num_pipelines=2, sampler_state=SamplerState(limit=8)
        )
    )
    assert positions_of(scheduler, A, 0) == positions_of(scheduler, B, 0) == 4
    scheduler.step(Acknowledge(A, 0, 1))
    assert scheduler.step(Acquire(A, 1, 4, None, 1)) == []
    assert scheduler.step(Ready(A, 1, 1)) == []  # it is back in its policy, and waits for B
    assert isinstance(scheduler.step(Ready(B, 1, 1))[-1], Assign)


def positions_of(scheduler: Scheduler, worker: Worker, number: int) -> int:
    (acquired,) = scheduler.step(Acquire(worker, number, 4, None, 1))
    assert isinstance(acquired, Acquired)
    return len(positions(acquired.ranges))


def test_dispatch_can_end_after_the_current_batch() -> None:
    scheduler = joined(setup_of(limit=100))
    assert scheduler.step(Acquire(A, 0, 4, None, 1)) == [Acquired(A, 0, None, ((0, 4),))]
    [progress] = scheduler.step(QueryProgress(A, 0, 1, batch=6))
    assert progress.sampler_state == SamplerState(limit=6, next=4, outstanding=((0, 4),))
    [again] = scheduler.step(QueryProgress(A, 1, 1, batch=6))
    assert again.sampler_state == progress.sampler_state
    assert scheduler.step(Acquire(B, 0, 4, None, 1)) == [Acquired(B, 0, None, ((4, 6),))]
    assert scheduler.step(Acquire(A, 1, 4, None, 1)) == []  # B may be lost with its chunk
    assert scheduler.step(Acknowledge(A, 0, 1)) == []
    assert scheduler.step(Acknowledge(B, 0, 1)) == [Acquired(A, 1, None, ())]


def test_end_after_batch_never_raises_the_limit() -> None:
    scheduler = joined(setup_of(limit=8))
    scheduler.step(Acquire(A, 0, 8, None, 1))
    assert scheduler.step(Acquire(B, 0, 4, None, 1)) == []
    assert scheduler.step(QueryProgress(B, 0, 1, batch=3))[-1].sampler_state.limit == 8


def test_a_passive_member_that_is_ready_since_its_exchange_has_unused_samples() -> None:
    """Pairwise: the average has its model of before, not the update of the samples."""
    setup = Setup(
        policy="pairwise", num_stages=1, num_pipelines=2, sampler_state=SamplerState(limit=100)
    )
    scheduler = joined(setup)
    for worker in (A, B):
        scheduler.step(Acquire(worker, 0, 10, None, 1))
    scheduler.step(Acknowledge(A, 0, 1))
    [assign] = [c for c in scheduler.step(Ready(A, 1, 1, 0.0)) if isinstance(c, Assign)]
    assert assign.members == (A, B)
    scheduler.step(Done(B, assign.gid, True, 1))
    scheduler.step(Acknowledge(B, 0, 1))
    scheduler.step(Ready(B, 1, 1, 0.0))
    commands = scheduler.step(Done(A, assign.gid, True, 1))
    assert any(isinstance(command, Commit) for command in commands)
    scheduler.step(Dead(B, 1))
    [progress] = [
        command
        for command in scheduler.step(QueryProgress(A, 1, 1))
        if isinstance(command, SampleProgress)
    ]
    assert progress.sampler_state == SamplerState(limit=100, next=20, pool=((10, 20),))
