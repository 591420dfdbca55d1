"""Replicas agree without unpickling, under names that the store counts; the mesh of a job."""

import inspect
import os
import pickle
import signal
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed.distributed_c10d import _get_default_store

import polyrhythm as pr
from polyrhythm.errors import LaunchError, PeerError, PolicyError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.comm.process_groups import (
    DEFAULT_TIMEOUT,
    Replicas,
    abort,
    check_nccl,
    count_rounds,
    default_environment,
    job_mesh,
    new_gloo_group,
)
from tests.gloo.decoupled import error_of, stack, train_steps, wrap_optimizer
from tests.gloo.pipelines import run_stages
from tests.gloo.replicas import run_with_failures

TIMEOUT = 20.0


def test_variables_of_nccl_are_set_for_one_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    with default_environment(defaults):
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
        assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


@pytest.mark.parametrize("error", [ErrorType.SUCCESS, ErrorType.COMM_ERROR, ErrorType.TIMEOUT])
def test_nccl_tells_whether_all_has_come(error: ErrorType) -> None:
    class Group:
        def name(self) -> str:
            return "nccl"

        def abort(self) -> None:
            pass

        def get_error(self) -> ErrorType:
            return error

    whole, aborted = Group(), Group()
    context = nullcontext() if error == ErrorType.SUCCESS else pytest.raises(PeerError)
    with context:
        check_nccl([whole])  # type: ignore[list-item]
    abort(aborted)  # type: ignore[arg-type]
    with pytest.raises(PeerError, match="its connection was lost"):
        check_nccl([aborted])  # type: ignore[list-item]


def test_rounds_are_counted_in_the_store() -> None:
    """A process that has not been there before counts as the others do."""
    store = dist.HashStore()
    assert [count_rounds(store, "a", 3) for _ in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    assert count_rounds(store, "b", 3) == 0


def test_groups_with_equal_members_are_separate(tmp_path: Path) -> None:
    """Messages with the same tag go to the group that they were sent in."""

    def work(ctx: DistContext) -> list[float]:
        groups = [new_gloo_group([1, 0], "a test", timeout=TIMEOUT) for _ in range(2)]
        other = 1 - groups[0].rank()
        tensors = [torch.tensor([float(number)]) for number in range(2)]
        if ctx.rank == 0:
            works = [g.send([t], other, 7) for g, t in zip(groups, tensors, strict=True)]
        else:
            tensors = [torch.zeros(1) for _ in groups]
            works = [g.recv([t], other, 7) for g, t in zip(groups, tensors, strict=True)][::-1]
        for each in works:
            each.wait()
        return [tensor.item() for tensor in tensors]

    assert run_stages(2, work, tmp_path)[1] == [0.0, 1.0]


@pytest.mark.parametrize("num_sockets", [1, 2])
def test_abort_wakes_waits_for_all_sockets(num_sockets: int, tmp_path: Path) -> None:
    """On both sides: of the one that aborts, and of its peer."""

    def work(ctx: DistContext) -> list[bool]:
        group = new_gloo_group([0, 1], "a test", timeout=TIMEOUT, num_sockets=num_sockets)
        assert len(group.options._devices) == num_sockets
        works = [group.recv([torch.zeros(1)], 1 - ctx.rank, tag) for tag in (6, 7)]
        dist.barrier()
        if ctx.rank == 0:
            abort(group)
        start = time.monotonic()
        for each in works:
            with pytest.raises(RuntimeError):
                each.wait(timedelta(seconds=TIMEOUT))
        return [time.monotonic() - start < TIMEOUT / 2]

    assert run_stages(2, work, tmp_path) == [[True], [True]]


def test_agreements_leave_nothing_in_the_store(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[Any, ...]:
        replicas = Replicas([0, 1, 2], "a test", timeout=TIMEOUT)
        found = replicas.all_gather_object({1: (ctx.rank,)}, "a()")
        numbers = replicas.all_gather_number(ctx.rank / 3, "b()")
        first = replicas.broadcast_object(ctx.rank, "c()")
        decided = replicas.run_on_first(lambda: [ctx.rank], "d()", as_type=list[int])
        replicas.all_gather_number(0.0, "e()")
        num_keys = _get_default_store().num_keys()
        for number in range(20):
            replicas.all_gather_object(number, "f()")
        replicas.all_gather_number(0.0, "g()")
        return found, numbers, first, decided, _get_default_store().num_keys() - num_keys

    for found, numbers, first, decided, num_more in run_stages(3, work, tmp_path):
        assert found == [{1: (0,)}, {1: (1,)}, {1: (2,)}]
        assert numbers == [0.0, 1 / 3, 2 / 3]
        assert (first, decided) == (0, [0])
        assert num_more < 3


@pytest.mark.long
def test_values_that_cannot_be_sent_are_named(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[str]:
        model = stack()
        optimizer = wrap_optimizer(model)
        train_steps(ctx, model, optimizer, range(2))
        for state in optimizer.state.values():
            state["history"] = {1, 2}
        errors = [error_of(optimizer.state_dict, kind=LaunchError)]
        for state in optimizer.state.values():
            state["history"] = ("a", 1)
        errors.append(str(optimizer.state_dict()["state"][0]["history"]))
        optimizer.close()
        return errors

    for refused, kept in run_stages(2, work, tmp_path):
        assert "a value that cannot be sent: a set" in refused
        assert kept == "('a', 1)"


def test_lost_worker_is_noticed_at_once(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        replicas = Replicas([0, 1], "a test", timeout=1000.0)
        replicas.all_gather_object(ctx.rank, "a()")
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return error_of(lambda: replicas.all_gather_object(ctx.rank, "b()"), kind=PeerError)

    assert "b(), which all workers call" in run_with_failures(2, work, tmp_path, lost={1})[0]


def test_workers_in_different_calls_are_named(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        replicas = Replicas([0, 1], "a test", timeout=TIMEOUT)
        call = ("first()", "second()")[ctx.rank]
        return error_of(lambda: replicas.broadcast_object(1, call), kind=PolicyError)

    first, second = run_stages(2, work, tmp_path)
    assert "rank 0 is in first(), and rank 1 in second()" in first
    assert "rank 1 is in second(), and rank 0 in first()" in second


def test_nothing_is_unpickled_while_training(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> int:
        unpickled: list[object] = []
        for name in ("loads", "load", "Unpickler"):
            setattr(pickle, name, lambda *args, **more: unpickled.append(args))
        model = stack()
        optimizer = wrap_optimizer(model, bucket_bytes="auto")
        train_steps(ctx, model, optimizer, range(15))
        (model(torch.ones(1, 6)).sum()).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        saved, later = optimizer.state_dict(), optimizer.async_state_dict()
        assert later.result()["state"].keys() == saved["state"].keys()
        optimizer.load_state_dict(saved)
        optimizer.close()
        return len(unpickled)

    assert run_stages(2, work, tmp_path) == [0, 0]


def test_mesh_has_pipelines_and_stages(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[Any, ...]:
        mesh = job_mesh(2, 2)
        total = torch.tensor([float(ctx.rank)])
        dist.all_reduce(total, group=mesh.get_group("dp"))
        errors = [error_of(lambda: job_mesh(3, 2), kind=LaunchError)]
        return (
            mesh.mesh_dim_names,
            mesh.mesh.tolist(),
            mesh.get_coordinate(),
            mesh["dp"].mesh.tolist(),
            (mesh.get_local_rank("dp"), mesh.get_local_rank("pp")),
            total.item(),
            errors,
        )

    found = run_stages(4, work, tmp_path)
    for names, layout, *_, errors in found:
        assert names == ("dp", "pp")
        assert layout == [[0, 1], [2, 3]]
        assert "for a mesh of 3 pipelines x 2 stages" in errors[0]
    assert [each[2] for each in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [each[3] for each in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [each[4] for each in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [each[5] for each in found] == [2.0, 4.0, 2.0, 4.0]


def test_mesh_needs_a_process_group() -> None:
    with pytest.raises(LaunchError, match="without a process group"):
        job_mesh(1, 1)


def test_one_default_timeout_in_the_whole_api() -> None:
    public = (
        pr.Pipeline,
        pr.DistributedOptimizer,
        pr.Checkpointer,
        pr.GroupSync,
        pr.ParameterServer,
        pr.Trainer,
        job_mesh,
    )
    defaults = [inspect.signature(each).parameters["timeout"].default for each in public]
    assert defaults == [DEFAULT_TIMEOUT] * len(public)
