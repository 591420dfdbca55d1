"""Samples per second of the Trainer in one process against other loops, with steps above 50 ms.

All train the same GPT-2 on the same batches of Python's own source, with one thread, the same
optimizer (fused AdamW), learning rates and clipping, and without logs and checkpoints. The batch is
as large as 70 ms of computing need on this machine. Blocks of steps alternate, and each side counts
with the median of its blocks. Times are taken whenever the embedding is called, so no side pays for
a callback.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

import polyrhythm as pr
from polyrhythm.run.demo.train import standard_library
from polyrhythm.types import Seconds

MIN_STEP: Seconds = 0.07
_CONTEXT, _VOCABULARY = 64, 256
_WARM_UP = 3  # steps of each block that are not timed
_LR = 1e-3

Run = Callable[[nn.Module, "Text", int, int], None]  # model, data, batch, steps


class Text(Dataset[dict[str, Tensor]]):
    """Pieces of the source of Python's library, by bytes; `labels` are the pieces themselves."""

    def __init__(self, num_samples: int) -> None:
        text = standard_library(num_samples * _CONTEXT)
        self._tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self._tokens[index * _CONTEXT : (index + 1) * _CONTEXT]
        return {"input_ids": tokens, "labels": tokens}


def measure(*, quick: bool) -> dict[str, float]:
    """Return the ratios and the rates; runs of all sides alternate, each one first in turn."""
    num_rounds, num_steps = (1, 4) if quick else (12, 12)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        batch = _batch_size()
        sides: dict[str, Run] = {
            "trainer": _trainer,
            "with_progress": _trainer_with_progress,
            "hf": _hugging_face,
            "fabric": _fabric,
        }
        times: dict[str, list[Seconds]] = {name: [] for name in sides}
        for number in range(num_rounds):
            order = list(sides)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                times[name].append(_step_time(sides[name], batch, num_steps))
    finally:
        torch.set_num_threads(threads)
    step = {name: statistics.median(found) for name, found in times.items()}
    return {
        "overhead_vs_hf": step["hf"] / step["trainer"],
        "overhead_vs_fabric": step["fabric"] / step["trainer"],
        "overhead_of_progress": step["trainer"] / step["with_progress"],
        "overhead_step_ms": step["trainer"] * 1e3,
        **{f"overhead_{name}_samples_per_s": batch / step[name] for name in step},
    }


def _model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=_VOCABULARY,
        n_positions=_CONTEXT,
        n_embd=96,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: GPT2LMHeadModel = GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]
    return model


def _batch_size() -> int:
    """Return the samples for which a step of a plain loop takes MIN_STEP."""
    model = _model()
    inputs = torch.stack([item["input_ids"] for item in map(Text(8).__getitem__, range(8))])
    times = list[Seconds]()
    for _ in range(12):
        start = time.thread_time()  # without what other load takes
        model(input_ids=inputs, labels=inputs).loss.backward()
        times.append(time.thread_time() - start)
    return max(1, round(8 * MIN_STEP / min(times)))


def _step_time(run: Run, batch: int, num_steps: int) -> Seconds:
    """Return the mean time of a step of one block."""
    model, starts = _model(), list[Seconds]()
    model.transformer.wte.register_forward_pre_hook(lambda *_: starts.append(time.perf_counter()))
    run(model, Text(batch * (_WARM_UP + num_steps + 1)), batch, _WARM_UP + num_steps + 1)
    assert len(starts) >= _WARM_UP + num_steps + 1, "one call of the embedding per step"
    return (starts[-1] - starts[-1 - num_steps]) / num_steps


def _trainer(
    model: nn.Module, data: Text, batch: int, num_steps: int, *, progress: bool = False
) -> None:
    with pr.Trainer(
        model,
        None,  # the model's own loss
        pr.adamw(lr=_LR, weight_decay=0.0, fused=True),
        data,
        batch_size=batch,
        microbatch_size=batch,
        lr_schedule=pr.linear(),
        clip_grad_norm=1.0,
        data=pr.DataConfig(shuffle=False),
        device="cpu",
    ) as trainer:
        trainer.fit(max_steps=num_steps, progress=progress)


def _trainer_with_progress(model: nn.Module, data: Text, batch: int, num_steps: int) -> None:
    _trainer(model, data, batch, num_steps, progress=True)


def _hugging_face(model: nn.Module, data: Text, batch: int, num_steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder,
            per_device_train_batch_size=batch,
            max_steps=num_steps,
            learning_rate=_LR,
            optim="adamw_torch_fused",
            train_sampling_strategy="sequential",
            use_cpu=True,
            dataloader_pin_memory=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model, options, train_dataset=data)
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def _fabric(model: nn.Module, data: Text, batch: int, num_steps: int) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.0, fused=True)
    schedule = LambdaLR(optimizer, lambda step: 1 - step / num_steps)
    wrapped, optimizer = fabric.setup(model, optimizer)
    loader: Any = DataLoader(data, batch, collate_fn=default_data_collator)
    loader = fabric.setup_dataloaders(loader)
    for inputs in loader:
        loss = wrapped(**inputs).loss
        fabric.backward(loss)
        fabric.clip_gradients(wrapped, optimizer, max_norm=1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
