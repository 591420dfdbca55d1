"""How a model is split into stages: between layers of a Sequential, along a layer list, or not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn

from polyrhythm.errors import PlanError
from polyrhythm.run.pipeline.partition import (
    ModelPartition,
    as_partition,
    split_layers,
    split_sequential,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSplit:
    """Arguments of `Pipeline.from_layers`; without `layers`, a Sequential is split by layer."""

    layers: str | None = None
    prologue: Sequence[str] = ()
    every: Sequence[str] = ()
    epilogue: Sequence[str] = ()

    def num_layers(self, model: nn.Module) -> int:
        """Return the number of layers to split between; 1 for a model that cannot be split."""
        if self.layers is not None:
            layer_list = dict(model.named_modules(remove_duplicate=False)).get(self.layers)
            # `extract_stage` raises if there is no such list.
            return len(layer_list._modules) if layer_list is not None else 1
        return len(model._modules) if isinstance(model, nn.Sequential) else 1

    def check(self, model: nn.Module, layers_per_stage: Sequence[int]) -> None:
        """Reject a stage without parameters; raises PlanError in all processes."""
        if self.layers is not None or not isinstance(model, nn.Sequential):
            return
        layers, bounds = list(model._modules.values()), [0, *accumulate(layers_per_stage)]
        for stage, (first, end) in enumerate(pairwise(bounds)):
            held = [layer for layer in layers[first:end] if layer is not None]
            if not any(True for layer in held for _ in layer.parameters()):
                kinds = ", ".join(type(layer).__name__ for layer in held)
                raise PlanError(
                    f"stage {stage} has no parameters: {kinds}",
                    expected="at least one parameter in every stage",
                    fix="use fewer stages, or another layers_per_stage in the plan",
                )

    def extract_stage(
        self, model: nn.Module, stage: int, layers_per_stage: Sequence[int]
    ) -> ModelPartition:
        """Return one stage of the model; parameters keep their names."""
        num_stages = len(layers_per_stage)
        if self.layers is not None:  # also for one stage, for the same arguments of the loss
            return split_layers(
                model,
                stage=stage,
                num_stages=num_stages,
                layers=self.layers,
                prologue=self.prologue,
                every=self.every,
                epilogue=self.epilogue,
                layers_per_stage=layers_per_stage,
            )
        if num_stages == 1:
            return as_partition(model, 0, 1)
        if isinstance(model, nn.Sequential):
            return split_sequential(
                model, stage=stage, num_stages=num_stages, layers_per_stage=layers_per_stage
            )
        raise PlanError(
            f"a {type(model).__name__} for a plan of {num_stages} stages",
            expected="a model that can be split: an nn.Sequential, or one with a list of layers",
            fix='name the list, LayerSplit(layers="model.layers"), or use a plan of one stage',
        )


def build_model(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return the whole model; a function is called with the same seed in every process."""
    if isinstance(model, nn.Module):
        return model
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = model()
    if not isinstance(made, nn.Module):
        raise PlanError(
            f"the model function returned a {type(made).__name__}",
            expected="an nn.Module",
            fix="return the model from the function",
        )
    return made
