"""The planning problem in numbers: devices, links, layers and the job."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from polyrhythm.cost.memory import (
    StageMemory,
    max_in_flight,
    peak_temporary,
    recomputed_activations,
)
from polyrhythm.cost.step import StageWork, StepSpec, recomputing
from polyrhythm.cost.sync import Links, Sync
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import Layer, ModelProfile, recompute_blocks, recompute_bytes
from polyrhythm.describe.speed import fit_speeds
from polyrhythm.errors import PlanError
from polyrhythm.plan.options import TrainingJob
from polyrhythm.types import Bytes

_MAX_LEVELS = 64  # bandwidths considered for islands
_COPIES_OF_TWO = 0.5  # of two replicas: each copies half of the weights; the states are one whole


@dataclass(frozen=True, kw_only=True)
class Problem:
    cluster: Cluster
    profile: ModelProfile
    job: TrainingJob
    _stages: dict[tuple[tuple[int, ...], int, tuple[bool, ...]], tuple[StageWork, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _layers: dict[int, tuple[Layer, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _least: dict[tuple[int, bool, float], NDArray[np.float64]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    _kept: dict[int, list[Bytes]] = field(
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
        self, layers_per_stage: Sequence[int], microbatch_size: int, recompute: Sequence[bool] = ()
    ) -> tuple[StageWork, ...]:
        """Return the work of each stage; `recompute` is that of a plan."""
        key = tuple(layers_per_stage), microbatch_size, tuple(recompute)
        if key not in self._stages:
            layers = self.layers(microbatch_size)
            ends = list(accumulate(layers_per_stage, initial=0))
            plain = [
                StageWork(
                    forward=sum(layer.forward for layer in layers[a:b]),
                    backward=sum(layer.backward for layer in layers[a:b]),
                    activation_bytes=layers[b - 1].activation_bytes,
                    gradient_bytes=self.job.gradient_bytes
                    * sum(layer.parameter_bytes for layer in layers[a:b]),
                    parameter_bytes=sum(layer.parameter_bytes for layer in layers[a:b]),
                )
                for a, b in pairwise(ends)
            ]
            flags = recompute or (False,) * len(plain)
            self._stages[key] = tuple(
                recomputing(stage) if recomputes else stage
                for stage, recomputes in zip(plain, flags, strict=True)
            )
        return self._stages[key]

    def step(
        self,
        layers_per_stage: Sequence[int],
        microbatch_size: int,
        sync: str,
        recompute: Sequence[bool] = (),
    ) -> StepSpec:
        """Return a step without its replicas."""
        return StepSpec(
            replicas=(),
            stages=self.stages(layers_per_stage, microbatch_size, recompute),
            speeds=self.speeds,
            links=self.links,
            sync=Sync(sync),
        )

    def copies_per_weight(self, num_pipelines: int) -> float:
        """Return the bytes per byte of weights of copies for another replica, beyond what counts.

        In decoupled a replica has one shard of the optimizer's state, of as many as replicas, and a
        copy of another one with its weights. All of the state counts in any case. Copies are the
        largest after losses: of two replicas each has half of the state, and the other half's copy.
        """
        if self.job.sync != Sync.DECOUPLED or not self.job.buddy or num_pipelines < 2:
            return 0.0
        return _COPIES_OF_TWO

    def memory(
        self,
        layers: range,
        microbatch_size: int,
        recomputed: Collection[int] = (),
        *,
        num_pipelines: int = 1,
    ) -> StageMemory:
        """Return the memory of consecutive layers on one device, of which some are recomputed.

        A micro-batch in flight also holds a message from the previous stage and one to it.
        """
        table = self.layers(microbatch_size)
        inside = table[layers.start : layers.stop]
        before = table[layers.start - 1].activation_bytes if layers.start else 0
        weights = sum(layer.parameter_bytes for layer in inside)
        kept = self._recompute_bytes(microbatch_size)
        blocks = (
            [[i for i in block if i in layers and i in recomputed] for block in self._blocks]
            if recomputed
            else []
        )
        activations = recomputed_activations(
            [sum(table[i].stored_bytes for i in block) for block in blocks],
            [sum(kept[i] for i in block) for block in blocks],
        )
        stored = sum(table[i].stored_bytes for i in layers if i not in recomputed)
        held = [kept[i] if i in recomputed else table[i].stored_bytes for i in layers]
        temporary = peak_temporary([layer.temporary_bytes or 0 for layer in inside], held)
        return StageMemory(
            weights=weights,
            gradients=int(weights * self.job.gradient_bytes),
            optimizer=int(
                weights * (self.job.optimizer_bytes + self.copies_per_weight(num_pipelines))
            ),
            activation=stored + activations.per_microbatch + 2 * before,
            message=0,
            recomputed=activations.recomputed,
            cast=sum(layer.cast_bytes or 0 for layer in inside),
            temporary=temporary + (self.profile.workspace_bytes or 0),
        )

    @cached_property
    def _blocks(self) -> list[range]:
        return recompute_blocks(self.profile.layers)

    def _recompute_bytes(self, microbatch_size: int) -> list[Bytes]:
        if microbatch_size not in self._kept:
            self._kept[microbatch_size] = recompute_bytes(self.layers(microbatch_size))
        return self._kept[microbatch_size]

    def least_memory(
        self, microbatch_size: int, *, recompute: bool = False, num_pipelines: int = 1
    ) -> NDArray[np.float64]:
        """Return [a, b]: the memory of layers a to b with one micro-batch; inf if b <= a."""
        copies = self.copies_per_weight(num_pipelines)
        key = microbatch_size, recompute, copies
        if key not in self._least:
            layers = self.layers(microbatch_size)
            weights = np.cumsum([0, *(layer.parameter_bytes for layer in layers)])
            held = [layer.stored_bytes for layer in layers]
            before = np.array([0, *(2 * layer.activation_bytes for layer in layers)])
            per_weight = 1 + self.job.gradient_bytes + self.job.optimizer_bytes + copies
            total = per_weight * (weights[None, :] - weights[:, None]) + before[:, None]
            cast = np.cumsum([0, *(layer.cast_bytes or 0 for layer in layers)])
            total = total + (cast[None, :] - cast[:, None]) + (self.profile.workspace_bytes or 0)
            if recompute:
                held = self._recompute_bytes(microbatch_size)
                total = total + self._largest_rests(microbatch_size)
            activations = np.cumsum([0, *held])
            total = total + (activations[None, :] - activations[:, None])
            total = total + self._peak_temporaries(microbatch_size, activations)
            order = np.arange(len(layers) + 1)
            self._least[key] = np.where(order[:, None] < order, total, np.inf)
        return self._least[key]

    def _largest_rests(self, microbatch_size: int) -> NDArray[np.float64]:
        """Return [a, b]: what a backward recomputes at once if layers a to b are one stage."""
        layers, kept = self.layers(microbatch_size), self._recompute_bytes(microbatch_size)
        starts = {block.start for block in self._blocks}
        largest = np.zeros((len(layers) + 1, len(layers) + 1))
        for first in range(len(layers)):
            rest = 0
            for layer in range(first, len(layers)):
                own = layers[layer].stored_bytes - kept[layer]
                rest = own if layer in starts else rest + own
                largest[first, layer + 1] = max(largest[first, layer], rest)
        return largest

    def _peak_temporaries(
        self, microbatch_size: int, held: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return [a, b]: `peak_temporary` of layers a to b; `held`: the sum before each layer."""
        own = np.array([layer.temporary_bytes or 0 for layer in self.layers(microbatch_size)])
        peaks = np.zeros((len(own) + 1, len(own) + 1))
        if not own.any():
            return peaks
        for first in range(len(own)):
            with_earlier = np.maximum.accumulate((own + held[1:])[first:])
            peaks[first, first + 1 :] = np.maximum(0, with_earlier - held[first + 1 :])
        return peaks

    def max_in_flight(
        self,
        device: int,
        layers: range,
        microbatch_size: int,
        num_microbatches: int,
        recomputed: Collection[int] = (),
        *,
        num_pipelines: int = 1,
    ) -> int:
        """Return how many micro-batches fit; 0 if not even one."""
        limit = self.limit(device)
        if limit is None:
            return num_microbatches
        memory = self.memory(layers, microbatch_size, recomputed, num_pipelines=num_pipelines)
        return max_in_flight(memory, limit, num_microbatches, window=0)
