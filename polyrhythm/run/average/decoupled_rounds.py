"""Average models at the end of steps, and gather the averages during the next forward.

`step` returns when the average is certain: each member has made its part of the mean, and all have
said so. The forward waits for each part of the model where it uses it, so it computes with the same
weights as if it had waited for all of them.

Buckets are in the order of a forward. The first worker to come says which order that is; the others
go by it, without waiting for anybody.
"""

import contextlib
import json

from torch import Tensor

from polyrhythm.errors import PeerError
from polyrhythm.run.average.arrivals import Arrivals
from polyrhythm.run.average.averager import Outcome
from polyrhythm.run.average.flat import Model
from polyrhythm.run.average.meeting import Meeting
from polyrhythm.run.average.model_rounds import ModelRounds
from polyrhythm.run.average.scheduled import Scheduled
from polyrhythm.types import Seconds

_ENDING: Seconds = 2.0  # for the rest of an average, when training has failed


class DecoupledRounds(ModelRounds):
    def __init__(
        self, model: Model, line: Scheduled, meeting: Meeting, *, every: int, asks_ahead: bool
    ) -> None:
        self._meeting, self._is_ordered = meeting, False
        self._arrivals = Arrivals(model, timeout=meeting.timeout)
        super().__init__(model, line, every=every, overlap=False, asks_ahead=asks_ahead, outer=None)

    def step(self) -> None:
        self._arrivals.finish()
        self._agree_on_order()
        super().step()

    def refresh(self) -> None:
        self._arrivals.finish()

    def consolidate(self) -> None:
        """Both halves at once: nothing could hide the second."""
        self._arrivals.finish()
        self._agree_on_order()
        super().consolidate()

    def close(self, *, in_order: bool) -> None:
        try:
            if in_order:
                self._arrivals.finish()
                self._line.settle()
            else:  # the weights may be wanted nevertheless
                with contextlib.suppress(PeerError):
                    self._arrivals.finish(_ENDING)
        finally:
            self._arrivals.remove()
            super().close(in_order=in_order)

    def _agree_on_order(self) -> None:
        if not self._is_ordered:
            order = self._meeting.agreed("order", json.dumps(self._arrivals.order()))
            self._model.order, self._is_ordered = json.loads(order), True

    def _take_in(self, outcome: Outcome | None, *, unmoved: Tensor | None = None) -> None:
        if outcome is not None:
            assert outcome.published is unmoved, "training has waited for it"
            assert outcome.arriving is not None, "its second half is on its way"
            self._arrivals.expect(outcome.arriving)
