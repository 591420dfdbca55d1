"""The tests of `torch_pipelining`, by the names that torch's tests have."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    Pipe,
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    SplitPoint,
    build_stage,
    pipe_split,
    pipeline,
)
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from torch.distributed.pipelining.schedules import (
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
    _ScheduleForwardOnly,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from torch.nn.functional import relu, scaled_dot_product_attention

from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.types import Action

WIDTH, BATCH_SIZE, CHUNKS = 48, 64, 8
CPU = torch.device("cpu")
SCHEDULES: dict[str, tuple[Callable[..., Any], str]] = {
    "ScheduleGPipe": (ScheduleGPipe, "gpipe"),
    "Schedule1F1B": (Schedule1F1B, "1f1b"),
}
TIMEOUT = 20.0
sum_loss = nn.MSELoss(reduction="sum")


@dataclass(slots=True)
class Trial:
    """A test in one of its processes."""

    rank: int
    world_size: int
    folder: Path  # for files; the same in all processes
    differences: list[str] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.world_size - 1

    def check(self, what: str, holds: bool) -> None:
        if not holds:
            self.differences.append(f"rank {self.rank}: {what}")

    def compare(self, what: str, found: Any, expected: Any, **tolerances: Any) -> None:
        try:
            torch.testing.assert_close(found, expected, **tolerances)
        except AssertionError as error:
            self.check(f"{what}: {' '.join(str(error).split())[:200]}", holds=False)


@dataclass(frozen=True, slots=True)
class Case:
    """One of torch's tests."""

    name: str
    num_processes: int
    run: Callable[[Trial], None]
    traced: str | None = None  # the name of the model to trace before the processes start


class MLP(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(relu(self.net1(x)))


class Layers(nn.Module):
    """One MLP per stage."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Constant(nn.Module):
    """Sends a constant that needs no gradient from the first stage to the second."""

    def __init__(self, num_stages: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(2))
        self.constant = nn.Buffer(torch.randn(WIDTH))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_stages - 1))

    def forward(self, x: Tensor) -> Tensor:
        x = relu(x @ self.first)
        constant = self.constant.clone()
        x = self.linears[0](x)
        pipe_split()
        x = (relu(x) + constant) @ self.second
        for linear in self.linears[1:]:
            pipe_split()
            x = relu(linear(x))
        return x


class WithKeyword(nn.Module):
    """Takes a second input by name, on the first stage."""

    def __init__(self, num_stages: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_stages))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = relu(self.linears[0](x @ self.first + y))
        pipe_split()
        x = relu(self.linears[1](x @ self.second))
        for linear in self.linears[2:]:
            pipe_split()
            x = relu(linear(x))
        return x


_TRACED: dict[str, tuple[nn.Module, Pipe]] = {}


def traced_models(cases: Sequence[Case]) -> None:
    """Trace the models of these cases, once each."""
    torch.manual_seed(0)
    for name in sorted({case.traced for case in cases if case.traced} - _TRACED.keys()):
        kind, number = name.split(" ")
        num_stages = int(number)
        model: nn.Module
        if kind == "layers":
            model = Layers(num_stages)
            splits = {f"layers.{i}": SplitPoint.BEGINNING for i in range(1, num_stages)}
            pipe = pipeline(model, (microbatch(),), split_spec=splits)
        elif kind == "constant":
            model = Constant(num_stages)
            pipe = pipeline(model, (microbatch(),))
        else:
            model = WithKeyword(num_stages)
            pipe = pipeline(model, (microbatch(),), {"y": microbatch()})
        _TRACED[name] = (model, pipe)


def microbatch() -> Tensor:
    return torch.zeros(BATCH_SIZE // CHUNKS, WIDTH)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return the same numbers in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def traced_stage(trial: Trial, name: str) -> Any:
    """Return a new stage of a traced model."""
    _, pipe = _TRACED[name]
    module = copy.deepcopy(pipe.get_stage_module(trial.rank))
    return build_stage(module, trial.rank, pipe.info(), CPU)


def manual_stage(trial: Trial, **options: Any) -> PipelineStage:
    """Return a new stage whose module is a layer of `whole_layers`."""
    module = whole_layers(trial).get_submodule(f"layers.{trial.rank}")
    return PipelineStage(module, trial.rank, trial.world_size, CPU, **options)


def whole_layers(trial: Trial) -> Layers:
    torch.manual_seed(1)
    return Layers(trial.world_size)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


def step(schedule: Any, trial: Trial, x: Tensor, target: Tensor | None, **keywords: Any) -> Any:
    """Call torch's schedule, or ours, as a script does: inputs first, targets last."""
    if trial.is_first:
        return schedule.step(x, **keywords)
    if trial.is_last and target is not None:
        losses: list[Tensor] = []
        return schedule.step(target=target, losses=losses), losses
    return schedule.step()


def in_both(
    trial: Trial,
    schedule: str,
    new_stage: Callable[[], Any],
    run: Callable[[Any, nn.Module], Any],
    *,
    chunks: int = CHUNKS,
    **options: Any,
) -> Any:
    """Run torch's schedule, then ours on a new stage; compare what `run` returns."""
    theirs, ours = SCHEDULES[schedule]
    stage = new_stage()
    expected = run(theirs(stage, chunks, **options), stage.submod)
    stage = new_stage()
    with Pipeline(stage, chunks, schedule=ours, timeout=TIMEOUT, **options) as pipe:
        found = run(pipe, stage.submod)
    trial.compare("against torch's schedule", found, expected)
    return found


def reference(
    model: nn.Module, x: Tensor, target: Tensor, **keywords: Any
) -> tuple[Tensor, Tensor]:
    """Return output and loss of the model in one process, which then has gradients."""
    output = model(x, **keywords)
    loss = sum_loss(output, target)
    loss.backward()
    return output, loss


def forward_only(trial: Trial) -> None:
    x = random(BATCH_SIZE, WIDTH)

    def run(schedule: Any) -> Tensor | None:
        given = x.clone()
        output: Any = None
        for _ in range(20):
            if trial.is_first:
                schedule.step(given)
                dist.recv(given, src=trial.world_size - 1)
            else:
                output = schedule.step()
            if trial.is_last:
                dist.send(output, dst=0)
        return output

    expected = run(_ScheduleForwardOnly(traced_stage(trial, "layers 4"), CHUNKS, scale_grads=False))
    stage = traced_stage(trial, "layers 4")
    with Pipeline(stage, CHUNKS, scale_grads=False, timeout=TIMEOUT) as pipe:
        found = run(pipe)
    if trial.is_last:
        trial.compare("against torch's schedule", found, expected)
        model, _ = _TRACED["layers 4"]
        for _ in range(20):
            x = model(x)
        trial.compare("against one process", found, x)


def eval_inference_mode(schedule: str, trial: Trial) -> None:
    x, target = random(BATCH_SIZE, WIDTH), random(BATCH_SIZE, WIDTH, seed=1)

    def run(schedule: Any, module: nn.Module) -> list[Tensor]:
        module.zero_grad()
        losses: list[Tensor] = []
        if trial.is_first:
            with torch.no_grad():
                schedule.eval(x)
        elif trial.is_last:
            schedule.eval(target=target, losses=losses)
        else:
            schedule.eval()
        trial.check(
            "eval computed gradients", not any(p.grad is not None for p in module.parameters())
        )
        trial.check("eval computed no losses", not trial.is_last or len(losses) == CHUNKS)
        return losses

    new_stage = partial(traced_stage, trial, "layers 4")
    in_both(trial, schedule, new_stage, run, loss_fn=sum_loss, scale_grads=False)


def return_output(schedule: str, trial: Trial) -> None:
    x, target = random(BATCH_SIZE, WIDTH), random(BATCH_SIZE, WIDTH, seed=1)

    def run(schedule: Any, module: nn.Module) -> list[Tensor]:
        losses: list[Tensor] = []
        if trial.is_last:
            output = schedule.step(target=target, losses=losses, return_outputs=False)
            trial.check("an output with return_outputs=False", output is None)
        else:
            schedule.step(x)  # also on stages that take no inputs
        return losses

    new_stage = partial(traced_stage, trial, "layers 4")
    in_both(trial, schedule, new_stage, run, loss_fn=sum_loss, scale_grads=False)


def multi_iter(schedule: str, trial: Trial) -> None:
    x, target = random(BATCH_SIZE, WIDTH), random(BATCH_SIZE, WIDTH, seed=1)

    def run(schedule: Any, module: nn.Module) -> Any:
        for _ in range(20):
            result = step(schedule, trial, x, target)
        return result, gradients(module)  # of all steps

    new_stage = partial(traced_stage, trial, "layers 4")
    in_both(trial, schedule, new_stage, run, loss_fn=sum_loss, scale_grads=False)


def kwargs_with_tracer(schedule: str, trial: Trial) -> None:
    x, y, target = (random(BATCH_SIZE, WIDTH, seed=seed) for seed in range(3))

    def run(schedule: Any, module: nn.Module) -> Any:
        return step(schedule, trial, x, target, y=y), gradients(module)

    new_stage = partial(traced_stage, trial, "keyword 4")
    found, _ = in_both(trial, schedule, new_stage, run, loss_fn=sum_loss, scale_grads=False)
    if trial.is_last:
        output, losses = found
        expected, loss = reference(_TRACED["keyword 4"][0], x, target, y=y)
        trial.compare("outputs", output, expected, rtol=1e-2, atol=5e-3)
        trial.compare("loss", sum(losses), loss)


def compare_gradients(
    trial: Trial, schedule: str, new_stage: Callable[[], Any], model: nn.Module, prefix: str = ""
) -> None:
    """Train two steps; compare outputs, loss and gradients with those of one process."""
    x = random(BATCH_SIZE, WIDTH)
    with torch.no_grad():
        target = model(x) + random(BATCH_SIZE, WIDTH, seed=1)

    def run(schedule: Any, module: nn.Module) -> Any:
        for _ in range(2):
            module.zero_grad()
            result = step(schedule, trial, x, target)
        return result, gradients(module)

    found, grads = in_both(trial, schedule, new_stage, run, loss_fn=sum_loss, scale_grads=False)
    model.zero_grad()
    output, loss = reference(model, x, target)
    if trial.is_last:
        trial.compare("outputs", found[0], output)
        trial.compare("loss", sum(found[1]), loss)
    expected = {name: model.get_parameter(prefix + name).grad for name in grads}
    trial.compare("gradients", grads, expected, rtol=1e-5, atol=4e-5)


def grad_with_tracer(schedule: str, trial: Trial) -> None:
    model, _ = _TRACED["layers 4"]
    compare_gradients(trial, schedule, partial(traced_stage, trial, "layers 4"), model)


def grad_with_manual(schedule: str, shape_inference: bool, trial: Trial) -> None:
    def new_stage() -> PipelineStage:
        if shape_inference:
            return manual_stage(trial)
        inputs = microbatch().requires_grad_(not trial.is_first)
        outputs = manual_stage(trial).submod(inputs)
        return manual_stage(trial, input_args=(inputs,), output_args=outputs)

    model = whole_layers(trial)
    compare_gradients(trial, schedule, new_stage, model, f"layers.{trial.rank}.")


class _ReorderedB(_PipelineScheduleRuntime):
    """Forward, forward, backward, backward on both stages, with its sends and receives."""

    def __init__(self, stages: Any, n_microbatches: int, **options: Any) -> None:
        super().__init__(stages, n_microbatches, **options)
        forward, backward = _ComputationType.FORWARD, _ComputationType.FULL_BACKWARD
        orders = {
            0: (forward, SEND_F, RECV_B, backward),
            1: (RECV_F, forward, backward, SEND_B),
        }
        self.pipeline_order_with_comms = {
            rank: [_Action(rank, kind, m) for kind in order for m in range(2)]
            for rank, order in orders.items()
        }


@contextmanager
def leaked_tensors() -> Iterator[list[Tensor]]:
    """Fill the list with the tensors that only the garbage collector can free."""
    found: list[Tensor] = []
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += [x for x in gc.garbage if isinstance(x, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def runtime_custom_sched(trial: Trial) -> None:
    model = whole_layers(trial)
    x = random(BATCH_SIZE, WIDTH)
    with torch.no_grad():
        target = model(x) + random(BATCH_SIZE, WIDTH, seed=1)

    def run(schedule: Any, module: nn.Module) -> Any:
        with leaked_tensors() as leaked:
            for _ in range(2):
                module.zero_grad()
                result = step(schedule, trial, x, target)
        trial.check(f"{len(leaked)} leaked tensors", not leaked)
        return result, gradients(module)

    options: dict[str, Any] = {"loss_fn": sum_loss, "scale_grads": False}
    stage = manual_stage(trial)
    expected = run(_ReorderedB([stage], 2, **options), stage.submod)
    order = [Action.parse(text) for text in ("F0", "F1", "B0", "B1")]
    stage = manual_stage(trial)
    with Pipeline(stage, 2, schedule=[order, order], timeout=TIMEOUT, **options) as pipe:
        found = run(pipe, stage.submod)
    trial.compare("against torch's schedule", found, expected)
    output, loss = reference(model, x, target)
    if trial.is_last:
        trial.compare("outputs", found[0][0], output)
        trial.compare("loss", sum(found[0][1]), loss)
    expected_gradients = gradients(model.get_submodule(f"layers.{trial.rank}"))
    trial.compare("gradients", found[1], expected_gradients, rtol=1e-5, atol=4e-5)


def tracer(name: str, trial: Trial) -> None:
    x, y = random(BATCH_SIZE, WIDTH), random(BATCH_SIZE, WIDTH, seed=1)
    keywords = {"y": y} if name.startswith("keyword") else {}
    model, _ = _TRACED[name]

    def run(schedule: Any, module: nn.Module) -> Any:
        names = module.state_dict().keys()
        trial.check("names that the model does not have", names <= model.state_dict().keys())
        return step(schedule, trial, x, None, **keywords)

    found = in_both(trial, "ScheduleGPipe", partial(traced_stage, trial, name), run)
    if trial.is_last:
        with torch.no_grad():
            expected = model(x, **keywords)
        trial.compare("outputs", found, expected, atol=1e-3, rtol=5e-2)


def manual(trial: Trial) -> None:
    x = random(BATCH_SIZE, WIDTH)

    def run(schedule: Any, module: nn.Module) -> Any:
        return step(schedule, trial, x, None)

    found = in_both(trial, "ScheduleGPipe", partial(manual_stage, trial), run)
    if trial.is_last:
        trial.compare("outputs", found, whole_layers(trial)(x))


def custom_dw_with_fb_schedule(trial: Trial) -> None:
    x, target = random(BATCH_SIZE, WIDTH), random(BATCH_SIZE, WIDTH, seed=1)
    calls: list[int] = []

    def dw_builder() -> Callable[[], None]:
        return lambda: calls.append(1)

    def run(schedule: Any, module: nn.Module) -> Any:
        calls.clear()
        result = step(schedule, trial, x, target)
        trial.check(f"{len(calls)} calls of the function for weights", len(calls) == CHUNKS)
        return result, gradients(module)

    new_stage = partial(manual_stage, trial, dw_builder=dw_builder)
    found, _ = in_both(trial, "ScheduleGPipe", new_stage, run, loss_fn=sum_loss)
    if trial.is_last:
        trial.compare("outputs", found[0], whole_layers(trial)(x))


def output_chunks_memory_usage(trial: Trial) -> None:
    x, target = random(BATCH_SIZE, WIDTH), random(BATCH_SIZE, WIDTH, seed=1)
    outputs: list[weakref.ref[Tensor]] = []

    def record(module: nn.Module, args: Any, output: Tensor) -> None:
        outputs.append(weakref.ref(output))

    def run(schedule: Any, module: nn.Module) -> Any:
        module.register_forward_hook(record)
        return step(schedule, trial, x, target)

    result = in_both(trial, "ScheduleGPipe", partial(manual_stage, trial), run, loss_fn=sum_loss)
    ours = outputs[-CHUNKS:]
    gc.collect()
    trial.check("outputs kept after the step", not any(output() is not None for output in ours))
    trial.check("no outputs of the batch", not trial.is_last or len(result[0]) == BATCH_SIZE)


def shape_prop_mismatch(trial: Trial) -> None:
    """Another batch size, which torch refuses, runs; what else torch refuses is an error."""
    x = random(BATCH_SIZE, WIDTH)
    hooks: dict[str, Callable[[Tensor], Tensor]] = {
        "integers": lambda output: output,
        "another shape": lambda output: output.flatten(),
        "another dtype": lambda output: output.to(torch.bfloat16),
    }
    for what, change in hooks.items():
        stage = manual_stage(trial)
        pipe = Pipeline(stage, CHUNKS, schedule="gpipe", timeout=TIMEOUT)
        step(pipe, trial, x, None)
        larger = random(BATCH_SIZE + 1, WIDTH, seed=2)
        output = step(pipe, trial, larger, None)
        if trial.is_last:
            trial.compare("outputs of a larger batch", output, whole_layers(trial)(larger))
        dist.barrier()
        if trial.is_first:
            stage.submod.register_forward_hook(lambda module, args, output, f=change: f(output))
            try:
                pipe.step(x.int() if what == "integers" else x)
            except (RuntimeError, ValueError):
                pass
            else:
                trial.check(f"{what} raised no error", holds=False)
        dist.barrier()
        pipe.__exit__(RuntimeError, RuntimeError("a step failed"), None)


def custom_dw_errors(trial: Trial) -> None:
    """Torch refuses weight gradients before a backward; `Pipeline` a builder without a function."""
    stage = manual_stage(trial, dw_builder=lambda: None)
    stage.has_backward = True
    try:
        stage.backward_weight_one_chunk(bwd_chunk_id=0)
    except AssertionError:
        pass
    else:
        trial.check("torch raised no error", holds=False)
    x = random(BATCH_SIZE, WIDTH)
    pipe = Pipeline(stage, CHUNKS, loss_fn=sum_loss, schedule="gpipe", timeout=TIMEOUT)
    try:
        step(pipe, trial, x, x)
    except Exception:
        pass
    else:
        trial.check("a builder that returns no function raised no error", holds=False)
    pipe.__exit__(RuntimeError, RuntimeError("a step failed"), None)


class Echo(nn.Module):
    """Returns its inputs, and records their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[list[torch.Size]] = []

    def forward(self, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, ...]:
        inputs = (*args, *kwargs.values())
        self.shapes.append([x.shape for x in inputs])
        return inputs


def split_and_merge(trial: Trial) -> None:
    """Torch splits tensors of any length by default; ours does if a spec says so."""
    args = tuple(random(rows, WIDTH) for rows in (128, 256, 512))
    kwargs: dict[str, Any] = {f"x{i}": x for i, x in enumerate(args)}
    specs = TensorChunkSpec.from_tuple((0, 0, 0))
    named = TensorChunkSpec.from_dict({"x0": 0, "x1": 0, "x2": 0})
    module = Echo()
    with Pipeline(
        module,
        2,
        schedule="gpipe",
        args_chunk_spec=specs,
        kwargs_chunk_spec=named,
        output_merge_spec=(*specs, *specs),
    ) as pipe:
        merged = pipe.eval(*args, **kwargs)
    parts, named_parts = split_args_kwargs_into_chunks(args, kwargs, 2)
    expected = [
        [x.shape for x in (*a, *k.values())] for a, k in zip(parts, named_parts, strict=True)
    ]
    trial.check(f"micro-batches of {module.shapes}", module.shapes == expected)
    trial.compare("positional outputs", merged[:3], merge_chunks(parts, specs))
    trial.compare("the others", merged[3:], args)
    with Pipeline(Echo(), 2, schedule="gpipe") as pipe:
        try:
            pipe.eval(*args)
        except ValueError as error:
            trial.check("an error without the spec to pass", "TensorChunkSpec" in str(error))
        else:
            trial.check("tensors of unequal lengths were split without a spec", holds=False)


class MaskedAttention(nn.Module):
    """Attends as a block mask says, densely: flex_attention has no backward on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[BlockMask] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, named: dict[str, BlockMask]) -> Tensor:
        mask = named["block_mask"]
        self.masks.append(mask)
        length = q.shape[-2]
        dense = create_mask(mask.mask_mod, len(q), 1, length, length, device="cpu")
        return scaled_dot_product_attention(q, k, v, dense)


def split_block_mask(trial: Trial) -> None:
    batch_size, length, document = 6, 256, 30
    ends = (torch.arange(batch_size * length) % document).reshape(
        batch_size, length
    ) == document - 1
    number = torch.cumsum(ends, 1) - ends.long()  # of the document, in its sample

    def causal_in_document(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (number[b, q] == number[b, kv]) & (q >= kv)

    mask = create_block_mask(causal_in_document, batch_size, 1, length, length, device="cpu")
    whole = [random(batch_size, 1, length, 32, seed=i).requires_grad_() for i in range(3)]
    expected = MaskedAttention()(*whole, {"block_mask": mask})
    expected.sum().backward()
    module, parts = MaskedAttention(), [x.detach().clone().requires_grad_() for x in whole]
    with Pipeline(
        module,
        batch_size,
        loss_fn=lambda output, target: output.sum(),
        schedule="gpipe",
        scale_grads=False,
    ) as pipe:
        output = pipe.step(*parts, {"block_mask": mask}, target=torch.zeros(batch_size))
    trial.compare("outputs", output, expected)
    trial.compare("gradients", [x.grad for x in parts], [x.grad for x in whole])
    for table in ("kv_indices", "kv_num_blocks", "full_kv_indices", "full_kv_num_blocks"):
        joined = torch.cat([getattr(part, table) for part in module.masks])
        trial.compare(table, joined, getattr(mask, table))


def chunk_spec(trial: Trial) -> None:
    x, y = random(BATCH_SIZE, WIDTH), random(BATCH_SIZE, WIDTH, seed=1)
    specs: dict[str, Any] = {
        "args_chunk_spec": TensorChunkSpec.from_tuple((0,)),
        "kwargs_chunk_spec": TensorChunkSpec.from_dict({"y": 0}),
    }

    def run(schedule: Any, module: nn.Module) -> Any:
        return step(schedule, trial, x, None, y=y)

    new_stage = partial(traced_stage, trial, "keyword 2")
    found = in_both(trial, "ScheduleGPipe", new_stage, run, **specs)
    if trial.is_last:
        with torch.no_grad():
            trial.compare("outputs", found, _TRACED["keyword 2"][0](x, y=y))


class Chunk(nn.Module):
    """The layers of one stage, under the names of the whole model."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): MLP(10) for i in range(start, end)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def pp_and_dcp(trial: Trial) -> None:
    torch.manual_seed(trial.rank)
    module = Chunk(trial.rank, trial.rank + 1)
    x = random(8, 10)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    with Pipeline(module, 4, loss_fn=sum_loss, schedule="gpipe", timeout=TIMEOUT) as pipe:
        step(pipe, trial, x, x)
        optimizer.step()
        weights, state = get_state_dict(pipe.module, optimizer)
    save({"app": {"model": weights, "optim": state}}, checkpoint_id=trial.folder)
    loaded: dict[str, Any] = {}
    reader = FileSystemReader(trial.folder)
    _load_state_dict(loaded, storage_reader=reader, planner=_EmptyStateDictLoadPlanner())
    found = loaded["app"]["model"]
    trial.check("missing names", module.state_dict().keys() <= found.keys())
    trial.check("names of other stages are missing", len(found) == 4 * trial.world_size)
    mine = {name: found.get(name) for name in module.state_dict()}
    trial.compare("weights", mine, dict(module.state_dict()))


class EvenMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(width, width), nn.Linear(width, width)
        self.net3 = nn.Linear(width, width * 2)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.net3(relu(self.net2(relu(self.net1(x))))))


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def output_sum(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


def train_composed(
    trial: Trial,
    schedule: str,
    pp: DeviceMesh,
    new_module: Callable[[], nn.Module],
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    check: Callable[[nn.Module, int, list[Tensor]], None] = lambda module, number, losses: None,
) -> None:
    """Train in both with AdamW; compare losses and weights after every step."""
    group, place = pp.get_group(), (pp.get_local_rank(), pp.size())
    at = Trial(place[0], place[1], trial.folder, trial.differences)  # in this pipeline

    def new_stage() -> PipelineStage:
        return PipelineStage(new_module(), *place, CPU, group=group)

    def run(schedule: Any, module: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(
            module.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
        )
        results = []
        for number, (x, target) in enumerate(batches):
            optimizer.zero_grad()
            result = step(schedule, at, x, target)
            losses = result[1] if at.is_last else []
            check(module, number, losses)
            optimizer.step()
            results.append((losses, [local(p) for p in module.parameters()]))
        return results

    in_both(at, schedule, new_stage, run, loss_fn=output_sum, scale_grads=False)


def batches_of(width: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    """Return the five batches of a composability test."""
    return [
        (random(8, width, seed=2 * i).abs().to(dtype), random(8, width, seed=2 * i + 1).to(dtype))
        for i in range(5)
    ]


def tp_dp_pp(schedule: str, dtype: torch.dtype, trial: Trial) -> None:
    width = 8
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)

    def new_module() -> nn.Module:
        torch.manual_seed(3)
        layers = [EvenMLP(width) for _ in range(4)]
        start = 2 * mesh["pp"].get_local_rank()
        module = nn.Sequential(*layers[start : start + 2])
        plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel(), "net3": ColwiseParallel()}
        for layer in module:
            parallelize_module(layer, mesh["tp"], plan)
            fully_shard(layer, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=False)
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
        return module

    train_composed(trial, schedule, mesh["pp"], new_module, batches_of(width)[:3])


def replicated_layers(
    mesh: DeviceMesh, policy: MixedPrecisionPolicy | None, width: int
) -> nn.Module:
    """Return the layers of this stage, replicated over the mesh's first dimension."""
    torch.manual_seed(42)
    layers = [MLP(width) for _ in range(4)]
    start = 2 * mesh["pp"].get_local_rank()
    module = nn.Sequential(*layers[start : start + 2])
    options: dict[str, Any] = {"mesh": mesh["replicate"]}
    if policy is not None:
        options["mp_policy"] = policy
    for layer in module:
        replicate(layer, **options)
    replicate(module, **options)
    return module


def replicate_pp(schedule: str, dtype: torch.dtype, trial: Trial) -> None:
    width = 8
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "pp"))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    new_module = partial(replicated_layers, mesh, policy, width)
    train_composed(trial, schedule, mesh["pp"], new_module, batches_of(width, dtype))


def replicate_pp_grads(schedule: str, trial: Trial) -> None:
    width, batches = 8, batches_of(8)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "pp"))
    torch.manual_seed(42)
    model = nn.Sequential(*(MLP(width) for _ in range(4)))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
    )
    expected: list[tuple[Tensor, dict[str, Tensor]]] = []
    for x, target in batches:  # all replicas have the same batch, whose mean is that of one
        optimizer.zero_grad()
        losses = [output_sum(model(part), target) for part in x.split(1)]
        torch.stack(losses).sum().backward()
        grads = {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        expected.append((torch.stack(losses).mean().detach(), grads))
        optimizer.step()
    start = 2 * mesh["pp"].get_local_rank()

    def check(module: nn.Module, number: int, losses: list[Tensor]) -> None:
        loss, grads = expected[number]
        if losses:
            trial.compare("loss", torch.stack(losses).mean(), loss, rtol=1e-4, atol=1e-5)
        for name, parameter in module.named_parameters():
            layer, rest = name.split(".", 1)
            assert parameter.grad is not None
            trial.compare(
                f"gradient of {name}",
                local(parameter.grad),
                grads[f"{int(layer) + start}.{rest}"],
                rtol=1e-4,
                atol=1e-5,
            )

    new_module = partial(replicated_layers, mesh, None, width)
    train_composed(trial, schedule, mesh["pp"], new_module, batches, check=check)


def _cases() -> Iterator[Case]:
    file = "test_schedule_multiproc.py::ScheduleTest"
    yield Case(f"{file}::test_forward_only[_ScheduleForwardOnly]", 4, forward_only, "layers 4")
    for schedule in SCHEDULES:
        for name, run, model in (
            ("test_eval_inference_mode", eval_inference_mode, "layers 4"),
            ("test_return_output", return_output, "layers 4"),
            ("test_multi_iter", multi_iter, "layers 4"),
            ("test_kwargs_with_tracer", kwargs_with_tracer, "keyword 4"),
            ("test_grad_with_tracer", grad_with_tracer, "layers 4"),
        ):
            yield Case(f"{file}::{name}[{schedule}]", 4, partial(run, schedule), model)
        for inference in (True, False):
            run_manual = partial(grad_with_manual, schedule, inference)
            yield Case(f"{file}::test_grad_with_manual[{schedule}, {inference}]", 4, run_manual)
    name = "CustomSchedulesTest::test_pipeline_schedule_runtime_custom_sched"
    yield Case(
        f"test_schedule_multiproc.py::{name}[ScheduleWithReorderedB]", 2, runtime_custom_sched
    )
    file = "test_stage.py::StageTest"
    for name, model in (("ExampleCode", "constant 3"), ("MultiMLP", "layers 3")):
        yield Case(f"{file}::test_tracer[{name}]", 3, partial(tracer, model), model)
    run_tracer = partial(tracer, "keyword 3")
    yield Case(f"{file}::test_tracer_kwargs[ModelWithKwargs]", 3, run_tracer, "keyword 3")
    yield Case(f"{file}::test_manual", 2, manual)
    yield Case(f"{file}::test_custom_dw_with_fb_schedule", 3, custom_dw_with_fb_schedule)
    yield Case(f"{file}::test_output_chunks_memory_usage", 3, output_chunks_memory_usage)
    file = "test_stage.py::StageNegativeTest"
    yield Case(f"{file}::test_shape_prop_mismatch", 2, shape_prop_mismatch)
    yield Case(f"{file}::test_custom_dw_errors", 2, custom_dw_errors)
    file = "test_microbatch.py::MicrobatchTests"
    yield Case(f"{file}::test_split_and_merge", 1, split_and_merge)
    yield Case(f"{file}::test_split_block_mask", 1, split_block_mask)
    yield Case(f"{file}::test_chunk_spec", 2, chunk_spec, "keyword 2")
    file = "test_pp_composability.py::ComposabilityTest"
    yield Case(f"{file}::test_pp_and_dcp", 4, pp_and_dcp)
    for schedule in SCHEDULES:
        for dtype in (torch.bfloat16, torch.float32):
            shown = f"[{schedule}, {str(dtype).removeprefix('torch.')}]"
            run_3d = partial(tp_dp_pp, schedule, dtype)
            yield Case(f"{file}::test_3d_with_tp_dp_pp{shown}", 8, run_3d)
            run_replicated = partial(replicate_pp, schedule, dtype)
            yield Case(f"{file}::test_replicate_pp{shown}", 4, run_replicated)
        run_grads = partial(replicate_pp_grads, schedule)
        yield Case(f"{file}::test_replicate_pp_grads[{schedule}]", 4, run_grads)


CASES = tuple(_cases())
