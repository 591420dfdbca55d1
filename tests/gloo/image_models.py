"""DenseNet-201 and Inception-v4 in torch, as chains of layers, to compare with counted profiles."""

import torch
from torch import Tensor, nn
from torch.nn import functional

Size = int | tuple[int, int]


class DenseLayer(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, 128, 1, bias=False),
            nn.BatchNorm2d(128),
            nn.ReLU(inplace=True),
            nn.Conv2d(128, 32, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.inner(x)), 1)


def densenet201() -> nn.Sequential:
    stem = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    )
    layers: list[nn.Module] = [stem]
    channels = 64
    for index, num_layers in enumerate((6, 12, 48, 32)):
        if index:
            half = nn.Conv2d(channels, channels // 2, 1, bias=False)
            norm = nn.BatchNorm2d(channels)
            layers.append(nn.Sequential(norm, nn.ReLU(inplace=True), half, nn.AvgPool2d(2)))
            channels //= 2
        for _ in range(num_layers):
            layers.append(DenseLayer(channels))
            channels += 32
    head = nn.Sequential(
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 1000),
    )
    return nn.Sequential(*layers, head)


def _unit(inputs: int, outputs: int, kernel: Size, stride: int = 1, padding: Size = 0) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def _row(inputs: int, outputs: int, width: int = 7) -> nn.Module:
    return _unit(inputs, outputs, (1, width), padding=(0, width // 2))


def _column(inputs: int, outputs: int, height: int = 7) -> nn.Module:
    return _unit(inputs, outputs, (height, 1), padding=(height // 2, 0))


class Branches(nn.Module):
    """Parallel branches of the same input, concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.parts(x), 1)

    def parts(self, x: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        for branch in self.branches:
            found += branch.parts(x) if isinstance(branch, ForkedBranch) else [branch(x)]
        return found


class ForkedBranch(nn.Module):
    """A branch that splits in two at its end."""

    def __init__(self, stem: nn.Module, *branches: nn.Module) -> None:
        super().__init__()
        self.stem, self.branches = stem, nn.ModuleList(branches)

    def parts(self, x: Tensor) -> list[Tensor]:
        shared = self.stem(x)
        return [end(shared) for end in self.branches]


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False)


def inceptionv4() -> nn.Sequential:
    largest = nn.MaxPool2d(3, 2)
    chain = nn.Sequential
    stem = [
        _unit(3, 32, 3, 2),
        _unit(32, 32, 3),
        _unit(32, 64, 3, padding=1),
        Branches(largest, _unit(64, 96, 3, 2)),
        Branches(
            chain(_unit(160, 64, 1), _unit(64, 96, 3)),
            chain(_unit(160, 64, 1), _row(64, 64), _column(64, 64), _unit(64, 96, 3)),
        ),
        Branches(_unit(192, 192, 3, 2), largest),
    ]
    a = [
        Branches(
            _unit(384, 96, 1),
            chain(_unit(384, 64, 1), _unit(64, 96, 3, padding=1)),
            chain(_unit(384, 64, 1), _unit(64, 96, 3, padding=1), _unit(96, 96, 3, padding=1)),
            chain(Mean(), _unit(384, 96, 1)),
        )
        for _ in range(4)
    ]
    reduction_a = Branches(
        _unit(384, 384, 3, 2),
        chain(_unit(384, 192, 1), _unit(192, 224, 3, padding=1), _unit(224, 256, 3, 2)),
        largest,
    )
    b = [
        Branches(
            _unit(1024, 384, 1),
            chain(_unit(1024, 192, 1), _row(192, 224), _column(224, 256)),
            chain(
                _unit(1024, 192, 1),
                _column(192, 192),
                _row(192, 224),
                _column(224, 224),
                _row(224, 256),
            ),
            chain(Mean(), _unit(1024, 128, 1)),
        )
        for _ in range(7)
    ]
    reduction_b = Branches(
        chain(_unit(1024, 192, 1), _unit(192, 192, 3, 2)),
        chain(_unit(1024, 256, 1), _row(256, 256), _column(256, 320), _unit(320, 320, 3, 2)),
        largest,
    )
    c = [
        Branches(
            _unit(1536, 256, 1),
            ForkedBranch(_unit(1536, 384, 1), _row(384, 256, 3), _column(384, 256, 3)),
            ForkedBranch(
                chain(_unit(1536, 384, 1), _column(384, 448, 3), _row(448, 512, 3)),
                _row(512, 256, 3),
                _column(512, 256, 3),
            ),
            chain(Mean(), _unit(1536, 256, 1)),
        )
        for _ in range(3)
    ]
    head = chain(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1536, 1000))
    return nn.Sequential(*stem, *a, reduction_a, *b, reduction_b, *c, head)
