"""Positions dealt by a scheduler: to all stages alike, each used once, whoever is lost."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PolicyError
from polyrhythm.sync.decision_log import DecisionLog, DecisionReader, replay
from polyrhythm.sync.dispenser import Ranges, Supply
from polyrhythm.sync.messages import (
    Assign,
    Command,
    Dead,
    Dealt,
    Event,
    Gather,
    Join,
    Leave,
    Ready,
    Refuse,
    Request,
    Skip,
    Take,
    Tallied,
    Tally,
    Used,
)
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Worker


def positions(ranges: Ranges) -> list[int]:
    return [position for start, end in ranges for position in range(start, end)]


def setup_of(stages: int = 1, pipelines: int = 2, **supply: object) -> Setup:
    return Setup(policy="age", num_stages=stages, num_pipelines=pipelines, supply=Supply(**supply))


def joined(setup: Setup) -> Scheduler:
    scheduler = setup.scheduler()
    for worker in setup.workers:
        assert scheduler.step(Join(worker, "node", 0, 1, 0.0)) == []
    return scheduler


A, B = Worker(0, 0), Worker(0, 1)


def test_stages_of_a_pipeline_are_dealt_the_same() -> None:
    scheduler = joined(setup_of(stages=2, limit=10))
    other = Worker(1, 0)
    assert scheduler.step(Take(A, 0, 4, None, 1)) == [Dealt(A, 0, None, ((0, 4),))]
    assert scheduler.step(Take(B, 0, 4, None, 1)) == [Dealt(B, 0, None, ((4, 8),))]
    assert scheduler.step(Take(other, 0, 4, None, 1)) == [Dealt(other, 0, None, ((0, 4),))]
    assert scheduler.step(Take(A, 0, 4, None, 1)) == [Dealt(A, 0, None, ((0, 4),))]  # again
    assert scheduler.step(Used(A, 0, 1)) == []
    [tallied] = scheduler.step(Tally(B, 5, 1))
    assert tallied == Tallied(B, 5, Supply(limit=10, next=8, outstanding=((0, 8),)))
    scheduler.step(Take(A, 0, 4, None, 1))  # by a stage that has used it: changes nothing
    scheduler.step(Used(other, 0, 1))  # now all that have asked for it
    [tallied] = scheduler.step(Tally(B, 6, 1))
    assert tallied.supply.outstanding == ((4, 8),)
    assert scheduler.counters["late"] == 0
    scheduler.step(Used(other, 0, 1))
    assert scheduler.counters["late"] == 1


def test_used_says_so_of_all_chunks_before() -> None:
    scheduler = joined(setup_of())
    for number in range(3):
        scheduler.step(Take(A, number, 4, None, 1))
    scheduler.step(Used(A, 1, 1))
    [tallied] = scheduler.step(Tally(A, 0, 1))
    assert tallied.supply.outstanding == ((8, 12),)


def test_who_asks_when_others_have_the_rest_waits_for_them() -> None:
    scheduler = joined(setup_of(limit=8))
    scheduler.step(Take(A, 0, 4, None, 1))
    scheduler.step(Take(B, 0, 4, None, 1))
    assert scheduler.step(Used(B, 0, 1)) == []
    assert scheduler.step(Take(B, 1, 4, None, 1)) == []
    assert scheduler.step(Take(B, 1, 4, None, 1)) == []  # asks again, and is answered once
    assert scheduler.step(Take(A, 1, 4, None, 1)) == [Dealt(A, 1, None, ())]  # it has the rest
    assert scheduler.step(Used(A, 0, 1)) == [Dealt(B, 1, None, ())]


def test_the_last_chunk_of_one_that_dies_is_dealt_to_who_waits() -> None:
    scheduler = joined(setup_of(pipelines=3, limit=12))
    waiting = Worker(0, 2)
    for worker in (A, B, waiting):
        scheduler.step(Take(worker, 0, 4, None, 1))
    scheduler.step(Used(waiting, 0, 1))
    assert scheduler.step(Take(waiting, 1, 3, None, 1)) == []
    dealt = scheduler.step(Dead(B, 1, 1.0))
    assert dealt == [Dealt(waiting, 1, None, ((4, 7),))]
    assert scheduler.step(Take(A, 1, 3, None, 1)) == [Dealt(A, 1, None, ((7, 8),))]


@pytest.mark.parametrize("is_last", [True, False])
def test_a_pipeline_that_leaves_gives_back_what_it_did_not_use(is_last: bool) -> None:
    scheduler = joined(setup_of(stages=2))
    for stage in (0, 1):
        scheduler.step(Take(Worker(stage, 0), 0, 4, None, 1))
    scheduler.step(Leave(Worker(1, 0), 1))
    if is_last:
        scheduler.step(Leave(Worker(0, 0), 1))
    [tallied] = scheduler.step(Tally(B, 0, 1))
    assert (tallied.supply.pool, tallied.supply.outstanding)[not is_last] == ((0, 4),)


def test_the_rest_of_a_broken_pipeline_is_told_why_and_counts_anew() -> None:
    scheduler = joined(setup_of(stages=2, limit=4))
    mate = Worker(1, 0)
    scheduler.step(Take(B, 0, 4, None, 1))
    assert scheduler.step(Take(A, 0, 4, None, 1)) == []
    [dealt] = scheduler.step(Dead(mate, 1, 1.0))
    assert (dealt.worker, dealt.ranges, dealt.why) == (A, (), "s1p0 died")
    [dealt] = scheduler.step(Take(A, 0, 4, None, 1))
    assert dealt.why == "its pipeline is not whole: s1p0 is dead"
    scheduler.step(Join(mate, "node", 0, 2, 2.0))
    [dealt] = scheduler.step(Take(A, 1, 4, None, 1))
    assert dealt.why == "it asks for chunk 1, and its pipeline has taken 0"
    scheduler.step(Dead(Worker(1, 1), 1, 3.0))
    assert scheduler.step(Take(A, 0, 4, None, 1)) == [Dealt(A, 0, None, ((0, 4),))]
    assert scheduler.step(Take(mate, 0, 4, None, 2)) == [Dealt(mate, 0, None, ((0, 4),))]


def test_a_worker_that_starts_anew_gives_back_what_it_had() -> None:
    scheduler = joined(setup_of())
    scheduler.step(Take(A, 0, 4, None, 1))
    scheduler.step(Join(A, "node", 0, 2, 1.0))
    assert scheduler.step(Used(A, 0, 1)) == []  # of its former life
    assert scheduler.step(Take(A, 1, 4, None, 1)) == []
    assert scheduler.counters["late"] == 2
    assert scheduler.step(Take(A, 0, 3, None, 2)) == [Dealt(A, 0, None, ((0, 3),))]


def test_a_stage_that_has_left_and_comes_back_begins_another_life_of_its_pipeline() -> None:
    scheduler = joined(setup_of(stages=2))
    mate = Worker(1, 0)
    for number in range(2):
        scheduler.step(Take(A, number, 4, None, 1))
    scheduler.step(Leave(mate, 1))
    scheduler.step(Join(mate, "node", 0, 2, 1.0))
    assert scheduler.step(Take(mate, 0, 4, None, 2)) == [Dealt(mate, 0, None, ((0, 4),))]
    [tallied] = scheduler.step(Tally(B, 0, 1))
    assert tallied.supply == Supply(next=8, pool=((4, 8),), outstanding=((0, 4),))


def test_strangers_are_refused_and_so_is_asking_where_nothing_is_dealt() -> None:
    scheduler = joined(setup_of())
    for stranger, life in ((Worker(0, 7), 1), (A, 2)):
        for event in (Take(stranger, 0, 4, None, life), Tally(stranger, 0, life)):
            [refuse] = scheduler.step(event)
            assert (type(refuse), refuse.worker, refuse.clock) == (Refuse, stranger, -1)
    scheduler.step(Dead(A, 1, 1.0))
    [refuse] = scheduler.step(Take(A, 0, 4, None, 1))
    assert "is dead, and has to join anew" in refuse.why
    without = joined(Setup(policy="age", num_stages=1, num_pipelines=2))
    [refuse] = without.step(Take(A, 0, 4, None, 1))
    assert "this job deals none" in refuse.why


def test_an_answer_that_comes_too_late_says_so() -> None:
    scheduler = joined(setup_of(stages=2))
    scheduler.step(Take(A, 0, 4, None, 1))
    scheduler.step(Used(A, 0, 1))
    [dealt] = scheduler.step(Take(Worker(1, 0), 0, 4, None, 1))
    assert dealt.why == "chunk 0 of its pipeline was used already"


class Trained:
    """A grid of workers that take, compute, and are lost, in any order, with a real scheduler."""

    def __init__(self, setup: Setup, chance: random.Random) -> None:
        self.setup, self.chance, self.scheduler = setup, chance, setup.scheduler()
        self.log: list[tuple[Event, list[Command]]] = []
        self.lives = dict.fromkeys(setup.workers, 0)
        self.said: dict[Worker, list[Event]] = {}
        self.dealt: dict[Worker, dict[int, Ranges]] = {}  # in this life
        self.asked: dict[Worker, set[int]] = {}
        self.used: dict[Worker, int] = {}
        self.over: set[Worker] = set()
        self.counted: list[int] = []
        self.ahead = chance.randint(0, 2)
        for pipeline in range(setup.num_pipelines):
            self.begin(pipeline)

    def tell(self, event: Event) -> None:
        commands = self.scheduler.step(event)
        self.log.append((event, commands))
        for command in commands:
            assert isinstance(command, Dealt), command
            if command.why:  # the rest of a broken pipeline
                assert isinstance(event, Dead)
                assert command.worker.pipeline == event.worker.pipeline
                continue
            self.dealt[command.worker][command.number] = command.ranges
            if not command.ranges:
                self.over.add(command.worker)

    def say(self, worker: Worker, event: Event) -> None:
        self.said[worker].append(event)
        self.tell(event)

    def workers(self, pipeline: int) -> list[Worker]:
        return [worker for worker in self.setup.workers if worker.pipeline == pipeline]

    def begin(self, pipeline: int) -> None:
        """All stages of a pipeline, in a new life."""
        for worker in self.workers(pipeline):
            self.lives[worker] += 1
            self.said[worker], self.dealt[worker], self.asked[worker] = [], {}, set()
            self.used[worker] = -1
            self.over.discard(worker)
        for worker in self.workers(pipeline):
            self.tell(Join(worker, "node", 0, self.lives[worker], 0.0))

    @property
    def is_over(self) -> bool:
        return all(self.has_ended(worker) for worker in self.setup.workers)

    def has_ended(self, worker: Worker) -> bool:
        """There is nothing left for it to take, or to use."""
        has = [number for number, found in self.dealt[worker].items() if found]
        return worker in self.over and self.used[worker] == max(has, default=-1)

    def act(self) -> None:
        """Somebody does something that it may do now."""
        worker = self.chance.choice([w for w in self.setup.workers if not self.has_ended(w)])
        life, next_number = self.lives[worker], len(self.asked[worker])
        could_use = self.used[worker] + 1
        all_have = all(self.dealt[w].get(could_use) for w in self.workers(worker.pipeline))
        choice = self.chance.random()
        if choice < 0.04:
            stages = self.workers(worker.pipeline)
            kind = Dead if choice < 0.02 else Leave
            for stage in stages:
                self.tell(kind(stage, self.lives[stage], 0.0))
            self.begin(worker.pipeline)
        elif choice < 0.1 and self.said[worker]:
            self.tell(self.said[worker][-1])
        elif choice < 0.5 and all_have:
            self.used[worker] += 1
            slowest = min(self.used[w] for w in self.workers(worker.pipeline))
            if slowest == could_use:
                self.counted += positions(self.dealt[worker][could_use])
            self.say(worker, Used(worker, could_use, life))
        elif next_number <= could_use + self.ahead and worker not in self.over:
            self.asked[worker].add(next_number)
            self.say(worker, Take(worker, next_number, self.chance.randint(1, 6), None, life))


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 40), st.integers(0, 10**6))
def test_a_job_uses_every_position_once_whoever_is_lost(
    stages: int, pipelines: int, limit: int, seed: int
) -> None:
    setup = setup_of(stages, pipelines, limit=limit)
    job = Trained(setup, random.Random(seed))
    for _ in range(20_000):
        if job.is_over:
            break
        job.act()
    assert sorted(job.counted) == list(range(limit))
    for pipeline in range(pipelines):
        dealt = [job.dealt[worker] for worker in job.workers(pipeline)]
        first, *others = [{n: found for n, found in each.items() if found} for each in dealt]
        assert all(other == first for other in others)
    [tallied] = job.scheduler.step(Tally(A, 0, job.lives[A]))
    assert tallied.supply == Supply(limit=limit, next=limit)


def test_what_was_dealt_replays_from_the_log(tmp_path: Path) -> None:
    setup = setup_of(2, 3, limit=60, next=20, pool=((3, 5),), outstanding=((8, 9),))
    job = Trained(setup, random.Random(5))
    while not job.is_over:
        job.act()
    assert sorted(job.counted) == [3, 4, 8, *range(20, 60)]
    log = DecisionLog(tmp_path / "log", setup)
    for event, commands in job.log:
        log.add(event, commands)
    log.close()
    assert DecisionReader(tmp_path / "log").setup == setup
    assert replay(tmp_path / "log") is None
    text = (tmp_path / "log").read_text()
    assert text.count('"pool":[[3,5]]') == 1
    (tmp_path / "log").write_text(text.replace('"pool":[[3,5]]', '"pool":[[3,4]]'))
    assert replay(tmp_path / "log") is not None


def test_jobs_that_deal_otherwise_have_another_text() -> None:
    texts = {setup_of(limit=limit, next=used).text for limit in (None, 4) for used in (0, 2)}
    texts |= {Setup(policy="age", num_stages=1, num_pipelines=2).text}
    assert len(texts) == 5
    assert "age every=1 seed=0 deals=2:4" in texts


def test_static_deals_nothing() -> None:
    with pytest.raises(PolicyError, match="positions to be dealt under static"):
        Setup(policy="static", num_stages=1, num_pipelines=2, supply=Supply())


@pytest.mark.parametrize("policy", ["all_reduce", "partial_reduce", "smart"])
def test_nobody_waits_to_average_with_one_that_has_nothing_to_do(policy: str) -> None:
    """Who has the last positions may have to average before it uses them; then both go on."""
    options = {"group_size": 2} if policy == "partial_reduce" else {}
    supply = Supply(limit=12)
    scheduler = joined(
        Setup(policy=policy, num_stages=1, num_pipelines=2, options=options, supply=supply)
    )
    assert positions_of(scheduler, A, 0) == 4
    assert positions_of(scheduler, B, 0) == positions_of(scheduler, B, 1) == 4
    for worker in (A, B):  # both have asked ahead for a group, where a policy wants that
        scheduler.step(Request(worker, 1, 1))
    scheduler.step(Used(A, 0, 1))
    scheduler.step(Used(B, 0, 1))
    assert scheduler.step(Take(A, 1, 4, None, 1, 1.0)) == []  # it waits: B has the last ones
    commands = scheduler.step(Ready(B, 1, 1, 2.0))
    assert [type(command) for command in commands] == [Skip]
    commands = scheduler.step(Used(B, 1, 1, 3.0))
    assert commands == [Dealt(A, 1, None, ())]
    assert scheduler.step(Gather(B, 1, 1, 4.0)) == []
    (assign,) = scheduler.step(Gather(A, 1, 1, 5.0))
    assert isinstance(assign, Assign)
    assert assign.members == (A, B)


def test_one_that_had_nothing_to_do_is_back_with_its_next_step() -> None:
    scheduler = joined(
        Setup(policy="all_reduce", num_stages=1, num_pipelines=2, supply=Supply(limit=8))
    )
    assert positions_of(scheduler, A, 0) == positions_of(scheduler, B, 0) == 4
    scheduler.step(Used(A, 0, 1))
    assert scheduler.step(Take(A, 1, 4, None, 1)) == []
    assert scheduler.step(Ready(A, 1, 1)) == []  # it had not heard yet, and waits for B
    assert isinstance(scheduler.step(Ready(B, 1, 1))[-1], Assign)


def positions_of(scheduler: Scheduler, worker: Worker, number: int) -> int:
    (dealt,) = scheduler.step(Take(worker, number, 4, None, 1))
    assert isinstance(dealt, Dealt)
    return len(positions(dealt.ranges))


def test_the_supply_can_be_ended_at_the_end_of_a_batch() -> None:
    scheduler = joined(setup_of(limit=100))
    assert scheduler.step(Take(A, 0, 4, None, 1)) == [Dealt(A, 0, None, ((0, 4),))]
    [tallied] = scheduler.step(Tally(A, 0, 1, batch=6))
    assert tallied.supply == Supply(limit=6, next=4, outstanding=((0, 4),))
    [again] = scheduler.step(Tally(A, 1, 1, batch=6))
    assert again.supply == tallied.supply
    assert scheduler.step(Take(B, 0, 4, None, 1)) == [Dealt(B, 0, None, ((4, 6),))]
    assert scheduler.step(Take(A, 1, 4, None, 1)) == []  # B may be lost, with what it has
    assert scheduler.step(Used(A, 0, 1)) == []
    assert scheduler.step(Used(B, 0, 1)) == [Dealt(A, 1, None, ())]


def test_who_waits_hears_of_an_end_that_leaves_it_nothing() -> None:
    scheduler = joined(setup_of(limit=8))
    scheduler.step(Take(A, 0, 8, None, 1))
    assert scheduler.step(Take(B, 0, 4, None, 1)) == []
    assert scheduler.step(Tally(B, 0, 1, batch=3))[-1].supply.limit == 8  # never later than told
