"""Push to a parameter server and pull from it; how far one may run ahead, the scheduler says."""

from collections.abc import Callable

from torch import Tensor

from polyrhythm.run.average.flat import Model
from polyrhythm.run.average.parameter_server import ServerLine
from polyrhythm.run.average.scheduled import Scheduled


class ServerRounds:
    def __init__(self, model: Model, line: Scheduled, server: ServerLine, *, every: int) -> None:
        self.num_steps = 0
        self._model, self._line, self._server = model, line, server
        self._every = every
        self._pulled = model.flat().read()
        server.begin(self._pulled)

    def step(self) -> None:
        self.num_steps += 1
        if self.num_steps % self._every == 0:
            self._meet(self._wait)

    def consolidate(self) -> None:
        """All have pushed by the time that anybody pulls."""
        self._meet(self._gather)

    def close(self, *, in_order: bool) -> None:
        self._line.close(in_order=in_order)
        self._server.close()

    def _meet(self, wait: Callable[[Tensor], object]) -> None:
        flat = self._model.flat()
        weights = flat.read()
        self._server.push(weights - self._pulled)
        wait(weights)
        self._pulled = self._server.pull(weights)
        flat.write(self._pulled)

    def _wait(self, weights: Tensor) -> None:
        self._line.publish(lambda _: weights)
        self._line.wait(self.num_steps - 1)

    def _gather(self, weights: Tensor) -> None:
        self._line.gather(lambda _: weights, self.num_steps - 1)
