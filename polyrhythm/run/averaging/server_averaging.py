"""Push to a parameter server and pull from it; the scheduler bounds how far a worker runs ahead."""

from collections.abc import Callable

from torch import Tensor

from polyrhythm.run.averaging.buffers import ReplicaState
from polyrhythm.run.averaging.group_client import GroupClient
from polyrhythm.run.averaging.parameter_server import ParameterServerClient


class ServerAveraging:
    def __init__(
        self, model: ReplicaState, client: GroupClient, server: ParameterServerClient, *, every: int
    ) -> None:
        self.num_steps = 0
        self._model, self._client, self._server = model, client, server
        self._every = every
        self._pulled = model.flat().read()
        server.init(self._pulled)

    def step(self) -> None:
        self.num_steps += 1
        if self.num_steps % self._every == 0:
            self._push_pull(self._wait)

    def average_all(self) -> None:
        """Pull after all workers have pushed."""
        self._push_pull(self._average_all)

    def close(self, *, graceful: bool) -> None:
        self._client.close(graceful=graceful)
        self._server.close()

    def _push_pull(self, wait: Callable[[Tensor], object]) -> None:
        flat = self._model.flat()
        weights = flat.read()
        self._server.push(weights - self._pulled)
        wait(weights)
        self._pulled = self._server.pull(weights)
        flat.write(self._pulled)

    def _wait(self, weights: Tensor) -> None:
        self._client.publish(lambda _: weights)
        self._client.wait(self.num_steps - 1)

    def _average_all(self, weights: Tensor) -> None:
        self._client.average_all(lambda _: weights, self.num_steps - 1)
