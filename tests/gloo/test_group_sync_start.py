"""The start of averaging: one initial state for all, and no threads left after a failed start."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from polyrhythm.errors import PeerError, PolicyError, UserError
from polyrhythm.run.averaging.buffers import FlatBuffer
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.averaging.parameter_server import ParameterServer, _StageWeights
from polyrhythm.run.comm.launch import DistContext
from tests.gloo.replicas import TIMEOUT, Point, run_replicas, target_of


class Partly(nn.Module):
    """Frozen and trained parameters and buffers of several dtypes, initially unequal by worker."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.full((2,), float(rank)))
        self.frozen = nn.Parameter(torch.full((3,), 10.0 + rank), requires_grad=False)
        self.small = nn.Parameter(torch.full((2,), 20.0 + rank).bfloat16(), requires_grad=False)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("table", torch.arange(4) + 2**40 + rank)
        self.register_buffer("mask", torch.tensor([rank == 0, True]))
        self.norm.num_batches_tracked += rank


@pytest.mark.parametrize("policy", ["age", "static", "all_reduce"])
def test_all_workers_start_with_first_workers_state(policy: str, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> dict[str, torch.Tensor]:
        model = Partly(ctx.rank)
        optimizer = torch.optim.SGD([model.trained, *model.norm.parameters()], lr=0.1)
        with GroupSync(model, optimizer, policy, timeout=TIMEOUT):
            return model.state_dict()

    expected = Partly(0).state_dict()
    for found in run_replicas(3, work, tmp_path):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("half_at", [0, 1])
def test_dtype_mismatch_names_both_dtypes(half_at: int, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        model = Point().to(torch.bfloat16 if ctx.rank == half_at else torch.float32)
        with pytest.raises((UserError, PeerError)) as caught:
            GroupSync(model, torch.optim.SGD(model.parameters()), "age", timeout=TIMEOUT)
        return str(caught.value)

    _, refused = run_replicas(2, work, tmp_path)
    assert "weight: bfloat16" in refused
    assert "weight: float32" in refused


def test_size_mismatch_names_both_sizes(tmp_path: Path) -> None:
    """One worker has skipped its first Adam step, as a GradScaler may: it has no state yet."""

    def work(ctx: DistContext) -> str:
        model = Point()
        optimizer = torch.optim.Adam(model.parameters())
        sync = GroupSync(model, optimizer, "age", state="average", timeout=TIMEOUT)
        model(target_of(ctx.rank)).backward()
        if ctx.rank == 0:
            optimizer.step()
        with pytest.raises((PolicyError, PeerError)) as caught, sync:
            sync.step()
        return str(caught.value)

    found = run_replicas(2, work, tmp_path)
    assert any("72 bytes" in message and "24" in message for message in found), found
    assert any('state="local"' in message for message in found), found


def test_unfreezing_parameters_is_refused(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        model = Partly(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with GroupSync(model, optimizer, "age", timeout=TIMEOUT) as sync:
            model.frozen.requires_grad_(True)
            with pytest.raises(PolicyError) as caught:
                sync.step()
        return caught.value.fix

    assert "frozen or unfrozen" in run_replicas(1, work, tmp_path)[0]


def test_no_threads_remain_after_failed_start(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[str]:
        if ctx.rank == 0:
            model = Point()
            with pytest.raises(PeerError):
                GroupSync(model, torch.optim.SGD(model.parameters()), "age", timeout=2.0)
        return [thread.name for thread in threading.enumerate()]

    failed, unstarted = run_replicas(2, work, tmp_path)
    assert failed == unstarted


def test_second_parameter_server_continues_after_first(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> float:
        model = Point(size=1)
        for name in ("first", "second"):
            options = {"num_pipelines": 2, "timeout": TIMEOUT, "name": name}
            if ctx.rank == 2:
                ParameterServer(**options).serve()
                continue
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with GroupSync(model, optimizer, "ssp", **options) as sync:
                model.weight.grad = torch.tensor([-1.0 - 2 * ctx.rank])
                optimizer.step()
                sync.average_all()
        return model.weight.item()

    assert run_replicas(3, work, tmp_path)[:2] == [4.0, 4.0]  # twice the mean of 1 and 3


def test_parameter_server_accumulates_in_float32() -> None:
    stage_weights = _StageWeights(num_pipelines=8)
    stage_weights.init(torch.ones(1, dtype=torch.bfloat16), num_weights=1)
    for _ in range(1000):
        stage_weights.push(torch.full((1,), 2.0**-7, dtype=torch.bfloat16))
    assert stage_weights.pull(torch.bfloat16).item() == pytest.approx(
        1 + 1000 * 2**-7 / 8, rel=2**-8
    )


def test_stale_statistics_keep_variances_on_a_parameter_server_positive() -> None:
    """Eight steps of one worker while the other one computes: the variance falls for both."""
    stage_weights, falling = _StageWeights(num_pipelines=2), 0.1
    stage_weights.init(torch.tensor([5.0, 1.0]), num_weights=1)
    for _ in range(8):
        weight, variance = stage_weights.pull(torch.float32)
        stage_weights.push(torch.stack([torch.tensor(-1.0), variance * falling]))
    stage_weights.push(torch.tensor([-1.0, 1.0 * falling]))  # it pulled before the others' pushes
    weight, variance = stage_weights.pull(torch.float32)
    assert weight == 5.0 - 9 / 2
    assert 0 < variance < 1


def test_flat_buffer_promotes_dtypes_and_is_on_cpu() -> None:
    tensors = [torch.tensor([1.0]), torch.tensor([2.0 + 3.0j])]
    with torch.device("meta"):
        read = FlatBuffer(tensors).read()
    assert read.device.type == "cpu"
    assert read.tolist() == [1.0, 2.0 + 3.0j]
