"""How replicas keep together in a training loop: not at all, in groups, or by decoupled halves.

One object per way, all called alike: `update` after each batch, `average_all` before weights are
read by somebody else, `close` at the end.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from polyrhythm.errors import PeerError
from polyrhythm.run.averaging.group_client import AverageTimings
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.decoupled.background_gather import GatherFuture
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.sync.dispatch import SamplerState
from polyrhythm.sync.replay import DECOUPLED
from polyrhythm.types import Seconds, Worker

LOCKSTEP = frozenset({"all_reduce", "balanced", "static", DECOUPLED})  # equally many steps for all


class NoSync:
    """One pipeline has nobody to keep together with."""

    sync: GroupSync | None = None

    def __init__(self, pipeline: Pipeline, optimizer: Optimizer, clip: float | None) -> None:
        self.optimizer = optimizer  # what learning rates are set in
        self._pipeline, self._clip = pipeline, clip

    def update(self, acknowledge: Callable[[], None]) -> None:
        """Use the gradients of a batch, say that it is `acknowledge`, and keep together.

        In that order: who waits for the last samples may be who this worker averages with.
        """
        self.clip()
        self.optimizer.step()
        acknowledge()
        self.optimizer.zero_grad()

    def clip(self) -> None:
        if self._clip is not None:
            self._pipeline.clip_grad_norm_(self._clip)

    def averaged(self) -> AverageTimings:
        """What it took since this was asked the last time."""
        return AverageTimings(0.0, 0.0, 1)

    def synchronize(self) -> None:
        """The weights of this worker are complete, for somebody to read."""

    def async_state_dict(self) -> GatherFuture | None:
        """The optimizer's state of now, where each replica has a part of it; called by all."""
        return None

    def average_all(self) -> None:
        """All replicas get the same weights, complete on each."""

    def close(self) -> None:
        """Leave in good order."""

    def abort(self) -> None:
        """Leave without waiting for anybody, after a failure."""


class GroupSyncStrategy(NoSync):
    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: Optimizer,
        clip: float | None,
        *,
        policy: str,
        overlap: bool,
        options: Mapping[str, object],
        worker: Worker,
        num_pipelines: int,
        seed: int,
        timeout: Seconds,
        sampler_state: SamplerState | None,
    ) -> None:
        super().__init__(pipeline, optimizer, clip)
        self._num_pipelines = num_pipelines
        self._averages_all = policy in ("all_reduce", "balanced")
        self._averaged = AverageTimings(0.0, 0.0, 1)
        self.sync: GroupSync = GroupSync(
            pipeline,
            optimizer,
            policy,
            overlap=overlap,
            options=options,
            worker=worker,
            num_pipelines=num_pipelines,
            seed=seed,
            timeout=timeout,
            sampler_state=sampler_state,
        )

    def update(self, acknowledge: Callable[[], None]) -> None:
        if self._clip is not None:
            self.sync.average_gradients()  # if those are what is averaged
        super().update(acknowledge)
        self.sync.step()
        self._averaged = self.sync.averaged()
        if self._averages_all and self._averaged.num_members < self._num_pipelines:
            raise PeerError(
                "another pipeline",
                action="averaging gradients",
                waited=self._averaged.waited,
                cause="it has died or left, and its share of the batch with it",
            )

    def averaged(self) -> AverageTimings:
        return self._averaged

    def synchronize(self) -> None:
        self.sync.refresh()

    def average_all(self) -> None:
        self.sync.average_all()

    def close(self) -> None:
        self.sync.close()

    def abort(self) -> None:
        self.sync.__exit__(RuntimeError, RuntimeError(), None)


class DecoupledStrategy(NoSync):
    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: Optimizer,
        clip: float | None,
        *,
        num_pipelines: int,
        timeout: Seconds,
    ) -> None:
        super().__init__(pipeline, optimizer, clip)
        self._num_pipelines = num_pipelines
        self._distributed = DistributedOptimizer(optimizer, pipeline, timeout=timeout)
        self.optimizer = self._distributed
        self._later: GatherFuture | None = None

    def clip(self) -> None:
        if self._clip is not None:
            self._distributed.clip_grad_norm_(self._clip)

    def averaged(self) -> AverageTimings:
        return AverageTimings(*self._distributed.averaged(), self._num_pipelines)

    def synchronize(self) -> None:
        self._distributed.synchronize()

    def async_state_dict(self) -> GatherFuture:
        self._wait_for_state()  # one at a time: each takes memory
        self._later = self._distributed.async_state_dict()
        return self._later

    def average_all(self) -> None:
        self.synchronize()

    def close(self) -> None:
        self._wait_for_state()  # the first pipeline needs what this one sends
        self._distributed.close()

    def _wait_for_state(self) -> None:
        if self._later is not None:
            self._later.wait()


def make_sync_strategy(
    pipeline: Pipeline,
    optimizer: Optimizer,
    clip: float | None,
    *,
    sync_mode: str,
    num_pipelines: int,
    timeout: Seconds,
    sampler_state: SamplerState,
    **group_options: Any,
) -> NoSync:
    """In that way: `decoupled`, or a policy."""
    if num_pipelines == 1:
        return NoSync(pipeline, optimizer, clip)
    if sync_mode == DECOUPLED:
        return DecoupledStrategy(
            pipeline, optimizer, clip, num_pipelines=num_pipelines, timeout=timeout
        )
    return GroupSyncStrategy(
        pipeline,
        optimizer,
        clip,
        policy=sync_mode,
        num_pipelines=num_pipelines,
        timeout=timeout,
        sampler_state=None if sync_mode in LOCKSTEP else sampler_state,
        **group_options,
    )
