"""Cuts: a job on any number of stages and pipelines against a plain loop in one process.

Small models of transformers in double precision, each with what a cut may get wrong: dropout,
padding on the left, position ids of packed texts, random masking, labels of -100, and a batch in
which micro-batches have other lengths, other numbers of labels and other keywords. The loop is
plain PyTorch with the seeds that the documentation describes. Figure: the largest relative
difference of the losses of all steps, and of the trained weights.
"""

import importlib
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import polyrhythm as pr
from benchmarks.parity.facts import Fact
from polyrhythm.plan.plan import even_plan
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.data.order import SampleOrder

NUM_STEPS, BATCH, MICROBATCH, NUM_SAMPLES, SEED = 20, 12, 2, 100, 3
NUM_LAYERS, WIDTH, WORDS, LENGTH, IGNORED = 4, 16, 31, 10, -100
CUTS = ((1, 1), (2, 1), (1, 2), (2, 2), (3, 2))  # pipelines x stages
TIMEOUT = 60.0

_SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2,
}
_TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}

Collated = tuple[dict[str, Any], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutModel:
    """A model, its data, and how it is split."""

    name: str
    build: Callable[[], nn.Module]
    split: pr.LayerSplit
    collate_fn: Callable[[list[int]], Collated]  # the items of a dataset are their numbers
    shifts_labels: bool = False  # each token predicts the next one

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the mean over the labels of a micro-batch."""
        if self.shifts_labels:
            logits, target = logits[:, :-1], target[:, 1:]
        return cross_entropy(logits.flatten(0, -2), target.flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class CutJob:
    """A model on some number of pipelines and stages."""

    model: CutModel
    num_pipelines: int = 1
    num_stages: int = 1
    num_steps: int = NUM_STEPS
    trainer_options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        mode = f", {self.trainer_options['sync']}" if "sync" in self.trainer_options else ""
        return f"{self.model.name} on {self.num_pipelines}x{self.num_stages}{mode}"

    @property
    def num_workers(self) -> int:
        return self.num_pipelines * self.num_stages

    def trainer(self) -> pr.Trainer:
        plan = even_plan(
            num_layers=NUM_LAYERS, num_stages=self.num_stages, num_pipelines=self.num_pipelines
        )
        options: dict[str, Any] = {
            "plan": plan,
            "schedule": "1f1b",
            "batch_size": BATCH,
            "microbatch_size": MICROBATCH,
            "split": self.model.split,
            "data": pr.DataConfig(seed=SEED),
            "collate_fn": self.model.collate_fn,
            "timeout": TIMEOUT,
        }
        dataset: Any = range(NUM_SAMPLES)
        return pr.Trainer(
            self.model.build,
            self.model.loss,
            _optimizer,
            dataset,
            **options | self.trainer_options,
        )


@dataclass(frozen=True, slots=True)
class Trained:
    losses: Tensor  # of all labels of each step, from the step on that was restored
    weights: dict[str, Tensor]

    def difference(self, expected: "Trained") -> float:
        """Return the largest relative difference; inf if a weight is missing."""
        if self.weights.keys() != expected.weights.keys():
            return float("inf")
        # Some weights are rounding errors of 0: biases of keys have no gradient.
        least = 1e-6 * max(float(tensor.abs().max()) for tensor in expected.weights.values())
        of_weights = (
            _relative_difference(self.weights[name], tensor, least)
            for name, tensor in expected.weights.items()
        )
        return max(_relative_difference(self.losses, expected.losses), *of_weights)


def measure(*, quick: bool) -> list[Fact]:
    facts = [_fact_of_masks()]
    for model in [quick_model()] if quick else cut_models():
        alone = train_alone(model)
        cuts: list[tuple[int, int, dict[str, Any]]] = [(*cut, {}) for cut in CUTS]
        if model.name == "bert":  # the others in the default mode only
            cuts += [(2, 2, {"sync": sync}) for sync in ("all_reduce", "balanced")]
        for num_pipelines, num_stages, options in [(1, 2, {})] if quick else cuts:
            job = CutJob(
                model=model,
                num_pipelines=num_pipelines,
                num_stages=num_stages,
                trainer_options=options,
            )
            found = train(job)
            detail = f"{job.num_steps} steps, last loss {found.losses[-1]:.3f}"
            expected = Trained(mean_losses(alone[0]), alone[1])
            facts.append(Fact(job.name, found.difference(expected), detail))
    return facts


def _fact_of_masks(num_positions: int = 50, size: int = 1000) -> Fact:
    """Compare dropout masks of all layers and positions: equal seeds give equal losses, too."""
    layers = nn.Sequential(*(nn.Dropout(0.2) for _ in range(NUM_LAYERS)))
    streams, masks = pr.RandomStreams(SEED, layers), list[Tensor]()
    for position in range(num_positions):
        with streams.isolated():
            streams.begin_forward(position)
            masks += [layer(torch.ones(size)) > 0 for layer in layers]
    # Independent masks of 1000 elements share 680 of them, with a standard deviation of 15.
    kept = torch.stack(masks)
    shared = (kept[:, None] == kept).sum(-1).fill_diagonal_(0)
    mean, most = kept.double().mean().item(), int(shared.max())
    is_random = abs(mean - 0.8) < 0.005 and most < 0.8 * size
    detail = f"{len(masks)} masks keep {mean:.4f} of 0.8, two share at most {most} of {size}"
    return Fact("masks of all positions and layers differ", float(not is_random), detail)


def train(job: CutJob, *, restores: bool = False, callbacks: Sequence[Any] = ()) -> Trained:
    """Run a job on local processes; `restores`: from the newest checkpoint of its run folder."""

    def work(ctx: DistContext, folder: Path) -> None:
        torch.set_num_threads(1)
        with job.trainer() as trainer:
            if restores:
                trainer.restore()
            steps = trainer.fit(max_steps=job.num_steps, callbacks=callbacks).steps
            losses = [(info.own.loss or 0.0, info.own.num_labels) for info in steps]
            state = {k: v for k, v in trainer.model.state_dict().items() if v.is_floating_point()}
            is_last = trainer.pipeline.is_last
            torch.save((losses if is_last else [], state), folder / f"{ctx.rank}.pt")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with LocalJob(partial(work, folder=folder), job.num_workers, output_folder=folder) as local:
            if not local.wait(TIMEOUT):
                raise TimeoutError(f"{job.name} takes longer than {TIMEOUT} s")
        found = [torch.load(folder / f"{rank}.pt") for rank in range(job.num_workers)]
    by_pipeline = [losses for losses, _ in found if losses]
    weights = {k: v for _, state in found[: job.num_stages] for k, v in state.items()}
    return Trained(mean_losses(list(zip(*by_pipeline, strict=True))), weights)


def train_alone(
    model: CutModel, num_steps: int = NUM_STEPS
) -> tuple[list[list[tuple[float, int]]], dict[str, Tensor]]:
    """Train in a plain loop; return mean and number of labels of each micro-batch, and weights."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        module = model.build()
    optimizer, order = _optimizer(module.parameters()), SampleOrder(NUM_SAMPLES, SEED)
    assert model.split.layers is not None, "each model has a list of layers"
    layers: Any = module.get_submodule(model.split.layers)
    streams = pr.RandomStreams(SEED, layers)
    steps = []
    for step in range(num_steps):
        found = list[tuple[float, int]]()
        for position in range(step * BATCH, (step + 1) * BATCH, MICROBATCH):
            with pr.seeded_draws(SEED, position):
                items = order.ids(position, position + MICROBATCH).tolist()
                inputs, target = model.collate_fn(items)
            with streams.isolated():
                streams.begin_forward(position)
                logits = module(**inputs)["logits"]
                streams.begin_loss()
                loss, labels = model.loss(logits, target), target
                if model.shifts_labels:
                    labels = target[:, 1:]
                num_labels = int((labels != IGNORED).sum())
                if num_labels:  # otherwise the mean is nan
                    (loss * num_labels).backward()  # type: ignore[no-untyped-call]
            found.append((loss.item() if num_labels else 0.0, num_labels))
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad /= sum(num_labels for _, num_labels in found)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(found)
    torch.set_num_threads(num_threads)
    state = {k: v for k, v in module.state_dict().items() if v.is_floating_point()}
    return steps, state


def mean_losses(steps: Sequence[Sequence[tuple[float, float]]]) -> Tensor:
    """Return the mean over all labels of each step, from means and counts of its parts."""
    means, counts = torch.tensor(steps, dtype=torch.float64).unbind(-1)
    return (means * counts).sum(-1) / counts.sum(-1)


def quick_model() -> CutModel:
    """Return a model without transformers, whose import takes seconds."""
    return CutModel(
        name="encoder",
        build=lambda: _in_double(_Encoder()),
        split=pr.LayerSplit(layers="layers", prologue=["embed"], epilogue=["head"]),
        collate_fn=_collate_masked,
    )


def cut_models() -> list[CutModel]:
    transformers = importlib.import_module("transformers")  # seconds
    return [
        CutModel(
            name="gpt2",
            build=partial(_gpt2, transformers),
            split=pr.LayerSplit(
                layers="transformer.h",
                prologue=["transformer.wte", "transformer.wpe", "transformer.drop"],
                epilogue=["transformer.ln_f", "lm_head"],
            ),
            collate_fn=_collate_text,
            shifts_labels=True,
        ),
        CutModel(
            name="llama",
            build=partial(_llama, transformers),
            split=pr.LayerSplit(
                layers="model.layers",
                prologue=["model.embed_tokens"],
                every=["model.rotary_emb"],
                epilogue=["model.norm", "lm_head"],
            ),
            collate_fn=_collate_padded_or_packed,
            shifts_labels=True,
        ),
        CutModel(
            name="bert",
            build=partial(_bert, transformers),
            split=pr.LayerSplit(
                layers="bert.encoder.layer", prologue=["bert.embeddings"], epilogue=["cls"]
            ),
            collate_fn=_collate_masked,
        ),
        CutModel(
            name="vit",
            build=partial(_vit, transformers),
            split=pr.LayerSplit(
                layers="vit.layers",
                prologue=["vit.embeddings"],
                epilogue=["vit.layernorm", "classifier"],
            ),
            collate_fn=_collate_images,
        ),
    ]


class _Encoder(nn.Module):
    """Layers of torch with a mask for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        make_layer = partial(nn.TransformerEncoderLayer, WIDTH, 2, 24, 0.1, batch_first=True)
        self.layers = nn.ModuleList(make_layer() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=~attention_mask)
        return {"logits": self.head(hidden)}


def _gpt2(transformers: Any) -> nn.Module:
    sizes = {"vocab_size": WORDS, "n_positions": 16, "n_embd": WIDTH, "n_layer": NUM_LAYERS}
    config = transformers.GPT2Config(**sizes, n_head=2, **_TOKENS)
    return _in_double(transformers.GPT2LMHeadModel(config))


def _llama(transformers: Any) -> nn.Module:
    sizes = {"vocab_size": WORDS, "max_position_embeddings": 16, "num_key_value_heads": 1}
    options = {"attention_dropout": 0.1, "use_cache": False}  # a cache would hide that texts end
    config = transformers.LlamaConfig(**sizes, **_SIZES, **_TOKENS, **options)
    model = transformers.LlamaForCausalLM(config)
    # Its own norm computes in single precision, which turns a last bit into a difference of 1e-7.
    norms = [name for name, _ in model.named_modules() if name.endswith("norm")]
    for name in norms:
        model.set_submodule(name, nn.RMSNorm(WIDTH, eps=config.rms_norm_eps))
    return _in_double(model)


def _bert(transformers: Any) -> nn.Module:
    sizes = {"vocab_size": WORDS, "max_position_embeddings": 16}
    config = transformers.BertConfig(**sizes, **_SIZES, pad_token_id=0)
    return _in_double(transformers.BertForMaskedLM(config))


def _vit(transformers: Any) -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    sizes = {"image_size": 8, "patch_size": 4, "num_labels": WORDS}
    config = transformers.ViTConfig(**sizes, **_SIZES, **dropout)
    return _in_double(transformers.ViTForImageClassification(config))


def _in_double(module: Any) -> nn.Module:
    found: nn.Module = module.double().train()
    return found


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def _texts(items: list[int]) -> list[Tensor]:
    """Return a text of 5 to LENGTH words for each item."""
    lengths = (5 + item % (LENGTH - 4) for item in items)
    return [
        torch.arange(n) * 7 % (3 + item % 11) + item % (WORDS - 12) + 1
        for item, n in zip(items, lengths, strict=True)
    ]


def _padded(texts: list[Tensor], value: int, side: str) -> Tensor:
    return nn.utils.rnn.pad_sequence(
        texts, batch_first=True, padding_value=value, padding_side=side
    )


def _collate_text(items: list[int]) -> Collated:
    """Pad on the right, with a mask."""
    texts = _texts(items)
    tokens = _padded(texts, 0, "right")
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long()}, _padded(
        texts, IGNORED, "right"
    )


def _collate_padded_or_packed(items: list[int]) -> Collated:
    """Pad on the left, with positions from the mask; or pack two texts into each row."""
    texts = _texts(items)
    if sum(items) % 2:
        tokens = _padded(texts, 0, "left")
        mask = (tokens > 0).long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
        return inputs, _padded(texts, IGNORED, "left")
    rows = [torch.cat([text[:5], text[:4]]) for text in texts]
    positions = torch.cat([torch.arange(5), torch.arange(4)]).expand(len(rows), -1)
    target = torch.stack(rows)
    target[:, 5] = IGNORED  # the first word of the second text
    return {"input_ids": torch.stack(rows), "position_ids": positions}, target


def _collate_masked(items: list[int]) -> Collated:
    """Mask words at random, as for BERT: others are no labels."""
    texts = _texts(items)
    tokens = _padded(texts, 0, "right")
    chosen = (torch.rand(tokens.shape) < 0.3) & (tokens > 0)
    chosen[:, 0] = True
    chosen[torch.tensor(items) % 3 == 0] = False  # some samples, and micro-batches, have no label
    inputs = {"input_ids": torch.where(chosen, WORDS - 1, tokens), "attention_mask": tokens > 0}
    return inputs, torch.where(chosen, tokens, IGNORED)


def _collate_images(items: list[int]) -> Collated:
    """Return noisy images, each shifted at random."""
    numbers = torch.tensor(items, dtype=torch.float64)[:, None, None, None]
    images = torch.sin(numbers + torch.arange(3 * 8 * 8).reshape(1, 3, 8, 8))
    images = images.roll(int(torch.randint(8, ())), -1) + 0.1 * torch.randn(images.shape)
    return {"pixel_values": images}, torch.tensor(items) % WORDS


def _relative_difference(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Return the largest difference over the largest number, which is at least `least`."""
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=least))
    return float("inf") if math.isnan(difference) else difference
