"""All stages of a model in one process, compared with the whole model.

Everything that computes runs in a process of its own: a parent in which autograd has run must not
fork the workers of later tests.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.pipeline.partition import ModelPartition


def run_in_process(work: Callable[[], None], folder: Path) -> None:
    def seeded(ctx: DistContext) -> None:
        torch.manual_seed(5)
        work()

    with LocalJob(seeded, 1, output_folder=folder) as job:
        assert job.wait(90), "not done in time"


class Chained:
    """All stages in one process; the graph is detached between them, as between processes."""

    def __init__(self, parts: list[ModelPartition]) -> None:
        self.parts = parts
        self.messages: dict[tuple[int, int], list[Tensor]] = {}
        self._received: list[list[Tensor]] = []
        self._outputs: list[tuple[Tensor, ...]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self._received, self._outputs = [], []
        for stage, part in enumerate(self.parts):
            received = [m for s in part.wiring.sources for m in self.messages[s, stage]]
            received = [m.detach().requires_grad_() for m in received]
            returned = part.module(*(received if stage else args), **kwargs)
            outputs = (returned,) if isinstance(returned, Tensor) else tuple(returned)
            for target, positions in part.wiring.targets.items():
                positions = range(len(outputs)) if positions is None else positions
                self.messages[stage, target] = [outputs[p] for p in positions]
            self._received.append(received)
            self._outputs.append(outputs)
        return returned

    def backward(self, gradient: Tensor) -> None:
        output_gradients = [[torch.zeros_like(y) for y in outputs] for outputs in self._outputs]
        output_gradients[-1] = [gradient]
        for stage, part in reversed(list(enumerate(self.parts))):
            torch.autograd.backward(self._outputs[stage], output_gradients[stage])
            gradients = [x.grad for x in self._received[stage]]
            for source in part.wiring.sources:
                positions = self.parts[source].wiring.targets[stage]
                for p in range(len(output_gradients[source])) if positions is None else positions:
                    output_gradients[source][p] += gradients.pop(0)
            assert not gradients, "an input has no source"

    def gradients(self) -> dict[str, Tensor]:
        """Return gradients by name in the whole model, summed over stages if tied."""
        gradients: dict[str, Tensor] = {}
        for stage, part in enumerate(self.parts):
            keys = {tie.name: tie.key for tie in part.tied}
            assert all(stage in tie.stages for tie in part.tied)
            for name, parameter in part.module.named_parameters():
                key = keys.get(name, name)
                assert key not in gradients or name in keys, f"{name} is held twice"
                if parameter.grad is not None:
                    gradients[key] = gradients.get(key, 0) + parameter.grad
        return gradients


def compare(
    model: nn.Module,
    split: Callable[..., ModelPartition],
    *args: Tensor,
    num_stages: int,
    **kwargs: Tensor,
) -> Chained:
    """Compare the chained stages with the model; every stage splits its own copy of it."""
    whole = copy.deepcopy(model)
    expected = whole(*args, **kwargs)
    expected = expected if isinstance(expected, Tensor) else expected.logits
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    chained = Chained(
        [split(copy.deepcopy(model), stage=s, num_stages=num_stages) for s in range(num_stages)]
    )
    output = chained.forward(*args, **kwargs)
    assert torch.equal(output, expected), f"{num_stages} stages: {(output - expected).abs().max()}"
    chained.backward(gradient)
    actual = chained.gradients()
    gradients = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    assert actual.keys() == gradients.keys()
    for name, reference in gradients.items():
        worst = (actual[name] - reference).abs().max() / max(1.0, reference.abs().max())
        assert worst < 1e-6, f"gradient of {name} is off by {worst}"  # sums differ in order
    return chained
