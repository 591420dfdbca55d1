"""A job has the losses and weights of one process, whatever its stages and pipelines.

Models with masks, dropout and random collators: every stage gets the inputs it takes, all stages
draw the same numbers, and dropout masks follow from samples and layers.
"""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.data.order import SampleOrder
from polyrhythm.run.pipeline.partition import LayerSplit
from polyrhythm.run.random_streams import RandomStreams, seeded_draws
from polyrhythm.run.trainer.config import DataConfig
from polyrhythm.run.trainer.trainer import Trainer
from tests.gloo.trainer_jobs import run_job
from tests.grids import long_except

STEPS, BATCH, MICROBATCH, SEED, WORDS = 4, 8, 2, 7, 11
SPLIT = LayerSplit(layers="layers", prologue=["embed"], epilogue=["head"])


class Block(nn.Module):
    """Attention with a mask and positions, and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.drop = nn.Linear(width, width), nn.Dropout(0.3)

    def forward(self, hidden: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        scores = hidden @ hidden.transpose(1, 2) - (positions[:, None] - positions[..., None]).abs()
        weights = scores.masked_fill(~mask[:, None], -1e9).softmax(-1)
        return hidden + self.drop(torch.tanh(self.mix(weights @ hidden)))


class MaskedModel(nn.Module):
    """Takes keywords in each layer, computes positions from tokens, and draws between layers."""

    checkpoints = False

    def __init__(self, *, num_layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.layers = nn.ModuleList(Block(8) for _ in range(num_layers))
        self.head = nn.Linear(8, WORDS)

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        scale: Tensor | None = None,
        *,
        shift: int = 0,
    ) -> Tensor:
        mask = tokens > 0 if mask is None else mask.bool()
        positions = mask.cumsum(1).to(self.embed.weight.dtype) + shift
        hidden = nn.functional.dropout(self.embed(tokens), 0.1, self.training)
        for layer in self.layers:
            if self.checkpoints and torch.is_grad_enabled():
                hidden = checkpoint(layer, hidden, mask, positions, use_reentrant=False)
                continue
            hidden = hidden * (1 + 0.1 * torch.rand(()))  # a draw between layers
            hidden = layer(hidden, mask, positions)
        if scale is not None:
            hidden = hidden * scale
        return self.head(nn.functional.dropout(hidden, 0.2, self.training))


class CheckpointedModel(MaskedModel):
    checkpoints = True


class CheckpointedGPT2(nn.Module):
    """A model of Hugging Face that checkpoints its layers by itself."""

    split = LayerSplit(
        layers="gpt2.transformer.h",
        prologue=[f"gpt2.transformer.{name}" for name in ("wte", "wpe", "drop")],
        epilogue=["gpt2.transformer.ln_f", "gpt2.lm_head"],
    )

    def __init__(self) -> None:
        super().__init__()
        import transformers  # seconds

        sizes = {"vocab_size": WORDS, "n_positions": 8, "n_embd": 8, "n_layer": 4, "n_head": 2}
        config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        self.gpt2 = transformers.GPT2LMHeadModel(config)
        self.gpt2.gradient_checkpointing_enable()

    @property
    def layers(self) -> Any:
        return self.gpt2.transformer.h

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt2(tokens, attention_mask=(tokens > 0).long(), use_cache=False).logits


class Sentences:
    """Sentences of various lengths."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Tensor:
        return (torch.arange(3 + i % 5) * 3 + i) % (WORDS - 1) + 1


def padded(items: list[Tensor], padding: int = 0) -> Tensor:
    return nn.utils.rnn.pad_sequence(
        items, batch_first=True, padding_value=padding, padding_side="left"
    )


def labels(items: list[Tensor]) -> Tensor:
    return padded(items, -100)


def by_name(items: list[Tensor]) -> tuple[dict[str, Any], Tensor]:
    """Return tokens with some of them masked at random, and all they were."""
    tokens = padded(items)
    masked = torch.where(torch.rand(tokens.shape) < 0.3, 1, tokens)
    scale = torch.full((1, 1, 1), random.uniform(0.5, 1.5), dtype=torch.float64)
    inputs = {"tokens": masked, "mask": tokens > 0, "scale": scale, "shift": len(items)}
    return inputs, labels(items)


def by_place(items: list[Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    tokens = padded(items)
    return (tokens, (tokens > 0).long()), labels(items)


def tokens_only(items: list[Tensor]) -> tuple[Tensor, Tensor]:
    return padded(items), labels(items)


def word_loss(logits: Tensor, target: Tensor) -> Tensor:
    loss = cross_entropy(logits.flatten(0, 1), target.flatten())
    return loss * (1 + 0.1 * torch.rand(()))  # a loss may draw, too


def built(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: kind().double()


def one_process(
    kind: type[nn.Module], collate: Callable[[Any], Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Train in a plain loop; return sum and count of each micro-batch by step, and the weights."""
    torch.manual_seed(SEED)
    model, data = built(kind)(), Sentences()
    optimizer, sums = torch.optim.SGD(model.parameters(), 0.1), []
    order = SampleOrder(len(data), SEED)
    streams = RandomStreams(SEED, model.layers)
    for step in range(STEPS):
        found = []
        for position in range(step * BATCH, (step + 1) * BATCH, MICROBATCH):
            with seeded_draws(SEED, position):
                inputs, target = collate(
                    [data[i] for i in order.ids(position, position + MICROBATCH)]
                )
            args = inputs if isinstance(inputs, tuple) else (inputs,)
            args, kwargs = ((), inputs) if isinstance(inputs, dict) else (args, {})
            with streams.isolated():
                streams.begin_forward(position)
                output = model(*args, **kwargs)
                streams.begin_loss()
                count = (target != -100).sum()
                loss = word_loss(output, target) * count
                loss.backward()
            found.append((loss.item(), count.item()))
        sums.append(found)
        for parameter in model.parameters():
            parameter.grad /= sum(count for _, count in found)
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(sums, dtype=torch.float64), model.state_dict()


def job(
    folder: Path,
    layers_per_stage: tuple[int, ...],
    num_pipelines: int,
    kind: type[nn.Module],
    collate: Callable[[Any], Any],
) -> tuple[Tensor, dict[str, Tensor], list[float]]:
    """Return the losses of each pipeline, the weights, and what `evaluate` returns everywhere."""
    plan = Plan(
        layers_per_stage=layers_per_stage,
        pipelines=(PipelinePlan(schedule="1f1b"),) * num_pipelines,
    )

    def work(ctx: DistContext | None) -> Any:
        with Trainer(
            built(kind),
            word_loss,
            partial(torch.optim.SGD, lr=0.1),
            Sentences(),
            plan=plan,
            split=getattr(kind, "split", SPLIT),
            batch_size=BATCH,
            microbatch_size=MICROBATCH,
            data=DataConfig(seed=SEED),
            collate_fn=collate,
            sync="all_reduce",
            timeout=30.0,
        ) as made:
            steps = made.fit(max_steps=STEPS).steps
            state = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
            return [s.own.loss for s in steps], state, made.evaluate(Sentences())

    found = run_job(plan.num_workers, work, folder)
    losses = torch.tensor(
        [ends for ends, _, _ in found if ends[0] is not None], dtype=torch.float64
    )
    weights = {k: v for _, state, _ in found[: plan.num_stages] for k, v in state.items()}
    return losses, weights, [evaluated for _, _, evaluated in found]


CASES = {
    "by name": (MaskedModel, by_name),
    "by place": (MaskedModel, by_place),
    "tokens only": (MaskedModel, tokens_only),
    "activation checkpointing": (CheckpointedModel, by_name),
    "checkpointing of Hugging Face": (CheckpointedGPT2, tokens_only),
}


@pytest.mark.parametrize("case", long_except(list(CASES), 0, 1, 2, 3))
def test_any_number_of_stages_and_pipelines_equals_one_process(tmp_path: Path, case: str) -> None:
    kind, collate = CASES[case]
    sums, weights = one_process(kind, collate)
    _, _, (evaluated,) = job(tmp_path, (4,), 1, kind, collate)
    shapes = [((4,), 1), ((1, 2, 1), 1), ((2, 2), 2)] if case == "by name" else [((3, 1), 1)]
    for number, (layers_per_stage, num_pipelines) in enumerate(shapes):
        folder = tmp_path / str(number)
        found, state, held_out = job(folder, layers_per_stage, num_pipelines, kind, collate)
        of_pipelines = sums.unflatten(1, (num_pipelines, -1)).sum(2).movedim(1, 0)
        losses = of_pipelines[..., 0] / of_pipelines[..., 1]
        torch.testing.assert_close(found, losses, atol=0, rtol=1e-10)
        assert held_out == pytest.approx([evaluated] * len(held_out), rel=1e-10)
        for name, expected in weights.items():
            torch.testing.assert_close(state[name], expected, atol=1e-10, rtol=1e-10)


class CountingReads:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.num_read, self._inputs = 0, torch.randn(40, 8, generator=generator)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.num_read += 1
        return self._inputs[i], self._inputs[i, :4]


def test_sequential_with_dropout_equals_one_process_and_only_the_first_stage_reads(
    tmp_path: Path,
) -> None:
    def build() -> nn.Module:
        shared = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8))  # used twice
        return nn.Sequential(
            nn.Linear(8, 8), shared, nn.Dropout(0.2), nn.Tanh(), shared, nn.Linear(8, 4)
        )

    def train(folder: Path, layers: tuple[int, ...]) -> tuple[list[float], list[int]]:
        def work(ctx: DistContext | None) -> Any:
            data = CountingReads()
            with Trainer(
                build,
                mse_loss,
                partial(torch.optim.SGD, lr=0.1),
                data,
                plan=Plan(layers_per_stage=layers, pipelines=(PipelinePlan(schedule="gpipe"),)),
                batch_size=8,
                microbatch_size=2,
                timeout=30.0,
            ) as made:
                return made.fit(max_steps=STEPS).losses, data.num_read

        found = run_job(len(layers), work, folder)
        return list(found[-1][0]), [num_read for _, num_read in found]

    losses, _ = train(tmp_path, (6,))
    found, num_read = train(tmp_path / "job", (1, 2, 3))
    assert found == pytest.approx(losses, rel=1e-6)
    assert num_read == [8 * STEPS, 0, 0]


def test_streams_can_be_turned_off_and_leave_the_generators_alone() -> None:
    inputs = torch.ones(8, 4)

    def masks(seed_dropout: bool) -> tuple[list[float], Tensor]:
        torch.manual_seed(3)
        with Trainer(
            nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1)),
            lambda output, target: output.mean(),
            partial(torch.optim.SGD, lr=0.0),
            TensorDataset(inputs, inputs),
            batch_size=8,
            data=DataConfig(seed_dropout=seed_dropout),
        ) as made:
            first = made.fit(max_steps=2).losses
            return list(first), torch.rand(1)

    torch.manual_seed(3)
    nn.Linear(4, 1)
    expected = torch.rand(1)
    assert masks(True)[1] == expected
    assert masks(False)[1] != expected
    (one, two), _ = masks(True)
    assert one != two
