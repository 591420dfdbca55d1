"""Positions dealt to real processes: each used once, more by the fast, whoever is killed."""

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from polyrhythm.errors import PeerError, PolicyError
from polyrhythm.run.average.group_sync import GroupSync
from polyrhythm.run.coordinator.client import CoordinatorClient
from polyrhythm.run.coordinator.coordinator import Coordinator
from polyrhythm.run.coordinator.deals import Deals
from polyrhythm.run.data.order import Order
from polyrhythm.run.launch import Place
from polyrhythm.sync.decision_log import replay
from polyrhythm.sync.dispenser import Ranges, Supply
from polyrhythm.sync.messages import Dealt, Take, Used
from polyrhythm.types import Seconds, Worker
from tests.gloo.coordinators import KEYS, Proxy, coordinator_of, eventually, hello_of, setup_of
from tests.gloo.replicas import TIMEOUT, Point, run_replicas, run_with_losses, target_of

SAMPLES, EPOCHS, CHUNK = 40, 2, 4
LIMIT = SAMPLES * EPOCHS
PAUSES: tuple[Seconds, ...] = (0.01, 0.02, 0.12)  # of a chunk, by pipeline


def positions(ranges: Ranges) -> list[int]:
    return [position for start, end in ranges for position in range(start, end)]


class Trainee:
    """A worker that trains on what it is dealt, asking one chunk ahead."""

    def __init__(self, place: Place, **more: object) -> None:
        self.rank, self.model = place.rank, Point()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        options = {"policy": "adaptive", "dispense": Supply(limit=LIMIT), "timeout": TIMEOUT}
        self.sync = GroupSync(self.model, self.optimizer, **{**options, **more})
        self.pause = PAUSES[self.sync.worker.pipeline]
        self.number, self.used = 0, list[int]()

    def train(self, until: int | None = None, num_chunks: int = LIMIT) -> None:
        answer = self.sync.take(self.number, CHUNK, until)
        last = self.number + num_chunks
        while self.number < last and (ranges := answer.wait()):
            answer = self.sync.take(self.number + 1, CHUNK, until)
            self.compute(ranges)
            self.sync.used(self.number)
            self.used += positions(ranges)
            self.sync.step()
            self.number += 1

    def compute(self, ranges: Ranges) -> None:
        time.sleep(self.pause)
        self.optimizer.zero_grad()
        self.model(target_of(self.rank)).backward()
        self.optimizer.step()


def assert_every_sample_once_per_epoch(used: list[int]) -> None:
    order = Order(SAMPLES, seed=3)
    ids = [int(order.ids(position, position + 1)[0]) for position in sorted(used)]
    for epoch in range(EPOCHS):
        assert sorted(ids[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))
    assert len(ids) == LIMIT


def test_the_fast_get_more_and_every_sample_is_used_once(tmp_path: Path) -> None:
    def work(place: Place) -> tuple[list[int], Supply, torch.Tensor]:
        trainee = Trainee(place, log=tmp_path)
        with trainee.sync as sync:
            trainee.train()
            supply = sync.supply()
            sync.consolidate()
            return trainee.used, dataclasses.astuple(supply), trainee.model.place.detach()

    found = run_replicas(3, work, tmp_path)
    assert_every_sample_once_per_epoch([position for used, _, _ in found for position in used])
    fast, middle, slow = [len(used) for used, _, _ in found]
    assert min(fast, middle) > slow > 0
    assert all(supply == (LIMIT, LIMIT, (), ()) for _, supply, _ in found)
    assert all(torch.equal(place, found[0][2]) for _, _, place in found)
    assert replay(tmp_path / "scheduler.jsonl") is None


def test_all_stages_of_a_pipeline_train_on_the_same(tmp_path: Path) -> None:
    def work(place: Place) -> list[int]:
        stage, pipeline = place.rank % 2, place.rank // 2
        mates = [dist.new_group([2 * p, 2 * p + 1]) for p in range(3)]
        worker = Worker(stage, pipeline)
        trainee = Trainee(place, worker=worker, num_stages=2, num_pipelines=3)

        def compute(ranges: Ranges) -> None:  # which needs both of them
            dist.barrier(mates[pipeline])
            Trainee.compute(trainee, ranges)

        trainee.compute = compute
        with trainee.sync as sync:
            trainee.train()
            sync.consolidate()
        return trainee.used

    found = run_replicas(6, work, tmp_path)
    firsts, seconds = found[::2], found[1::2]
    assert firsts == seconds
    assert_every_sample_once_per_epoch([position for used in firsts for position in used])


def test_what_a_killed_pipeline_had_not_used_is_used_by_another_one(tmp_path: Path) -> None:
    victim = 1  # fast enough to get a third chunk

    def work(place: Place) -> list[int]:
        trainee = Trainee(place)
        with trainee.sync as sync:
            if place.rank == victim:
                trainee.train(num_chunks=2)
                (tmp_path / "used").write_text(" ".join(map(str, trainee.used)))
                ranges = sync.take(trainee.number, CHUNK).wait()
                assert ranges
                (tmp_path / "lost").write_text(" ".join(map(str, positions(ranges))))
                os.kill(os.getpid(), signal.SIGKILL)
            trainee.train()
            sync.consolidate()
        return trainee.used

    found = run_with_losses(3, work, tmp_path, lost={victim})
    used, lost = [
        [int(position) for position in (tmp_path / name).read_text().split()]
        for name in ("used", "lost")
    ]
    survivors = [position for each in found.values() for position in each]
    assert set(lost) <= set(survivors)
    assert_every_sample_once_per_epoch([*used, *survivors])


def test_what_was_saved_in_the_middle_goes_on_where_it_was(tmp_path: Path) -> None:
    def work(place: Place) -> tuple[list[int], list[int], list[int]]:
        first = Trainee(place)
        with first.sync as sync:
            first.train(until=LIMIT // 2)  # as far as all go before they save together
            paused = list(first.used)
            assert sync.supply() == Supply(limit=LIMIT, next=LIMIT // 2)
            sync.consolidate()
            first.train(num_chunks=1 + place.rank)
            saved = [sync.supply()]
            sync.consolidate()
            dist.broadcast_object_list(saved)
        second = Trainee(place, dispense=saved[0])
        with second.sync as sync:
            second.train()
            sync.consolidate()
        rest = saved[0].pool + saved[0].outstanding
        unused = {*positions(rest), *range(saved[0].next, LIMIT)}
        return paused, sorted(unused), second.used

    found = run_replicas(3, work, tmp_path)
    assert sorted(p for paused, _, _ in found for p in paused) == list(range(LIMIT // 2))
    unused = found[0][1]
    assert CHUNK < len(unused) < LIMIT // 2
    assert sorted(p for _, _, used in found for p in used) == unused


# A client and its coordinator

ME, OTHER = Worker(0, 0), Worker(0, 1)


class Served(NamedTuple):
    coordinator: Coordinator
    proxy: Proxy  # between it and mine
    mine: CoordinatorClient
    other: CoordinatorClient


@pytest.fixture
def served() -> Iterator[Served]:
    setup = setup_of(policy="age", pipelines=2, supply=Supply(limit=8))
    with coordinator_of(setup) as coordinator:
        proxy = Proxy(coordinator.address)
        clients = [
            CoordinatorClient(
                address, KEYS, hello_of(setup, worker), hear=print, fail=print, **more
            )
            for worker, address, more in (
                (ME, proxy.address, {"silence": 3.0}),
                (OTHER, coordinator.address, {}),
            )
        ]
        for client in clients:
            client.join(20)
        yield Served(coordinator, proxy, *clients)
        for client in clients:
            client.close()
        proxy.close()


def test_to_ask_does_not_wait_and_an_answer_can_be_read_again(served: Served) -> None:
    mine = served.mine
    answers = [mine.take(number, 3, None, 20.0) for number in range(3)]
    assert [answer.wait() for answer in answers] == [((0, 3),), ((3, 6),), ((6, 8),)]
    assert answers[0].wait() == ((0, 3),)
    assert all(answer.is_here for answer in answers)
    assert mine.tally(1, 20.0).wait() == Supply(limit=8, next=8, outstanding=((0, 8),))


def test_who_waits_for_the_last_positions_is_told_when_they_are_used(served: Served) -> None:
    mine, other = served.mine, served.other
    assert mine.take(0, 8, None, 20.0).wait() == ((0, 8),)
    waiting = other.take(0, 4, None, 20.0)
    with pytest.raises(PeerError, match=r"other pipelines .*waiting for positions.*not used them"):
        waiting.wait(0.05)
    assert not waiting.is_here
    assert other.take(0, 4, None, 20.0) is waiting
    mine.use(0)
    assert waiting.wait() == ()


def test_what_a_broken_connection_has_lost_is_said_again(served: Served) -> None:
    mine = served.mine
    assert mine.take(0, 4, None, 20.0).wait() == ((0, 4),)
    served.proxy.loses = True
    mine.use(0)
    answer = mine.take(1, 2, None, 20.0)
    eventually(lambda: served.proxy.num_lost)
    served.proxy.loses = False
    served.proxy.cut()
    assert answer.wait() == ((4, 6),)
    assert mine.tally(1, 20.0).wait() == Supply(limit=8, next=6, outstanding=((4, 6),))


def test_a_coordinator_that_is_gone_fails_whoever_waits(served: Served) -> None:
    mine, other = served.mine, served.other
    other.take(0, 8, None, 20.0).wait()
    waiting = mine.take(0, 4, None, 20.0)
    served.coordinator.close()
    with pytest.raises(PeerError, match="lost coordinator"):
        waiting.wait()
    with pytest.raises(PeerError, match="lost coordinator"):
        mine.take(1, 4, None, 20.0)


def test_closing_wakes_whoever_waits(served: Served) -> None:
    mine, other = served.mine, served.other
    other.take(0, 8, None, 20.0).wait()
    waiting, raised = mine.take(0, 4, None, 20.0), []

    def wait() -> None:
        try:
            waiting.wait()
        except PolicyError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    mine.close()
    thread.join(10)
    assert len(raised) == 1
    assert "will not hear of" in str(raised[0])


def test_an_answer_to_another_question_is_none() -> None:
    deals = Deals()
    answer = deals.ask(Take(ME, 3, 4, 50), 1.0)
    deals.hear(Dealt(ME, 3, 40, ()))  # late: it was asked until 40 before
    assert not answer.is_here
    deals.hear(Dealt(ME, 3, 50, (), "s1p0 died"))
    with pytest.raises(PeerError, match=r"pipeline 0 .* s1p0 died"):
        answer.wait()
    deals.hear(Dealt(ME, 3, 50, ((0, 4),)))  # once more
    assert deals.last_used() == []
    deals.use(Used(ME, 3))
    assert deals.last_used() == [Used(ME, 3)]


def test_what_cannot_be_dealt_is_refused(tmp_path: Path) -> None:
    def work(place: Place) -> list[str]:
        said = []
        with pytest.raises(PolicyError) as refused:
            Trainee(place, policy="static")
        said.append(str(refused.value))
        trainee = Trainee(place)
        for number, count, until in ((1, 4, None), (0, 0, None), (-1, 4, None), (0, 4, -3)):
            with pytest.raises(PolicyError) as refused:
                trainee.sync.take(number, count, until)
            said.append(str(refused.value))
        trainee.sync.close()
        for sync in (trainee.sync, Trainee(place, dispense=None).sync):
            with pytest.raises(PolicyError) as refused:
                sync.take(0, 4)
            said.append(str(refused.value))
            sync.close()
        return said

    [said] = run_replicas(1, work, tmp_path)
    asked = ["4 positions before None, as chunk 1", "0 positions", "chunk -1", "before -3"]
    expected = ["under static", *asked, "was closed", "none are dealt"]
    for text, part in zip(said, expected, strict=True):
        assert part in text
