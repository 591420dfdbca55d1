"""One architecture: its split is found, verified, and compared with the whole model.

The comparison shares no code with the verification: each stage splits a copy of its own, in train
mode, on another batch, with a padded text and another length. So it also tells whether what holds
for the verified example holds for the next batch.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import polyrhythm as pr
from benchmarks.architectures import tiny_models
from polyrhythm.errors import PlanError
from polyrhythm.run.pipeline.stage_modules import later_stage_keywords
from polyrhythm.run.pipeline.verify_split import verify_split

TOLERANCE = 1e-5  # of the largest value of each tensor; single precision
_NEGLIGIBLE = 1e-5  # of the largest gradient: those of some biases are rounding errors of 0


@dataclass(frozen=True, slots=True)
class Compared:
    """How the stages of an architecture compare with the whole model."""

    name: str
    has_plan: bool
    result: str  # equal, refused, wrong (and not refused), or failed: it does not run
    difference: float = 0.0
    detail: str = ""


def compare(name: str, *, has_plan: bool) -> Compared:
    torch.manual_seed(1)
    model = tiny_models.build(name)
    example = (), tiny_models.batch(model, seed=2)
    whole = copy.deepcopy(model)
    inputs = tiny_models.batch(model, seed=3, length=tiny_models.LENGTH + 3, padded=True)
    expected = _logits(whole(**inputs, **_no_cache(whole)))  # transformers itself may fail
    try:
        split = pr.LayerSplit().found(model, example)
        sizes = _sizes(split, pr.LayerSplit().num_layers(model))
        verify_split(model, split, sizes, example)
    except PlanError as error:
        return Compared(name, has_plan, "refused", detail=error.wrong)
    weight = torch.randn_like(expected)
    expected.backward(weight)  # type: ignore[no-untyped-call]
    found, gradients = _run_stages(model, split, sizes, inputs, weight)
    reference = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in reference.values())
    differences = {
        name: _difference(reference.get(name), gradients.get(name), _NEGLIGIBLE * largest)
        for name in reference.keys() | gradients.keys()
    }
    differences["the output"] = _difference(expected, found, 0.0)
    worst = max(differences, key=differences.__getitem__)
    result = "equal" if differences[worst] <= TOLERANCE else "wrong"
    return Compared(name, has_plan, result, differences[worst], f"{_text(split, sizes)}: {worst}")


def _sizes(split: pr.LayerSplit, num_layers: int) -> list[int]:
    """Return two stages; not in the middle if layers there belong together."""
    bounds = sorted(range(1, num_layers), key=lambda bound: abs(bound - num_layers // 2))
    for bound in bounds:
        if not any(first < bound <= last for first, last in split.together):
            return [bound, num_layers - bound]
    return [bounds[0], num_layers - bounds[0]]  # which is refused


def _no_cache(model: Any) -> dict[str, bool]:
    return {"use_cache": False} if hasattr(model.config, "use_cache") else {}


def _logits(output: Any) -> Tensor:
    logits: Tensor = output.logits
    return logits


def _run_stages(
    model: nn.Module,
    split: pr.LayerSplit,
    sizes: list[int],
    inputs: dict[str, Tensor],
    weight: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output, and gradients by name in the whole model, summed where tied."""
    parts = [split.extract_stage(copy.deepcopy(model), stage, sizes) for stage in range(2)]
    sent = parts[0].module(**inputs)
    received = sent.detach().requires_grad_()
    output = parts[1].module(received, **later_stage_keywords(parts[0].module, (), inputs))
    output.backward(weight)
    sent.backward(received.grad)
    gradients = dict[str, Tensor]()
    for part in parts:
        keys = {tie.name: tie.key for tie in part.tied}
        for name, parameter in part.module.named_parameters():
            if parameter.grad is not None:
                key = keys.get(name, name)
                gradients[key] = gradients.get(key, torch.zeros(())) + parameter.grad
    return output, gradients


def _difference(expected: Tensor | None, found: Tensor | None, least: float) -> float:
    """Return the difference relative to the largest value; a missing gradient is 0."""
    if expected is None or found is None:
        other = expected if found is None else found
        return 0.0 if other is None or not other.any() else float("inf")
    if expected.shape != found.shape or found.isnan().any():
        return float("inf")
    difference = float((expected - found).abs().max())
    return difference / max(float(expected.abs().max()), least, 1e-30)


def _text(split: pr.LayerSplit, sizes: list[int]) -> str:
    every = f", {' '.join(split.every)} on both" if split.every else ""
    return f"{split.layers} {sizes[0]} + {sizes[1]}{every}"
