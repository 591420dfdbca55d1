"""Averages that are all-gathered during the next forward equal those of a worker that waits."""

import copy
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyrhythm.errors import PeerError, PolicyError, UserError
from polyrhythm.run.averaging import exchange, split_all_reduce
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.averaging.split_all_reduce import StreamingBuffer
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.pipeline import Pipeline
from tests.gloo.pipelines import random_batch, run_stages, stack_of, step
from tests.gloo.replicas import TIMEOUT, Point, run_replicas
from tests.grids import long_except

WIDTH = 8
FULL_GROUP = {  # options with which three workers form one group
    "age": {"window": float("inf"), "group_size": 3},
    "adaptive": {"window": float("inf"), "group_size": 3},
    "random": {"group_size": 3},
    "partial_reduce": {"group_size": 3},
    "all_reduce": {},
}


class Normalised(nn.Sequential):
    """In evaluation, uses the weights of its last layer without calling it."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return super().forward(x)
        return nn.functional.linear(self[2](self[1](self[0](x))), self[3].weight, self[3].bias)


class Tied(nn.Module):
    """One weight shared by two modules; the one registered last is called first."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.first.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)).tanh())


class Uncalled(nn.Module):
    """One module is never used; the weights of another are used without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.read = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.called(x).tanh(), self.read.weight)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=False)
        return x


def use_small_buckets() -> None:
    """Make this process use many buckets, with a shard per member."""
    exchange.SMALL, split_all_reduce.BUCKET = 0, 100


def delay_all_gather(seconds: float = 0.1) -> None:
    """Make all-gathers of this process late, so that code that does not wait sees old weights."""
    gather = split_all_reduce.SplitAllReduce.all_gather

    def delayed(*args: Any) -> str | None:
        time.sleep(seconds)
        return gather(*args)

    split_all_reduce.SplitAllReduce.all_gather = delayed


def inputs_of(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(4, WIDTH, generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def make_replica(
    kind: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    policy: str = "age",
    **more: Any,
) -> tuple[nn.Module, torch.optim.Optimizer, GroupSync]:
    torch.manual_seed(3)
    model = kind()
    updates = optimizer(model)
    name = f"decoupled={more.get('decoupled')}"  # one job makes two
    options = {"options": FULL_GROUP[policy], "timeout": TIMEOUT, "name": name, **more}
    return model, updates, GroupSync(model, updates, policy, **options)


def train_step(
    ctx: DistContext, number: int, model: nn.Module, optimizer: Any, sync: Any
) -> Tensor:
    optimizer.zero_grad()
    loss = model(inputs_of(ctx.rank, number)).square().mean()
    loss.backward()
    optimizer.step()
    sync.step()
    return loss.detach()


def content(state: Any) -> list[Tensor]:
    """Return clones of all tensors in a state."""
    if isinstance(state, Tensor):
        return [state.detach().clone()]
    if isinstance(state, dict):
        return [tensor for key in state for tensor in content(state[key])]
    return [tensor for item in state for tensor in content(item)] if isinstance(state, list) else []


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("policy", "optimizer", "state", "kind"),
    long_except(
        [
            ("age", sgd, "average", Normalised),
            ("adaptive", adamw, "average", Normalised),
            ("random", adamw, "local", Normalised),
            ("random", sgd, "local", Tied),
            ("partial_reduce", sgd, "average", Uncalled),
            ("age", adamw, "average", Checkpointed),
            ("all_reduce", sgd, "local", Tied),  # averages models, every second step
        ],
        *(0, 3, 4, 5),
    ),
)
def test_decoupled_training_is_bitwise_equal(
    policy: str,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    state: str,
    kind: Callable[[], nn.Module],
    tmp_path: Path,
) -> None:
    def work(ctx: DistContext) -> tuple[bool, bool, list[Tensor]]:
        use_small_buckets()
        delay_all_gather(0.02)
        found = []
        every = 2 if policy == "all_reduce" else 1
        for decoupled in (False, True):
            model, updates, sync = make_replica(
                kind, optimizer, policy, state=state, every=every, decoupled=decoupled
            )
            with sync:
                losses = [train_step(ctx, number, model, updates, sync) for number in range(6)]
            found.append((losses, content(model.state_dict()), content(updates.state_dict())))
        plain, split = found
        return equal(split[0], plain[0]), equal(split[1] + split[2], plain[1] + plain[2]), split[1]

    found = run_replicas(3, work, tmp_path)
    assert [(losses, states) for losses, states, _ in found] == [(True, True)] * 3
    assert equal(found[1][2], found[0][2])


def test_forward_starts_before_all_gather_ends(tmp_path: Path) -> None:
    """The last bucket is held back until the first layer has been computed."""

    def work(ctx: DistContext) -> list[bool]:
        use_small_buckets()
        computed, mark_filled, held = threading.Event(), StreamingBuffer.mark_filled, []

        def hold(streaming_buffer: StreamingBuffer, num: int) -> None:
            if num == streaming_buffer.value.numel():
                held.append(computed.wait(10.0))
            mark_filled(streaming_buffer, num)

        model, optimizer, sync = make_replica(lambda: stack_of(4), decoupled=True)
        with sync:
            train_step(ctx, 0, model, optimizer, sync)
            sync.apply_pending()
            StreamingBuffer.mark_filled = hold
            train_step(ctx, 1, model, optimizer, sync)
            model[0].register_forward_hook(lambda *_: computed.set())
            train_step(ctx, 2, model, optimizer, sync)
        return held

    assert run_replicas(3, work, tmp_path) == [[True, True]] * 3


@pytest.mark.long
def test_compiled_model_waits_in_forward_hooks(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[bool, int]:
        use_small_buckets()
        delay_all_gather(0.05)
        warnings.simplefilter("ignore")  # torch warns of graph breaks
        found = []
        for decoupled in (True, False):
            model, optimizer, sync = make_replica(Normalised, decoupled=decoupled)
            compiled = torch.compile(model, backend="aot_eager")
            with sync:
                for number in range(4):
                    train_step(ctx, number, compiled, optimizer, sync)
                if decoupled:
                    num_seen = len(sync._strategy._forward_hooks._seen)
            found.append(content(model.state_dict()))
            torch._dynamo.reset()
        return equal(*found), num_seen

    assert run_replicas(3, work, tmp_path) == [(True, 8)] * 3


READS: dict[str, Callable[[nn.Module, Any, GroupSync], Any]] = {
    "the model's state": lambda model, _, __: model.state_dict(),
    "the state of a part of it": lambda model, _, __: model[3].state_dict(),
    "the optimizer's state": lambda _, optimizer, __: optimizer.state_dict(),
    "evaluation": lambda model, _, __: model.eval()(inputs_of(9, 9)),
    "a forward without gradients": lambda model, _, __: model(inputs_of(9, 9)),
    "the weights, after apply_pending": lambda m, _, sync: (
        sync.apply_pending(),
        list(m.parameters()),
    )[1],
    "the weights of a copy": lambda m, _, s: (
        s.apply_pending(),
        list(copy.deepcopy(m).parameters()),
    )[1],
}


def test_reads_between_steps_see_the_average(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> dict[str, bool]:
        use_small_buckets()
        delay_all_gather()
        found: dict[bool, dict[str, list[Tensor]]] = {False: {}, True: {}}
        for decoupled, seen in found.items():
            model, optimizer, sync = make_replica(Normalised, decoupled=decoupled, state="average")
            with sync:
                train_step(ctx, 0, model, optimizer, sync)
                for number, (what, read) in enumerate(READS.items()):
                    train_step(ctx, number, model, optimizer, sync)
                    with torch.no_grad():
                        seen[what] = content(read(model, optimizer, sync))
                    model.train()
        return {what: equal(found[True][what], found[False][what]) for what in READS}

    assert run_replicas(3, work, tmp_path) == [dict.fromkeys(READS, True)] * 3


def test_pending_average_does_not_overwrite_loaded_weights(tmp_path: Path) -> None:
    """Loading waits for an average that is still arriving."""

    def work(ctx: DistContext) -> bool:
        use_small_buckets()
        delay_all_gather()
        model, optimizer, sync = make_replica(Normalised, decoupled=True)
        saved = copy.deepcopy(model.state_dict())
        with sync:
            train_step(ctx, 0, model, optimizer, sync)
            model.load_state_dict(saved)
            time.sleep(0.3)
            return equal(content(model.state_dict()), content(saved))

    assert run_replicas(3, work, tmp_path) == [True] * 3


def test_worker_may_leave_before_average_all(tmp_path: Path) -> None:
    """A worker that leaves has sent all its shards: no repair is needed."""

    def work(ctx: DistContext) -> list[Tensor]:
        use_small_buckets()
        delay_all_gather(0.02)
        model, optimizer, sync = make_replica(Normalised, adamw, decoupled=True, log=tmp_path)
        with sync:
            for number in range(4):
                train_step(ctx, number, model, optimizer, sync)
            if ctx.rank == 1:
                return []
            for number in range(4, 8):
                train_step(ctx, number, model, optimizer, sync)
            sync.average_all()
            return [p.detach().clone() for p in model.parameters()]

    found = run_replicas(3, work, tmp_path)
    assert equal(found[0], found[2])
    assert "average_repaired" not in "".join(
        path.read_text() for path in tmp_path.glob("workers/*.jsonl")
    )


def test_pipeline_stages_all_gather_during_forward(tmp_path: Path) -> None:
    num_stages, num_pipelines = 2, 2

    def work(ctx: DistContext) -> tuple[bool, list[Tensor]]:
        use_small_buckets()
        delay_all_gather(0.02)
        found = []
        for decoupled in (False, True):
            groups = [
                torch.distributed.new_group([num_stages * p + s for s in range(num_stages)])
                for p in range(num_pipelines)
            ]
            number = ctx.rank // num_stages
            with Pipeline.from_sequential(
                stack_of(num_stages),
                loss_fn=lambda output, target: (output - target).square().mean(),
                process_group=groups[number],
                pipeline=number,
                n_microbatches=4,
                timeout=TIMEOUT,
            ) as pipeline:
                optimizer = sgd(pipeline.module)
                options = {"window": float("inf"), "group_size": 2}
                name = f"decoupled={decoupled}"
                with GroupSync(
                    pipeline, optimizer, "age", options=options, decoupled=decoupled, name=name
                ) as sync:
                    for batch in range(4):
                        step(pipeline, *random_batch(8, 8, seed=10 * number + batch))
                        optimizer.step()
                        sync.step()
                        optimizer.zero_grad()
                found.append(content(pipeline.module.state_dict()))
        return equal(found[1], found[0]), found[1]

    found = run_stages(num_stages * num_pipelines, work, tmp_path)
    assert [same for same, _ in found] == [True] * 4
    assert equal(found[0][1], found[2][1])


BAD = [
    ({"policy": "age", "overlap": True}, "overlap=True and decoupled=True", "overlap=True"),
    ({"policy": "all_reduce"}, "decoupled=True under all_reduce", "DistributedOptimizer"),
    ({"policy": "balanced"}, "decoupled=True under balanced", "DistributedOptimizer"),
    ({"policy": "static"}, "decoupled=True under static", "use age"),
    ({"policy": "ssp"}, "decoupled=True under ssp", "use age"),
    ({"policy": "pairwise"}, "decoupled=True under pairwise", "use age"),
    ({"policy": "local"}, "decoupled=True under local", "use age"),
]


def test_policies_that_cannot_decouple_are_refused(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[tuple[str, str]]:
        model, reasons = Point(), []
        for options, _, _ in BAD:
            with pytest.raises(PolicyError) as caught:
                GroupSync(model, sgd(model), decoupled=True, **options)
            reasons.append((caught.value.wrong, caught.value.fix))
        with GroupSync(model, sgd(model), "age", decoupled=True, timeout=TIMEOUT) as sync:
            with pytest.raises(PolicyError, match="overlap=True and decoupled=True"):
                sync.overlap = True
            assert not sync.overlap
        with (
            Pipeline(
                Point(), loss_fn=lambda y, _: y, flush=False, n_microbatches=1, schedule="1f1b"
            ) as pipeline,
            pytest.raises(PolicyError, match="flush=False"),
        ):
            GroupSync(pipeline, sgd(pipeline.module), "age", decoupled=True)
        return reasons

    found = run_replicas(1, work, tmp_path)[0]
    for (wrong, fix), (_, expected_wrong, expected_fix) in zip(found, BAD, strict=True):
        assert expected_wrong in wrong
        assert expected_fix in fix


def test_mixed_decoupled_settings_are_refused(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        model = Point()
        with pytest.raises((UserError, PeerError)) as caught:
            GroupSync(model, sgd(model), "age", decoupled=ctx.rank == 1, timeout=TIMEOUT)
        return str(caught.value)

    assert "decoupled=True" in run_replicas(2, work, tmp_path)[1]
