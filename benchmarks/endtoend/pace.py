"""The pace of a machine that is not there: a stage computes, and then sleeps as long as is missing.

Hooks on the stage's module, so that torch's pipeline and ours have the same. An action takes so
long per sample, with no fixed part; what a scenario adds is drawn before each forward and each
backward of a micro-batch, and slept first. Only time on a core counts as compute: what an action
waits for meanwhile, such as weights that are on their way, comes on top.
"""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from polyrhythm.describe.slowness import Slowness
from polyrhythm.types import Seconds


@dataclass(slots=True, kw_only=True)
class Pace:
    forward: Seconds  # of one sample
    backward: Seconds
    slowness: Slowness = field(default_factory=Slowness)
    first: Seconds | None = field(default=None, init=False)  # when the first action began
    slept: Seconds = field(default=0.0, init=False)
    _began: Seconds | None = field(default=None, init=False)  # None: nothing takes time
    _computing_since: Seconds = field(default=0.0, init=False)

    def keep(self, module: nn.Module) -> None:
        """From now on in all that this stage computes; its first argument has samples in rows."""
        module.register_forward_pre_hook(self._before_forward)
        module.register_forward_hook(self._after_forward)

    def begin(self, moment: Seconds) -> None:
        """The clock of slowness starts at that moment; before, nothing takes time."""
        self._began = moment

    def end(self) -> None:
        self._began = None

    def _before_forward(self, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            self._hold_back(self.forward, len(given[0]))

    def _after_forward(self, module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        number = len(given[0])
        self._fill_up(self.forward * number)

        def before_backward(gradient: Tensor) -> None:
            self._hold_back(self.backward, number)
            # Called when all of the backward is done, as DDP does to wait for its averages.
            Variable._execution_engine.queue_callback(lambda: self._fill_up(self.backward * number))

        output.register_hook(before_backward)  # type: ignore[no-untyped-call]

    def _hold_back(self, each: Seconds, number: int) -> None:
        if self._began is not None:
            both = (self.forward + self.backward) * number
            now = time.monotonic()
            self.first = self.first or now
            self._sleep(self.slowness.delay(now - self._began, each * number, both))
        self._computing_since = time.thread_time()

    def _fill_up(self, work: Seconds) -> None:
        if self._began is not None:
            self._sleep(work - (time.thread_time() - self._computing_since))

    def _sleep(self, seconds: Seconds) -> None:
        if seconds > 0:
            self.slept += seconds
            time.sleep(seconds)
