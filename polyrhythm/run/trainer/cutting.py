"""How a model is cut into stages: between layers of a Sequential, along a list, or not at all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from polyrhythm.errors import PlanError
from polyrhythm.run.pipeline.split import Part, split_layers, split_sequential
from polyrhythm.run.pipeline.standing import whole_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """As `Pipeline.from_layers` takes it; without `layers`, a Sequential is cut between its own."""

    layers: str | None = None
    prologue: Sequence[str] = ()
    every: Sequence[str] = ()
    epilogue: Sequence[str] = ()

    def num_layers(self, model: nn.Module) -> int:
        """How many parts there are to make stages of; one for a model that cannot be cut."""
        if self.layers is not None:
            cut_list = dict(model.named_modules(remove_duplicate=False)).get(self.layers)
            return len(cut_list._modules) if cut_list is not None else 1  # told when it is cut
        return len(model._modules) if isinstance(model, nn.Sequential) else 1

    def part(self, model: nn.Module, stage: int, layers_per_stage: Sequence[int]) -> Part:
        """One stage's share of the model, which keeps its names."""
        num_stages = len(layers_per_stage)
        if num_stages == 1:
            return whole_of(model, 0, 1)
        if self.layers is not None:
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
        if isinstance(model, nn.Sequential):
            return split_sequential(
                model, stage=stage, num_stages=num_stages, layers_per_stage=layers_per_stage
            )
        raise PlanError(
            f"a {type(model).__name__} for a plan of {num_stages} stages",
            expected="a model that can be cut: an nn.Sequential, or one with a list of layers",
            fix='name the list, Trainer(..., layers="model.layers"), or use a plan of one stage',
        )


def build(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """The whole model; one that is given as a function gets the same weights in every process."""
    if isinstance(model, nn.Module):
        return model
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = model()
    if not isinstance(made, nn.Module):
        raise PlanError(
            f"the function that makes the model returned a {type(made).__name__}",
            expected="an nn.Module",
            fix="return the model from it",
        )
    return made
