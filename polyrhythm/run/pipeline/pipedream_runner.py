"""Run a pipeline without a flush: PipeDream's continuous 1F1B with weight stashing.

Step i of a stage runs the forward of mini-batch i and, once its limit of mini-batches is in flight,
the backward of the oldest; the caller then updates the weights. A forward uses the newest weights,
and the backward of that mini-batch must use the same version: each forward stashes a copy, at most
`limit` of them. The gradient is applied to the newest weights; averaging with other pipelines
concerns the newest weights, too, never the copies.

Source: Narayanan et al., "PipeDream", SOSP 2019, section 3.3 (weight stashing); SDPipe, VLDB 2023,
Algorithm 1. Departure: limits may exceed 1F1B's S-s, to tolerate slow links and stragglers.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.stateless import _reparametrize_module

from polyrhythm.errors import ScheduleError
from polyrhythm.run.pipeline.batch import Batch, BatchHeader
from polyrhythm.run.pipeline.executor import Executor
from polyrhythm.run.pipeline.partition import TiedParameter
from polyrhythm.types import Action, Op


@dataclass(slots=True, kw_only=True)
class PipeDreamRunner:
    """Runs one stage; `limits[stage]` mini-batches may be in flight on a stage."""

    module: nn.Module
    executor: Executor
    limits: tuple[int, ...]
    has_gradients: bool = field(default=False, init=False)
    peak_weight_versions: int = field(default=0, init=False)  # copies of the weights held at once
    _num_expected: int = field(default=0, init=False)
    _num_run: int = field(default=0, init=False)
    _in_flight: deque[Batch] = field(default_factory=deque, init=False)
    _stashed_weights: dict[int, dict[str, Tensor]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.executor.connections is not None:
            # A window covers the batches in flight on the sender (activations) or here (gradients).
            self.executor.connections.set_windows(self.limits, self.limits[self.stage])
            self.executor.connections.prefetch_headers(self._expect)

    @property
    def is_drained(self) -> bool:
        return not self._in_flight

    @property
    def microbatch_size(self) -> None:
        """None: batches are not split."""

    @property
    def stage(self) -> int:
        return self.executor.stage.stage

    @property
    def limit(self) -> int:
        return self.limits[self.stage]

    def post_receives(self, header: BatchHeader) -> int:
        """Prepare for a batch; return its number. Later stages have prefetched its header."""
        if self.stage == 0:
            self._expect(header)
        return self._num_run if header.training else 0

    def run(self, batch: Batch) -> None:
        """Run the forward of a mini-batch and, at the limit, the backward of the oldest."""
        self._in_flight.append(batch)
        if self.limit > 1:  # otherwise no update comes between a forward and its backward
            self._stash(batch.first)
        self.executor.execute(Action(Op.F, batch.first), batch)
        self.executor.stage.call = self.module
        self.has_gradients = len(self._in_flight) == self.limit
        if self.has_gradients:
            self._backward()
        self._num_run += 1

    def _expect(self, header: BatchHeader) -> None:
        self.executor.post_receives(header, self._num_expected if header.training else 0)
        self._num_expected += header.training

    def drain(self) -> Iterator[None]:
        """Run the remaining backwards; update the weights after each."""
        while self._in_flight:
            self.has_gradients = True
            self._backward()
            yield
        self.has_gradients = False

    def release(self) -> None:
        """Free the batches in flight, their activations and the stashed weights."""
        self._in_flight.clear()
        self._stashed_weights.clear()
        self.executor.stage.call = self.module  # a failed forward leaves a stashed copy there
        self.executor.stage.release()

    def _stash(self, number: int) -> None:
        weights = {  # frozen parameters are equal in all versions
            name: p.detach().clone().requires_grad_()
            for name, p in self.module.named_parameters()
            if p.requires_grad
        }
        self._stashed_weights[number] = weights
        self.peak_weight_versions = max(self.peak_weight_versions, len(self._stashed_weights))
        self.executor.stage.call = partial(_call, self.module, weights)

    def _backward(self) -> None:
        batch = self._in_flight.popleft()
        weights = self._stashed_weights.pop(batch.first, {})
        # Activation checkpointing recomputes the forward: it must use the same weights.
        with _reparametrize_module(self.module, weights, tie_weights=True):
            self.executor.execute(Action(Op.B, batch.first), batch)
        for name, parameter in self.module.named_parameters():
            gradient = weights[name].grad if name in weights else None
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _call(module: nn.Module, weights: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    return functional_call(module, weights, args, kwargs)


def check_untied(tied: Sequence[TiedParameter]) -> None:
    """Refuse tied parameters: without a flush, stages update their copies at different times."""
    if tied:
        raise ScheduleError(
            f"flush=False with {tied[0].key} tied across stages",
            expected="no parameter that two stages share",
            fix="untie it, or use flush=True",
        )
