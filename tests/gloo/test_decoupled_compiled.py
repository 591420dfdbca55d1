"""Compiled modules wait for their weights before their graphs, which have no hooks inside."""

import copy
import inspect
import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import polyrhythm as pr
from polyrhythm.run.averaging import exchange, split_all_reduce
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.comm.forward_hooks import ForwardOrder
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.trainer.trainer import Trainer
from tests.gloo.decoupled import (
    TIMEOUT,
    WIDTH,
    adam,
    close_to,
    error_of,
    inputs_of,
    reference_steps,
    train_steps,
    wrap_optimizer,
)
from tests.gloo.pipelines import run_single_process, run_stages
from tests.gloo.replicas import run_replicas
from tests.grids import long_except

KINDS = ["in place", pytest.param("wrapped", marks=pytest.mark.long)]
NUM_STEPS = 4


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(x + self.drop(self.down(torch.tanh(self.up(self.norm(x))))))


class Blocks(nn.Module):
    def __init__(self, *, recompute: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(3)])
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def tie(model: Blocks) -> Blocks:
    first, *_, last = model.blocks
    last.down.weight = first.up.weight  # type: ignore[union-attr]
    return model


class Graphs:
    """A backend of torch.compile that counts the calls of each graph, and runs it as it is."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        number = len(self.calls)
        self.calls.append(0)

        def run(*args: Any) -> Any:
            self.calls[number] += 1
            return graph.forward(*args)

        return run


@contextmanager
def graphs() -> Iterator[Graphs]:
    torch._dynamo.reset()
    # Dynamo reads it of the inputs of a graph.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    yield Graphs()
    torch._dynamo.reset()


def compiled(module: nn.Module, kind: str, backend: Any, *, fullgraph: bool = True) -> nn.Module:
    if kind == "wrapped":
        return torch.compile(module, backend=backend, fullgraph=fullgraph)  # type: ignore[return-value]
    module.compile(backend=backend, fullgraph=fullgraph)
    return module


def compile_blocks(model: Blocks, kind: str, backend: Any, *, fullgraph: bool = True) -> Blocks:
    for index, block in enumerate(model.blocks):
        plain = getattr(block, "_orig_mod", block)
        model.blocks[index] = compiled(plain, kind, backend, fullgraph=fullgraph)
    return model


def calls_of_plain(model: nn.Module, backend: Graphs) -> list[list[int]]:
    """Train without a DistributedOptimizer; return the calls of each graph, after each step."""
    optimizer, found = adam(model), []
    for step in range(NUM_STEPS):
        reference_steps(model, optimizer, range(1), range(step, step + 1))
        found.append([*backend.calls])
    return found


def calls_of_decoupled(ctx: DistContext, model: nn.Module, backend: Graphs) -> list[list[int]]:
    optimizer, found = wrap_optimizer(model), []
    for step in range(NUM_STEPS):
        train_steps(ctx, model, optimizer, range(step, step + 1))
        found.append([*backend.calls])
    optimizer.close()
    return found


def without_prefixes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}


def is_like_single_process(model: nn.Module, reference: nn.Module) -> bool:
    reference_steps(reference, adam(reference), range(2), range(NUM_STEPS))
    return close_to(without_prefixes(model.state_dict()), reference.state_dict())


MODELS: dict[str, Callable[[], Blocks]] = {
    "plain": Blocks,
    "recompute": lambda: Blocks(recompute=True),
    "tied": lambda: tie(Blocks()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", long_except(list(MODELS), 2))
def test_compiled_blocks_have_the_graphs_of_plain_training(
    name: str, kind: str, tmp_path: Path
) -> None:
    def work(ctx: DistContext) -> list[Any]:
        with graphs() as backend:
            expected = calls_of_plain(compile_blocks(MODELS[name](), kind, backend), backend)
        with graphs() as backend:
            model = compile_blocks(MODELS[name](), kind, backend)
            found = calls_of_decoupled(ctx, model, backend)
        return [expected, found, is_like_single_process(model, MODELS[name]())]

    for expected, found, is_same in run_stages(2, work, tmp_path):
        assert sum(expected[-1]) >= 3 * NUM_STEPS, "the blocks are compiled"
        assert found == expected
        assert is_same


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_model_waits_once_for_all_weights(kind: str, tmp_path: Path) -> None:
    """The blocks are compiled, too: they become a part of the model's graph."""

    def work(ctx: DistContext) -> list[Any]:
        found = []
        for is_decoupled in (False, True):
            with graphs() as backend:
                model = compiled(compile_blocks(Blocks(), kind, backend), kind, backend)
                if is_decoupled:
                    found.append(calls_of_decoupled(ctx, model, backend))
                else:
                    found.append(calls_of_plain(model, backend))
        return [*found, is_like_single_process(model, Blocks())]

    for expected, found, is_same in run_stages(2, work, tmp_path):
        assert expected[-1] == [NUM_STEPS]
        assert found == expected
        assert is_same


def own_names(module: nn.Module) -> set[str]:
    return set(without_prefixes(dict(module.named_parameters())))


def waits_of(model: nn.Module) -> tuple[ForwardOrder, list[set[str]]]:
    """Return the names of the parameters for which each wait has waited."""
    names, waits = without_prefixes(dict(model.named_parameters())), list[set[str]]()
    before = lambda indices: waits.append({[*names][i] for i in indices})  # noqa: E731
    return ForwardOrder(model, list(names.values()), before), waits


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_of_a_layer_waits_for_its_weights(kind: str, tmp_path: Path) -> None:
    """Calls that do not pass through the compiled block, and code that is compiled later."""

    def work() -> None:
        x = inputs_of(0, 0)
        with graphs() as backend, torch.no_grad():
            model = compile_blocks(Blocks(), kind, backend)
            order, waits = waits_of(model)
            block = model.blocks[0]
            inside = {f"blocks.0.{name}" for name in own_names(block)}

            def waited(call: Callable[[], Any]) -> set[str]:
                waits.clear()
                call()
                return set[str]().union(*waits)

            norm = {name for name in inside if ".norm." in name}
            later = torch.compile(lambda x: block.norm(x), backend=backend)
            for _ in range(2):
                assert waited(lambda: block(x)) == inside
                assert waited(lambda: block.norm(x)) == norm
                assert waited(lambda: later(x)) == norm
            assert list(order.order) == list(range(2, 2 + len(inside))), "first calls"
            for whole in (model, torch.compile(model, backend=backend)):
                assert waited(lambda whole=whole: whole(x)) == own_names(model)  # type: ignore[misc]
            again = compiled(block, kind, backend, fullgraph=False)
            assert [waited(lambda: again(x)) for _ in range(2)] == [inside] * 2
            model.eval()
            for call in (block, block.norm, again):
                assert waited(lambda call=call: call(x)) == own_names(model)  # type: ignore[misc]

    run_single_process(work, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_removal_restores_compiled_code_in_any_order(kind: str, tmp_path: Path) -> None:
    """Two optimizers may share a model; copies are taken and states loaded meanwhile."""

    def work() -> None:
        x, attribute = inputs_of(0, 0), "_compiled_call_impl" if kind == "in place" else "forward"
        for is_reversed in (False, True):
            with graphs() as backend, torch.no_grad():
                model = compile_blocks(Blocks(), kind, backend)
                before = [
                    (vars(block)[attribute], inspect.signature(block.forward))
                    for block in model.blocks
                ]
                orders = [waits_of(model) for _ in range(2)]
                expected = model(x)
                assert all(waits for _, waits in orders)
                made = copy.deepcopy(model)
                made.load_state_dict(model.state_dict())
                assert torch.equal(made.eval()(x), expected)
                assert inspect.signature(model.blocks[0].forward) == before[0][1]
                for order, _ in reversed(orders) if is_reversed else orders:
                    order.remove()
                for _, waits in orders:
                    waits.clear()
                assert torch.equal(model(x), expected)
                assert not any(waits for _, waits in orders)
                assert [vars(block)[attribute] for block in model.blocks] == [f for f, _ in before]

    run_single_process(work, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_compiled_after_the_optimizer_was_made_are_correct(
    kind: str, tmp_path: Path
) -> None:
    """Their hooks break the graphs. They are also compiled again."""

    def work(ctx: DistContext) -> list[bool]:
        with graphs() as backend:
            model = Blocks()
            optimizer = wrap_optimizer(model, adam(model))
            for step in range(NUM_STEPS):
                if step % 2:
                    compile_blocks(model, kind, backend, fullgraph=False)
                train_steps(ctx, model, optimizer, range(step, step + 1))
            optimizer.close()
            return [len(backend.calls) > 1, is_like_single_process(model, Blocks())]

    assert run_stages(2, work, tmp_path) == [[True, True]] * 2


class Borrowing(nn.Module):
    """In some steps reads the weight of a compiled block that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lender, self.calls_lender = nn.Linear(WIDTH, WIDTH), Block(), True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return torch.as_tensor(self.lender(x) if self.calls_lender else x @ self.lender.up.weight)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_read_of_a_compiled_blocks_weight_before_its_update_is_refused(
    kind: str, tmp_path: Path
) -> None:
    def work(ctx: DistContext) -> str:
        with graphs() as backend:
            model = Borrowing()
            model.lender = compiled(model.lender, kind, backend)  # type: ignore[assignment]
            optimizer = wrap_optimizer(model, bucket_bytes=170)
            train_steps(ctx, model, optimizer, range(2))
            model.calls_lender = False
            message = error_of(lambda: train_steps(ctx, model, optimizer, range(2, 3)))
            optimizer.synchronize()
            return message

    for message in run_stages(2, work, tmp_path):
        assert "up.weight was used before its update" in message


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_detached_optimizer_compiles_nothing_again(kind: str, tmp_path: Path) -> None:
    """As between two fits of a Trainer. Removing hooks once costs a graph per kind of block."""

    def work(ctx: DistContext) -> list[int]:
        with graphs() as backend:
            model, found = compile_blocks(Blocks(), kind, backend), []
            optimizer = wrap_optimizer(model)
            for step in range(NUM_STEPS):
                train_steps(ctx, model, optimizer, range(step, step + 1))
                optimizer.detach()
                model(inputs_of(0, 0))
                optimizer.attach()
                found.append(len(backend.calls))
            optimizer.close()
        return found

    for first, *others in run_stages(2, work, tmp_path):
        assert others == [first] * len(others)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_groups_average_compiled_blocks(kind: str, tmp_path: Path) -> None:
    """All-gathers are late: a block that does not wait computes with the weights before."""

    def work(ctx: DistContext) -> list[Any]:
        exchange.SMALL, split_all_reduce.BUCKET = 0, 100  # many buckets, with a shard per member
        gather = split_all_reduce.SplitAllReduce.all_gather

        def delayed(*args: Any) -> str | None:
            time.sleep(0.05)
            return gather(*args)

        split_all_reduce.SplitAllReduce.all_gather = delayed  # type: ignore[method-assign]
        states, calls = [], []
        for decoupled in (False, True):
            with graphs() as backend:
                model = compile_blocks(Blocks(), kind, backend)
                optimizer = adam(model)
                sync = GroupSync(
                    model,
                    optimizer,
                    "age",
                    options={"window": float("inf"), "group_size": 2},
                    decoupled=decoupled,
                    timeout=TIMEOUT,
                    name=f"decoupled={decoupled}",
                )
                with sync:
                    for step in range(NUM_STEPS):
                        reference_steps(
                            model, optimizer, range(ctx.rank, ctx.rank + 1), range(step, step + 1)
                        )
                        sync.step()
                states.append({name: value.clone() for name, value in model.state_dict().items()})
                calls.append(backend.calls)
        same = all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        return [calls[0] == calls[1], same, sum(calls[1])]

    assert run_replicas(2, work, tmp_path) == [[True, True, 3 * NUM_STEPS]] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_between_layers_are_set_outside_of_graphs(kind: str, tmp_path: Path) -> None:
    """A layer's own hook would be a part of its graph."""

    def work() -> None:
        results = []
        for is_compiled in (False, True):
            torch.manual_seed(0)
            blocks = [Block(dropout=0.5) for _ in range(2)]
            with graphs() as backend:
                if is_compiled:
                    blocks = [compiled(block, kind, backend) for block in blocks]
                model = nn.Sequential(*blocks)
                attributes = [set(vars(block)) for block in blocks]
                pipeline = Pipeline.from_sequential(
                    model, n_microbatches=1, loss_fn=mse_loss, seed=0
                )
                with pipeline:
                    for step in range(3):
                        pipeline.step(inputs_of(0, step), target=inputs_of(1, step))
                    pickle.loads(pickle.dumps(model[0]._forward_hooks))
                assert [set(vars(block)) for block in blocks] == attributes
                assert sum(backend.calls) == (6 if is_compiled else 0)
                results.append([p.grad for p in model.parameters()])
        torch.testing.assert_close(*results)

    run_single_process(work, tmp_path)


@pytest.mark.long
def test_trainer_keeps_layers_compiled(tmp_path: Path) -> None:
    """On each of two stages, in each of two pipelines, with dropout between layers."""

    def work(ctx: DistContext) -> list[Any]:
        with graphs() as backend:
            torch.manual_seed(0)
            layers = [compiled(Block(dropout=0.1), "in place", backend) for _ in range(4)]
            with Trainer(
                model=nn.Sequential(*layers),
                dataset=TensorDataset(inputs_of(0, 0).repeat(8, 1), inputs_of(0, 1).repeat(8, 1)),
                loss_fn=mse_loss,
                optimizer_fn=pr.adamw(lr=0.01),
                batch_size=8,
                microbatch_size=2,
                stages=2,
                pipelines=2,
                timeout=TIMEOUT,
            ) as trainer:
                trainer.fit(max_steps=3, progress=False)
        return backend.calls

    # On the first stage: a graph whose input needs no gradient, and one for the other layer.
    assert run_stages(4, work, tmp_path) == [[6, 6], [12]] * 2
