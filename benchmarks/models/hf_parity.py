"""The Trainer against transformers.Trainer: the loss of each step, on the same samples.

Both train the same causal language models in the same order, with padded micro-batches, AdamW whose
decay spares biases and norms, warm-up and cosine, and clipping. transformers.Trainer accumulates
gradients over micro-batches in one process; the Trainer runs in one process, and as 2 stages x 2
pipelines. All differences are relative to the loss.
"""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)
from transformers import Trainer as HuggingFaceTrainer

import polyrhythm as pr
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.data.order import SampleOrder
from polyrhythm.run.demo.train import standard_library

_BATCH, _MICROBATCH, _NUM_SAMPLES = 16, 4, 512
_SEED, _RATE, _DECAY, _CLIP = 0, 1e-3, 0.1, 1.0
_TIMEOUT = 300.0


def measure(*, quick: bool) -> dict[str, float]:
    """Return the worst difference in float64, and in float32, over models and plans."""
    num_steps = 10 if quick else 100
    models = [_gpt2] if quick else [_gpt2, _llama]
    return {
        "hf_parity": max(_differences(num_steps, torch.float64, models)),
        "hf_parity_float32": max(_differences(num_steps, torch.float32, models[:1])),
    }


def _differences(
    num_steps: int, dtype: torch.dtype, models: list[Callable[[], nn.Module]]
) -> Iterator[float]:
    for model in models:
        build = partial(_built, model, dtype)
        expected = _hugging_face(build, num_steps)
        for shape in ((1, 1), (2, 2)):
            losses = _polyrhythm(build, num_steps, *shape)
            yield max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def _gpt2() -> nn.Module:
    dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=256, n_positions=64, **dropout)
    model: Any = GPT2LMHeadModel(config)
    # Without it transformers.Trainer divides by all tokens, also by those that are not predicted.
    model.loss_type = "ForCausalLM"
    made: nn.Module = model
    return made


def _llama() -> nn.Module:
    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=256,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def _built(model: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(_SEED)
    return model().to(dtype)


def samples() -> list[dict[str, list[int]]]:
    """Texts of unequal lengths, as bytes."""
    text, draw = standard_library(_NUM_SAMPLES * 64), torch.Generator().manual_seed(_SEED)
    lengths = torch.randint(8, 65, (_NUM_SAMPLES,), generator=draw).tolist()
    return [{"input_ids": list(text[64 * i : 64 * i + n])} for i, n in enumerate(lengths)]


def collate(items: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(item["input_ids"]) for item in items)
    rows = [item["input_ids"] for item in items]
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class _InOrder(HuggingFaceTrainer):  # type: ignore[misc]  # its types are not read
    """transformers.Trainer without shuffling, which keeps the loss of each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.microbatch_losses = list[float]()

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return SequentialSampler(self.train_dataset)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self.microbatch_losses.append(loss.item())
        return loss


def _hugging_face(build: Callable[[], nn.Module], num_steps: int) -> list[float]:
    """Return the loss of each step, a sum over its micro-batches of shares of the mean."""
    order, data, per_step = SampleOrder(_NUM_SAMPLES, _SEED), samples(), _BATCH // _MICROBATCH
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=_MICROBATCH,
            gradient_accumulation_steps=per_step,
            max_steps=num_steps,
            learning_rate=_RATE,
            weight_decay=_DECAY,
            max_grad_norm=_CLIP,
            warmup_steps=num_steps // 10,
            lr_scheduler_type="cosine",
            optim="adamw_torch",
            seed=_SEED,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        ordered = [data[i] for i in order.samples(0, num_steps * _BATCH)]
        trainer = _InOrder(build(), arguments, data_collator=collate, train_dataset=ordered)
        trainer.train()
    losses = trainer.microbatch_losses
    return [sum(losses[i : i + per_step]) for i in range(0, len(losses), per_step)]


def _polyrhythm(
    build: Callable[[], nn.Module], num_steps: int, stages: int, pipelines: int
) -> list[float]:
    def train() -> list[float]:
        with pr.Trainer(
            build,
            dataset=samples(),
            collate_fn=collate,
            optimizer_fn=pr.adamw(lr=_RATE, weight_decay=_DECAY),
            lr_schedule=pr.cosine(warmup=num_steps // 10),
            clip_grad_norm=_CLIP,
            batch_size=_BATCH,
            microbatch_size=_MICROBATCH,
            stages=stages,
            pipelines=pipelines,
            device="cpu",
            timeout=_TIMEOUT,
            data=pr.DataConfig(seed=_SEED),
        ) as trainer:
            return list(trainer.fit(max_steps=num_steps, progress=False).losses)

    if stages * pipelines == 1:
        return train()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "losses.pt"

        def work(ctx: DistContext) -> None:
            torch.set_num_threads(1)
            losses = train()
            if ctx.rank == 0:
                torch.save(losses, path)

        with LocalJob(work, stages * pipelines, output_folder=Path(name) / "logs") as job:
            if not job.wait(_TIMEOUT):
                raise RuntimeError(f"{stages} stages x {pipelines} pipelines took too long")
        found: list[float] = torch.load(path)
        return found
