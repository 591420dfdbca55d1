"""Stage modules that are compiled, or sharded over processes, train as plain ones do.

There are two stages of two processes each: two parallel pipelines whose stages share modules.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate as older_replicate
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from polyrhythm.errors import PeerError, ScheduleError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.partition import ModelPartition, split_layers, split_sequential
from polyrhythm.run.pipeline.pipeline import Pipeline
from tests.gloo.pipelines import (
    assert_close,
    gradients,
    merged,
    random_batch,
    run_single_process,
    run_stages,
    stack_of,
    step,
)

SCHEDULES = ("1f1b", "gpipe", "kfkb:2", "bounded:3,1")
BATCHES = [random_batch(20, 6, 8, seed=seed) for seed in range(2)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def blocks() -> nn.Sequential:
    """Build blocks of which both stages hold the weights of the first block's `up`."""
    torch.manual_seed(6)
    first, *others = (Block() for _ in range(4))
    return nn.Sequential(first, *others, first.up, nn.Linear(12, 8), nn.Tanh())


def partition_of(stage: int) -> ModelPartition:
    return split_sequential(blocks(), stage=stage, num_stages=2, layers_per_stage=[2, 5])


def whole() -> dict[str, Any]:
    model = blocks()
    for inputs, target in BATCHES:
        mse_loss(model(inputs), target).backward()
    found = {"gradients": gradients(model)}
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return {**found, "norm": norm, "clipped": gradients(model)}


def full_gradients(module: nn.Module) -> dict[str, Tensor]:
    found = gradients(module)
    if "4.weight" in found:  # layer 4 is the `up` of layer 0
        found |= {f"0.up.{name}": found.pop(f"4.{name}") for name in ("weight", "bias")}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}


def train(
    module: nn.Module, group: dist.ProcessGroup, share: Callable[[Tensor], Tensor], **options: Any
) -> dict[str, Any]:
    pipeline = Pipeline(
        module, loss_fn=mse_loss, n_microbatches=4, process_group=group, timeout=20, **options
    )
    with pipeline:
        for inputs, target in BATCHES:
            step(pipeline, share(inputs), share(target))
        found = {"gradients": full_gradients(pipeline.module)}
        norm = pipeline.clip_grad_norm_(0.01)
        return {**found, "norm": norm, "clipped": full_gradients(pipeline.module)}


def assert_as_one_process(stages: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    assert_close(merged(stage["gradients"] for stage in stages), expected["gradients"])
    assert_close(merged(stage["clipped"] for stage in stages), expected["clipped"])
    for stage in stages:
        torch.testing.assert_close(stage["norm"], expected["norm"], rtol=1e-6, atol=0)


def in_mesh(
    folder: Path, work: Callable[[DeviceMesh, int], list[dict[str, Any]]]
) -> list[list[dict[str, Any]]]:
    """Run `work(mesh, stage)` in four processes; return the results by rank."""

    def meshed(ctx: DistContext) -> list[dict[str, Any]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "share"))
        return work(mesh, mesh.get_local_rank("stage"))

    return run_stages(4, meshed, folder)


# The function that FSDP2 of this torch release calls.
REDUCE = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)


@pytest.mark.timeout(60)
def test_fsdp2_reduces_gradients_once_per_step(tmp_path: Path) -> None:
    num_reduced, reduce = 0, getattr(dist, REDUCE)

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_reduced
        num_reduced += 1
        return reduce(*args, **kwargs)

    def work(mesh: DeviceMesh, stage: int) -> list[dict[str, Any]]:
        setattr(dist, REDUCE, counted)
        share_index, group = mesh.get_local_rank("share"), mesh.get_group("stage")
        found = []
        for schedule in SCHEDULES:
            partition = partition_of(stage)
            for inner in [*partition.module.children(), partition.module]:
                if not isinstance(inner, nn.Linear):  # they belong to the module around them
                    fully_shard(inner, mesh=mesh["share"])
            before = num_reduced
            half = lambda batch: batch.chunk(2)[share_index]  # noqa: E731
            found.append(train(partition, group, half, schedule=schedule))
            num_groups = 2 + (stage == 1)  # two blocks, and on the last stage the rest
            assert num_reduced - before == num_groups * len(BATCHES)
        for inner in [*(partition := partition_of(stage)).module.children(), partition.module]:
            if not isinstance(inner, nn.Linear):
                replicate(inner, mesh=mesh["share"])  # FSDP2 without shards
        found.append(train(partition, group, half, schedule="1f1b"))
        return found

    expected = run_single_process(whole, tmp_path)
    for stages in zip(*in_mesh(tmp_path, work), strict=True):
        assert_as_one_process(list(stages), expected)


@pytest.mark.long
@pytest.mark.timeout(60)
def test_tensor_parallel_matches_single_process(tmp_path: Path) -> None:
    def work(mesh: DeviceMesh, stage: int) -> list[dict[str, Any]]:
        block = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        found = []
        for schedule in SCHEDULES:
            partition = partition_of(stage)
            plan = {f"{n}.{which}": style for n in range(4) for which, style in block.items()}
            plan["4"] = ColwiseParallel(output_layouts=Replicate())
            own_plan = {
                name: style for name, style in plan.items() if name[0] in partition.module._modules
            }
            parallelize_module(partition.module, mesh["share"], own_plan)
            found.append(train(partition, mesh.get_group("stage"), lambda x: x, schedule=schedule))
        return found

    expected = run_single_process(whole, tmp_path)
    for stages in zip(*in_mesh(tmp_path, work), strict=True):
        assert_as_one_process(list(stages), expected)


@pytest.mark.timeout(60)
def test_chained_tensor_parallel_layers_match_single_process(tmp_path: Path) -> None:
    """Nothing between or after them waits for their collectives: they return unfinished results."""

    def chained() -> nn.Sequential:
        torch.manual_seed(8)
        return nn.Sequential(*(nn.Linear(*shape) for _ in range(2) for shape in ((8, 12), (12, 8))))

    def work(mesh: DeviceMesh, stage: int) -> list[dict[str, Any]]:
        partition = split_sequential(chained(), stage=stage, num_stages=2)
        first, second = partition.module._modules
        plan = {first: ColwiseParallel(), second: RowwiseParallel()}
        parallelize_module(partition.module, mesh["share"], plan)
        group = mesh.get_group("stage")
        return [train(partition, group, lambda x: x, schedule="1f1b")["gradients"]]

    def single_process() -> dict[str, Tensor]:
        model = chained()
        for inputs, target in BATCHES:
            mse_loss(model(inputs), target).backward()
        return gradients(model)

    expected = run_single_process(single_process, tmp_path)
    for stages in zip(*in_mesh(tmp_path, work), strict=True):
        assert_close(merged(stages), expected)


class Named(nn.Module):
    """A model with a tied head; `from_layers` ends its forward at the next stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 8)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(self.embed(x))
        for layer in self.layers:
            x = layer(x)
        return torch.sin(self.head(x))


NAMED = {"layers": "layers", "prologue": ["embed"], "epilogue": ["head"]}


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # no in-place changes of its output
def test_split_layers_may_be_sharded_with_fsdp2(tmp_path: Path) -> None:
    """Each layer may be sharded; their parent is refused, as its forward does not return."""

    def work(mesh: DeviceMesh, stage: int) -> list[dict[str, Any]]:
        share_index, share = mesh.get_local_rank("share"), mesh["share"]
        stages = mesh.get_group("stage")
        options = {"process_group": stages, "loss_fn": mse_loss, "n_microbatches": 4}
        pipeline = Pipeline.from_layers(Named(), **NAMED, **options, schedule="1f1b", timeout=20)
        for name in ("embed", "layers.0", "layers.1", "layers.2", "layers.3", "head"):
            inner = pipeline.module.get_submodule(name)
            if any(True for _ in inner.parameters()):
                fully_shard(inner, mesh=share)
        with pipeline:
            for inputs, target in BATCHES:
                step(pipeline, inputs.chunk(2)[share_index], target.chunk(2)[share_index])
        found = full_gradients(pipeline.module)
        if stage == 1:
            found["embed.weight"] = found.pop("head.weight")
        partition = split_layers(Named(), **NAMED, stage=stage, num_stages=2)
        fully_shard(partition.module, mesh=share)
        if stage == 0:
            with pytest.raises(ScheduleError, match="stage 0 is sharded"):
                Pipeline(partition, **options, schedule="1f1b")
        return [found]

    def single_process() -> dict[str, Tensor]:
        model = Named()
        for inputs, target in BATCHES:
            mse_loss(model(inputs), target).backward()
        return gradients(model)

    expected = run_single_process(single_process, tmp_path)
    assert_close(merged(found for (found,) in in_mesh(tmp_path, work)), expected)


@pytest.mark.timeout(60)
def test_unsupported_wrappers_are_refused_with_reason(tmp_path: Path) -> None:
    def work(mesh: DeviceMesh, stage: int) -> list[dict[str, Any]]:
        group, share = mesh.get_group("stage"), mesh["share"]
        options = {"process_group": group, "loss_fn": mse_loss, "timeout": 20, "n_microbatches": 4}
        ddp = DistributedDataParallel(stack_of(1), process_group=mesh.get_group("share"))
        replicated = older_replicate(stack_of(1), process_group=mesh.get_group("share"))
        for module in (ddp, nn.Sequential(stack_of(1), ddp), replicated):
            with pytest.raises(ScheduleError) as caught:
                Pipeline(module, **options, schedule="1f1b")
            wrapped = "DistributedDataParallel|the older replicate"
            assert caught.match(f"stage {stage}.* is wrapped in ({wrapped})")
            assert caught.match("after every micro-batch")
            assert caught.match("fix: .*fully_shard")
        wide = stack_of(1)
        parallelize_module(wide, share, {"0.0": ColwiseParallel(output_layouts=Replicate())})
        for shared in (fully_shard(stack_of(1), mesh=share), wide):
            for changed, reason in (
                ({}, "each would choose its own"),
                (
                    {"schedule": "1f1b", "flush": False, "n_microbatches": 1},
                    "cannot be stashed",
                ),
            ):
                with pytest.raises(ScheduleError, match=reason) as caught:
                    Pipeline(shared, **{**options, **changed})
                assert caught.match("fix: name the schedule, such as schedule='1f1b'")
        # Sharded after the pipeline is created: only the first step can detect it.
        # A pipeline of one stage has nothing to choose, and refuses it all the same.
        one_stage = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        inputs, target = BATCHES[0]
        for of_pipeline in (group, one_stage):
            late = Pipeline(module := stack_of(1), **{**options, "process_group": of_pipeline})
            fully_shard(module, mesh=share)
            reason = r"schedule='auto' with a module of stage .|lost s0p0"  # which failed first
            with pytest.raises((ScheduleError, PeerError), match=reason) as caught:
                step(late, inputs, target)
            assert caught.type is ScheduleError or not late.is_first
            dist.barrier()  # until then the other stage may wait for this pipeline's header
        return []

    in_mesh(tmp_path, work)


@pytest.mark.long
@pytest.mark.timeout(90)
def test_compiled_modules_match_eager(tmp_path: Path) -> None:
    """Micro-batches have two sizes; modules are compiled by wrapping and in place.

    The pipeline's hooks must not be compiled: dynamo would warn, and warnings are errors.
    """

    def work(ctx: DistContext) -> dict[str, dict[str, Tensor]]:
        num_compiled = 0
        aot_eager = torch._dynamo.lookup_backend("aot_eager")

        def backend(graph: Any, inputs: Any) -> Any:
            nonlocal num_compiled
            num_compiled += 1
            return aot_eager(graph, inputs)

        found = {}
        for mode in ("plain", "wrapped", "in place"):
            torch._dynamo.reset()
            module = nn.Sequential(blocks()[ctx.rank], nn.Tanh())
            called = torch.compile(module, backend=backend) if mode == "wrapped" else module
            if mode == "in place":
                module.compile(backend=backend)
            before = num_compiled
            with Pipeline(
                called, loss_fn=mse_loss, n_microbatches=4, schedule="kfkb:2", timeout=60
            ) as pipeline:
                for seed in range(2):
                    step(pipeline, *random_batch(10, 8, seed=seed))
            assert (num_compiled > before) == (mode != "plain")
            found[mode] = gradients(module)
        return found

    for stage in run_stages(2, work, tmp_path):
        assert_close(stage["wrapped"], stage["plain"])
        assert_close(stage["in place"], stage["plain"])
