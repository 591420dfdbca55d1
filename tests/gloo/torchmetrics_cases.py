"""Metrics of torchmetrics whose states are merged in different ways."""

from typing import Any

import torch
import torchmetrics
from torch import Tensor


class Above(torchmetrics.Metric):
    """Counts, and keeps a list, which grows with the number of updates."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("above", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("sizes", [], dist_reduce_fx="cat")

    def update(self, output: Tensor, target: Tensor) -> None:
        self.above += (output > target).sum()
        self.sizes.append(torch.tensor([target.numel()]))

    def compute(self) -> Tensor:
        return self.above / torch.cat(self.sizes).sum()


class Wrapped(torchmetrics.Metric):
    """Has no state itself, and a metric inside whose state is a mean over updates."""

    class Mean(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")

        def update(self, output: Tensor, target: Tensor) -> None:
            count = self._update_count  # of this update, too
            self.mean += (output.mean() - self.mean) / count

        def compute(self) -> Tensor:
            return self.mean

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Mean()

    def update(self, output: Tensor, target: Tensor) -> None:
        self.inner.update(output, target)

    def compute(self) -> Tensor:
        return self.inner.compute()


class Flat(torchmetrics.Metric):
    """Passes all outputs as one column to a metric whose states are stacked, not summed."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def update(self, output: Tensor, target: Tensor) -> None:
        self.inner.update(output.flatten(), target.flatten())

    def compute(self) -> Tensor:
        return self.inner.compute()


def cases() -> dict[str, torchmetrics.Metric]:
    return {
        "above": Above(),
        "mse": torchmetrics.MeanSquaredError(),
        "mean": Wrapped(),
        "pearson": Flat(torchmetrics.PearsonCorrCoef(num_outputs=1)),
    }


def collection() -> torchmetrics.MetricCollection:
    return torchmetrics.MetricCollection([Above()])
