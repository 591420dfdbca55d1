"""After a loss a job divides its layers anew, in memory, and trains as if nothing was lost."""

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import AdamW, Optimizer
from torch.utils.data import IterableDataset, TensorDataset

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.model import Layer, ModelProfile
from polyrhythm.describe.write import write_cluster, write_model
from polyrhythm.errors import PeerError
from polyrhythm.plan.after_loss import AfterLoss
from polyrhythm.plan.plan import PipelinePlan, Plan, Sources
from polyrhythm.plan.survivors import Assignment
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.coordinator.epoch_client import EpochClient
from polyrhythm.run.decoupled import layer_transfer
from polyrhythm.run.pipeline.partition import LayerSplit
from polyrhythm.run.trainer import rank_assignment
from polyrhythm.run.trainer import trainer as trainer_module
from polyrhythm.run.trainer.config import CheckpointConfig, DeviceConfig
from polyrhythm.run.trainer.division import LayerDivision
from polyrhythm.run.trainer.elastic import ElasticJob, EpochStart
from polyrhythm.run.trainer.optimizers import NamedParameters
from polyrhythm.run.trainer.trainer import Trainer
from polyrhythm.sync.epochs import Vote
from tests.gloo import faults
from tests.gloo.faults import Fault, after_step, both
from tests.gloo.trainer_jobs import BATCH, LAYERS, fit, model, plan_of, samples, trainer
from tests.grids import long_except

NUM_STEPS, _TIMEOUT = 12, 60.0
_MEGABYTE = 10**6


class Found(NamedTuple):
    """What a process that was left has trained."""

    steps: list[int]
    weights: dict[str, Tensor]
    layers: tuple[int, ...]  # per stage of its last plan
    num_pipelines: int


def planned(
    folder: Path,
    shape: tuple[int, int],
    layers_per_stage: tuple[int, ...],
    *,
    work: float,
    memory: int | None,
) -> Plan:
    """Return a plan of stages x pipelines, with files of the cluster and profile it is made for.

    Of five layers every second one is linear. Each linear layer computes for `work` seconds; with
    `memory` a device has space for so many.
    """
    names = tuple(f"d{number}" for number in range(shape[0] * shape[1]))
    limit = None if memory is None else int(memory * 5.5 * _MEGABYTE / 0.9)
    cluster = Cluster(
        name="small",
        devices=tuple(Device(name=name, region="r", memory=limit) for name in names),
        regions=("r",),
        latency=((1e-4,),),
        bandwidth=((1e9,),),
    )
    num_layers = sum(layers_per_stage)
    is_linear = [num_layers < 5 or number % 2 == 0 for number in range(num_layers)]
    layers = tuple(
        Layer(
            name=f"layer{number}",
            forward=work / 3 * linear,
            backward=work * 2 / 3 * linear,
            parameter_bytes=_MEGABYTE * linear,
            activation_bytes=100,
            stored_bytes=200,
        )
        for number, linear in enumerate(is_linear)
    )
    folder.mkdir(exist_ok=True)
    write_cluster(cluster, folder / "cluster.toml")
    write_model(
        ModelProfile(name="model", microbatch_size=2, layers=layers), folder / "profile.json"
    )
    stages, pipelines = shape
    return Plan(
        layers_per_stage=layers_per_stage,
        pipelines=tuple(
            PipelinePlan(
                devices=names[number * stages : (number + 1) * stages],
                num_microbatches=BATCH // 2 // pipelines,
                schedule="1f1b",
            )
            for number in range(pipelines)
        ),
        microbatch_size=2,
        sources=Sources(cluster=str(folder / "cluster.toml"), profile=str(folder / "profile.json")),
    )


def train(
    folder: Path,
    shape: tuple[int, int],
    fault: Fault,
    *,
    work: float = 30.0,
    memory: int | None = None,
    layers: tuple[int, ...] = (),
    **more: Any,
) -> dict[int, Found]:
    """Train stages x pipelines; return what the processes that were left have found, by rank."""
    plan = planned(folder, shape, layers or LAYERS[shape[0]], work=work, memory=memory)

    def run(ctx: DistContext) -> None:
        callback = fault(ctx)
        with trainer(plan, **more) as made:
            callbacks = [] if callback is None else [callback]
            fitted = made.fit(max_steps=NUM_STEPS, callbacks=callbacks, progress=False)
            weights = {name: value.clone() for name, value in made.model.state_dict().items()}
            steps = [info.step for info in fitted.steps]
            last = made.plan.layers_per_stage, made.plan.num_pipelines
        torch.save((steps, weights, *last), folder / f"found{ctx.rank}.pt")

    logs, num = folder / "logs", plan.num_workers
    with LocalJob(run, num, output_folder=logs, keeps_survivors=True) as job:
        assert job.wait(_TIMEOUT), "not done in time"
    paths = {rank: folder / f"found{rank}.pt" for rank in range(num)}
    return {rank: Found(*torch.load(path)) for rank, path in paths.items() if path.exists()}


def check(found: dict[int, Found], folder: Path, *late: int) -> None:
    """Check that all steps were made once, and weights are those of one process.

    `late`: processes that were spares for some steps.
    """
    _, expected = fit(folder / "alone", 1, 1, steps=NUM_STEPS)
    weights = dict[str, Tensor]()
    for rank, each in found.items():
        if rank not in late:
            assert each.steps == list(range(NUM_STEPS))
        for name, value in each.weights.items():
            torch.testing.assert_close(value, weights.setdefault(name, value), rtol=0, atol=0)
    assert weights.keys() == expected.keys(), "some stage has no survivor"
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


SYNCS = ["decoupled", "all_reduce", "balanced"]


@pytest.mark.parametrize(
    ("sync", "victim"), long_except([(sync, victim) for sync in SYNCS for victim in (0, 3)], 0)
)
def test_a_spare_becomes_a_replica_of_all_layers(tmp_path: Path, sync: str, victim: int) -> None:
    found = train(tmp_path, (2, 2), after_step(4, victim), sync=sync)
    assert found.keys() == {0, 1, 2, 3} - {victim}
    assert all((each.layers, each.num_pipelines) == ((5,), 3) for each in found.values())
    check(found, tmp_path)


@pytest.mark.parametrize("sync", long_except(SYNCS))
def test_a_spare_becomes_a_stage_of_a_longer_pipeline(tmp_path: Path, sync: str) -> None:
    found = train(tmp_path, (2, 2), after_step(4, 1), sync=sync, memory=2)
    assert found.keys() == {0, 2, 3}
    assert all((len(each.layers), each.num_pipelines) == (3, 1) for each in found.values())
    check(found, tmp_path)


@pytest.mark.parametrize("sync", long_except(["decoupled", "all_reduce"]))
def test_a_replica_is_lost_after_a_new_division(tmp_path: Path, sync: str) -> None:
    found = train(tmp_path, (2, 2), both(after_step(3, 0), after_step(7, 2)), sync=sync)
    assert found.keys() == {1, 3}
    assert all((each.layers, each.num_pipelines) == ((5,), 2) for each in found.values())
    check(found, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("sync", ["decoupled", "all_reduce"])
def test_layers_are_divided_twice_and_one_process_is_not_needed(tmp_path: Path, sync: str) -> None:
    """Of five processes two pipelines of two are made, of the three that are left one of three."""
    fault = both(after_step(3, 5), faults.at_call(EpochClient, "commit", 8, 0))
    found = train(tmp_path, (3, 2), fault, sync=sync, memory=2)
    assert len(found) == 3
    assert all((len(each.layers), each.num_pipelines) == (3, 1) for each in found.values())
    check(found, tmp_path)


@pytest.mark.long
def test_layers_are_kept_without_a_gain(tmp_path: Path) -> None:
    found = train(tmp_path, (2, 2), after_step(4, 1), sync="all_reduce", work=0.01)
    assert found.keys() == {2, 3}  # process 0 is a spare to the end
    assert all(each.layers == LAYERS[2] for each in found.values())
    check(found, tmp_path)


def after_its_vote(ctx: DistContext) -> None:
    """End process 4 when the coordinator has its vote on the new division."""

    def commit_division(self: ElasticJob, start: EpochStart, assignment: object) -> None:
        client = self._client
        client._submit(Vote(*client._key, client.epoch, 0, len(start.members), may_end=False))
        time.sleep(0.2)
        faults.end_this_process(signal.SIGKILL)

    if ctx.rank == 4:
        ElasticJob.commit_division = commit_division  # type: ignore[method-assign]


# What a process does in the epoch in which layers are divided, as its last act. Without it the
# others make two pipelines of two stages again, unless the new division is committed.
POINTS: dict[str, Fault] = {
    "decides": faults.at_call(LayerDivision, "decide", 0, 0),
    "makes a stage": faults.at_call(LayerDivision, "extract_stage", 0, 2),
    "connects": faults.at_call(trainer_module, "move_layers", 0, 4),
    "posts its layers": faults.at_call(layer_transfer, "_sources_of", 3, 0, when="after"),
    "has sent its layers": faults.at_call(trainer_module, "move_layers", 0, 0, when="after"),
    "votes": faults.at_call(ElasticJob, "commit_division", 0, 4),
    "has voted": after_its_vote,
    "goes on": faults.at_call(ElasticJob, "commit_division", 0, 4, when="after"),
}
ONLY_SHARDED: dict[str, Fault] = {
    "gives its shard": faults.at_call(trainer_module, "reshard", 0, 4),
    "gathers shards": faults.at_call(trainer_module, "reshard", 0, 0),
    "has gathered shards": faults.at_call(trainer_module, "reshard", 0, 0, when="after"),
}


@pytest.mark.parametrize(
    ("sync", "point"),
    long_except(
        [(sync, point) for sync in ("decoupled", "all_reduce") for point in POINTS]
        + [("decoupled", point) for point in ONLY_SHARDED],
        4,
    ),
)
def test_a_loss_while_layers_are_divided(tmp_path: Path, sync: str, point: str) -> None:
    """All go on with what they had, or all with the new division."""
    fault = both(after_step(4, 1), {**POINTS, **ONLY_SHARDED}[point])
    found = train(tmp_path, (2, 3), fault, sync=sync)
    assert len(found) == 4
    expected = ((5,), 4) if point in ("has voted", "goes on") else (LAYERS[2], 2)
    assert {(each.layers, each.num_pipelines) for each in found.values()} == {expected}
    check(found, tmp_path)


@pytest.mark.long
def test_layers_are_kept_if_they_cannot_be_moved(tmp_path: Path) -> None:
    def fault(ctx: DistContext) -> Any:
        if ctx.rank == 2:
            trainer_module.move_layers = fail  # type: ignore[assignment]
        return after_step(4, 1)(ctx)

    def fail(*_: object, **__: object) -> None:
        raise PeerError("another process", action="moving layers", waited=30.0, cause="slow")

    found = train(tmp_path, (2, 2), fault, sync="decoupled")
    assert found.keys() == {2, 3}
    assert all(each.layers == LAYERS[2] for each in found.values())
    check(found, tmp_path)


@pytest.mark.long
def test_a_worker_that_gets_sigterm_hands_over_its_layers(tmp_path: Path) -> None:
    def fault(ctx: DistContext) -> Any:
        def callback(info: Any) -> None:
            time.sleep(0.1)
            if (ctx.rank, info.step) == (1, 3):
                os.kill(os.getpid(), signal.SIGTERM)

        return callback

    found = train(tmp_path, (2, 2), fault, sync="decoupled")
    assert found.keys() == {0, 2, 3}
    assert all((each.layers, each.num_pipelines) == ((5,), 3) for each in found.values())
    check(found, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("sync", ["decoupled", "all_reduce"])
def test_checkpoints_after_a_new_division(tmp_path: Path, sync: str) -> None:
    run = tmp_path / "run"
    options: dict[str, Any] = {"run_dir": run, "checkpoint": CheckpointConfig(every=3)}
    check(train(tmp_path, (2, 2), after_step(4, 0), sync=sync, **options), tmp_path)
    assert len(list((run / "checkpoints").iterdir())) == 3
    with trainer(plan_of(1, 1), run_dir=run) as made:
        assert made.restore() == NUM_STEPS
        weights = made.model.state_dict()
    _, expected = fit(tmp_path / "alone", 1, 1, steps=NUM_STEPS)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_a_new_division_in_float16(tmp_path: Path) -> None:
    device = DeviceConfig("cpu", autocast=torch.float16)
    found = train(tmp_path, (2, 2), after_step(4, 0), sync="all_reduce", device=device)
    assert found.keys() == {1, 2, 3}
    for each in found.values():
        for name, value in each.weights.items():
            torch.testing.assert_close(value, found[1].weights[name], rtol=0, atol=0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.rand(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale


class Blocks(nn.Module):
    """Layers in a list between others, with a tied weight, statistics and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.layers[1].linear.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(8, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.last(self.norm(hidden))


@pytest.mark.long
@pytest.mark.parametrize("memory", [None, 2])
def test_a_model_with_a_list_of_layers(tmp_path: Path, memory: int | None) -> None:
    """Tied and frozen parameters, buffers and groups of parameters move with their layers."""
    inputs = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {
        "model": Blocks,
        "dataset": TensorDataset(inputs, inputs.tanh()),
        "optimizer_fn": two_groups,
        "split": LayerSplit(layers="layers", prologue=["first"], epilogue=["norm", "last"]),
        "layers": (1, 2),
        "sync": "decoupled",
    }
    found = train(tmp_path, (2, 2), after_step(4, 0), memory=memory, **options)
    whole = Plan(layers_per_stage=(sum(options.pop("layers")),), pipelines=(PipelinePlan(),))
    with trainer(whole, **options) as made:
        made.fit(max_steps=NUM_STEPS, progress=False)
        expected = made.model.state_dict()
    weights = {name: value for each in found.values() for name, value in each.weights.items()}
    assert weights.keys() == expected.keys()
    assert all(each.layers == ((3,) if memory is None else (1, 1, 1)) for each in found.values())
    for name, value in expected.items():
        if name.startswith("norm."):  # each pipeline has its own statistics
            continue
        # Norms of two samples amplify rounding: without a loss weights differ as much.
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)


def two_groups(named: NamedParameters) -> Optimizer:
    some = list(named)
    groups = [[p for _, p in some if (p.dim() > 1) == is_matrix] for is_matrix in (True, False)]
    return AdamW([{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1]}], lr=1e-2)


class Stream(IterableDataset):
    """Endless samples."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            inputs = torch.randn(8, generator=self.generator)
            yield inputs, torch.tanh(inputs[:4]) + inputs[4:]

    def state_dict(self) -> dict[str, Any]:
        return {"chance": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["chance"])


@pytest.mark.long
def test_a_new_first_stage_finds_its_place_in_a_stream(tmp_path: Path) -> None:
    found = train(tmp_path, (2, 2), after_step(4, 0), sync="decoupled", dataset=Stream())
    assert {each.layers for each in found.values()} == {(5,)}
    _, expected = fit(tmp_path / "alone", 1, 1, steps=NUM_STEPS, dataset=Stream())
    for name, value in expected.items():
        torch.testing.assert_close(found[1].weights[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_a_measured_plan_is_decided_with_what_was_measured(tmp_path: Path) -> None:
    """Without rank 0, which has measured; of steps of milliseconds too few are left to search."""

    decide = LayerDivision.decide

    def noting(self: LayerDivision, kept: Assignment, *, steps: int) -> AfterLoss:
        decided = decide(self, kept, steps=steps)
        (tmp_path / "decided").write_text(f"{len(kept.members)} processes, {decided.why}")
        return decided

    def run(ctx: DistContext) -> None:
        rank_assignment.machine_name = lambda: f"machine{ctx.rank}"
        LayerDivision.decide = noting  # type: ignore[method-assign]
        fault = after_step(4, 0)(ctx)
        made = Trainer(
            *(model, mse_loss, partial(AdamW, lr=1e-2), samples()),
            batch_size=BATCH,
            stages=2,
            timeout=30.0,
        )
        with made:
            assert made.plan.num_pipelines == 2
            made.fit(max_steps=NUM_STEPS, callbacks=[fault] if fault else [], progress=False)

    with LocalJob(run, 4, output_folder=tmp_path / "logs", keeps_survivors=True) as job:
        assert job.wait(_TIMEOUT), "not done in time"
    text = (tmp_path / "decided").read_text()
    assert text.startswith("3 processes, keep the layers: the steps that are left take about")
