"""Verify a split: all stages in this process, one after the other, against the whole model.

A split that names a module in the wrong place, or that cannot be right since layers share more than
the hidden state, gives other outputs or gradients. Both are compared on one example before training
starts, so no run trains a model other than the one it was given.
"""

from collections.abc import Mapping, Sequence
from math import inf, isnan
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyrhythm.errors import PlanError
from polyrhythm.run.pipeline.find_split import Example, unchanged
from polyrhythm.run.pipeline.loss import logits_of, loss_of
from polyrhythm.run.pipeline.partition import LayerSplit, ModelPartition
from polyrhythm.run.pipeline.stage_modules import (
    first_tensor,
    later_stage_keywords,
    return_whole_output,
    without_cache,
)

_FIX = "name the parts, split=LayerSplit(layers=..., prologue=[...], every=[...], epilogue=[...]), "
_FIX += "or use one stage and several pipelines"
_TOLERANCE = 1e-5  # of the largest value
_NEGLIGIBLE = 1e-6  # some gradients are rounding errors of 0: those of biases of keys


def verify_split(
    model: nn.Module,
    split: LayerSplit,
    layers_per_stage: Sequence[int],
    example: Example,
    labels: Mapping[str, Any] = MappingProxyType({}),
) -> float:
    """Compare output and gradients of all stages with the whole model; return the difference.

    With `labels`, which the last stage is given, the model's own loss is compared, too.

    The difference is relative to the largest value of each tensor. A PlanError says what differs.
    Costs two forwards and two backwards of the whole model on the example, wherever the model is,
    and the memory of one gradient more than a step; needs no other process. In eval mode, since
    stages draw other random numbers. Leaves mode, gradients, buffers and random states as they
    were. A model on the meta device has no values: only its call order is verified.
    """
    args, kwargs = example
    num_stages = len(layers_per_stage)
    with unchanged(model), torch.enable_grad():
        model.eval()
        parts = [split.extract_stage(model, s, layers_per_stage) for s in range(num_stages)]
        torch.manual_seed(0)
        keywords = without_cache(model, {**kwargs, **labels})
        output, gradients = _of_whole(model, args, keywords, has_loss=bool(labels))
        try:
            found, found_gradients = _of_stages(parts, args, kwargs, labels)
        except PlanError:
            raise
        except Exception as error:  # layers that miss what another stage has may raise anything
            raise _difference_error(
                f"a stage raised {type(error).__name__}: {error}", num_stages
            ) from error
        names = {parameter: name for name, parameter in model.named_parameters()}
        return _compare(output, found, gradients, found_gradients, names, num_stages)


def _weight_like(output: Tensor) -> Tensor:
    """Return a gradient of the output in which no two samples or classes are alike."""
    count = torch.arange(output.numel(), device=output.device, dtype=torch.float64)
    return count.sin().reshape(output.shape).to(output.dtype)


def _of_whole(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, has_loss: bool
) -> tuple[Tensor, dict[nn.Parameter, Tensor]]:
    output = _compared(model(*args, **kwargs), has_loss)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return output.detach(), _gradients(output, parameters, _weight_like(output))


def _compared(output: Any, has_loss: bool) -> Tensor:
    """Return the logits, or the first output, and with labels also the loss, as one tensor."""
    if not has_loss:
        return first_tensor(output)
    loss, logits = loss_of(output).nan_to_num().reshape(1), logits_of(output)
    leaves = pytree.tree_leaves(logits)
    found = [x for x in leaves if isinstance(x, Tensor) and x.dim() and x.is_floating_point()]
    return torch.cat([*(x.flatten() for x in found[:1]), loss])


def _gradients(output: Tensor, inputs: Sequence[Tensor], weight: Tensor) -> dict[Any, Tensor]:
    """Differentiate without touching `.grad`; inputs that the output does not use are left out."""
    if not inputs or not output.requires_grad:  # frozen
        return {}
    found = torch.autograd.grad(output, inputs, weight, allow_unused=True)
    return {x: g for x, g in zip(inputs, found, strict=True) if g is not None}


def _of_stages(
    parts: Sequence[ModelPartition],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    labels: Mapping[str, Any],
) -> tuple[Tensor, dict[nn.Parameter, Tensor]]:
    """Run the stages; their gradients are summed where several hold a parameter."""
    if labels:
        return_whole_output(parts[-1].module)
    inputs: list[list[Tensor]] = []
    outputs: list[Tensor] = []
    given, keywords = tuple(args), dict(kwargs)
    for stage, part in enumerate(parts):
        torch.manual_seed(0)
        inputs.append([x for x in given if stage])
        if stage == len(parts) - 1:
            output = _compared(part.module(*given, **keywords, **labels), bool(labels))
        else:
            output = part.module(*given, **keywords)
        outputs.append(output)
        if stage == 0:
            keywords = later_stage_keywords(part.module, args, kwargs)
        given = (output.detach().requires_grad_(),)
    total: dict[nn.Parameter, Tensor] = {}
    weight = _weight_like(outputs[-1])
    for stage, part in reversed(list(enumerate(parts))):
        parameters = [p for p in part.module.parameters() if p.requires_grad]
        found = _gradients(outputs[stage], [*parameters, *inputs[stage]], weight)
        for parameter in parameters:
            if parameter in found:
                previous = total.get(parameter)
                gradient = found[parameter]
                total[parameter] = gradient if previous is None else previous + gradient
        if stage:
            (hidden,) = inputs[stage]
            weight = found.get(hidden, torch.zeros_like(hidden))
    return outputs[-1].detach(), total


def _compare(
    output: Tensor,
    found: Tensor,
    gradients: Mapping[nn.Parameter, Tensor],
    found_gradients: Mapping[nn.Parameter, Tensor],
    names: Mapping[nn.Parameter, str],
    num_stages: int,
) -> float:
    if output.is_meta:
        return 0.0
    worst = _difference(output, found, 0.0)
    if not worst <= _tolerance(output):
        raise _difference_error(
            f"the output differs by {worst:.2g} of its largest value", num_stages
        )
    largest = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
    excesses: dict[str, tuple[float, float]] = {}  # over the tolerance, with the difference
    for parameter, name in names.items():
        if parameter not in gradients and parameter not in found_gradients:
            continue
        zeros = torch.zeros_like(parameter)
        expected, actual = gradients.get(parameter, zeros), found_gradients.get(parameter, zeros)
        difference = _difference(expected, actual, _NEGLIGIBLE * largest)
        if not difference <= _tolerance(parameter):
            difference = inf if isnan(difference) else difference
            excesses[name] = (difference / _tolerance(parameter), difference)
        worst = max(worst, difference)
    if excesses:  # a wrong part also changes the gradients before it, but less than its own
        name = max(excesses, key=excesses.__getitem__)
        raise _difference_error(
            f"the gradient of {name} differs by {excesses[name][1]:.2g} of its largest value",
            num_stages,
        )
    return worst


def _difference(expected: Tensor, found: Tensor, least: float) -> float:
    if expected.shape != found.shape:
        return float("inf")
    if not expected.numel() or torch.equal(expected, found):
        return 0.0
    differences = (expected - found).abs().where(expected != found, 0.0)  # both may be infinite
    largest = float(expected.abs().where(expected.isfinite(), 0.0).max())
    return float(differences.max()) / max(largest, least, 1e-300)


def _tolerance(tensor: Tensor) -> float:
    """Return the largest difference that another order of a sum explains."""
    return max(_TOLERANCE, 4 * torch.finfo(tensor.dtype).eps)


def _difference_error(problem: str, num_stages: int) -> PlanError:
    return PlanError(
        f"the model split into {num_stages} stages is not the whole model: {problem}",
        expected="the same output and gradients on one example",
        fix=_FIX,
    )
