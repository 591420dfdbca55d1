"""With buddies one lost replica loses no optimizer state: the others continue exactly."""

import multiprocessing
import multiprocessing.synchronize
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyrhythm.errors import PeerError, TrainingError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.comm.process_groups import Replicas, abort, new_gloo_group
from polyrhythm.run.comm.reduce_scatter import (
    CollectivePhase,
    GlooCollectives,
    Pending,
    PinnedCollectives,
    _tag,
)
from polyrhythm.run.decoupled import gradient_sync
from polyrhythm.run.decoupled.gradient_sync import GradientSync
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
from polyrhythm.run.decoupled.reshard import (
    StateMessages,
    _choose_epoch,
    _Introduction,
    _Offer,
    reshard,
)
from polyrhythm.sync.fusion.tuner import BucketCandidate, BucketMode
from tests.gloo.decoupled import TIMEOUT, WIDTH, inputs_of, loss_of
from tests.gloo.emulated_cuda import without_cuda
from tests.gloo.emulated_nccl import EmulatedNccl, emulate_nccl
from tests.gloo.pipelines import assert_equal, run_stages
from tests.gloo.replicas import run_with_failures
from tests.grids import long_except

BUCKET, NUM_STEPS, LOST_AT = 200, 8, 4  # the step in which a replica is lost
NUM_GATHERS = 16  # of two tensors of AdamW for each bucket


class Layers(nn.Module):
    """Layers of unequal sizes, one that only some steps use, a buffer, and a frozen weight."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise([WIDTH, 5, 9, WIDTH])))
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.offset = nn.Buffer(torch.rand(1))
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        is_rare = bool(x[0, 0] > 0.3)
        for layer in self.layers:
            x = layer(x).tanh()
        return (self.rare(x) if is_rare else x) + self.offset + self.frozen.sum()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": parameters[:3], "weight_decay": 0.1},
        {"params": parameters[3:]},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)


Maker = Callable[[nn.Module], torch.optim.Optimizer]
# By number of replicas: the optimizer, the size of buckets, and the largest norm.
CASES: dict[int, list[tuple[Maker, int, float | None]]] = {
    2: [(adam, 100, 0.05), (momentum, BUCKET, None), (momentum, 10_000, 0.05)],
    3: [(momentum, 100, 0.05), (adam, BUCKET, None)],
    4: [(adam, 10_000, None), (momentum, BUCKET, 0.05)],
}


def replicas_of(
    model: nn.Module, make: Maker = adam, ranks: Sequence[int] = (), **more: Any
) -> DistributedOptimizer:
    """Wrap a new optimizer on these ranks, by default on all; not the same call as others'."""
    group = dist.new_group([*ranks], use_local_synchronization=True) if ranks else None
    settings = {"bucket_bytes": BUCKET, "timeout": TIMEOUT, "buddy": True, **more}
    return DistributedOptimizer(make(model), model, process_group=group, **settings)


def halve_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 2:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] / 2


def train(
    rank: int,
    model: nn.Module,
    optimizer: Any,
    steps: range,
    *,
    clip: float | None = 0.05,
    commit: Callable[[], None] | None = None,
) -> Iterator[Tensor]:
    for step in steps:
        loss = loss_of(model, inputs_of(rank, step))
        loss.backward()
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        if commit is not None:
            optimizer.prepare_step()
            commit()
        optimizer.step()
        optimizer.zero_grad()
        halve_rate(optimizer, step)
        yield loss.detach()


def reference(ranks_of: Callable[[int], Sequence[int]], make: Maker) -> tuple[Any, Any]:
    """Train in one process on the batches of all ranks; return weights and optimizer state."""
    model = Layers()
    optimizer = make(model)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        ranks = ranks_of(step)
        for rank in ranks:
            (loss_of(model, inputs_of(rank, step)) / len(ranks)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        halve_rate(optimizer, step)
    return model.state_dict(), optimizer.state_dict()


def check_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def segments_of(optimizer: DistributedOptimizer) -> list[Any]:
    return [
        (s.index, s.start, s.stop, s.weights.clone(), dict(s.state), s.is_own)
        for s in optimizer.held_segments()
    ]


def check_copies(workers: Sequence[Sequence[Any]]) -> None:
    """Every copy has the same bits as the shard of its owner, and every shard has a copy."""
    own = {each[:3]: each for segments in workers for each in segments if each[5]}
    copies = {each[:3]: each for segments in workers for each in segments if not each[5]}
    assert own.keys() == copies.keys()
    for key, (*_, weights, state, _) in copies.items():
        assert_equal((weights, state), own[key][3:5])


# --- training with buddies -----------------------------------------------------------------------


@pytest.mark.parametrize("num", long_except(list(CASES), 0))
def test_training_with_buddies_is_bit_identical(tmp_path: Path, num: int) -> None:
    """Also if a step is skipped, weights are changed by hand, and buckets change."""

    def work(ctx: DistContext) -> list[Any]:
        found: list[Any] = []
        for make, size, clip in CASES[num]:
            for buddy in (False, True):
                found.append(_run_all(ctx, make, buddy=buddy, bucket_bytes=size, clip=clip))
        return found

    results = run_stages(num, work, tmp_path)
    for result in results:
        for plain, buddies in zip(result[::2], result[1::2], strict=True):
            assert_equal(plain[0], buddies[0])
    for case in range(1, len(results[0]), 2):
        for moment in range(len(results[0][case][1])):
            check_copies([result[case][1][moment] for result in results])
        assert all(result[case][2] > 0 for result in results)
        assert all(result[case - 1][2] == 0 for result in results)


def _run_all(
    ctx: DistContext, make: Maker, *, clip: float | None, has_nccl: bool = False, **more: Any
) -> Any:
    model = Layers()
    optimizer = replicas_of(model, make, **more)
    segments, has_buddies = [], more["buddy"]
    losses = list(train(ctx.rank, model, optimizer, range(3), clip=clip))
    segments.append(segments_of(optimizer))  # some weights may not have arrived
    loss = loss_of(model, inputs_of(ctx.rank, 3))
    (loss * (torch.nan if ctx.rank == 1 else 1.0)).backward()
    assert optimizer.drop_non_finite()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()
    with torch.no_grad():
        next(model.layers[1].parameters()).mul_(0.5)
    if not has_nccl:  # there the copies have it in the next step
        segments.append(segments_of(optimizer))
    losses += train(ctx.rank, model, optimizer, range(4, 6), clip=clip)
    segments.append(segments_of(optimizer))
    for mode in (BucketMode.DECOUPLED, BucketMode.ALL_REDUCE, BucketMode.DECOUPLED):
        optimizer._change_buckets(BucketCandidate(300, mode))
        assert optimizer.has_buddies == has_buddies
        losses += train(ctx.rank, model, optimizer, range(6, 8), clip=clip)
    state, options = optimizer.state_dict(), optimizer.whole_param_groups
    optimizer.load_state_dict(state)
    losses += train(ctx.rank, model, optimizer, range(8, 9), clip=clip)
    segments.append(segments_of(optimizer))
    copied = optimizer.buddy_bytes
    future = optimizer.async_state_dict().result(TIMEOUT)
    optimizer.close()
    return (losses, model.state_dict(), state, options, future), segments, copied


@pytest.mark.long
def test_hierarchical_shards_have_their_buddies_on_the_other_node(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> Any:
        found = []
        for buddy in (False, True):
            model = Layers()
            node = "ab"[ctx.rank % 2]
            optimizer = replicas_of(model, mode="hierarchical", node=node, buddy=buddy)
            losses = list(train(ctx.rank, model, optimizer, range(4)))
            found.append((losses, model.state_dict(), optimizer.state_dict()))
            segments = segments_of(optimizer)
            optimizer.close()
        return found, segments

    results = run_stages(4, work, tmp_path)
    for (plain, buddies), _ in results:
        assert_equal(plain, buddies)
    check_copies([segments for _, segments in results])
    owner = {each[:3]: rank for rank, (_, s) in enumerate(results) for each in s if each[5]}
    for rank, (_, segments) in enumerate(results):
        copied = [each for each in segments if not each[5]]
        assert copied
        assert all((rank - owner[each[:3]]) % 2 == 1 for each in copied)


# --- the commit ----------------------------------------------------------------------------------


def test_commit_that_raises_changes_nothing(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[list[Any], int, int]:
        model, calls = Layers(), list[int]()
        optimizer = replicas_of(model)

        def commit() -> None:
            calls.append(optimizer.num_steps)
            if len(calls) == 4:
                raise PeerError("rank 9", action="a commit", waited=0.0, cause="lost")

        optimizer.commit = commit
        for _ in train(ctx.rank, model, optimizer, range(3)):
            optimizer.synchronize()
        seen = [(_all_of(model), optimizer.state_dict(), segments_of(optimizer))]
        with pytest.raises(PeerError, match="rank 9"):
            next(train(ctx.rank, model, optimizer, range(3, 4)))
        is_prepared = [optimizer.is_prepared]
        optimizer.zero_grad()
        assert [*is_prepared, optimizer.is_prepared] == [True, False]
        seen.append((_all_of(model), optimizer.state_dict(), segments_of(optimizer)))
        list(train(ctx.rank, model, optimizer, range(3, 5)))
        other = Layers()
        without = replicas_of(other)
        list(train(ctx.rank, other, without, range(5)))
        for each in (optimizer, without):
            each.close()
        assert_equal(model.state_dict(), other.state_dict())
        return seen, optimizer.num_steps, len(calls)

    for (before, after), num_steps, num_calls in run_stages(2, work, tmp_path):
        assert_equal(after, before)
        assert (num_steps, num_calls) == (5, 6)


def _all_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


# --- recovery ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """Which replicas die, and at what point of the step LOST_AT."""

    victims: tuple[int, ...]
    at: str = "backward"
    is_commit_lost_on: int | None = None  # the rank that does not learn that all have committed
    # Of all replicas, at the beginning of that step: a victim whose step before fails goes on.
    barrier: multiprocessing.synchronize.Barrier | None = None


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_and_recover(
    ctx: DistContext, make: Maker, num: int, loss: Loss, goes_on: Sequence[int]
) -> Any:
    """Train as one of `num` replicas, or wait as a spare; `goes_on` continue after the loss."""
    is_replica = ctx.rank < num
    model, optimizer = Layers(seed=0 if is_replica else 7), None
    losses = list[Tensor]()
    if is_replica:
        votes = Replicas(range(num), "committing", timeout=TIMEOUT)
        optimizer = replicas_of(model, make, range(num))
        step = [0]

        def commit() -> None:
            is_last = step[0] == LOST_AT
            if is_last and ctx.rank in loss.victims and loss.at == "commit":
                die()
            try:
                votes.all_gather_number(0.0, "a commit")
            except PeerError:
                abort(votes.group)  # the others need not wait for the timeout
                raise
            if is_last and ctx.rank == loss.is_commit_lost_on:
                raise PeerError("rank 1", action="a commit", waited=0.0, cause="lost")
            if is_last and loss.at == "step":
                if ctx.rank in loss.victims:
                    die()
                time.sleep(0.3)  # until its connections are closed

        optimizer.commit = commit if loss.at != "step" else None
        by_caller = commit if loss.at == "step" else None
        try:
            for step[0] in range(NUM_STEPS):
                if step[0] == LOST_AT and loss.barrier is not None:
                    loss.barrier.wait(TIMEOUT)
                if step[0] == LOST_AT and ctx.rank in loss.victims:
                    if loss.at == "backward":
                        die()
                    if loss.at == "gather":
                        GradientSync.gather_weights = die  # type: ignore[method-assign]
                now = range(step[0], step[0] + 1)
                losses += train(ctx.rank, model, optimizer, now, commit=by_caller)
        except PeerError as error:
            cause = str(error)
        assert "lost" in cause, cause
        optimizer.abort()
        model.zero_grad()
    else:  # torch's groups have the same names where as many were made before
        dist.new_group([ctx.rank], use_local_synchronization=True)
    return recover(ctx, model, make, optimizer, num, loss, goes_on, losses)


def recover(
    ctx: DistContext,
    model: nn.Module,
    make: Maker,
    old: torch.optim.Optimizer | None,
    num: int,
    loss: Loss,
    goes_on: Sequence[int],
    losses: list[Tensor],
) -> Any:
    survivors = [rank for rank in range(ctx.world_size) if rank not in loss.victims]
    recovery = new_gloo_group(survivors, "a recovery", timeout=TIMEOUT)
    new: Any = None
    if ctx.rank in goes_on:
        alone = len(goes_on) == 1
        new = make(model) if alone else replicas_of(model, make, goes_on, for_reshard=True)
    try:
        first = reshard(old, new, model, recovery, timeout=TIMEOUT)
    except TrainingError as error:
        if isinstance(new, DistributedOptimizer):
            new.abort()
        return str(error)
    if new is None:
        return first, None
    del old
    weights = _all_of(model)
    segments = segments_of(new) if isinstance(new, DistributedOptimizer) else None
    if isinstance(new, DistributedOptimizer):
        assert (new.has_buddies, new.predecessor, new.num_steps) == (True, None, first)
        losses += train(ctx.rank, model, new, range(first, NUM_STEPS))
    else:
        new.clip_grad_norm_ = lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm)
        losses += train(ctx.rank, model, new, range(first, NUM_STEPS))
    state = new.state_dict()
    if isinstance(new, DistributedOptimizer):
        new.close()
    return first, (weights, segments, model.state_dict(), state, losses)


def check_recovery(
    found: dict[int, Any], make: Maker, num: int, goes_on: Sequence[int], first: int
) -> None:
    assert {each[0] for each in found.values()} == {first}
    continued = [found[rank][1] for rank in goes_on]
    for weights, *_ in continued[1:]:
        assert_equal(weights, continued[0][0])
    if len(goes_on) > 1:
        check_copies([segments for _, segments, *_ in continued])
    weights, state = reference(lambda step: range(num) if step < first else goes_on, make)
    for _, _, final, final_state, _ in continued:
        check_close(final, weights)
        check_close(final_state["state"], state["state"])
        assert final_state["param_groups"] == state["param_groups"]


POINTS = {
    "before the step": (Loss((1,)), LOST_AT),
    "before the commit": (Loss((1,), "commit"), LOST_AT),
    "while new weights travel": (Loss((1,), "gather"), LOST_AT + 1),
    "after a commit by the caller": (Loss((1,), "step"), LOST_AT + 1),
    "committed on all but one": (Loss((1,), "gather", is_commit_lost_on=2), LOST_AT + 1),
}


@pytest.mark.parametrize("point", long_except(list(POINTS), 0))
def test_three_of_four_continue_exactly(tmp_path: Path, point: str) -> None:
    loss, first = POINTS[point]
    make = momentum if loss.at == "commit" else adam
    left = [0, 2, 3]

    def work(ctx: DistContext) -> Any:
        return train_and_recover(ctx, make, 4, loss, left)

    found = run_with_failures(4, work, tmp_path, lost={1})
    check_recovery(found, make, 4, left, first)


def test_the_last_replica_continues_with_a_plain_optimizer(tmp_path: Path) -> None:
    loss = Loss((1,), "gather")

    def work(ctx: DistContext) -> Any:
        return train_and_recover(ctx, momentum, 2, loss, [0])

    found = run_with_failures(2, work, tmp_path, lost={1})
    check_recovery(found, momentum, 2, [0], LOST_AT + 1)


@pytest.mark.long
def test_a_spare_takes_the_place_of_a_lost_replica(tmp_path: Path) -> None:
    """It has other weights and buffers; a survivor leaves."""
    loss, goes_on = Loss((1,), "gather"), [0, 3]

    def work(ctx: DistContext) -> Any:
        return train_and_recover(ctx, adam, 3, loss, goes_on)

    found = run_with_failures(4, work, tmp_path, lost={1})
    check_recovery(found, adam, 3, goes_on, LOST_AT + 1)
    assert found[2] == (LOST_AT + 1, None)


@pytest.mark.long
def test_two_lost_neighbours_are_an_error(tmp_path: Path) -> None:
    loss = Loss((1, 2), barrier=multiprocessing.get_context("fork").Barrier(4))

    def work(ctx: DistContext) -> Any:
        return train_and_recover(ctx, adam, 4, loss, [0, 3])

    errors = run_with_failures(4, work, tmp_path, lost={1, 2})
    assert errors[0] == errors[3]
    assert "2 of 4 replicas are lost" in errors[0]
    assert "restore a checkpoint" in errors[0]


@pytest.mark.long
def test_replicas_join_one_that_was_alone(tmp_path: Path) -> None:
    """And before the first step, when there are no buckets."""

    def work(ctx: DistContext) -> Any:
        found = []
        for num_alone in (LOST_AT, 0):
            model = Layers(seed=7 * ctx.rank)
            old: Any = adam(model) if ctx.rank == 0 else None
            for step in range(num_alone if ctx.rank == 0 else 0):
                loss_of(model, inputs_of(0, step)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                old.step()
                old.zero_grad()
                halve_rate(old, step)
            group = new_gloo_group([0, 1], "joining", timeout=TIMEOUT)
            new = replicas_of(model, for_reshard=True)
            reshard(old, new, model, group, timeout=TIMEOUT)
            list(train(ctx.rank, model, new, range(num_alone, NUM_STEPS)))
            found.append((model.state_dict(), new.state_dict()["state"]))
            new.close()
        return found

    for later, at_once in run_stages(2, work, tmp_path):
        for found, alone in ((later, LOST_AT), (at_once, 0)):
            weights, state = reference(partial(_ranks_when_joined, alone), adam)
            check_close(found, (weights, state["state"]))


SECOND_LOSSES = ("wait", "first barrier", "second barrier", "unequal")


@pytest.mark.long
@pytest.mark.parametrize("second", long_except(list(SECOND_LOSSES), 0))
def test_loss_of_another_replica_during_the_recovery_loses_nothing(
    tmp_path: Path, second: str
) -> None:
    """Two of four are left; one may have gone on with its new optimizer, the other not."""
    left = [0, 2]

    def die_in_recovery(ctx: DistContext) -> None:
        barrier, numbers = StateMessages.barrier, iter(range(3))

        def counted(self: StateMessages) -> None:
            if (ctx.rank, next(numbers)) == (3, 0 if second == "first barrier" else 1):
                die()
            barrier(self)
            if ctx.rank == 2 and second == "unequal":
                raise PeerError("rank 3", action="a recovery", waited=0.0, cause="lost")

        if ctx.rank == 3 and second == "wait":
            StateMessages.wait = die  # type: ignore[method-assign]
        if second != "wait":
            StateMessages.barrier = counted  # type: ignore[method-assign]

    def work(ctx: DistContext) -> Any:
        model = Layers()
        old = replicas_of(model)
        list(train(ctx.rank, model, old, range(LOST_AT)))
        old.synchronize()
        if ctx.rank == 1:
            die()
        with pytest.raises(PeerError):
            next(train(ctx.rank, model, old, range(LOST_AT, NUM_STEPS)))
        old.abort()
        model.zero_grad()
        group = new_gloo_group([0, 2, 3], "a recovery", timeout=TIMEOUT)
        new = replicas_of(model, ranks=[0, 2, 3], for_reshard=True)
        original = StateMessages.wait, StateMessages.barrier
        die_in_recovery(ctx)
        is_done = True
        try:
            reshard(old, new, model, group, timeout=TIMEOUT)
        except PeerError:
            is_done = False
        assert is_done == (second == "second barrier" or (second, ctx.rank) == ("unequal", 0))
        StateMessages.wait, StateMessages.barrier = original  # type: ignore[method-assign]
        if is_done:
            assert new.predecessor is old
            with pytest.raises(PeerError):
                next(train(ctx.rank, model, new, range(LOST_AT, NUM_STEPS)))
        new.abort()
        model.zero_grad()
        return recover(ctx, model, adam, new if is_done else old, 4, Loss((1, 3)), left, [])

    found = run_with_failures(4, work, tmp_path, lost={1, 3})
    check_recovery(found, adam, 4, left, LOST_AT)


def _ranks_when_joined(num_alone: int, step: int) -> range:
    return range(1 if step < num_alone else 2)


# --- other collectives ---------------------------------------------------------------------------


@pytest.mark.long
def test_copies_pass_through_pinned_memory(tmp_path: Path) -> None:
    """Of a GPU, whose copies are synchronous here."""

    def work(ctx: DistContext) -> Any:
        found = []
        for is_pinned in (False, True):
            with pytest.MonkeyPatch.context() as monkeypatch:
                if is_pinned:
                    without_cuda(monkeypatch)
                    monkeypatch.setattr(gradient_sync, "select_backend", pinned)
                model = Layers()
                optimizer = replicas_of(model)
                losses = list(train(ctx.rank, model, optimizer, range(4)))
                segments = segments_of(optimizer)
                found.append((losses, model.state_dict(), optimizer.state_dict()))
                optimizer.close()
        return found, segments

    results = run_stages(3, work, tmp_path)
    for (plain, staged), _ in results:
        assert_equal(plain, staged)
    check_copies([segments for _, segments in results])


def pinned(device: torch.device, nccl: Any, host: GlooCollectives, *, start: Any) -> Any:
    return PinnedCollectives(host, device, start=start)


def test_copies_pass_over_nccl(tmp_path: Path) -> None:
    """Gradients that are not finite count as 0 there, in copies too."""

    def work(ctx: DistContext) -> Any:
        with pytest.MonkeyPatch.context() as monkeypatch:
            emulate_nccl(monkeypatch)
            return [
                _run_all(ctx, adam, has_nccl=True, buddy=buddy, bucket_bytes=BUCKET, clip=0.05)
                for buddy in (False, True)
            ]

    results = run_stages(3, work, tmp_path)
    for plain, buddies in results:
        assert_equal(plain[0], buddies[0])
    for moment in range(len(results[0][1][1])):
        check_copies([buddies[1][moment] for _, buddies in results])


@pytest.mark.parametrize("at", ["weights", "weights that this one trusts", "state"])
def test_what_nccl_has_not_delivered_is_not_used(tmp_path: Path, at: str) -> None:
    """Its kernels end after an abort as if all had come: weights, or moved state, are anything.

    Those of another worker may go on with what they get from it: only a commit by all tells.
    """
    loss, left = Loss((1,)), [0, 2, 3]

    class Cut(EmulatedNccl):
        is_cut = False

        def all_gather(self, flat: Tensor, number: int) -> Pending:
            pending = super().all_gather(flat, number)
            shards = flat.view(self.num_workers, -1)

            def garble() -> None:
                pending.wait()
                for rank in range(self.num_workers):
                    if Cut.is_cut and rank != self.rank:
                        shards[rank].fill_(7.0)

            return Pending(garble)

        def confirm(self) -> None:
            if Cut.is_cut and at != "weights that this one trusts":
                raise PeerError("another worker", action="a test", waited=0.0, cause="lost")

    def work(ctx: DistContext) -> Any:
        with pytest.MonkeyPatch.context() as monkeypatch:
            emulate_nccl(monkeypatch, Cut)
            model = Layers()
            optimizer = replicas_of(model)

            def commit() -> None:  # the new weights of the last step are lost
                Cut.is_cut = at != "state" and optimizer.num_steps == LOST_AT - 1
                if optimizer.num_steps == LOST_AT:
                    raise PeerError("another worker", action="a test", waited=0.0, cause="lost")

            optimizer.commit = commit
            losses = list(train(ctx.rank, model, optimizer, range(LOST_AT)))
            if at != "state":
                with pytest.raises(PeerError, match="lost"):
                    next(train(ctx.rank, model, optimizer, range(LOST_AT, NUM_STEPS)))
            else:
                optimizer.synchronize()
                Cut.is_cut = True
                with pytest.raises(PeerError, match="lost"):
                    optimizer._change_buckets(BucketCandidate(10_000, BucketMode.DECOUPLED))
            assert optimizer.num_steps == LOST_AT
            optimizer.abort()
            model.zero_grad()
            if ctx.rank in loss.victims:
                die()
        return recover(ctx, model, adam, optimizer, 4, loss, left, losses)

    found = run_with_failures(4, work, tmp_path, lost={1})
    check_recovery(found, adam, 4, left, LOST_AT)


# --- a loss while buckets change -----------------------------------------------------------------


def send_to_buddy_and_die(collectives: GlooCollectives, flat: Tensor, number: int) -> None:
    """Send the own shard to the next worker only: it completes a gather that others cannot."""
    shards, phase = flat.view(collectives.num_workers, -1), CollectivePhase.ALL_GATHER
    messages = collectives.receive([shards[each] for each in collectives.others], number, phase)
    own = shards[collectives.rank].clone()
    collectives._exchange.send_to_next(messages, own, tag=_tag(number, phase))
    messages._works[-1][1].wait()
    time.sleep(0.3)  # until it has arrived
    die()


@pytest.mark.parametrize("num_gathered", long_except([0, 1, 7, NUM_GATHERS - 1], 1))
def test_loss_during_a_change_of_buckets_loses_nothing(tmp_path: Path, num_gathered: int) -> None:
    loss, left = Loss((1,)), [0, 2, 3]

    def work(ctx: DistContext) -> Any:
        model = Layers()
        optimizer, losses = replicas_of(model, bucket_bytes=100), list[Tensor]()
        losses += train(ctx.rank, model, optimizer, range(LOST_AT))
        optimizer.synchronize()
        is_late = [bucket.is_late for bucket in optimizer._gradient_sync.buckets]
        assert (any(is_late), 2 * len(is_late)) == (True, NUM_GATHERS)
        all_gather, numbers = GlooCollectives.all_gather, iter(range(100))

        def gather_or_die(self: GlooCollectives, flat: Tensor, number: int) -> Pending:
            if next(numbers) == num_gathered:
                send_to_buddy_and_die(self, flat, number)
            return all_gather(self, flat, number)

        if ctx.rank in loss.victims:
            GlooCollectives.all_gather = gather_or_die  # type: ignore[method-assign]
        try:
            optimizer._change_buckets(BucketCandidate(10_000, BucketMode.DECOUPLED))
            raise AssertionError("a replica is lost")
        except PeerError:
            num_held = len(optimizer.held_segments())
        optimizer.abort()
        assert num_held == len(optimizer.held_segments())
        return recover(ctx, model, adam, optimizer, 4, loss, left, losses)

    found = run_with_failures(4, work, tmp_path, lost={1})
    check_recovery(found, adam, 4, left, LOST_AT)


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_member_with_the_whole_state_is_enough(epoch: int) -> None:
    """Another one may not know that it has got their shards: its own are not needed."""
    whole = _Introduction(True, "form", [4], {0: _Offer(is_whole=True)})
    shard = _Introduction(False, "form", [4], {epoch: _Offer(num_steps=7, num_replicas=3)})
    assert _choose_epoch([whole, shard]) == (0, {0: _Offer(is_whole=True)})
    later = _Introduction(True, "form", [4], {1: _Offer(num_steps=8), 0: _Offer(is_whole=True)})
    other = _Introduction(True, "form", [4], {1: _Offer(num_steps=8)})
    assert _choose_epoch([later, other]) == (1, dict.fromkeys((0, 1), _Offer(num_steps=8)))
    assert _choose_epoch([shard, shard]) == (epoch, dict.fromkeys((0, 1), shard.offers[epoch]))
