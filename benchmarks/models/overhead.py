"""Samples per second of the Trainer in one process against other loops, with steps above 50 ms.

All train the same GPT-2 on the same batches of Python's own source, with one thread, the same
optimizer (fused AdamW), learning rates and clipping, and without logs and checkpoints. The batch is
as large as 70 ms of computing need on this machine. Each side has a process of its own, and they
take turns after every step: at any time one computes, so that noise of the machine which lasts
longer than a round is the same for all. Processes of the same code differ by 1 %, by where their
memory lies, so each side has several, one after another. A ratio is the median over all rounds of
the ratio within one. A step ends when the embedding is called again, without a callback.
"""

import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
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
from benchmarks.harness.child import in_child
from polyrhythm.processes import Child, end_all
from polyrhythm.run.demo.train import standard_library
from polyrhythm.types import Seconds

MIN_STEP: Seconds = 0.07
_CONTEXT, _VOCABULARY = 64, 256
_WARM_UP = 8  # rounds that are not counted
_TIMEOUT: Seconds = 60.0  # of a step
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of glibc's mallopt
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
    """Return the ratios and the rates."""
    num_processes, num_rounds = (1, 4) if quick else (7, 32)
    batch = in_child("batch size", _batch_size, int, _TIMEOUT)
    sides: dict[str, Run] = {
        "trainer": _trainer,
        "with_progress": _trainer_with_progress,
        "hf": _hugging_face,
        "fabric": _fabric,
    }
    rounds = list[dict[str, Seconds]]()
    for _ in range(num_processes):
        rounds += _measure_rounds(sides, batch, _WARM_UP + num_rounds)

    def speed(side: str, other: str) -> float:
        return statistics.median(times[other] / times[side] for times in rounds)

    step = {name: statistics.median(times[name] for times in rounds) for name in rounds[0]}
    return {
        "overhead_vs_hf": speed("trainer", "hf"),
        "overhead_vs_fabric": speed("trainer", "fabric"),
        "overhead_of_progress": speed("with_progress", "trainer"),
        "overhead_step_ms": step["trainer"] * 1e3,
        **{f"overhead_{name}_samples_per_s": batch / step[name] for name in step},
    }


def _measure_rounds(sides: dict[str, Run], batch: int, num_rounds: int) -> list[dict[str, Seconds]]:
    """Return the times of a step by side, of each round after the warm-up."""
    rounds = list[dict[str, Seconds]]()
    children = list[Child]()
    ends: dict[str, Connection[str, Seconds]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, run in sides.items():
                ends[name], end = Pipe()
                work = partial(_run_side, run, end, batch, num_rounds)
                children.append(Child(work, output=Path(folder) / name))
                end.close()
            for number in range(num_rounds):
                names = list(sides)
                order = names[number % len(names) :] + names[: number % len(names)]
                rounds.append({name: _run_step(ends[name]) for name in order})
        except (EOFError, OSError, TimeoutError) as error:
            shown = [f"{name}: {child.reason}" for name, child in zip(sides, children, strict=True)]
            raise RuntimeError(f"a side does not train: {'; '.join(shown)}") from error
        finally:
            for end in ends.values():
                end.close()
            end_all(children)
    return rounds[_WARM_UP:]


def _run_step(end: "Connection[str, Seconds]") -> Seconds:
    """Let a side run one step; return its time."""
    end.send("go")
    if not end.poll(_TIMEOUT):
        raise TimeoutError(f"{_TIMEOUT:g} s for a step")
    return end.recv()


def _run_side(run: Run, end: "Connection[Seconds, str]", batch: int, num_rounds: int) -> None:
    """Train, and wait for a turn when the embedding is called: the search for a split does, too."""
    torch.set_num_threads(1)
    # Freed memory stays with the process: how much returns to the kernel, and costs page faults
    # in the next step, is different in each process.
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, 2**30)
        libc.mallopt(_TRIM_THRESHOLD, 2**30)
    model, start = _model(), 0.0

    def wait_for_step(*_: object) -> None:
        nonlocal start
        if start:
            end.send(time.perf_counter() - start)
        end.recv()
        start = time.perf_counter()

    model.transformer.wte.register_forward_pre_hook(wait_for_step)
    num_steps = num_rounds + 1
    run(model, Text(batch * num_steps), batch, num_steps)


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
    model: GPT2LMHeadModel = GPT2LMHeadModel(config)
    return model


def _batch_size() -> int:
    """Return the samples for which a step of a plain loop takes MIN_STEP."""
    torch.set_num_threads(1)
    model = _model()
    inputs = torch.stack([item["input_ids"] for item in map(Text(8).__getitem__, range(8))])
    times = list[Seconds]()
    for _ in range(12):
        start = time.thread_time()  # without what other load takes
        model(input_ids=inputs, labels=inputs).loss.backward()
        times.append(time.thread_time() - start)
    return max(1, round(8 * MIN_STEP / min(times)))


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
