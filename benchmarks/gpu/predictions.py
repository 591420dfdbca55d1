"""Predictions from a profile of the GPU against training on it: memory and time of stages.

`polyrhythm profile` measures the model with its loss, under autocast. From that the planner
predicts, for 8 micro-batches in a step,

- the memory of each of two stages, 1f1b and bounded. Two processes run them on the one GPU, with
  AdamW, and each reads the peak of its own allocator;
- the time of a step of the whole model as one stage, under both schedules, and the compute of each
  half as a stage of its own, with its inputs at hand. Two stages at once would share the GPU, which
  no plan means. The optimizer's step is not predicted and not measured.

Micro-batches are as large as keeps the GPU busy. With 4 sequences the host that launches kernels is
slower than the GPU: one lease took 262 to 386 ms for the same step of the 350M model.
"""

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import polyrhythm as pr
from benchmarks.gpu import model as models
from benchmarks.gpu.model import DEVICE, Size, adamw, autocast, gpt, loss_fn
from benchmarks.gpu.ranks import GLOO, TIMEOUT, run_ranks
from benchmarks.gpu.stages import half_of
from benchmarks.harness.child import in_child
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.measure import finish
from polyrhythm.describe.model import ModelProfile
from polyrhythm.plan.options import TrainingJob
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.plan.predict import Prediction, predict
from polyrhythm.plan.problem import Problem
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.profile.profile import measure_profile
from polyrhythm.types import Seconds

NUM_MICROBATCHES = 8
MICROBATCHES = {"tiny": 4, "125m": 16, "350m": 8, "1300m": 4}  # sequences, by model
# Names in figures, and schedules of one stage and of two.
SCHEDULES = {"1f1b": ("1f1b", "1f1b"), "bounded": ("bounded:3", "bounded:4,2")}
_TIMEOUT: Seconds = 120.0  # of a profile, and of the measured steps


def profiled_tiny() -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    return _profiled(models.TINY, MICROBATCHES["tiny"])


def profiled_125m() -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    return _profiled(models.GPT_125M, MICROBATCHES["125m"])


def profiled_350m() -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    return _profiled(models.GPT_350M, MICROBATCHES["350m"])


def profiled_1300m() -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    return _profiled(models.GPT_1300M, MICROBATCHES["1300m"])


def _profiled(size: Size, microbatch: int) -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """Return a model, an example of its input, and the loss of its output, for a profile."""

    # Random, as in training: a GPU multiplies equal numbers with less power, and so faster.
    tokens, target = (torch.randint(size.vocabulary, (microbatch, size.context)) for _ in range(2))
    target = target.to(DEVICE)
    return gpt(size), tokens, lambda logits: loss_fn(logits, target[: len(logits)])


def measure(label: str, size: Size, *, quick: bool) -> dict[str, float]:
    """Return predicted over measured: `memory_ratio_...` and `profile_ratio_...`."""
    if quick:
        label, size = "tiny", models.TINY
    batch = NUM_MICROBATCHES * MICROBATCHES[label]
    profile = in_child(f"profile of {label}", partial(_profile, label), ModelProfile, _TIMEOUT)
    times = in_child(
        f"steps of {label}", partial(_stage_times, size, batch, quick), dict[str, float], _TIMEOUT
    )
    peaks = run_ranks(partial(_peaks, size, batch), timeout=_TIMEOUT)
    found = {f"step_{label}_{name}_ms": 1e3 * value for name, value in times.items()}
    for name, (schedule, schedule_of_two) in SCHEDULES.items():
        whole = predicted(profile, batch, 1, schedule)
        found[f"profile_ratio_{label}_{name}"] = whole.time.total / times[name]
        for use in predicted(profile, batch, 2, schedule_of_two).uses:
            stage = use.stages.start
            key, measured = f"{label}_{name}_stage{stage}", peaks[stage][name]
            found |= {
                f"memory_ratio_{key}": use.memory / measured,
                f"memory_{key}_gb": measured / 1e9,
            }
    for use in predicted(profile, batch, 2, "1f1b").uses:
        name = f"stage{use.stages.start}"
        found[f"profile_ratio_{label}_{name}"] = use.busy / times[name]
    return found


def worst_error(figures: dict[str, float], prefix: str, num_expected: int) -> float:
    """Return the largest |ratio - 1| of figures with a prefix; nan if one is missing."""
    ratios = [value for name, value in figures.items() if name.startswith(prefix)]
    if len(ratios) < num_expected:
        return float("nan")
    return max(abs(ratio - 1) for ratio in ratios)


def predicted(profile: ModelProfile, batch: int, num_stages: int, schedule: str) -> Prediction:
    """Return what the planner predicts for one pipeline of equal devices."""
    names = tuple(f"gpu{stage}" for stage in range(num_stages))
    cluster = Cluster(
        name="one GPU",
        devices=tuple(Device(name=name, region="here") for name in names),
        regions=("here",),
        latency=((1e-6,),),
        bandwidth=((1e11,),),
    )
    job = TrainingJob(batch_size=batch)
    num_layers = len(profile.layers)
    layers = (num_layers,) if num_stages == 1 else (num_layers // 2, num_layers - num_layers // 2)
    pipeline = PipelinePlan(devices=names, num_microbatches=NUM_MICROBATCHES, schedule=schedule)
    plan = Plan(
        layers_per_stage=layers, pipelines=(pipeline,), microbatch_size=batch // NUM_MICROBATCHES
    )
    return predict(plan, Problem(cluster=cluster, profile=profile, job=job))


def _profile(label: str) -> ModelProfile:
    return measure_profile(
        f"{__name__}:profiled_{label}",
        sizes=[MICROBATCHES[label]],
        device=DEVICE.type,
        autocast="bfloat16",
    )


def _batch(size: Size, batch: int) -> tuple[Tensor, Tensor]:
    shape = batch, size.context
    inputs, target = (torch.randint(size.vocabulary, shape, device=DEVICE) for _ in range(2))
    return inputs, target


def _stage_times(size: Size, batch: int, quick: bool) -> dict[str, float]:
    """Return the time of a step of each schedule on one stage, and of each half as a stage."""
    torch.manual_seed(0)
    inputs, target = _batch(size, batch)
    hidden = torch.randn(*inputs.shape, size.width, device=DEVICE)
    whole = gpt(size)
    first, second = half_of(whole, 0), half_of(whole, 1)
    cases: dict[str, tuple[nn.Module, str, Tensor, Tensor, Callable[..., Tensor]]] = {
        **{name: (whole, spec, inputs, target, loss_fn) for name, (spec, _) in SCHEDULES.items()},
        # A loss that stands in for the later stage: it sends a gradient at once.
        "stage0": (first, "1f1b", inputs, hidden, functional.mse_loss),
        "stage1": (second, "1f1b", hidden, target, loss_fn),
    }
    times: dict[str, list[Seconds]] = {name: [] for name in cases}
    num_steps = 3
    for _ in range(1 if quick else 2):
        for name, (module, schedule, x, y, loss) in cases.items():
            with pr.Pipeline(
                module, NUM_MICROBATCHES, loss, schedule=schedule, process_group=None, device=DEVICE
            ) as pipeline:
                for step in range(1 + num_steps):  # the first warms up
                    if step == 1:
                        finish(DEVICE)
                        start = time.perf_counter()
                    with autocast():
                        pipeline.step(x, target=y, return_outputs=False)
                    module.zero_grad()
                finish(DEVICE)
                times[name].append((time.perf_counter() - start) / num_steps)
    # The first round may still allocate memory and choose kernels.
    return {name: statistics.median(some[1:] or some) for name, some in times.items()}


def _peaks(size: Size, batch: int, ctx: DistContext) -> dict[str, float]:
    """Train as one of two stages under each schedule; return the peaks of allocated memory."""
    torch.cuda.set_device(DEVICE)
    with ctx.process_group(TIMEOUT, backend=GLOO):
        module = half_of(gpt(size), ctx.rank)
        inputs, target = _batch(size, batch)
        optimizer = adamw(module.named_parameters())
        peaks = dict[str, float]()
        for name, (_, schedule) in SCHEDULES.items():
            with pr.Pipeline(
                module, NUM_MICROBATCHES, loss_fn, schedule=schedule, timeout=TIMEOUT
            ) as pipeline:
                arguments: tuple[Any, ...] = (inputs,) if pipeline.is_first else ()
                for step in range(4):
                    if step == 2:  # from then on there is optimizer state, and nothing is measured
                        gc.collect()
                        finish(DEVICE)
                        torch.cuda.reset_peak_memory_stats()
                    with autocast():
                        pipeline.step(*arguments, target=target, return_outputs=False)
                    optimizer.step()
                    optimizer.zero_grad()
                finish(DEVICE)
                peaks[name] = float(torch.cuda.max_memory_allocated())
        return peaks
