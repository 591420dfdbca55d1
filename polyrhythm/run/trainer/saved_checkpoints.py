"""The callback `on_checkpoint`, on every worker."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyrhythm.run.trainer.fit_context import FitContext
from polyrhythm.run.trainer.metrics import Callback, call_hooks
from polyrhythm.types import Seconds

_LOOK_INTERVAL: Seconds = 0.1  # for a checkpoint that has become complete


class SavedCheckpoints:
    """Calls `on_checkpoint` on every worker for each checkpoint that becomes complete in a fit.

    Only the first pipeline saves: its first worker publishes each in the job's store.
    """

    def __init__(self, name: str, context: FitContext, callbacks: Sequence[Any]) -> None:
        self._name, self._context, self._callbacks = name, context, callbacks
        self._is_used = False  # a worker has such a callback
        self._num_reported, self._next_look = 0, 0.0

    def begin(self) -> None:
        """Find out whether any worker has such a callback; all call it."""
        if self._context.checkpointer is None:
            return
        while self._context.checkpointer.pop_saved() is not None:
            pass  # those of `save` and of an earlier fit
        hooks = (getattr(each, "on_checkpoint", None) for each in self._callbacks)
        does_nothing = None, Callback.on_checkpoint
        own = any(getattr(hook, "__func__", hook) not in does_nothing for hook in hooks)
        store, name = self._context.store, f"checkpoint callbacks of {self._name}"
        self._is_used = any(store.all_gather_object(name, own, self._context.members))

    def report(self) -> bool:
        """Call the callbacks for checkpoints that have become complete; return whether to stop."""
        now = time.monotonic()
        if not self._is_used or now < self._next_look:
            return False
        self._next_look = now + _LOOK_INTERVAL
        wants_stop = False
        while (found := self._next()) is not None:
            step, path = found
            self._num_reported += 1
            wants_stop |= call_hooks(self._callbacks, "on_checkpoint", step, Path(path))
        return wants_stop

    def finish(self) -> None:
        """At the end of a fit: wait for the last one."""
        if not self._is_used:
            return
        context, self._next_look = self._context, 0.0

        def finish_last() -> None:
            assert context.checkpointer is not None, "there are checkpoints"
            context.checkpointer.wait()
            self.report()

        name = f"the end of the checkpoints of {self._name}"
        context.store.run_on_leader(name, finish_last, context.members)
        self._next_look = 0.0
        self.report()

    def _next(self) -> tuple[int, str] | None:
        context, name = self._context, f"checkpoint {self._num_reported} of {self._name}"
        if not context.is_leader:
            found: tuple[int, str] | None = context.store.peek(name, context.members)
            return found
        assert context.checkpointer is not None, "there are checkpoints"
        saved = context.checkpointer.pop_saved()
        if saved is None:
            return None
        published = saved.step, str(saved.path)
        context.store.set_once(name, published, context.members)
        return published
