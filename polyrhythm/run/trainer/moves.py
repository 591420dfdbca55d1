"""`sync="auto"` while training goes on: what steps took comes to the first worker, which decides.

The first stage of each pipeline tells what its steps took, through the job's store. In lockstep all
stop for that at the end of each window, and hear what was decided. In groups nobody stops: the
first worker looks at what was told by then, and training goes on meanwhile.
"""

import logging
from collections.abc import Mapping, Sequence

import msgspec

from polyrhythm.events import EventLog
from polyrhythm.run.peers import waiting_for
from polyrhythm.run.trainer.telling import FIRST
from polyrhythm.run.trainer.turns import store_of
from polyrhythm.sync.auto import Auto, Decision
from polyrhythm.sync.foreseen import Shape, Took
from polyrhythm.types import Seconds, Worker

_TOLD_AT_ONCE = 5  # steps, in groups: small next to a window, and few messages
_logger = logging.getLogger(__name__)


class Moves:
    """Of one worker and one fit."""

    def __init__(
        self, name: str, worker: Worker, shape: Shape, log: EventLog | None, deadline: Seconds
    ) -> None:
        auto = Auto(shape)
        self._auto, self.num_steps = auto if worker == FIRST else None, auto.num_steps
        self._store, self._worker, self._log = store_of(name, deadline), worker, log
        self._num_pipelines, self._piece, self._num_told = shape.num_pipelines, -1, 0
        self._num_heard = [0] * self._num_pipelines  # by pipeline, of what was told
        self._untold: list[Took] = []
        self._num_made = 0  # steps of this piece

    def begin(self, way: str, step: int) -> None:
        """A piece of training that is done in one way."""
        self._piece += 1
        self._num_told, self._num_heard = 0, [0] * self._num_pipelines
        self._untold, self._num_made = [], 0
        if self._piece == 0 and self._worker == FIRST:
            self._record(way, step, "training starts in lockstep, and is measured", {})

    def took(self, took: Took) -> None:
        """A step, on the first stage of this pipeline."""
        self._untold.append(took)

    def tell(self) -> None:
        """There, too: what its steps took since the last time."""
        told, self._untold = self._untold, []
        key = f"{self._piece}/{self._worker.pipeline}/{self._num_told}"
        self._num_told += 1
        self._store.set(key, msgspec.json.encode(told).decode())

    def after_window(self, step: int) -> Decision:
        """In lockstep, on the first worker; all pipelines have told, or will at once."""
        with waiting_for("another pipeline", "hearing what its steps took"):
            return self._decided([self._heard(p) for p in range(self._num_pipelines)], step)

    def after_step(self, step: int) -> Decision | None:
        """In groups, on each first stage; the first worker decides now and then."""
        self._num_made += 1
        if len(self._untold) >= _TOLD_AT_ONCE:
            self.tell()
        if self._auto is None or self._num_made % self.num_steps:
            return None
        times = [list[Took]() for _ in range(self._num_pipelines)]
        for pipeline, steps in enumerate(times):
            while self._store.check([self._key(pipeline)]):
                steps += self._heard(pipeline)
        return self._decided(times, step)

    def _key(self, pipeline: int) -> str:
        """Of what that one tells next."""
        return f"{self._piece}/{pipeline}/{self._num_heard[pipeline]}"

    def _heard(self, pipeline: int) -> list[Took]:
        key = self._key(pipeline)
        told = self._store.get(key)
        self._store.delete_key(key)  # nobody else reads it
        self._num_heard[pipeline] += 1
        return msgspec.json.decode(told, type=list[Took])

    def _decided(self, times: Sequence[Sequence[Took]], step: int) -> Decision:
        assert self._auto is not None, "the first worker decides"
        decision = self._auto.after_window(times)
        if decision.moves:
            self._record(decision.way, step, decision.why, decision.predicted)
        return decision

    def _record(self, way: str, step: int, why: str, predicted: Mapping[str, Seconds]) -> None:
        """`step` is the global one that comes next."""
        say = _logger.warning if self._piece > 0 or predicted else _logger.info
        say("sync=auto: %s from step %d on: %s", way, step, why)
        if self._log is not None:
            values = {f"{name}_s": seconds for name, seconds in predicted.items()}
            self._log.write("way", step=step, name=way, why=why, values=values)
