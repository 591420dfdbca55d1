"""A Hugging Face model trains on a GPU with its own loss, as on a CPU, in one and in two stages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.trainer.config import DataConfig
from polyrhythm.run.trainer.optimizers import adamw, cosine
from polyrhythm.run.trainer.trainer import Trainer

pytestmark = pytest.mark.skipif(
    not torch.cuda.device_count(), reason="this machine has no CUDA device"
)
WORDS, NUM_STEPS = 64, 6


def model() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": WORDS, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0))


def texts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 24, (64,), generator=draw).tolist()
    return [torch.randint(1, WORDS, (n,), generator=draw).tolist() for n in lengths]


def padded(items: list[list[int]]) -> dict[str, Tensor]:
    longest = max(map(len, items))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in items])
    return {"input_ids": ids, "attention_mask": ids.sign(), "labels": ids.where(ids > 0, -100)}


def losses(folder: Path, device: str, num_stages: int, data: DataConfig) -> list[float]:
    def work(ctx: DistContext) -> None:
        options: Any = {"stages": num_stages} if num_stages > 1 else {}
        with Trainer(
            model,
            dataset=texts(),
            collate_fn=padded,
            optimizer_fn=adamw(lr=1e-2, weight_decay=0.1),
            lr_schedule=cosine(warmup=2),
            batch_size=16,
            microbatch_size=4,
            clip_grad_norm=1.0,
            device=device,
            data=data,
            **options,
        ) as trainer:
            found = list(trainer.fit(max_steps=NUM_STEPS, progress=False).losses)
            assert next(trainer.model.parameters()).device.type == device
        torch.save(found, folder / f"{ctx.rank}.pt")

    folder.mkdir()
    with LocalJob(work, num_stages, output_folder=folder / "logs") as job:
        assert job.wait(120), "not done in time"
    found = [torch.load(folder / f"{rank}.pt") for rank in range(num_stages)]
    assert all(each == found[0] for each in found)
    return found[0]


def test_own_loss_is_that_of_a_cpu(tmp_path: Path) -> None:
    expected = losses(tmp_path / "cpu", "cpu", 1, DataConfig())
    for num_stages in (1, 2):
        data = DataConfig(num_workers=2, pin_memory=True)
        found = losses(tmp_path / f"gpu{num_stages}", "cuda", num_stages, data)
        assert found == pytest.approx(expected, rel=1e-4)
