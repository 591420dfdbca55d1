"""Sample dispatch to real processes: each position is used once, more by fast workers."""

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
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.coordinator.client import CoordinatorClient, SampleRequests
from polyrhythm.run.coordinator.server import Coordinator
from polyrhythm.run.data.order import SampleOrder
from polyrhythm.run.data.sample_dispatcher import SampleDispatcher
from polyrhythm.sync.dispatch import Ranges, SamplerState
from polyrhythm.sync.log_reader import replay
from polyrhythm.sync.protocol import Acknowledge, Acquire, Acquired
from polyrhythm.types import Seconds, Worker
from tests.gloo.coordinators import KEYS, Proxy, coordinator_of, eventually, hello_of, setup_of
from tests.gloo.replicas import TIMEOUT, Point, run_replicas, run_with_failures, target_of

SAMPLES, EPOCHS, CHUNK = 40, 2, 4
LIMIT = SAMPLES * EPOCHS
PAUSES: tuple[Seconds, ...] = (0.01, 0.02, 0.12)  # of a chunk, by pipeline


def positions(ranges: Ranges) -> list[int]:
    return [position for start, end in ranges for position in range(start, end)]


class SampleTrainer:
    """A worker that trains on the samples it acquires, one chunk ahead."""

    def __init__(self, ctx: DistContext, **more: object) -> None:
        self.rank, self.model = ctx.rank, Point()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        options = {
            "policy": "adaptive",
            "sampler_state": SamplerState(limit=LIMIT),
            "timeout": TIMEOUT,
        }
        self.sync = GroupSync(self.model, self.optimizer, **{**options, **more})
        self.samples = SampleDispatcher(self.sync)
        self.pause = PAUSES[self.sync.worker.pipeline]
        self.number, self.acknowledged = 0, list[int]()

    def train(self, until: int | None = None, num_chunks: int = LIMIT) -> None:
        future = self.samples.acquire(self.number, CHUNK, until)
        last = self.number + num_chunks
        while self.number < last and (ranges := future.wait()):
            future = self.samples.acquire(self.number + 1, CHUNK, until)
            self.compute(ranges)
            self.samples.acknowledge(self.number)
            self.acknowledged += positions(ranges)
            self.sync.step()
            self.number += 1

    def compute(self, ranges: Ranges) -> None:
        time.sleep(self.pause)
        self.optimizer.zero_grad()
        self.model(target_of(self.rank)).backward()
        self.optimizer.step()


def assert_every_sample_once_per_epoch(used: list[int]) -> None:
    order = SampleOrder(SAMPLES, seed=3)
    ids = [int(order.ids(position, position + 1)[0]) for position in sorted(used)]
    for epoch in range(EPOCHS):
        assert sorted(ids[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))
    assert len(ids) == LIMIT


def test_fast_workers_get_more_samples_and_each_is_used_once(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[list[int], SamplerState, torch.Tensor]:
        trainer = SampleTrainer(ctx, log=tmp_path, options={"window": 0.0})  # nobody waits
        with trainer.sync as sync:
            trainer.train()
            sampler_state = trainer.samples.sampler_state()
            sync.average_all()
            return (
                trainer.acknowledged,
                dataclasses.astuple(sampler_state),
                trainer.model.weight.detach(),
            )

    found = run_replicas(3, work, tmp_path)
    assert_every_sample_once_per_epoch([position for used, _, _ in found for position in used])
    fast, middle, slow = [len(used) for used, _, _ in found]
    assert min(fast, middle) > slow > 0
    assert all(sampler_state == (LIMIT, LIMIT, (), ()) for _, sampler_state, _ in found)
    assert all(torch.equal(weight, found[0][2]) for _, _, weight in found)
    assert replay(tmp_path / "scheduler.jsonl") is None


def test_second_dispatcher_continues_where_the_first_stopped(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[int]:
        trainer = SampleTrainer(ctx, log=tmp_path)
        with trainer.sync as sync:
            trainer.train(num_chunks=2)
            trainer.samples = SampleDispatcher(sync)
            trainer.train()
            return trainer.acknowledged

    used = [position for found in run_replicas(3, work, tmp_path) for position in found]
    assert_every_sample_once_per_epoch(used)


def test_all_stages_of_a_pipeline_get_the_same_samples(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[int]:
        stage, pipeline = ctx.rank % 2, ctx.rank // 2
        mates = [dist.new_group([2 * p, 2 * p + 1]) for p in range(3)]
        worker = Worker(stage, pipeline)
        trainer = SampleTrainer(ctx, worker=worker, num_stages=2, num_pipelines=3)

        def compute(ranges: Ranges) -> None:  # needs both stages
            dist.barrier(mates[pipeline])
            SampleTrainer.compute(trainer, ranges)

        trainer.compute = compute
        with trainer.sync as sync:
            trainer.train()
            sync.average_all()
        return trainer.acknowledged

    found = run_replicas(6, work, tmp_path)
    firsts, seconds = found[::2], found[1::2]
    assert firsts == seconds
    assert_every_sample_once_per_epoch([position for used in firsts for position in used])


def test_unacknowledged_samples_of_killed_pipeline_are_reassigned(tmp_path: Path) -> None:
    victim = 1  # fast enough to get a third chunk

    def work(ctx: DistContext) -> list[int]:
        trainer = SampleTrainer(ctx)
        with trainer.sync as sync:
            if ctx.rank == victim:
                trainer.train(num_chunks=2)
                (tmp_path / "used").write_text(" ".join(map(str, trainer.acknowledged)))
                ranges = trainer.samples.acquire(trainer.number, CHUNK).wait()
                assert ranges
                (tmp_path / "lost").write_text(" ".join(map(str, positions(ranges))))
                os.kill(os.getpid(), signal.SIGKILL)
            trainer.train()
            sync.average_all()
        return trainer.acknowledged

    found = run_with_failures(3, work, tmp_path, lost={victim})
    used, lost = [
        [int(position) for position in (tmp_path / name).read_text().split()]
        for name in ("used", "lost")
    ]
    survivors = [position for each in found.values() for position in each]
    assert set(lost) <= set(survivors)
    assert_every_sample_once_per_epoch([*used, *survivors])


def test_resume_from_saved_sampler_state(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[list[int], list[int], list[int]]:
        first = SampleTrainer(ctx)
        with first.sync as sync:
            first.train(until=LIMIT // 2)  # until a common checkpoint
            paused = list(first.acknowledged)
            assert first.samples.sampler_state() == SamplerState(limit=LIMIT, next=LIMIT // 2)
            sync.average_all()
            first.train(num_chunks=1 + ctx.rank)
            saved = [first.samples.sampler_state()]
            sync.average_all()
            dist.broadcast_object_list(saved)
        second = SampleTrainer(ctx, sampler_state=saved[0], name="second")
        with second.sync as sync:
            second.train()
            sync.average_all()
        rest = saved[0].pool + saved[0].outstanding
        unused = {*positions(rest), *range(saved[0].next, LIMIT)}
        return paused, sorted(unused), second.acknowledged

    found = run_replicas(3, work, tmp_path)
    assert sorted(p for paused, _, _ in found for p in paused) == list(range(LIMIT // 2))
    unused = found[0][1]
    assert CHUNK < len(unused) < LIMIT // 2
    assert sorted(p for _, _, used in found for p in used) == unused


ME, OTHER = Worker(0, 0), Worker(0, 1)


class Served(NamedTuple):
    coordinator: Coordinator
    proxy: Proxy  # between coordinator and client
    client: CoordinatorClient
    other: CoordinatorClient


@pytest.fixture
def served() -> Iterator[Served]:
    setup = setup_of(policy="age", pipelines=2, sampler_state=SamplerState(limit=8))
    with coordinator_of(setup, heartbeat_timeout=60.0) as coordinator:
        proxy = Proxy(coordinator.address)
        clients = [
            CoordinatorClient(
                address,
                KEYS.client_keys,
                hello_of(setup, worker),
                on_command=print,
                on_failure=print,
                **more,
            )
            for worker, address, more in (
                (ME, proxy.address, {"heartbeat_timeout": 3.0}),
                (OTHER, coordinator.address, {}),
            )
        ]
        for client in clients:
            client.join(20)
        yield Served(coordinator, proxy, *clients)
        for client in clients:
            client.close()
        proxy.close()


def test_acquire_does_not_block_and_result_is_reusable(served: Served) -> None:
    client = served.client
    futures = [client.acquire(number, 3, None, 20.0) for number in range(3)]
    assert [future.wait() for future in futures] == [((0, 3),), ((3, 6),), ((6, 8),)]
    assert futures[0].wait() == ((0, 3),)
    assert all(future.is_done for future in futures)
    assert client.query_progress(20.0).wait() == SamplerState(
        limit=8, next=8, outstanding=((0, 8),)
    )


def test_waiter_for_last_samples_is_woken_on_acknowledge(served: Served) -> None:
    client, other = served.client, served.other
    assert client.acquire(0, 8, None, 20.0).wait() == ((0, 8),)
    waiting = other.acquire(0, 4, None, 20.0)
    with pytest.raises(PeerError, match=r"lost other pipelines .*waiting for positions"):
        waiting.wait(0.05)
    assert not waiting.is_done
    assert other.acquire(0, 4, None, 20.0) is waiting
    client.acknowledge(0)
    assert waiting.wait() == ()


def test_lost_sample_requests_are_resent_on_reconnect(served: Served) -> None:
    client = served.client
    assert client.acquire(0, 4, None, 20.0).wait() == ((0, 4),)
    served.proxy.drops_messages = True
    client.acknowledge(0)
    future = client.acquire(1, 2, None, 20.0)
    eventually(lambda: served.proxy.num_dropped)
    served.proxy.drops_messages = False
    served.proxy.disconnect_all()
    assert future.wait() == ((4, 6),)
    assert client.query_progress(20.0).wait() == SamplerState(
        limit=8, next=6, outstanding=((4, 6),)
    )


def test_lost_coordinator_fails_pending_requests(served: Served) -> None:
    client, other = served.client, served.other
    other.acquire(0, 8, None, 20.0).wait()
    waiting = client.acquire(0, 4, None, 20.0)
    served.coordinator.close()
    with pytest.raises(PeerError, match="lost coordinator"):
        waiting.wait()
    with pytest.raises(PeerError, match="lost coordinator"):
        client.acquire(1, 4, None, 20.0)


def test_close_wakes_waiters(served: Served) -> None:
    client, other = served.client, served.other
    other.acquire(0, 8, None, 20.0).wait()
    waiting, raised = client.acquire(0, 4, None, 20.0), []

    def wait() -> None:
        try:
            waiting.wait()
        except PolicyError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    client.close()
    thread.join(10)
    assert len(raised) == 1
    assert "s0p0" in str(raised[0])


def test_reply_to_other_request_is_ignored() -> None:
    requests = SampleRequests()
    future = requests.submit(Acquire(ME, 3, 4, 50), 1.0)
    requests.on_receive(Acquired(ME, 3, 40, ()))  # late: the reply to an earlier request
    assert not future.is_done
    requests.on_receive(Acquired(ME, 3, 50, (), "s1p0 died"))
    with pytest.raises(PeerError, match=r"pipeline 0 .* s1p0 died"):
        future.wait()
    requests.on_receive(Acquired(ME, 3, 50, ((0, 4),)))  # a duplicate
    assert requests.last_acks() == []
    requests.acknowledge(Acknowledge(ME, 3))
    assert requests.last_acks() == [Acknowledge(ME, 3)]


def test_invalid_sample_requests_are_refused(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[str]:
        messages = []
        with pytest.raises(PolicyError) as refused:
            SampleTrainer(ctx, policy="static")
        messages.append(str(refused.value))
        trainer = SampleTrainer(ctx)
        for number, count, until in ((1, 4, None), (0, 0, None), (-1, 4, None), (0, 4, -3)):
            with pytest.raises(PolicyError) as refused:
                trainer.samples.acquire(number, count, until)
            messages.append(str(refused.value))
        trainer.sync.close()
        with pytest.raises(PolicyError) as refused:
            trainer.samples.acquire(0, 4)
        messages.append(str(refused.value))
        with pytest.raises(PolicyError) as refused:
            SampleTrainer(ctx, sampler_state=None, name="second")
        messages.append(str(refused.value))
        return messages

    [messages] = run_replicas(1, work, tmp_path)
    invalid = ["4 positions before None, as chunk 1", "0 positions", "chunk -1", "before -3"]
    expected = ["static", *invalid, "closed", "without sampler_state"]
    for text, part in zip(messages, expected, strict=True):
        assert part in text
