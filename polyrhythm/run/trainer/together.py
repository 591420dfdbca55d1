"""How replicas keep together in a training loop: not at all, in groups, or by decoupled halves.

One object per way, all called alike: `update` after each batch, `consolidate` before weights are
read by somebody else, `close` at the end.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from polyrhythm.errors import PeerError
from polyrhythm.run.average.group_sync import GroupSync
from polyrhythm.run.average.scheduled import Averaged
from polyrhythm.run.decoupled.beside import Later
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.sync.dispenser import Supply
from polyrhythm.sync.foreseen import DECOUPLED
from polyrhythm.types import Seconds, Worker

LOCKSTEP = frozenset({"all_reduce", "balanced", "static", DECOUPLED})  # equally many steps for all


class Alone:
    """One pipeline has nobody to keep together with."""

    sync: GroupSync | None = None

    def __init__(self, pipeline: Pipeline, optimizer: Optimizer, clip: float | None) -> None:
        self.optimizer = optimizer  # what learning rates are set in
        self._pipeline, self._clip = pipeline, clip

    def update(self, used: Callable[[], None]) -> None:
        """Use the gradients of a batch, say that it is `used`, and keep together.

        In that order: who waits for the last samples may be who this worker averages with.
        """
        self.clip()
        self.optimizer.step()
        used()
        self.optimizer.zero_grad()

    def clip(self) -> None:
        if self._clip is not None:
            self._pipeline.clip_grad_norm_(self._clip)

    def averaged(self) -> Averaged:
        """What it took since this was asked the last time."""
        return Averaged(0.0, 0.0, 1)

    def settle(self) -> None:
        """The weights of this worker are complete, for somebody to read."""

    def state_later(self) -> Later | None:
        """The optimizer's state of now, where each replica has a part of it; called by all."""
        return None

    def consolidate(self) -> None:
        """All replicas get the same weights, complete on each."""

    def close(self) -> None:
        """Leave in good order."""

    def break_off(self) -> None:
        """Leave without waiting for anybody, after a failure."""


class InGroups(Alone):
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
        supply: Supply | None,
    ) -> None:
        super().__init__(pipeline, optimizer, clip)
        self._num_pipelines = num_pipelines
        self._averages_all = policy in ("all_reduce", "balanced")
        self._averaged = Averaged(0.0, 0.0, 1)
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
            dispense=supply,
        )

    def update(self, used: Callable[[], None]) -> None:
        if self._clip is not None:
            self.sync.average_gradients()  # if those are what is averaged
        super().update(used)
        self.sync.step()
        self._averaged = self.sync.averaged()
        if self._averages_all and self._averaged.num_members < self._num_pipelines:
            raise PeerError(
                "another pipeline",
                action="averaging gradients",
                waited=self._averaged.waited,
                cause="it has died or left, and its share of the batch with it",
            )

    def averaged(self) -> Averaged:
        return self._averaged

    def settle(self) -> None:
        self.sync.refresh()

    def consolidate(self) -> None:
        self.sync.consolidate()

    def close(self) -> None:
        self.sync.close()

    def break_off(self) -> None:
        self.sync.__exit__(RuntimeError, RuntimeError(), None)


class Decoupled(Alone):
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
        self._later: Later | None = None

    def clip(self) -> None:
        if self._clip is not None:
            self._distributed.clip_grad_norm_(self._clip)

    def averaged(self) -> Averaged:
        return Averaged(*self._distributed.averaged(), self._num_pipelines)

    def settle(self) -> None:
        self._distributed.synchronize()

    def state_later(self) -> Later:
        self._wait_for_state()  # one at a time: each takes memory
        self._later = self._distributed.state_later()
        return self._later

    def consolidate(self) -> None:
        self.settle()

    def close(self) -> None:
        self._wait_for_state()  # the first pipeline needs what this one sends
        self._distributed.close()

    def _wait_for_state(self) -> None:
        if self._later is not None:
            self._later.wait()


def keep_together(
    pipeline: Pipeline,
    optimizer: Optimizer,
    clip: float | None,
    *,
    way: str,
    num_pipelines: int,
    timeout: Seconds,
    supply: Supply,
    **of_groups: Any,
) -> Alone:
    """In that way: `decoupled`, or a policy."""
    if num_pipelines == 1:
        return Alone(pipeline, optimizer, clip)
    if way == DECOUPLED:
        return Decoupled(pipeline, optimizer, clip, num_pipelines=num_pipelines, timeout=timeout)
    return InGroups(
        pipeline,
        optimizer,
        clip,
        policy=way,
        num_pipelines=num_pipelines,
        timeout=timeout,
        supply=None if way in LOCKSTEP else supply,
        **of_groups,
    )
