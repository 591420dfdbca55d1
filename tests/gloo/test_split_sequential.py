"""Parts of a model, chained as a pipeline chains them, compute what the whole model computes.

Everything that computes runs in a process of its own: a parent in which autograd has run must not
fork the workers of later tests.
"""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.errors import PlanError
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.pipeline.partition import ModelPartition, linear_wiring, split_sequential


def run_in_process(work: Callable[[], None], folder: Path) -> None:
    def seeded(ctx: DistContext) -> None:
        torch.manual_seed(5)
        work()

    with LocalJob(seeded, 1, output_folder=folder) as job:
        assert job.wait(90), "not done in time"


class Chained:
    """All stages in one process; the graph is cut between them, as it is between processes."""

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
        of_outputs = [[torch.zeros_like(y) for y in outputs] for outputs in self._outputs]
        of_outputs[-1] = [gradient]
        for stage, part in reversed(list(enumerate(self.parts))):
            torch.autograd.backward(self._outputs[stage], of_outputs[stage])
            gradients = [x.grad for x in self._received[stage]]
            for source in part.wiring.sources:
                positions = self.parts[source].wiring.targets[stage]
                for p in range(len(of_outputs[source])) if positions is None else positions:
                    of_outputs[source][p] += gradients.pop(0)
            assert not gradients, "every input came from somewhere"

    def gradients(self) -> dict[str, Tensor]:
        """By name in the whole model; of tied parameters, the sum over the stages."""
        found: dict[str, Tensor] = {}
        for stage, part in enumerate(self.parts):
            keys = {tie.name: tie.key for tie in part.tied}
            assert all(stage in tie.stages for tie in part.tied)
            for name, parameter in part.module.named_parameters():
                key = keys.get(name, name)
                assert key not in found or name in keys, f"{name} is held twice"
                if parameter.grad is not None:
                    found[key] = found.get(key, 0) + parameter.grad
        return found


def compare(
    model: nn.Module,
    split: Callable[..., ModelPartition],
    *args: Tensor,
    num_stages: int,
    **kwargs: Tensor,
) -> Chained:
    """Every stage splits its own copy of the model, as processes do."""
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
    ours = chained.gradients()
    theirs = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys()
    for name, theirs_one in theirs.items():
        worst = (ours[name] - theirs_one).abs().max() / max(1.0, theirs_one.abs().max())
        assert worst < 1e-6, f"gradient of {name} is off by {worst}"  # the order of sums
    return chained


class Join(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, 3, padding=1)

    def forward(self, x: Tensor, *skipped: Tensor) -> Tensor:
        return self.conv(torch.cat([x, *skipped], dim=1)).relu()


class UNet(nn.Module):
    """Written plainly; `layers` holds the same modules."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, 2, 1), nn.Conv2d(6, 8, 3, 2, 1)]
        self.layers = nn.Sequential(
            sizes[0],
            nn.Sequential(nn.ReLU(), sizes[1]),
            nn.Sequential(nn.ReLU(), sizes[2]),
            nn.Conv2d(8, 8, 1),
            nn.Upsample(scale_factor=2),
            Join(8 + 6, 6),
            nn.Upsample(scale_factor=2),
            Join(6 + 4, 4),
            Join(4 + 4, 5),
        )

    def forward(self, image: Tensor) -> Tensor:
        down0, down1, down2, middle, up1, join1, up0, join0, out = self.layers
        fine = down0(image)
        coarse = down1(fine)
        x = join1(up1(middle(down2(coarse))), coarse)
        return out(join0(up0(x), fine), fine)


UNET_SKIPS = {5: 1, "7": "0", 8: [0]}


@pytest.mark.timeout(60)
def test_unet_split_matches_whole_model(tmp_path: Path) -> None:
    def work() -> None:
        model = UNet()
        for num_stages, per_stage in [*((n, None) for n in range(1, 10)), (3, [1, 6, 2])]:
            split = partial(split_unet, layers_per_stage=per_stage)
            image = torch.randn(1 + num_stages % 3, 3, 8, 8)
            chained = compare(model, split, image, num_stages=num_stages)
        assert [len(part.module._modules) for part in chained.parts] == per_stage

    run_in_process(work, tmp_path)


def split_unet(unet: UNet, **how: Any) -> ModelPartition:
    part = split_sequential(unet.layers, skips=UNET_SKIPS, **how)
    # compared by name with the model around the Sequential
    names = [(f"layers.{name}", parameter) for name, parameter in part.module.named_parameters()]
    part.module.named_parameters = lambda: names
    return part


def test_linear_wiring_connects_neighbouring_stages() -> None:
    assert [linear_wiring(s, 3).sources for s in range(3)] == [(), (0,), (1,)]
    assert [linear_wiring(s, 3).targets for s in range(3)] == [{1: None}, {2: None}, {}]


def test_skip_is_sent_once_and_directly() -> None:
    layers = nn.Sequential(*(nn.Identity() for _ in range(9)))
    wirings = [
        split_sequential(layers, stage=s, num_stages=4, skips=UNET_SKIPS).wiring for s in range(4)
    ]  # layers 0-2, 3-4, 5-6, 7-8
    assert [wiring.sources for wiring in wirings] == [(), (0,), (0, 1), (0, 2)]
    # stage 0 returns the outputs of layers 0, 1 and 2
    assert wirings[0].targets == {1: (2,), 2: (1,), 3: (0,)}
    assert [wiring.targets for wiring in wirings[1:]] == [{2: (0,)}, {3: (0,)}, {}]


class Pair(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x, x * 2 if y is None else y


class Sum(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


@pytest.mark.timeout(60)
def test_sequential_with_repeated_tuple_and_in_place_layers(tmp_path: Path) -> None:
    def work() -> None:
        shared = nn.Linear(4, 4)
        layers = [shared, nn.ReLU(inplace=True), Pair(), Sum(), shared, nn.Tanh(), nn.Linear(4, 4)]
        model = nn.Sequential(*layers)
        model[6].weight = shared.weight
        for num_stages in range(1, 8):
            chained = compare(model, split_sequential, torch.randn(3, 4), num_stages=num_stages)
        ties = [(tie.key, tie.stages, tie.name) for tie in chained.parts[6].tied]
        assert ties == [("0.weight", (0, 4, 6), "6.weight")]
        keys = [[tie.key for tie in part.tied] for part in chained.parts]
        assert keys[0] == keys[4] == ["0.weight", "0.bias"]
        assert keys[1] == []
        together = split_sequential(model, stage=1, num_stages=2, layers_per_stage=[3, 4])
        assert (
            together.module.get_submodule("4").weight is together.module.get_submodule("6").weight
        )
        # the first stage takes what the caller gives
        first = split_sequential(nn.Sequential(Pair(), Sum()), stage=0, num_stages=2).module
        assert [x.item() for x in first(torch.ones(()), torch.zeros(()))] == [1, 0]
        check_non_tensor_outputs_are_refused()

    run_in_process(work, tmp_path)


class Boxed(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return {"x": x} if self.kind is dict else (x,)


def check_non_tensor_outputs_are_refused() -> None:
    one = torch.ones(())
    skipping = nn.Sequential(Pair(), Sum(), Pair())
    part = split_sequential(skipping, stage=0, num_stages=3, skips={2: 0})
    with pytest.raises(PlanError, match="layer 0 returned a tuple, which another stage needs"):
        part.module(one)
    for kind in (dict, tuple):  # a tuple of one would arrive as a tensor
        boxed = nn.Sequential(Boxed(kind), Boxed(kind))
        with pytest.raises(PlanError, match=f"layer 0 returned a {kind.__name__}"):
            split_sequential(boxed, stage=0, num_stages=2).module(one)
        assert isinstance(split_sequential(boxed, stage=1, num_stages=2).module(one), kind)


SEQUENTIAL_ERRORS = [
    ({"num_stages": 4}, "4 stages for 3 layers", "at most 3 stages"),
    ({"layers_per_stage": [1, 1]}, "2 layers in 2 stages", "one number per stage"),
    ({"layers_per_stage": [1, 1, 1]}, "3 layers in 3 stages", "one number per stage"),
    ({"layers_per_stage": [0, 3]}, r"\[0, 3\]", "fewer stages"),
    ({"skips": {1: 2}}, "2 has no output when layer 1 runs", r"swap the two: skips=\{2: 1\}"),
    ({"skips": {1: 1}}, "1 has no output when layer 1 runs", "a layer below 1"),
    ({"skips": {2: 7}}, "skips name layer 7", "one of 'first', 'second', 'third'"),
    ({"skips": {2: "frist"}}, "skips name layer 'frist'", "did you mean 'first'"),
    ({"skips": {2: 0, "third": 1}}, "layer 2 twice", r"skips=\{2: \["),
    (
        {"skips": {2: 0}, "inplace": True},
        "layer 1 works in place on",
        "inplace=False",
    ),
]


@pytest.mark.parametrize(("given", "wrong", "fix"), SEQUENTIAL_ERRORS)
def test_invalid_sequential_splits_are_refused(given: dict[str, Any], wrong: str, fix: str) -> None:
    second = nn.ReLU(inplace=given.pop("inplace", False))
    layers = {"first": nn.Identity(), "second": nn.Sequential(second), "third": nn.Identity()}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    with pytest.raises(PlanError) as caught:
        split_sequential(model, **{"stage": 0, "num_stages": 2, **given})
    assert caught.match(wrong)
    assert caught.match(f"fix: .*{fix}")
