"""One GPU: Trainer, Pipeline and DistributedOptimizer against plain loops, DDP and torch's 1F1B.

Ranks of a job share the GPU, over gloo in pinned memory, or over NCCL's sockets as if on different
hosts. Models are GPTs with random tokens, in bfloat16 under autocast unless a part compares losses.
Sides alternate (`alternate.py`). Each part runs in processes of its own: one that fails leaves its
figures out, its bars as nan and the reason at the end, and the other parts as they are.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import torch
from rich.console import Console

from benchmarks.gpu import averaging, predictions, replicas, single, stages, survivors, syncs
from benchmarks.gpu.model import GPT_30M, GPT_125M, GPT_350M, GPT_1300M
from benchmarks.harness.child import in_child
from benchmarks.harness.report import Bar, Result, print_bars, print_rows, progress_printer
from polyrhythm.errors import UserError
from polyrhythm.tables import print_line
from polyrhythm.types import Seconds

BARS = (
    Bar(
        "plain_350m", ">=", 0.98, "samples/s of the Trainer against a plain loop, 350M, with saves"
    ),
    Bar("plain_350m_compiled", ">=", 0.97, "the same with compiled blocks"),
    Bar("plain_30m", ">=", 0.95, "the same with steps of 13 ms"),
    Bar("pipeline_1stage", ">=", 0.98, "a Pipeline of one stage against gradient accumulation"),
    Bar("gloo_decoupled_30m", ">=", 1.0, "2 replicas over gloo, 30M: time of DDP / decoupled"),
    Bar("gloo_decoupled_350m", ">=", 0.98, "the same, 350M"),
    Bar("gloo_all_reduce_30m", ">=", 0.95, "2 replicas over gloo, 30M: time of DDP / all_reduce"),
    Bar("nccl_decoupled_350m", ">=", 0.97, "2 replicas over NCCL, 350M: time of DDP / decoupled"),
    Bar("nccl_pipeline", ">=", 0.97, "2 stages over NCCL: time of torch's Schedule1F1B / ours"),
    Bar("overlap", ">=", 0.80, "share of the transfer time that is hidden behind compute"),
    Bar("host_syncs", "<=", 1, "waits of the main thread for the GPU in a step"),
    Bar("hook_us", "<=", 10, "microseconds that hooks add to a backward, per parameter"),
    Bar("step1_peak", "<=", 1.05, "peak memory of step 1 / of step 10, decoupled"),
    Bar("memory_error", "<=", 0.05, "worst error of predicted memory: 3 models, 2 schedules"),
    Bar("profile_error", "<=", 0.08, "worst error of step times predicted from a profile"),
)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the benchmark: `measure(quick=...)` returns figures by name."""

    measure: Callable[..., dict[str, float]]
    expected: Seconds  # on an H200 with a slow host
    timeout: Seconds


def _part(expected: Seconds, measure: Callable[..., dict[str, float]]) -> Part:
    return Part(measure, expected, 60.0 + 2 * expected)


_PARTS = {  # 496 s in all
    "plain_350m": _part(52, partial(single.measure, "plain_350m", GPT_350M)),
    "plain_350m_compiled": _part(
        46, partial(single.measure, "plain_350m_compiled", GPT_350M, compiled=True, num_rounds=2)
    ),
    "plain_30m": _part(21, partial(single.measure, "plain_30m", GPT_30M, num_rounds=5)),
    "pipeline_1stage": _part(34, partial(single.measure_pipeline, GPT_350M)),
    "gloo_30m": _part(34, partial(replicas.measure_gloo_trainer, GPT_30M)),
    "gloo_350m": _part(38, partial(replicas.measure_gloo_loop, GPT_350M)),
    "nccl_350m": _part(50, partial(replicas.measure_nccl, GPT_350M)),
    "nccl_copies_350m": _part(27, partial(replicas.measure_copies, GPT_350M)),
    "nccl_recover": _part(12, partial(survivors.measure, GPT_30M)),
    "nccl_pipeline": _part(36, partial(stages.measure, GPT_350M)),
    "overlap": _part(38, partial(averaging.measure_overlap, GPT_350M)),
    "host_syncs": _part(13, partial(syncs.measure, GPT_350M)),
    "hook_us": _part(8, averaging.measure_hooks),
    "step1_peak": _part(6, partial(averaging.measure_first_step, GPT_125M)),
    "predict_125m": _part(20, partial(predictions.measure, "125m", GPT_125M)),
    "predict_350m": _part(25, partial(predictions.measure, "350m", GPT_350M)),
    "predict_1300m": _part(36, partial(predictions.measure, "1300m", GPT_1300M)),
}
_WORST = {"memory_error": "memory_ratio_", "profile_error": "profile_ratio_"}
_NUM_RATIOS = 4  # of each kind in a part that predicts
_PREDICTIONS = [name for name in _PARTS if name.startswith("predict_")]


class Figure(msgspec.Struct, frozen=True):
    name: str
    value: float


def run(*, quick: bool, console: Console) -> Result:
    if not torch.cuda.device_count():
        raise UserError(
            "bench gpu: this machine has no CUDA device that torch can use",
            expected="one NVIDIA GPU with 80 GB or more, and a torch that was built for CUDA",
            fix="run it on a machine with a GPU; `polyrhythm doctor` says what torch finds here",
        )
    show, found, reasons = progress_printer(console), dict[str, float](), dict[str, str]()
    num_predicted = 1 if quick else len(_PREDICTIONS)  # a smoke test has one model
    for name, part in _PARTS.items():
        if name in _PREDICTIONS[num_predicted:]:
            continue
        show(f"measuring {name}, about {part.expected:g} s")
        start, num_before = time.monotonic(), len(found)
        try:
            measure = partial(part.measure, quick=quick)
            found |= in_child(name, measure, dict[str, float], part.timeout)
        except RuntimeError as error:
            reasons[name] = str(error)
        found[f"seconds_{name}"] = time.monotonic() - start
        new = {key: f"{found[key]:.4g}" for key in list(found)[num_before:]}
        print_line(console, f"{name}: {new} {reasons.get(name, '')}")  # if the rest is cut off
    for name, prefix in _WORST.items():
        found[name] = predictions.worst_error(found, prefix, _NUM_RATIOS * num_predicted)
    rows = [Figure(name, value) for name, value in found.items()]
    columns: dict[str, Callable[[Figure], str]] = {
        "figure": lambda row: row.name,
        "value": lambda row: f"{row.value:.4g}",
    }
    print_rows(console, rows, columns)
    ratios = {bar.name: found.get(bar.name, math.nan) for bar in BARS}
    print_bars(console, BARS, ratios, quick=quick)
    for reason in reasons.values():
        print_line(console, reason)
    figures = {name: value for name, value in found.items() if name not in ratios}
    return Result(bench="gpu", ratios=ratios, figures=figures, rows=rows)
