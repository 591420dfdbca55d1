"""Average gradients over all workers before the optimizer's step, so that all replicas are equal.

`all_reduce` yields the mean of all workers' gradients. `balanced` yields the mean over the
micro-batches of the global batch, of which each worker computes as many as it can in equal time;
every worker's step time is sent with the gradients, so that all assign the same micro-batches.
"""

import time
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from polyrhythm.errors import PolicyError
from polyrhythm.run.averaging.buffers import GradientBuffer, ReplicaState
from polyrhythm.run.averaging.group_client import GroupClient
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.sync.policies.balanced import MicrobatchBalancer
from polyrhythm.types import Seconds, Worker


class GradientAveraging:
    def __init__(self, model: ReplicaState, client: GroupClient) -> None:
        self.num_steps = 0
        self._model, self._client = model, client
        self._gradients = GradientBuffer(model.module)
        self._is_averaged = False  # the user called average_gradients() before optimizer.step()
        self._hook = model.optimizer.register_step_pre_hook(self._before_update)

    def average_gradients(self) -> None:
        self.num_steps += 1
        self._average()
        self._is_averaged = True

    def step(self) -> None:
        """Do nothing: the gradients were averaged before the optimizer's step."""

    def average_all(self) -> None:
        """Average the models, which differ only in local state such as running statistics."""
        result = self._client.average_all(lambda _: self._model.flat().read(), self.num_steps - 1)
        if result is not None:
            self._model.flat().write(result.value)

    def close(self, *, graceful: bool) -> None:
        self._hook.remove()
        self._client.close(graceful=graceful)

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_averaged:
            self.average_gradients()
        self._is_averaged = False

    def _average(self) -> None:
        mean = self._mean(self._gradients.read())
        if mean is not None:
            self._gradients.write(mean)

    def _mean(self, flat: Tensor) -> Tensor | None:
        """Return the mean of `flat`, or None if this worker is the only one."""
        self._client.publish(lambda _: flat)
        self._client.wait(self.num_steps - 1, needed="averaging gradients")
        result = self._client.pop_result()
        return None if result is None else result.value


class BalancedGradientAveraging(GradientAveraging):
    def __init__(
        self,
        model: ReplicaState,
        client: GroupClient,
        num_pipelines: int,
        pipeline: Pipeline | None,
    ) -> None:
        """`pipeline`: set on stages after the first, to count the micro-batches they were sent."""
        super().__init__(model, client)
        self._pipeline = pipeline
        self._index = client.me.worker.pipeline
        self._workers = [Worker(client.me.worker.stage, p) for p in range(num_pipelines)]
        self._present = self._workers
        self._balancer: MicrobatchBalancer | None = None
        self._count = 0  # micro-batches of this worker in this step
        self._step_start: Seconds = 0.0

    def share(self, num_microbatches: int) -> range:
        if self._pipeline is not None:
            raise PolicyError(
                f"a share for {self._workers[self._index]}",
                expected="share() on the first stage, which sends the batches to the others",
                fix="call sync.share() where pipeline.is_first, pass it on by step(metadata=...)",
            )
        if self._balancer is None or self._balancer.num_microbatches != num_microbatches:
            self._balancer = MicrobatchBalancer(num_microbatches)
        counts = self._balancer.assign(self._present)
        first = sum(counts[worker] for worker in self._present if worker.pipeline < self._index)
        self._count, self._step_start = counts[self._workers[self._index]], time.perf_counter()
        return range(first, first + self._count)

    def _average(self) -> None:
        elapsed = time.perf_counter() - self._step_start
        if self._pipeline is not None:
            self._count = len(self._pipeline.sizes)
        elif self._balancer is None or self._count == 0:
            raise PolicyError(
                "a step under balanced without share()",
                expected="sync.share(num_microbatches) before each step",
                fix="compute exactly the micro-batches that share() returns",
            )
        # One column per worker: number of micro-batches, and seconds per micro-batch.
        stats = torch.zeros(2, len(self._workers), device="cpu")
        stats[0, self._index], stats[1, self._index] = self._count, elapsed / self._count
        gradients = self._gradients.read()
        flat = torch.cat([gradients, stats.flatten().to(gradients.dtype)])
        mean = self._mean(flat)
        if mean is None:  # there is no other worker
            mean = flat
        gradients, mean_stats = mean[: gradients.numel()], mean[gradients.numel() :].view_as(stats)
        self._gradients.write(gradients, factor=1 / mean_stats[0].float().sum().item())
        if self._balancer is not None:
            self._update_speeds(mean_stats, self._balancer)
        self._count = 0

    def _update_speeds(self, mean_stats: Tensor, balancer: MicrobatchBalancer) -> None:
        """Record every worker's speed from the mean: only the proportions matter."""
        counts, seconds = mean_stats.tolist()
        self._present = [w for w in self._workers if counts[w.pipeline] > 0]
        for worker in self._present:
            balancer.record(worker, 1, seconds[worker.pipeline])
