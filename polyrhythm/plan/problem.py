"""The planning problem in numbers: devices, links, layers and the job."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from polyrhythm.cost.memory import StageMemory, max_in_flight
from polyrhythm.cost.step import StageWork, StepSpec
from polyrhythm.cost.sync import Links, Sync
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import Layer, ModelProfile
from polyrhythm.describe.speed import fit_speeds
from polyrhythm.errors import PlanError
from polyrhythm.plan.options import TrainingJob
from polyrhythm.types import Bytes

_MAX_LEVELS = 64  # bandwidths considered for islands


@dataclass(frozen=True, kw_only=True)
class Problem:
    cluster: Cluster
    profile: ModelProfile
    job: TrainingJob
    _stages: dict[tuple[tuple[int, ...], int], tuple[StageWork, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _layers: dict[int, tuple[Layer, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _least: dict[int, NDArray[np.float64]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "cluster", fit_speeds(self.cluster, self.profile))
        if self.job.sync not in set(Sync):
            raise PlanError(
                f"sync={self.job.sync!r}",
                expected=f"one of {', '.join(Sync)}",
                fix="use all_reduce, decoupled or groups",
            )

    @cached_property
    def links(self) -> Links:
        return Links.of(self.cluster)

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        return tuple(device.speed for device in self.cluster.devices)

    @cached_property
    def index(self) -> dict[str, int]:
        """The index of each device by its name."""
        return {device.name: number for number, device in enumerate(self.cluster.devices)}

    @cached_property
    def islands(self) -> tuple[NDArray[np.int64], ...]:
        """Per bandwidth, from the lowest: each device's island (component) without slower links."""
        both = self.links.both_ways
        levels = np.unique(both[both > 0])
        kept = np.unique(np.linspace(0, len(levels) - 1, _MAX_LEVELS).round().astype(int))
        found: list[NDArray[np.int64]] = []
        for level in levels[kept] if len(levels) else []:
            number, island = connected_components(csr_array(both > level), directed=False)
            if number > (found[-1].max() + 1 if found else 1):
                found.append(island.astype(np.int64))
        return tuple(found)

    @property
    def num_devices(self) -> int:
        return len(self.cluster.devices)

    @property
    def num_layers(self) -> int:
        return len(self.profile.layers)

    def limit(self, device: int) -> Bytes | None:
        """Return the memory of a device that a plan may use."""
        memory = self.cluster.devices[device].memory
        return None if memory is None else int(memory * (1 - self.job.memory_reserve))

    @cached_property
    def memory_limits(self) -> NDArray[np.float64]:
        """The memory limits of all devices; inf without a limit."""
        limits = [self.limit(device) for device in range(self.num_devices)]
        return np.array([np.inf if limit is None else limit for limit in limits], np.float64)

    def layers(self, microbatch_size: int) -> tuple[Layer, ...]:
        """Return the model's layers for this micro-batch size."""
        if microbatch_size not in self._layers:
            self._layers[microbatch_size] = self.profile.at(microbatch_size).layers
        return self._layers[microbatch_size]

    def stages(
        self, layers_per_stage: Sequence[int], microbatch_size: int
    ) -> tuple[StageWork, ...]:
        key = tuple(layers_per_stage), microbatch_size
        if key not in self._stages:
            layers = self.layers(microbatch_size)
            ends = list(accumulate(layers_per_stage, initial=0))
            self._stages[key] = tuple(
                StageWork(
                    forward=sum(layer.forward for layer in layers[a:b]),
                    backward=sum(layer.backward for layer in layers[a:b]),
                    activation_bytes=layers[b - 1].activation_bytes,
                    gradient_bytes=self.job.gradient_bytes
                    * sum(layer.parameter_bytes for layer in layers[a:b]),
                    parameter_bytes=sum(layer.parameter_bytes for layer in layers[a:b]),
                )
                for a, b in pairwise(ends)
            )
        return self._stages[key]

    def step(self, layers_per_stage: Sequence[int], microbatch_size: int, sync: str) -> StepSpec:
        """Return a step without its replicas."""
        return StepSpec(
            replicas=(),
            stages=self.stages(layers_per_stage, microbatch_size),
            speeds=self.speeds,
            links=self.links,
            sync=Sync(sync),
        )

    def memory(self, layers: range, microbatch_size: int) -> StageMemory:
        """Return the memory of consecutive layers on one device.

        A micro-batch in flight also holds a message from the previous stage and one to it.
        """
        table = self.layers(microbatch_size)
        inside = table[layers.start : layers.stop]
        before = table[layers.start - 1].activation_bytes if layers.start else 0
        weights = sum(layer.parameter_bytes for layer in inside)
        return StageMemory(
            weights=weights,
            gradients=int(weights * self.job.gradient_bytes),
            optimizer=int(weights * self.job.optimizer_bytes),
            activation=sum(layer.stored_bytes for layer in inside) + 2 * before,
            message=0,
        )

    def least_memory(self, microbatch_size: int) -> NDArray[np.float64]:
        """Return [a, b]: the memory of layers a to b with one micro-batch; inf if b <= a."""
        if microbatch_size not in self._least:
            layers = self.layers(microbatch_size)
            weights = np.cumsum([0, *(layer.parameter_bytes for layer in layers)])
            stored = np.cumsum([0, *(layer.stored_bytes for layer in layers)])
            before = np.array([0, *(2 * layer.activation_bytes for layer in layers)])
            per_weight = 1 + self.job.gradient_bytes + self.job.optimizer_bytes
            total = per_weight * (weights[None, :] - weights[:, None]) + before[:, None]
            total = total + (stored[None, :] - stored[:, None])
            order = np.arange(len(layers) + 1)
            self._least[microbatch_size] = np.where(order[:, None] < order, total, np.inf)
        return self._least[microbatch_size]

    def max_in_flight(
        self, device: int, layers: range, microbatch_size: int, num_microbatches: int
    ) -> int:
        """Return how many micro-batches fit; 0 if not even one."""
        limit, memory = self.limit(device), self.memory(layers, microbatch_size)
        if limit is None:
            return num_microbatches
        return max_in_flight(memory, limit, num_microbatches, window=0)
