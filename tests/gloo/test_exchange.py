"""Means over any group: exact, bitwise equal, out of place; a lost peer breaks only its pairs."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from polyrhythm.errors import LaunchError, PeerError
from polyrhythm.run.averaging import exchange
from polyrhythm.run.averaging.exchange import (
    Peer,
    PeerConnections,
    PostedMessages,
    RoundShape,
    all_reduce_mean,
    direct_peers,
    reduce_scatter,
    shard_slices,
)
from polyrhythm.run.averaging.split_all_reduce import (
    BucketedAllReduce,
    BucketMemory,
    FillingBuffer,
    bucket_shards,
)
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.comm.process_groups import INTERFACES, NUM_SOCKETS
from polyrhythm.types import Worker
from tests.gloo.pipelines import run_stages
from tests.gloo.replicas import run_with_failures
from tests.gloo.transport_peers import signal_peer, wait_for_peer, wait_until

GROUPS = [(0, 1, 2), (1, 3), (0, 2, 3, 4), (2, 4), (0, 1, 2, 3, 4), (0, 3, 4)]


def peer(rank: int) -> Peer:
    return Peer(Worker(0, rank), 1)


def connections_of(ctx: DistContext, num_sockets: int = 1) -> PeerConnections:
    store = _get_default_store().clone()
    return PeerConnections(store, peer(ctx.rank), num_sockets=num_sockets)


def exchange_mean(
    connections: PeerConnections, group: tuple[int, ...], flat, number, weights=None, timeout=20.0
):
    members = [peer(rank) for rank in group]
    others = [member for member in members if member != connections.me]
    connections.connect(others, str(number), timeout=20.0)
    weights = weights or [1 / len(group)] * len(group)
    found = all_reduce_mean(connections, members, weights, flat, number=number, timeout=timeout)
    connections.flush(timeout)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_all_members_get_identical_mean_and_inputs_are_unchanged(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    sizes = (1, 3, 1000, 50_000)

    def values(rank: int, size: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * rank + size)
        return torch.randn(size, generator=generator).to(dtype)

    def work(ctx: DistContext) -> list[torch.Tensor | None]:
        connections, found = connections_of(ctx), []
        for number, group in enumerate(GROUPS):
            for size in sizes:
                if ctx.rank not in group:
                    found.append(None)
                    continue
                flat = values(ctx.rank, size)
                found.append(
                    exchange_mean(connections, group, flat, 10 * number + sizes.index(size))
                )
                assert torch.equal(flat, values(ctx.rank, size)), "out of place"
        return found

    found = run_stages(5, work, tmp_path)
    cases = [(group, size) for group in GROUPS for size in sizes]
    for case, (group, size) in enumerate(cases):
        results = [found[rank][case] for rank in group]
        assert all(torch.equal(result, results[0]) for result in results)
        wide = torch.stack([values(rank, size).double() for rank in group]).mean(0)
        tolerance = 4e-3 if dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(results[0].double(), wide, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_sockets", [(1, 1), (2, 1), (2, 2)], ids=str)
def test_a_large_message_travels_over_all_sockets_that_both_have(
    num_sockets: tuple[int, int], tmp_path: Path
) -> None:
    """An odd number of elements, so that the parts of a message differ in size."""
    num = 2 * (2**20 + 2**18) + 1

    def work(ctx: DistContext) -> tuple[bool, set[int], int]:
        connections, used = connections_of(ctx, num_sockets[ctx.rank]), set[int]()
        connections.connect([peer(1 - ctx.rank)], "7", timeout=20.0)
        connection = connections._by_peer[peer(1 - ctx.rank)]
        group: Any = connection.group

        def send(tensors: list[torch.Tensor], to: int, tag: int) -> dist.Work:
            used.update([tag % NUM_SOCKETS] if tensors[0].nbytes > 2**20 else [])
            return group.send(tensors, to, tag)

        recorded: Any = SimpleNamespace(rank=group.rank, recv=group.recv, send=send)
        connection.group = recorded
        flat = torch.arange(num, dtype=torch.float32) * (ctx.rank + 1)
        found = exchange_mean(connections, (0, 1), flat, 7)
        is_mean = torch.equal(found, torch.arange(num, dtype=torch.float32) * 1.5)
        return is_mean, used, len(group.options._devices)

    least = min(num_sockets)
    assert run_stages(2, work, tmp_path) == [(True, set(range(least)), least)] * 2


def test_half_precision_accumulates_in_float32(tmp_path: Path) -> None:
    """256 + 1 + 1 + 1 is 256 if it is summed in bfloat16, which has eight bits of precision."""

    def work(ctx: DistContext) -> float:
        value = 256.0 if ctx.rank == 0 else 1.0
        flat = torch.full((4,), value, dtype=torch.bfloat16)
        return exchange_mean(connections_of(ctx), (0, 1, 2, 3), flat, 1, weights=[1.0] * 4)[
            0
        ].item()

    assert run_stages(4, work, tmp_path) == [260.0] * 4  # 259, rounded once


def test_weights_follow_member_order(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[float]:
        flat = torch.full((3,), float(ctx.rank + 1))
        return exchange_mean(
            connections_of(ctx), (0, 1, 2), flat, 1, weights=[0.5, 0.25, 0.25]
        ).tolist()

    assert run_stages(3, work, tmp_path) == [[1.75] * 3] * 3


def test_lost_member_breaks_only_its_connections(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        connections, flat = connections_of(ctx), torch.ones(50_000)
        exchange_mean(connections, (0, 1, 2), flat, 1)
        if ctx.rank == 2:
            return "gone"
        lost = ""
        try:  # in separate groups: the first to notice would leave the other waiting
            exchange_mean(connections, (ctx.rank, 2), flat, 2)
        except PeerError as error:
            lost = error.peer
        connections.drop([Worker(0, 2)])
        exchange_mean(connections, (0, 1), flat, 3)  # the survivors' pair works as before
        return lost

    assert run_stages(3, work, tmp_path)[:2] == ["s0p2", "s0p2"]


LARGE = 1 << 24  # numbers: more than the socket buffers of a connection hold


def patch_send(patched: Callable[[Callable[[], None]], None]) -> None:
    """Call `patched` with a function that sends the message, for all sends of this process."""
    send = PostedMessages.send
    PostedMessages.send = lambda *args, **more: patched(lambda: send(*args, **more))


def reduce_scatter_two(
    connections: PeerConnections, ctx: DistContext, num_owned: int
) -> torch.Tensor:
    """Reduce-scatter over two members, of which the first owns `num_owned` numbers."""
    connections.connect([peer(1 - ctx.rank)], "1", timeout=20.0)
    flat = torch.full((LARGE + 4,), ctx.rank + 1.0)
    parts = [[slice(0, num_owned), slice(num_owned, LARGE + 4)]]
    return reduce_scatter(
        connections, [peer(0), peer(1)], [0.5] * 2, flat, parts, number=1, timeout=60.0
    )


def test_peer_killed_while_receiving_does_not_block_sender(tmp_path: Path) -> None:
    """Gloo reports nothing to the sender, which has its shard; the scheduler notices the loss."""
    pid_file = tmp_path / "pid"

    def send_and_write_pid(connections: PeerConnections, send: Callable[[], None]) -> None:
        send()
        connections.flush(20.0)
        pid_file.write_text(f"{os.getpid()}\n")

    def send_to_stopped_peer(send: Callable[[], None]) -> None:
        wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"), "not sent")
        victim = int(pid_file.read_text())
        os.kill(victim, signal.SIGSTOP)
        send()
        threading.Timer(0.2, os.kill, [victim, signal.SIGKILL]).start()

    def work(ctx: DistContext) -> list[float]:
        connections = connections_of(ctx)
        if ctx.rank == 1:
            patch_send(partial(send_and_write_pid, connections))
        else:
            patch_send(send_to_stopped_peer)
        found = reduce_scatter_two(connections, ctx, 4)
        connections.drop([Worker(0, 1)])
        return found[:4].tolist()

    found = run_with_failures(2, work, tmp_path, lost={1}, timeout=30.0)
    assert found == {0: [1.5] * 4}


@pytest.mark.parametrize("what", ["dies", "stands still"])
def test_partially_received_message_does_not_block_receiver(what: str, tmp_path: Path) -> None:
    """Gloo does not report that the sender is gone, or that the connection was aborted."""
    pid_file = tmp_path / "pid"

    def send_half(send: Callable[[], None]) -> None:
        time.sleep(0.5)  # the peer is ready to receive
        send()
        os.kill(os.getpid(), signal.SIGKILL if what == "dies" else signal.SIGSTOP)

    def send_and_abort(connections: PeerConnections, send: Callable[[], None]) -> None:
        send()
        threading.Timer(1.0, connections.abort, [[peer(1)]]).start()

    def work(ctx: DistContext) -> str:
        connections = connections_of(ctx)
        if ctx.rank == 1:
            pid_file.write_text(str(os.getpid()))
            patch_send(send_half)
        elif what == "stands still":
            patch_send(partial(send_and_abort, connections))
        with pytest.raises(PeerError) as caught:
            reduce_scatter_two(connections, ctx, LARGE)
        if what == "stands still":
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
        return caught.value.peer

    assert run_with_failures(2, work, tmp_path, lost={1}, timeout=30.0) == {0: "s0p1"}


def test_connect_is_cancelled_by_should_stop(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[str, bool]:
        if ctx.rank == 1:
            return "", False
        connections, start = connections_of(ctx), time.monotonic()
        with pytest.raises(PeerError) as caught:
            connections.connect(
                [peer(1)], "1", timeout=60.0, should_stop=lambda: time.monotonic() - start > 0.2
            )
        return caught.value.cause, time.monotonic() - start < 30.0

    assert run_stages(2, work, tmp_path)[0] == ("the group was aborted", True)


def test_abort_wakes_both_sides_of_exchange(tmp_path: Path) -> None:
    """One member stalls; the others wait until one of them aborts."""

    def work(ctx: DistContext) -> None:
        connections, flat = connections_of(ctx), torch.ones(10)
        exchange_mean(connections, (0, 1, 2), flat, 1)
        if ctx.rank == 2:  # alive, but sends nothing until the others are woken
            for rank in (0, 1):
                wait_for_peer(rank)
            return
        others = [peer(rank) for rank in (0, 1, 2) if rank != ctx.rank]
        threading.Timer(0.5, connections.abort, [others]).start()
        with pytest.raises(PeerError) as caught:
            exchange_mean(connections, (0, 1, 2), flat, 2, timeout=60.0)
        assert caught.value.waited < 50.0, "it is woken, and does not time out"
        signal_peer(2)

    run_stages(3, work, tmp_path)


def test_late_peer_sees_that_the_other_timed_out(tmp_path: Path) -> None:
    """The first peer arrives and times out, and only then the second arrives."""

    def work(ctx: DistContext) -> tuple[str, bool]:
        connections, other = connections_of(ctx), peer(1 - ctx.rank)
        timed_out = tmp_path / "timed-out"
        if ctx.rank == 1:
            wait_until(timed_out.exists, "the first peer times out")
        start = time.monotonic()
        with pytest.raises(PeerError) as caught:
            connections.connect([other], "1", timeout=60.0 if ctx.rank else 0.1)
        timed_out.touch()
        return caught.value.cause, time.monotonic() - start < 15.0

    found = run_stages(2, work, tmp_path)
    assert found == [("no answer", True), ("it has aborted the group", True)]


def test_keys_of_connections_are_deleted_once_their_peer_has_committed(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[str]:
        connections, other = connections_of(ctx), peer(1 - ctx.rank)
        for number in range(3):
            exchange_mean(connections, (0, 1), torch.ones(3), number)
            if number < 2:
                connections.drop([other.worker])  # as after an abort: they connect anew
        dist.barrier()
        connections.commit([Worker(0, 0), Worker(0, 1)])
        dist.barrier()
        return [key for key in _get_default_store().list_keys() if "s0p0.1+s0p1.1" in key]

    assert run_stages(2, work, tmp_path) == [[], []]


def test_keys_stay_until_all_their_readers_have_committed() -> None:
    store = dist.HashStore()
    connections = PeerConnections(store, peer(0))
    store.set("report", "1")
    connections.delete_later([Worker(0, rank) for rank in range(3)], ["report"])
    for rank, is_kept in ((1, True), (1, True), (2, False)):
        connections.commit([Worker(0, 0), Worker(0, rank)])
        assert store.check(["report"]) == is_kept


def begin_round(
    connections: PeerConnections, members: list[Peer], flat: torch.Tensor, number: int
) -> None:
    """Begin a round of `all_reduce_mean` that can be cancelled."""
    shards = shard_slices(flat.numel(), len(members), flat.element_size())
    others = [member for member in members if member != connections.me]
    shape = RoundShape(members, shards, flat.element_size(), number, gathers=True)
    connections.connect(others, str(number), timeout=20.0)
    connections.begin(shape, others)


@pytest.mark.parametrize("size", [10, 50_000, pytest.param(2**23, marks=pytest.mark.long)])
@pytest.mark.parametrize("num_sockets", [1, 2])
def test_an_aborted_round_leaves_the_connections_of_healthy_peers(
    size: int, num_sockets: int, tmp_path: Path
) -> None:
    """One member does not start; the others wait for it until all cancel the round."""
    members = [peer(rank) for rank in range(3)]

    def work(ctx: DistContext) -> tuple[bool, tuple[Worker, ...], list[float]]:
        connections, flat = connections_of(ctx, num_sockets), torch.full((size,), float(ctx.rank))
        for number in (1, 3):
            begin_round(connections, members, flat, number)
            before = dict(connections._by_peer)
            timer = threading.Timer(0.5, connections.cancel)
            timer.start()
            if ctx.rank < 2:
                with contextlib.suppress(PeerError):  # unless the others cancel it first
                    all_reduce_mean(
                        connections, members, [1 / 3] * 3, flat, number=number, timeout=60.0
                    )
            timer.join()
            connections.drain()
            is_kept = connections._by_peer == before
            found = exchange_mean(connections, (0, 1, 2), flat, number + 1)
        return is_kept, connections.pop_lost(), found[:: size - 1].tolist()

    assert run_stages(3, work, tmp_path) == [(True, (), [1.0, 1.0])] * 3


def test_a_peer_that_does_not_answer_is_named_and_the_others_stay_connected(
    tmp_path: Path,
) -> None:
    members = [peer(rank) for rank in range(3)]

    def work(ctx: DistContext) -> tuple[list[str], list[float]]:
        connections, flat = connections_of(ctx), torch.full((50_000,), float(ctx.rank))
        exchange_mean(connections, (0, 1, 2), flat, 1)
        dist.barrier()
        if ctx.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        begin_round(connections, members, flat, 2)
        threading.Timer(0.2, partial(connections.cancel, is_late=True)).start()
        threading.Timer(0.5, connections.end_wait, [2]).start()
        with pytest.raises(PeerError):
            all_reduce_mean(connections, members, [1 / 3] * 3, flat, number=2, timeout=60.0)
        pair = connections._by_peer[peer(1 - ctx.rank)]
        connections.drain()
        assert connections._by_peer == {peer(1 - ctx.rank): pair}
        lost = list(map(str, connections.pop_lost()))
        return lost, exchange_mean(connections, (0, 1), flat, 3)[:1].tolist()

    found = run_with_stopped(3, work, tmp_path, stopped=2)
    assert found == {rank: (["s0p2"], [0.5]) for rank in (0, 1)}


@pytest.mark.parametrize("is_late", [True, False])
def test_a_link_that_is_slow_when_a_round_is_aborted_early_is_not_broken(
    is_late: bool, tmp_path: Path
) -> None:
    """The pair connects again: messages in transfer cannot be withdrawn."""
    members = [peer(rank) for rank in range(2)]

    def work(ctx: DistContext) -> tuple[list[list[str]], int, list[float]]:
        connections, flat = connections_of(ctx), torch.full((50_000,), float(ctx.rank))
        exchange_mean(connections, (0, 1), flat, 1)
        dist.barrier()
        begin_round(connections, members, flat, 2)
        if ctx.rank == 0:  # the other one does not answer yet, as if its messages were large
            threading.Timer(0.2, partial(connections.cancel, is_late=is_late)).start()
            threading.Timer(0.5, connections.end_wait, [2]).start()
            with pytest.raises(PeerError):
                all_reduce_mean(connections, members, [0.5] * 2, flat, number=2, timeout=60.0)
        else:
            time.sleep(1.5)
        connections.drain()
        named = [list(map(str, pop())) for pop in (connections.pop_lost, connections.pop_slow)]
        num_left = len(connections._by_peer)
        dist.barrier()
        return named, num_left, exchange_mean(connections, (0, 1), flat, 3)[:1].tolist()

    (named, num_left, mean), (_, _, other) = run_stages(2, work, tmp_path)
    assert (num_left, mean, other) == (0, [0.5], [0.5])
    assert named == ([["s0p1"], []] if is_late else [[], ["s0p1"]])


def test_a_peer_that_dies_while_gradients_are_streamed_is_lost_alone(tmp_path: Path) -> None:
    """The thread that sends buckets still waits for the last one when the round fails."""
    members, half = [peer(rank) for rank in range(3)], 50_000

    def work(ctx: DistContext) -> tuple[str, list[str], list[float]]:
        connections, flat = connections_of(ctx), torch.full((2 * half,), float(ctx.rank))
        exchange_mean(connections, (0, 1, 2), flat, 1)
        dist.barrier()
        if ctx.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        memory = BucketMemory(flat, [slice(0, half), slice(half, 2 * half)])
        buffer = FillingBuffer(memory, lambda bucket: None)
        shards, others = bucket_shards(memory, members, ()), [peer(1 - ctx.rank), peer(2)]
        connections.begin(RoundShape(members, shards, 4, 2, gathers=True), others)
        buffer.mark_filled(0)
        all_reduce = BucketedAllReduce(
            connections, members, buffer, number=2, timeout=30.0, should_stop=lambda: False
        )
        with pytest.raises(PeerError) as caught:
            all_reduce.run([1 / 3] * 3)
        connections.drain()
        lost = list(map(str, connections.pop_lost()))
        assert set(connections._by_peer) == {peer(1 - ctx.rank)}
        found = exchange_mean(connections, (0, 1), torch.full((9,), float(ctx.rank)), 3)
        return caught.value.peer, lost, found[:1].tolist()

    found = run_with_failures(3, work, tmp_path, lost={2}, timeout=40.0)
    assert found == {rank: ("s0p2", ["s0p2"], [0.5]) for rank in (0, 1)}


def run_with_stopped(
    num: int, work: Callable[[DistContext], Any], folder: Path, *, stopped: int
) -> dict[int, Any]:
    """Run `work`, in which one rank stops; kill that when all others have returned."""
    pid_file = folder / "stopped"

    def work_and_kill(ctx: DistContext) -> Any:
        if ctx.rank == stopped:
            pid_file.write_text(str(os.getpid()))
        found = work(ctx)
        (folder / f"is-done{ctx.rank}").touch()
        first = min(rank for rank in range(num) if rank != stopped)
        if ctx.rank == first:
            others = [rank for rank in range(num) if rank != stopped]
            wait_until(
                lambda: all((folder / f"is-done{rank}").exists() for rank in others), "not done"
            )
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
        return found

    return run_with_failures(num, work_and_kill, folder, lost={stopped}, timeout=40.0)


def test_connections_are_made_at_once(tmp_path: Path) -> None:
    """With a delay in each handshake, all together take hardly longer than one."""
    delay = 0.5

    def work(ctx: DistContext) -> float:
        set_address = exchange._Handshake.set_peer_address

        def set_later(self: Any, socket: int, address: bytes) -> None:
            threading.Timer(delay, set_address, [self, socket, address]).start()

        exchange._Handshake.set_peer_address = set_later
        connections, start = connections_of(ctx), time.monotonic()
        connections.connect(
            [peer(rank) for rank in range(8) if rank != ctx.rank], "1", timeout=60.0
        )
        took = time.monotonic() - start
        assert exchange_mean(connections, tuple(range(8)), torch.ones(9), 1).tolist() == [1.0] * 9
        return took

    assert max(run_stages(8, work, tmp_path)) < 5 * delay


def test_handshake_with_a_dying_peer_ends_in_seconds(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[str, list[str], bool]:
        if ctx.rank == 2:
            publish = exchange._Connecting._set

            def publish_and_die(connecting: Any, values: dict[str, bytes]) -> None:
                publish(connecting, values)
                if not any(exchange._SOCKETS in key for key in values):  # its addresses
                    os.kill(os.getpid(), signal.SIGKILL)

            exchange._Connecting._set = publish_and_die
        else:
            set_address = exchange._Handshake.set_peer_address

            def set_later(handshake: Any, socket: int, address: bytes) -> None:
                time.sleep(0.2)  # until it is dead
                set_address(handshake, socket, address)

            exchange._Handshake.set_peer_address = set_later
        connections, start = connections_of(ctx), time.monotonic()
        with pytest.raises(PeerError) as caught:
            connections.connect(
                [peer(rank) for rank in range(3) if rank != ctx.rank], "1", timeout=60.0
            )
        is_soon = time.monotonic() - start < 3 * exchange._HANDSHAKE_TIMEOUT
        assert set(connections._by_peer) == {peer(1 - ctx.rank)}, "the healthy peer stays"
        return caught.value.peer, list(map(str, connections.pop_lost())), is_soon

    found = run_with_failures(3, work, tmp_path, lost={2})
    assert found == {rank: ("s0p2", ["s0p2"], True) for rank in (0, 1)}


def test_a_wrong_interface_is_the_error_of_its_worker_and_no_lost_peer(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[str, list[str], bool]:
        connections, start = connections_of(ctx), time.monotonic()
        if ctx.rank == 1:
            os.environ[INTERFACES] = "nope0"
        with pytest.raises((PeerError, LaunchError)) as caught:
            connections.connect([peer(1 - ctx.rank)], "1", timeout=60.0)
        lost, is_soon = connections.pop_lost(), time.monotonic() - start < 3.0
        return str(caught.value).partition(" during")[0], list(map(str, lost)), is_soon

    found = run_stages(2, work, tmp_path)
    assert found[0] == ("lost s0p1", [], True)
    assert found[1][0].startswith("GLOO_SOCKET_IFNAME='nope0'")
    assert "Unable to find address for: nope0" in found[1][0]
    assert found[1][1:] == ([], True)


@pytest.mark.parametrize("size", [10, 50_000])
def test_members_with_a_broken_link_average_through_the_others(size: int, tmp_path: Path) -> None:
    members, apart = [peer(rank) for rank in range(4)], [(Worker(0, 0), Worker(0, 2))]

    def work(ctx: DistContext) -> tuple[set[int], torch.Tensor, torch.Tensor]:
        connections = connections_of(ctx)
        flat = torch.randn(size, generator=torch.Generator().manual_seed(ctx.rank))
        connections.connect(direct_peers(members, connections.me, apart), "1", timeout=20.0)
        mean = all_reduce_mean(
            connections, members, [0.25] * 4, flat, number=1, timeout=20.0, apart=apart
        )
        connections.flush(20.0)
        return {other.worker.pipeline for other in connections._by_peer}, flat, mean

    found = run_stages(4, work, tmp_path)
    assert [peers for peers, _, _ in found] == [{1, 3}, {0, 2, 3}, {1, 3}, {0, 1, 2}]
    assert all(torch.equal(mean, found[0][2]) for _, _, mean in found)
    torch.testing.assert_close(found[0][2], torch.stack([own for _, own, _ in found]).mean(0))
