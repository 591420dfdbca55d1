"""Invalid arguments and mismatches are refused at once, with both values; no worker hangs."""

import logging
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from polyrhythm.errors import (
    LaunchError,
    PeerError,
    PolicyError,
    SingleWorkerError,
    UserError,
)
from polyrhythm.run.averaging import rendezvous
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
from polyrhythm.sync.policies.local import OuterNesterov
from tests.gloo.replicas import TIMEOUT, Point, run_replicas, run_with_failures, target_of, train

BAD = [
    ({"policy": "adaptve"}, "unknown policy: 'adaptve'", "did you mean 'adaptive'?"),
    (
        {"policy": "random", "options": {"group_size": 3}},
        "group_size=3",
        "pipelines",
    ),
    ({"policy": "adaptive", "options": {"last_groups": 0}}, "last_groups=0", ""),
    ({"policy": "age", "options": {"max_aeg": 3}}, "unknown option of age: 'max_aeg'", "max_age"),
    ({"policy": "age", "every": 0}, "every=0", "use 1"),
    ({"policy": "balanced", "every": 2}, "every=2 under balanced", "micro-batches"),
    ({"policy": "all_reduce", "overlap": True}, "overlap under all_reduce", "use age"),
    ({"policy": "ssp", "state": "average"}, 'state="average" under ssp', "another policy"),
    ({"policy": "age", "outer": OuterNesterov()}, "an outer optimizer under age", "local"),
    ({"policy": "age", "state": "averaged"}, "state='averaged'", "local"),
    ({"policy": "age", "timeout": 0.0}, "timeout=0", "several steps"),
]


def test_invalid_arguments_are_refused_before_rendezvous(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[tuple[str, str]]:
        if ctx.rank == 1:
            return []  # creates no GroupSync: a rendezvous of rank 0 would hang
        model, reasons = Point(), []
        for options, _, _ in BAD:
            with pytest.raises(UserError) as caught:
                GroupSync(model, torch.optim.SGD(model.parameters()), **options)
            reasons.append((caught.value.wrong, caught.value.fix))
        model.requires_grad_(False)
        with pytest.raises(PolicyError, match="Point without a trainable parameter"):
            GroupSync(model, torch.optim.SGD([torch.ones(1, requires_grad=True)]), "age")
        return reasons

    found = run_replicas(2, work, tmp_path)[0]
    for (wrong, fix), (_, expected_wrong, expected_fix) in zip(found, BAD, strict=True):
        assert expected_wrong in wrong
        assert expected_fix in fix


def test_missing_process_group_error_names_init_process_group() -> None:
    model = Point()
    with pytest.raises(LaunchError, match="init_process_group"):
        GroupSync(model, torch.optim.SGD(model.parameters()), "age")


def test_policy_mismatch_names_both_policies(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        model = Point()
        policy = "age" if ctx.rank == 1 else "adaptive"
        with pytest.raises((UserError, PeerError)) as caught:
            GroupSync(model, torch.optim.SGD(model.parameters()), policy, timeout=TIMEOUT)
        return str(caught.value)

    for refused in run_replicas(2, work, tmp_path):  # both at once: no worker waits for the other
        assert "s0p1 has policy=age every=1 seed=0, and s0p0 has policy=adaptive" in refused


def test_other_optimizer_is_refused(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        model = Point()
        kind = torch.optim.Adam if ctx.rank else torch.optim.SGD
        with pytest.raises(LaunchError) as caught:
            GroupSync(model, kind(model.parameters()), "age", timeout=TIMEOUT)
        return caught.value.wrong

    for wrong in run_replicas(2, work, tmp_path):
        assert wrong == "s0p1 has optimizer=Adam, and s0p0 has optimizer=SGD"


@pytest.mark.parametrize("policy", ["adaptive", "static"])
@pytest.mark.parametrize("size", [1, 4])
def test_shape_mismatch_names_both_shapes(policy: str, size: int, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        model = nn.Linear(3, size if ctx.rank == 1 else 2)
        with pytest.raises((UserError, PeerError)) as caught:
            GroupSync(model, torch.optim.SGD(model.parameters()), policy, timeout=TIMEOUT)
        return str(caught.value)

    _, refused = run_replicas(2, work, tmp_path)
    assert f"'weight: float32' of shape ({size}, 3) in s0p1" in refused
    assert "'weight: float32' of shape (2, 3) in s0p0" in refused


def test_static_policy_uses_no_coordinator(tmp_path: Path) -> None:
    """No coordinator exists, so no message can have been sent to one."""

    def work(ctx: DistContext) -> bool:
        def refuse(*_: object) -> None:
            raise AssertionError("static started a coordinator")

        rendezvous.Rendezvous.start_coordinator = refuse
        with train(ctx, 4, "static") as sync:
            return hasattr(sync._strategy, "_client")

    assert run_replicas(4, work, tmp_path) == [False] * 4


def test_closed_coordinator_is_reported_to_all_workers(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            sync = GroupSync(model, optimizer, "age", timeout=TIMEOUT)
            if ctx.rank == 0:
                sync._strategy._client._coordinator.close()
            for _ in range(1000):
                sync.step()
        except PeerError as error:
            return error.peer
        return "nothing happened"

    found = run_with_failures(3, work, tmp_path, lost=set())
    assert all("coordinator at tcp://127.0.0.1" in peer for peer in found.values())


@pytest.mark.long
def test_interpreter_exits_cleanly_without_close(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist, polyrhythm as pr\n"
        "dist.init_process_group('gloo', init_method='file://' + __file__ + '.store',\n"
        "                        rank=0, world_size=1)\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "sync = pr.GroupSync(model, optimizer)\n"
        "model(torch.ones(2)).sum().backward(); optimizer.step(); sync.step()\n"
        "print('done', sync.num_steps)\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "done 1\n"), ended.stderr


def test_two_group_syncs_are_independent(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[float, float]:
        models = [Point(size=1), Point(size=1)]
        syncs = [
            GroupSync(m, torch.optim.SGD(m.parameters(), lr=1.0), "all_reduce", every=2, name=name)
            for m, name in zip(models, ("first", "second"), strict=True)
        ]
        for _ in range(2):
            for number, (model, sync) in enumerate(zip(models, syncs, strict=True)):
                model.weight.data += 1.0 + number + 4 * ctx.rank
                sync.step()
        for sync in syncs:
            sync.close()
        dist.barrier()
        assert _get_default_store() is not None
        return models[0].weight.item(), models[1].weight.item()

    assert run_replicas(2, work, tmp_path) == [(6.0, 8.0)] * 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("refresh", "apply_pending()"),
        ("averaged", "pop_stats()"),
        ("take", "SampleDispatcher(sync).acquire()"),
        ("used", "SampleDispatcher(sync).acknowledge()"),
        ("supply", "SampleDispatcher(sync).sampler_state()"),
        ("pop_timings", "pop_stats()"),
        ("acquire", "SampleDispatcher(sync).acquire()"),
        ("acknowledge", "SampleDispatcher(sync).acknowledge()"),
        ("sampler_state", "SampleDispatcher(sync).sampler_state()"),
    ],
)
def test_old_names_give_the_new_one(old: str, new: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"GroupSync.{old} is now {new}")):
        getattr(GroupSync, old)


def test_process_groups_average_separately_under_one_name(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[str, float]:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        model = Point(size=1)
        model.weight.data += ctx.rank  # all start with the weights of their first worker
        with GroupSync(
            model,
            torch.optim.SGD(model.parameters()),
            "all_reduce",
            every=2,
            process_group=groups[ctx.rank % 2],
        ) as sync:
            model.weight.data += ctx.rank
            sync.average_all()
            return str(sync.worker), model.weight.item()

    found = run_replicas(4, work, tmp_path)
    assert found == [("s0p0", 1.0), ("s0p0", 3.0), ("s0p1", 1.0), ("s0p1", 3.0)]


def test_process_group_without_this_process_is_refused(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[str]:
        groups, model, found = [dist.new_group([0]), dist.new_group([1])], Point(), []
        for cls in (GroupSync, DistributedOptimizer):
            optimizer = torch.optim.SGD(model.parameters())
            args = (model, optimizer) if cls is GroupSync else (optimizer, model)
            with pytest.raises(PolicyError) as caught:
                cls(*args, process_group=groups[1 - ctx.rank], timeout=TIMEOUT)
            found.append(caught.value.wrong)
        return found

    for rank, found in enumerate(run_replicas(2, work, tmp_path)):
        assert found == [f"process_group= without rank {rank}, which passes it"] * 2


def test_second_group_sync_needs_another_name(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        train(ctx, 2, "age").close()
        with pytest.raises(LaunchError) as caught:
            train(ctx, 2, "age")
        train(ctx, 2, "age", name="second").close()
        return caught.value.wrong

    for rank, wrong in enumerate(run_replicas(2, work, tmp_path)):
        assert wrong == f"another GroupSync with the name 'sync' for s0p{rank}"


def test_error_on_rank_0_ends_other_workers_at_once(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[str, bool]:
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        start = time.monotonic()
        try:
            with GroupSync(model, optimizer, "age", timeout=200.0) as sync:
                for number in range(100_000):
                    if ctx.rank == 0 and number == 3:
                        raise ValueError("a bug in the training loop")
                    sync.step()
        except (ValueError, PeerError) as error:
            return str(error), time.monotonic() - start < 100
        return "nothing happened", False

    found = run_with_failures(3, work, tmp_path, lost=set())
    assert found[0] == ("a bug in the training loop", True)
    assert all("the coordinator has ended" in found[rank][0] for rank in (1, 2))


@pytest.mark.parametrize(
    ("policy", "more"),
    [("adaptive", {}), ("adaptive", {"overlap": True}), ("pairwise", {}), ("age", {"every": 2})],
)
def test_non_finite_weights_are_refused_and_do_not_spread(
    tmp_path: Path, policy: str, more: dict[str, Any]
) -> None:
    def work(ctx: DistContext) -> tuple[str, bool]:
        model, error = Point(), ""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        try:
            with GroupSync(model, optimizer, policy, timeout=TIMEOUT, **more) as sync:
                for step in range(12):
                    optimizer.zero_grad()
                    model(target_of(ctx.rank)).backward()
                    optimizer.step()
                    if ctx.rank == 1 and step == 5:
                        model.weight.data[2] = float("nan")
                    sync.step()
                sync.average_all()
        except SingleWorkerError as refused:
            error = refused.wrong
        dist.barrier()
        return error, bool(model.weight.isfinite().all())

    found = run_replicas(3, work, tmp_path)
    wrong = "the weights of s0p1 are not finite, and are not averaged"
    assert found == [("", True), (wrong, False), ("", True)]


@pytest.mark.parametrize("mode", ["all_reduce", "balanced"])
def test_average_all_after_gradient_averages_does_not_spread_non_finite_weights(
    mode: str, tmp_path: Path
) -> None:
    def work(ctx: DistContext) -> tuple[str, bool]:
        model, error = Point(), ""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        try:
            with GroupSync(model, optimizer, mode, timeout=TIMEOUT) as sync:
                if ctx.rank == 1:
                    model.weight.data[2] = float("nan")
                sync.average_all()
        except (SingleWorkerError, PeerError) as refused:
            error = str(refused).splitlines()[0]
        dist.barrier()
        return error, bool(model.weight.isfinite().all())

    errors, are_finite = zip(*run_replicas(3, work, tmp_path), strict=True)
    assert are_finite == (True, False, True)
    assert "the weights of s0p1 are not finite, and are not averaged" in errors[1]


def test_non_finite_weights_end_static_everywhere_at_once(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        model, error = Point(), ""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        sync = GroupSync(model, optimizer, "static", timeout=TIMEOUT)
        try:
            for step in range(6):
                if ctx.rank == 1 and step == 2:
                    model.weight.data[2] = float("nan")
                sync.step()
        except (PeerError, SingleWorkerError) as refused:
            error = str(refused)
        dist.barrier()  # the script goes on: no connection ends with its process
        return error

    for error in run_replicas(3, work, tmp_path):
        assert "the weights of s0p1 are not finite" in error


@pytest.mark.parametrize("mode", ["decoupled", "all_reduce", "balanced"])
def test_steps_with_non_finite_gradients_are_skipped_by_all_replicas(
    mode: str, tmp_path: Path
) -> None:
    """Steps 2 and 3 of 5 have them: weights are those after the other three."""

    def work(ctx: DistContext, num_steps: int = 5, bad: tuple[int, ...] = (2, 3)) -> Any:
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        logging.getLogger("polyrhythm").addHandler(handler)
        model = Point()
        inner = torch.optim.AdamW(model.parameters(), lr=0.2)
        optimizer: Any = inner
        sync = None
        if mode == "decoupled":
            optimizer = DistributedOptimizer(inner, model, timeout=TIMEOUT)
        else:
            sync = GroupSync(model, inner, mode, timeout=TIMEOUT)
        for step in range(num_steps):
            optimizer.zero_grad()
            if mode == "balanced":
                sync.share(2)
            loss = model(target_of(ctx.rank))
            (loss * float("inf") if ctx.rank == 1 and step in bad else loss).backward()
            optimizer.step()
            if sync is not None:
                sync.step()
        (optimizer if sync is None else sync).close()
        return model.weight.tolist(), records

    found = run_replicas(2, work, tmp_path)
    expected = run_replicas(2, partial(work, num_steps=3, bad=()), tmp_path)
    assert [weight for weight, _ in found] == [weight for weight, _ in expected]
    assert found[0][1] == []
    assert found[1][1] == [
        "step 2: the gradients of s0p1 are not finite: all replicas skip this step"
    ]
