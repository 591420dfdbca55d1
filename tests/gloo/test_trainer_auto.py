"""plan="auto": replicas on one machine without measuring, and what measuring leaves alone."""

import ctypes
import logging
import os
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import IterableDataset

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.errors import DescriptionError, PeerError, PlanError, UserError
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.run.launch import Place
from polyrhythm.run.probe.probe import ProbeOptions
from polyrhythm.run.trainer import deciding, measuring
from polyrhythm.run.trainer.cutting import Cut
from polyrhythm.run.trainer.deciding import decided
from polyrhythm.run.trainer.placing import DEVICE, Processes, seats
from polyrhythm.run.trainer.planned_before import PLAN, Wanted, planned_before
from polyrhythm.run.trainer.profiling import layers_together, profiled_layers, sizes_of
from polyrhythm.run.trainer.settings import Settings
from polyrhythm.run.trainer.trainer import Trainer
from tests.gloo.trainers import model, run_job, samples


def automatic(**more: Any) -> Trainer:
    optimizer = partial(torch.optim.SGD, lr=1e-2)
    given: dict[str, Any] = {"batch_size": 24, "deadline": 20.0, **more}
    return Trainer(given.pop("model", model), mse_loss, optimizer, samples(), **given)


def refuse_to_measure(place: Place, *_: object) -> None:
    wait_for_all(place)
    raise AssertionError("measured")


def wait_for_all(place: Place) -> None:
    """The first one has the store, and takes it along when it leaves: it alone stays."""
    assert place.store is not None
    num_here = place.store.add("here", 1)
    ends = time.monotonic() + 20
    while place.rank == 0 and num_here < place.world_size and time.monotonic() < ends:
        time.sleep(0.01)
        num_here = place.store.add("here", 0)


def met(*, deadline: float = 20.0) -> Processes:
    """All have time to meet; `deadline` is for what comes afterwards."""
    processes = Processes(20.0)
    processes.homes()
    processes.deadline = deadline
    return processes


def settings(**more: Any) -> Settings:
    return Settings(loss_fn=mse_loss, optimizer_fn=torch.optim.SGD, **more)


def test_on_one_machine_every_process_is_a_replica_and_nothing_is_measured(tmp_path: Path) -> None:
    def work(_: Place | None) -> tuple[int, int]:
        measuring.probe = refuse_to_measure  # type: ignore[attr-defined]
        with automatic() as trainer:
            trainer.fit(steps=1)
            return trainer.plan.num_stages, trainer.plan.num_pipelines

    assert run_job(3, work, tmp_path) == [(1, 3)] * 3


def found_slow(place: Place, name: str, options: ProbeOptions) -> Cluster | None:
    """What a probe would find where messages take long: replicas would do nothing but average."""
    if place.rank > 0:
        return None
    names = tuple(f"host{rank}" for rank in range(place.world_size))
    return Cluster(
        name=options.cluster_name,
        devices=tuple(Device(name=name, region=name, flops=1e9) for name in names),
        regions=names,
        latency=((0.0, 0.0001), (0.0001, 0.0)),
        bandwidth=((0.0, 1e4), (1e4, 0.0)),
        flops_dtype=options.dtype,
    )


def test_processes_of_two_machines_take_their_seats_in_the_plan_and_use_it_again(
    tmp_path: Path,
) -> None:
    def work(place: Place | None, *, probe: Any) -> tuple[str, int, list[float]]:
        assert place is not None
        os.environ[DEVICE] = f"host{place.rank}"
        measuring.probe = probe  # type: ignore[attr-defined]
        logging.basicConfig(level=logging.INFO, force=True)  # pytest has its own
        with automatic(model=wide, run=tmp_path / "run") as trainer:
            stage = trainer.worker.stage
            assert trainer.plan.pipelines[0].devices[stage] == f"host{place.rank}"
            return str(trainer.plan), stage, list(trainer.fit(steps=2).losses)

    first = run_job(2, partial(work, probe=found_slow), tmp_path / "first")
    again = run_job(2, partial(work, probe=refuse_to_measure), tmp_path / "again")
    assert [plan for plan, _, _ in first] == [first[0][0]] * 2
    assert {stage for _, stage, _ in first} == {0, 1}
    with automatic(model=wide) as alone:
        expected = list(alone.fit(steps=2).losses)
    for found in (first, again):
        (losses,) = [losses for _, stage, losses in found if stage == 1]
        assert losses == pytest.approx(expected, abs=1e-5)
    for folder, word in (("first", "measured in"), ("again", "used again")):
        said = (tmp_path / folder / "logs" / "rank0.log").read_text()
        assert said.count(f"plan {word}") == 1
        assert "2 stages x 1 pipeline," in said


def wide() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 4))


def test_a_model_that_cannot_be_cut_is_not_measured(tmp_path: Path) -> None:
    def work(place: Place | None) -> int:
        assert place is not None
        os.environ[DEVICE] = f"host{place.rank}"
        measuring.probe = refuse_to_measure  # type: ignore[attr-defined]
        with automatic(model=lambda: nn.Linear(8, 4)) as trainer:
            return trainer.plan.num_pipelines

    assert run_job(2, work, tmp_path) == [2, 2]


def test_on_one_machine_a_model_that_does_not_fit_is_measured(tmp_path: Path) -> None:
    def work(_: Place | None) -> str:
        measuring.probe = refuse_to_measure  # type: ignore[attr-defined]
        with pytest.raises(AssertionError) as refused:
            automatic(memory_limit=100)
        time.sleep(0.2)
        return str(refused.value)

    assert run_job(2, work, tmp_path) == ["measured"] * 2


def test_a_batch_size_is_asked_for_before_anybody_is_waited_for(tmp_path: Path) -> None:
    def work(place: Place | None) -> str:
        assert place is not None
        os.environ[DEVICE] = f"host{place.rank}"
        with pytest.raises(PlanError) as refused:
            automatic(batch_size=None)
        return refused.value.wrong

    assert run_job(2, work, tmp_path) == ["no batch_size"] * 2


def test_micro_batches_that_cannot_be_planned_are_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    def work(place: Place | None) -> str:
        assert place is not None
        os.environ[DEVICE] = f"host{place.rank}"
        measuring.probe = refuse_to_measure  # type: ignore[attr-defined]
        with pytest.raises(PlanError) as refused:
            automatic(microbatch_size=5)
        return refused.value.wrong

    told = "a batch of 24 in micro-batches of 5, to be planned"
    assert run_job(2, work, tmp_path) == [told] * 2


def test_all_processes_raise_what_the_first_one_refuses_with(tmp_path: Path) -> None:
    def refuse() -> str:
        raise DescriptionError("no such layer", expected="a layer", fix="add it")

    def work(_: Place | None) -> tuple[str, str, str]:
        with pytest.raises(UserError) as refused:
            decided(met(), "the plan", refuse)
        return type(refused.value).__name__, refused.value.wrong, refused.value.fix

    told = ("DescriptionError", "no such layer", "add it")
    assert run_job(3, work, tmp_path) == [told] * 3


def test_a_decision_may_take_longer_than_the_deadline(tmp_path: Path) -> None:
    def decide() -> str:
        time.sleep(3)
        return "late"

    def work(_: Place | None) -> str:
        processes = met(deadline=1.0)
        told = decided(processes, "the plan", decide)
        wait_for_all(processes.place)
        return told

    assert run_job(2, work, tmp_path) == ["late"] * 2


def test_a_decision_is_not_waited_for_without_end(tmp_path: Path) -> None:
    def decide() -> str:
        time.sleep(5)
        return "too late"

    def work(place: Place | None) -> str:
        assert place is not None
        deciding._DEADLINES = 2
        processes = met(deadline=0.5)
        if place.rank == 0:
            return decided(processes, "the plan", decide)
        with pytest.raises(PeerError) as lost:
            decided(processes, "the plan", decide)
        return lost.value.cause

    assert run_job(2, work, tmp_path) == ["too late", "it shows no sign of life"]


def test_who_shows_no_sign_of_life_while_it_decides_is_not_waited_for(tmp_path: Path) -> None:
    def stand_still() -> str:
        ctypes.PyDLL(None).sleep(4)  # and no other thread of this process runs
        return "too late"

    def work(place: Place | None) -> str:
        assert place is not None
        processes = met(deadline=1.0)
        if place.rank == 0:
            return decided(processes, "the plan", stand_still)
        with pytest.raises(PeerError) as lost:
            decided(processes, "the plan", stand_still)
        return lost.value.cause

    assert run_job(2, work, tmp_path) == ["too late", "it shows no sign of life"]


class _Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scale = random.random() + float(np.random.rand())
        return x * scale + torch.randn_like(x)


def test_measuring_a_model_leaves_it_and_all_that_is_random_as_they_were() -> None:
    whole = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), _Noisy(), nn.Linear(6, 4))
    whole[0].weight.grad = torch.ones(6, 8)
    whole.eval()
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    layers = profiled_layers(
        settings(batch_size=8),
        whole,
        samples(),
        sizes=(4, 2, 1),
        device=torch.device("cpu"),
    )
    assert [layer.name.partition(".")[2] for layer in layers] == [type(x).__name__ for x in whole]
    # A batch norm cannot do with a single sample, which is left out.
    assert [each.microbatch_size for each in layers[0].sizes] == [2]
    assert layers[0].parameter_bytes == (8 * 6 + 6) * 4
    assert all(torch.equal(value, before[name]) for name, value in whole.state_dict().items())
    assert torch.equal(whole[0].weight.grad, torch.ones(6, 8))
    assert whole[3].weight.grad is None
    assert not whole.training
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert states[2] == np.random.get_state()[1].tolist()


class _Counting(IterableDataset[Any]):
    """A stream, of inputs by name."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while True:
            self.at += 1
            yield {"x": torch.full((8,), float(self.at)), "y": torch.ones(8)}, torch.zeros(4)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(hidden)


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = self.first(x if y is None else x + y)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.last(x)
        return logits


def test_a_list_of_layers_is_measured_with_what_comes_before_and_after() -> None:
    stream = _Counting()
    layers = profiled_layers(
        settings(batch_size=4, cut=Cut(layers="blocks", prologue=("first",), epilogue=("last",))),
        _Blocks(),
        stream,
        sizes=(2, 1),
        device=torch.device("cpu"),
    )
    block, first, last = 8 * 9 * 4, 8 * 9 * 4, 4 * 9 * 4
    assert [layer.parameter_bytes for layer in layers] == [block + first, block, block + last]
    assert [layer.activation_bytes for layer in layers] == [2 * 8 * 4, 2 * 8 * 4, 2 * 4 * 4]
    assert stream.state_dict() == {"at": 0}, "training begins with the first sample"


def test_layers_without_parameters_stay_with_a_neighbour() -> None:
    kinds = [nn.Flatten(), nn.Linear(8, 8), nn.Tanh(), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8)]
    assert layers_together(Cut(), nn.Sequential(*kinds)) == (4, 1, 1)
    assert layers_together(Cut(layers="blocks"), _Blocks()) == (1, 1, 1)


@pytest.mark.parametrize(
    ("batch", "microbatch", "number", "sizes"),
    [
        (24, None, 4, (6, 2, 1)),
        (64, None, 4, (16, 4, 1)),
        (4096, None, 4, (64, 8, 1)),
        (23, None, 4, (1,)),
        (2, None, 4, (1,)),
        (24, 3, 4, (3,)),
    ],
)
def test_sizes_to_measure_divide_the_batch(
    batch: int, microbatch: int | None, number: int, sizes: tuple[int, ...]
) -> None:
    assert sizes_of(settings(batch_size=batch, microbatch_size=microbatch), number) == sizes


def planned() -> Plan:
    return Plan(
        layers_per_stage=(2, 1),
        pipelines=(PipelinePlan(devices=("b", "a"), num_microbatches=4, schedule="1f1b"),),
        microbatch_size=2,
        sync="decoupled",
        model="a model",
    )


@pytest.mark.parametrize(
    ("change", "is_used"),
    [
        ({}, True),
        ({"microbatch_size": 2}, True),
        ({"microbatch_size": 4}, False),
        ({"devices": ("a", "c")}, False),
        ({"devices": ("a", "b", "c")}, False),
        ({"model": "another"}, False),
        ({"batch": 16}, False),
        ({"sync": "groups"}, False),
    ],
)
def test_a_plan_is_used_again_for_the_same_job_only(
    tmp_path: Path, change: dict[str, Any], is_used: bool
) -> None:
    planned().save(tmp_path / PLAN)
    same: dict[str, Any] = {
        "devices": ("a", "b"),
        "model": "a model",
        "batch": 8,
        "microbatch_size": None,
        "sync": "decoupled",
    }
    found = planned_before(tmp_path, Wanted(**{**same, **change}))
    assert found == (planned() if is_used else None)


def test_a_damaged_plan_is_not_used_again_and_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / PLAN).write_text('{"schema": 2, "layers_per_st')
    wanted = Wanted(devices=("a",), model="", batch=1, microbatch_size=None, sync="decoupled")
    assert planned_before(tmp_path, wanted) is None
    assert "not used" in caplog.text


def test_processes_of_one_device_find_their_seats_by_rank() -> None:
    names = ["a", "b", "a"]
    pipelines = tuple(PipelinePlan(devices=(name,)) for name in ("b", "a (rank 2)", "a (rank 0)"))
    assert seats(Plan(layers_per_stage=(1,), pipelines=pipelines), names) == [2, 0, 1]
