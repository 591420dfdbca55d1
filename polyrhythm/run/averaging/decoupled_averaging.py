"""Average models at the end of steps, and all-gather the averages during the next forward.

`step` returns when the average is committed: each member has its shard of the mean and has sent
Done. The forward waits for each part of the model where it uses it, so it computes with the same
weights as if it had waited for all of them.

Buckets are in the order of a forward. The first worker that stores its order fixes it for all
workers of the stage, without waiting for anyone.
"""

import contextlib
import json

from torch import Tensor

from polyrhythm.errors import PeerError
from polyrhythm.run.averaging.averager import AverageResult
from polyrhythm.run.averaging.buffers import ReplicaState
from polyrhythm.run.averaging.forward_hooks import ForwardWaitHooks
from polyrhythm.run.averaging.group_client import GroupClient
from polyrhythm.run.averaging.model_averaging import ModelAveraging
from polyrhythm.run.averaging.rendezvous import Rendezvous
from polyrhythm.types import Seconds

_FAILED_TIMEOUT: Seconds = 2.0  # for the rest of an average after training has failed


class DecoupledModelAveraging(ModelAveraging):
    def __init__(
        self,
        model: ReplicaState,
        client: GroupClient,
        rendezvous: Rendezvous,
        *,
        every: int,
        takes_requests: bool,
    ) -> None:
        self._rendezvous, self._is_ordered = rendezvous, False
        self._forward_hooks = ForwardWaitHooks(model, timeout=rendezvous.timeout)
        super().__init__(
            model, client, every=every, overlap=False, takes_requests=takes_requests, outer=None
        )

    def step(self) -> None:
        self._forward_hooks.finish()
        self._agree_on_order()
        super().step()

    def refresh(self) -> None:
        self._forward_hooks.finish()

    def average_all(self) -> None:
        """Average without splitting: there is no forward to hide the all-gather behind."""
        self._forward_hooks.finish()
        self._agree_on_order()
        super().average_all()

    def close(self, *, graceful: bool) -> None:
        try:
            if graceful:
                self._forward_hooks.finish()
                self._client.wait_idle()
            else:  # the caller may still read the weights
                with contextlib.suppress(PeerError):
                    self._forward_hooks.finish(_FAILED_TIMEOUT)
        finally:
            self._forward_hooks.remove()
            super().close(graceful=graceful)

    def _agree_on_order(self) -> None:
        if not self._is_ordered:
            order = self._rendezvous.set_once("order", json.dumps(self._forward_hooks.order()))
            self._model.order, self._is_ordered = json.loads(order), True

    def _apply(self, result: AverageResult | None, *, unmoved: Tensor | None = None) -> None:
        if result is not None:
            assert result.published is unmoved, "training has waited for the Commit"
            assert result.streaming_buffer is not None, "the all-gather is running"
            self._forward_hooks.start(result.streaming_buffer)
