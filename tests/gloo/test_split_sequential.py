"""The stages of a Sequential, chained as in a pipeline, compute what the whole model computes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.errors import PlanError
from polyrhythm.run.pipeline.partition import ModelPartition, linear_wiring, split_sequential
from tests.gloo.chained_stages import compare, run_in_process


class Join(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, 3, padding=1)

    def forward(self, x: Tensor, *skipped: Tensor) -> Tensor:
        return self.conv(torch.cat([x, *skipped], dim=1)).relu()


class UNet(nn.Module):
    """A U-Net whose forward is written by hand; `layers` has the same modules."""

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
    # `compare` uses the names of the model around the Sequential.
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
        # The first stage passes all arguments of the caller.
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
    ({"skips": {1: 2}}, "2 is not before layer 1", r"swap the two: skips=\{2: 1\}"),
    ({"skips": {1: 1}}, "1 is not before layer 1", "a layer below 1"),
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
