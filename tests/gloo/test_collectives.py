"""The selection of collectives by device, and the in-place collectives of torch."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from polyrhythm.errors import PeerError, PolicyError
from polyrhythm.run.comm.comm_thread import CommThread
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.comm.process_groups import new_gloo_group
from polyrhythm.run.comm.reduce_scatter import (
    CollectivePhase,
    GlooCollectives,
    HierarchicalCollectives,
    NcclCollectives,
    PinnedCollectives,
    _GroupMessages,
    pinned_size,
    select_backend,
    uses_nccl,
)
from tests.gloo.emulated_cuda import without_cuda
from tests.gloo.pipelines import run_stages

TIMEOUT = 20.0


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def test_backend_is_selected_by_device(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[bool, bool, str]:
        host = GlooCollectives(new_gloo_group([0], "a test", timeout=TIMEOUT), timeout=TIMEOUT)
        on_cpu = select_backend(torch.device("cpu"), world(), host, start=lambda work: None)
        with pytest.raises(PolicyError) as caught:
            select_backend(torch.device("meta"), world(), host, start=lambda work: None)
        return on_cpu is host, uses_nccl(torch.device("cuda", 0), world()), str(caught.value)

    ((is_host, is_nccl, message),) = run_stages(1, work, tmp_path)
    assert is_host
    assert not is_nccl, "the group of WORLD is gloo for GPUs, too"
    assert "parameters on meta" in message


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_place_collectives_give_mean_and_all_shards(
    dtype: torch.dtype, num_workers: int, tmp_path: Path
) -> None:
    """In half precision NcclCollectives also run on gloo, which lacks the AVG of other dtypes."""

    def work(ctx: DistContext) -> tuple[torch.Tensor, torch.Tensor]:
        collectives = NcclCollectives(
            world(), torch.device("cpu"), GlooCollectives(world(), timeout=20.0)
        )
        flat = torch.arange(6 * num_workers, dtype=dtype) + 3 * ctx.rank
        collectives.reduce_scatter(flat, 0).wait()
        scattered = flat.view(num_workers, -1)[ctx.rank].clone()
        collectives.all_gather(flat, 0).wait()
        return scattered, flat

    found = run_stages(num_workers, work, tmp_path)
    mean = torch.arange(6 * num_workers, dtype=torch.float32) + 1.5 * (num_workers - 1)
    for own, (scattered, flat) in zip(mean.view(num_workers, -1), found, strict=True):
        torch.testing.assert_close(scattered.float(), own, rtol=0.01, atol=0)
        torch.testing.assert_close(flat.float(), mean, rtol=0.01, atol=0)


def test_complex_tensors_are_gathered_as_real_views(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> torch.Tensor:
        flat = torch.zeros(4, dtype=torch.complex64)
        flat.view(2, -1)[ctx.rank] = complex(1, ctx.rank)
        NcclCollectives(
            world(), torch.device("cpu"), GlooCollectives(world(), timeout=20.0)
        ).all_gather(flat, 0).wait()
        return flat

    expected = torch.tensor([1, 1, 1 + 1j, 1 + 1j])
    for flat in run_stages(2, work, tmp_path):
        assert torch.equal(flat, expected)


@pytest.mark.parametrize("num_sockets", [1, 2])
def test_large_buckets_give_mean_and_all_shards(num_sockets: int, tmp_path: Path) -> None:
    """Shards of more than 4 MB travel in parts, of unequal size here; small ones do not."""
    sizes = (2 * (2**20 + 2**18 + 1), 6, 2 * (2**20 + 7))

    def work(ctx: DistContext) -> list[torch.Tensor]:
        group = new_gloo_group([0, 1], "a test", timeout=TIMEOUT, num_sockets=num_sockets)
        collectives = GlooCollectives(group, timeout=TIMEOUT, num_sockets=num_sockets)
        flats = [torch.arange(size, dtype=torch.float32) * (1 + 2 * ctx.rank) for size in sizes]
        scattered = [collectives.reduce_scatter(flat, n) for n, flat in enumerate(flats)]
        for each in scattered[::-1]:
            each.wait()
        for each in [collectives.all_gather(flat, n) for n, flat in enumerate(flats)]:
            each.wait()
        return flats

    for flats in run_stages(2, work, tmp_path):
        for flat in flats:
            assert torch.equal(flat, torch.arange(len(flat), dtype=torch.float32) * 2)


@pytest.mark.parametrize("socket", [0, 1])
def test_a_timeout_closes_all_sockets(socket: int, tmp_path: Path) -> None:
    """Whichever of them has timed out: peers do not wait for a timeout of their own."""

    def work(ctx: DistContext) -> float:
        group = new_gloo_group([0, 1], "a test", timeout=TIMEOUT, num_sockets=2)
        timeout = 1.0 if ctx.rank == 0 else TIMEOUT / 2
        collectives = GlooCollectives(group, timeout=timeout, num_sockets=2)
        flat = torch.zeros(2 * 2**21)
        if ctx.rank == 0:
            messages = collectives.receive([flat[: 2**21]], 7, CollectivePhase.REDUCE_SCATTER)
        else:  # another message, in one of them
            messages = _GroupMessages(group, timedelta(seconds=timeout), 2, ["rank 0", "rank 1"])
            messages.receive(0, torch.zeros(1), tag=100 + socket, shard=0)
        dist.barrier()
        start = time.monotonic()
        with pytest.raises(PeerError):
            messages.wait()
        elapsed = time.monotonic() - start
        dist.barrier()  # a process that ends would close its sockets
        return elapsed

    assert max(run_stages(2, work, tmp_path)) < TIMEOUT / 4


@pytest.mark.parametrize("nodes", [[[0]], [[0, 1]], [[0, 1, 2]], [[0, 2], [1, 3]]], ids=str)
def test_staged_collectives_give_mean_and_all_shards(
    nodes: list[list[int]], tmp_path: Path
) -> None:
    """Copies are synchronous here; tests/gpu has the streams."""
    num_workers = sum(map(len, nodes))

    def work(ctx: DistContext) -> tuple[torch.Tensor, torch.Tensor, int]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            without_cuda(monkeypatch)
            own_node = next(node for node in nodes if ctx.rank in node)
            levels = [own_node, [node[own_node.index(ctx.rank)] for node in nodes]]
            groups = [new_gloo_group(ranks, "a test", timeout=TIMEOUT) for ranks in levels]
            comm_thread = CommThread(groups, timeout=TIMEOUT)
            inside, across = (
                PinnedCollectives(
                    GlooCollectives(group, timeout=TIMEOUT),
                    torch.device("cpu"),
                    start=comm_thread.start,
                )
                for group in groups
            )
            found: Any = HierarchicalCollectives(inside, across) if len(nodes) > 1 else inside
            flats = [torch.empty(6 * num_workers) for _ in range(2)]
            for step in range(3):
                for number, flat in enumerate(flats):
                    found.post_receives(flat, number, CollectivePhase.REDUCE_SCATTER)
                    flat.copy_(torch.arange(6 * num_workers) + 4 * ctx.rank + number + step)
                works = [found.reduce_scatter(flat, n) for n, flat in enumerate(flats)]
                for pending in works:
                    comm_thread.start(pending.wait).wait()
                    assert pending.join()
                scattered = flats[1].view(num_workers, -1)[found.rank].clone()
                works = [found.all_gather(flat, n) for n, flat in enumerate(flats)]
                for pending in works:
                    comm_thread.start(pending.wait).wait()
                    assert pending.join()
            comm_thread.close()
            return scattered, flats[1], inside.pinned_bytes

    for scattered, flat, pinned_bytes in run_stages(num_workers, work, tmp_path):
        mean = torch.arange(6 * num_workers) + 2 * (num_workers - 1) + 1 + 2
        assert torch.equal(flat, mean.float())
        assert any(torch.equal(scattered, shard) for shard in flat.view(num_workers, -1))
        if num_workers == 2:  # of each bucket: to send, and to receive in both phases
            assert pinned_bytes == 2 * 3 * pinned_size(flat.nbytes // 2)


@pytest.mark.parametrize(("nbytes", "size"), [(0, 0), (1, 1), (24, 32), (32, 32), (33, 64)])
def test_torch_rounds_pinned_memory_up(nbytes: int, size: int) -> None:
    assert pinned_size(nbytes) == size
