"""Run the steps of one stage: with a flush, or without one as in PipeDream.

With a flush every step runs the whole schedule and computes all gradients of its batch. FSDP2
reduces them in the last backward of a step; until then they accumulate locally, as in torch's own
pipelines. At its end the gradients of parameters that several stages hold are summed.

Without a flush, step i of a stage runs the forward of mini-batch i and, once its limit of
mini-batches is in flight, the backward of the oldest; the caller then updates the weights. A
forward uses the newest weights, and the backward of that mini-batch must use the same version: each
forward stashes a copy, at most `limit` of them. The gradient is applied to the newest weights;
averaging with other pipelines concerns the newest weights, too, never the copies.

Source: Narayanan et al., "PipeDream", SOSP 2019, section 3.3 (weight stashing); SDPipe, VLDB 2023,
Algorithm 1. Departure: limits may exceed 1F1B's S-s, to tolerate slow links and stragglers.
"""

import re
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.parameter import Parameter
from torch.nn.utils.stateless import _reparametrize_module

from polyrhythm.cost.memory import peak_in_flight
from polyrhythm.errors import ScheduleError, peer_errors
from polyrhythm.run.comm.process_groups import receive, send
from polyrhythm.run.pipeline.autotune import ScheduleAutotuner
from polyrhythm.run.pipeline.batch import Batch, BatchHeader
from polyrhythm.run.pipeline.executor import Executor, local
from polyrhythm.run.pipeline.loss import Count, as_count, divide_by
from polyrhythm.run.pipeline.partition import TiedParameter, check_module, fingerprint
from polyrhythm.run.pipeline.transport import Connections
from polyrhythm.schedule.builders import Schedule
from polyrhythm.schedule.check import check
from polyrhythm.schedule.spec import ExplicitSchedule, ScheduleSpec
from polyrhythm.types import Action, Bytes, Op

_EVAL_WINDOW = 8  # without backwards only messages need memory
_TIED_TAG = 2**22 + 2  # differs from the tags of batch headers and clocks


@dataclass(frozen=True, slots=True)
class TiedGradients:
    """Parameters that several stages hold: each holder gets the sum of all their gradients.

    The first holder adds them up, so that all holders have bit-identical sums.
    """

    module: nn.Module
    tied: Sequence[TiedParameter]
    connections: Connections

    def check_shapes(self, nbytes: Bytes) -> None:
        """Refuse copies of different shapes; all stages call this, with room for all names."""
        own = {f"{tie.key} {tie.stages}": _shape_of(p) for tie, p in self._parameters()}
        payload = msgspec.json.encode(own)
        seen: dict[str, str] = {}
        for found in self.connections.all_gather_bytes(payload, nbytes, "comparing parameters"):
            for name, shape in msgspec.json.decode(found, type=dict[str, str]).items():
                if seen.setdefault(name, shape) != shape:
                    raise ScheduleError(
                        f"tied: {name.partition(' ')[0]} is {seen[name]} on one stage and {shape} "
                        "on another",
                        expected="equal copies of one parameter",
                        fix="name parameters of one shape and dtype",
                    )

    @contextmanager
    def sum_gradients(self) -> Iterator[None]:
        """Sum the gradients of this block; gradients from before it are already summed."""
        trained = [(tie, p) for tie, p in self._parameters() if p.requires_grad]
        before = [parameter.grad for _, parameter in trained]
        for _, parameter in trained:
            parameter.grad = None
        yield
        for (tie, parameter), previous in zip(trained, before, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local(parameter.grad)
            with peer_errors("another stage", f"summing the gradient of {tie.key}"):
                gradient.copy_(self._total(gradient.cpu().contiguous(), tie))
            _restore(parameter, previous)

    def _parameters(self) -> list[tuple[TiedParameter, Parameter]]:
        """Return the current parameters: sharding a module replaces them."""
        return [(tie, self.module.get_parameter(tie.name)) for tie in self.tied]

    def _total(self, gradient: Tensor, tie: TiedParameter) -> Tensor:
        control = self.connections.control
        first, *others = tie.stages
        if self.connections.stage != first:
            send(control, gradient, first, tag=_TIED_TAG)
            receive(control, gradient, first, tag=_TIED_TAG)
            return gradient
        received = torch.empty_like(gradient)
        total = gradient.clone()
        for other in others:
            receive(control, received, other, tag=_TIED_TAG)
            total += received
        for other in others:
            send(control, total, other, tag=_TIED_TAG)
        return total

    def parameters(self) -> set[Parameter]:
        return {parameter for _, parameter in self._parameters()}

    def not_owned(self) -> set[Parameter]:
        """Return this stage's tied parameters that an earlier stage owns."""
        return {p for tie, p in self._parameters() if tie.stages[0] != self.connections.stage}


@dataclass(slots=True)
class GradientDivision:
    """Divides the gradients of a step by the number of its labels, if its losses are counted.

    If gradients are averaged over pipelines, which may start before the last count is known, the
    average divides them: it takes the `pop_divisor` of each pipeline.
    """

    is_enabled: bool  # otherwise gradients are those of the sum over all labels
    is_deferred: bool = False
    # Those of the stage; set before each step: users may replace them between steps, and FSDP2
    # does so between forward and backward. Only once if `keeps_parameters`, and no FSDP2.
    parameters: Sequence[Parameter] = field(default=(), init=False)
    mesh: DeviceMesh | None = field(default=None, init=False)  # of FSDP2, which averages gradients
    _divisor: Count | None = field(default=None, init=False)
    _previous: Sequence[Tensor | None] = field(default=(), init=False)  # by parameter

    def begin(self) -> None:
        """Before the first backward of a counted step: set earlier gradients aside."""
        if not self.is_deferred and self.is_enabled:
            self._previous = [p.grad for p in self.parameters]
            for parameter, previous in zip(self.parameters, self._previous, strict=True):
                if previous is not None:
                    parameter.grad = None
        elif self._divisor is not None and any(p.grad is not None for p in self.parameters):
            raise ScheduleError(
                "a second step before gradients are averaged, with a loss function that returns "
                "(sum, count)",
                expected="an optimizer step and zero_grad() after each step of the pipeline",
                fix="run one step on the whole batch, with more micro-batches",
            )

    def end(self, batch: Batch) -> None:
        """After the last backward: divide, and add the earlier gradients."""
        divisor = batch.divisor() if self.is_enabled else None
        if divisor is not None and self.mesh is not None:
            divisor = _mean_over(self.mesh, divisor)
        if self.is_deferred:
            self._divisor = divisor
        elif divisor is not None:
            gradients = (p.grad for p in self.parameters)
            divide_by(divisor, (local(g) for g in gradients if g is not None))
            for parameter, previous in self._of_parameters():
                _restore(parameter, previous)
        self._previous = ()

    def release(self) -> None:
        """After a failed step: its gradients are not divided, so only earlier ones stay."""
        for parameter, previous in self._of_parameters():
            parameter.grad = previous
        self._previous = ()

    def _of_parameters(self) -> Iterable[tuple[Parameter, Tensor | None]]:
        """Return the gradients that were set aside; none if none was counted."""
        return zip(self.parameters, self._previous, strict=True) if self._previous else ()

    def pop_divisor(self) -> Count | None:
        """Return the divisor of the gradients of this pipeline; None if they need none."""
        divisor, self._divisor = self._divisor, None
        return divisor


def _restore(parameter: Parameter, previous: Tensor | None) -> None:
    """Add a gradient that was set aside, in its own memory: users may hold views of it."""
    if previous is not None:
        if parameter.grad is not None:
            previous.add_(parameter.grad)
        parameter.grad = previous


def _mean_over(mesh: DeviceMesh, divisor: Count) -> Count:
    """Return the mean over the processes that share a stage."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device_type) + divisor
    with peer_errors("another pipeline", "averaging the number of labels"):
        for dim in range(mesh.ndim):
            dist.all_reduce(total, group=mesh.get_group(dim))
    return as_count(total / mesh.size())


def _mesh_of_shards(module: nn.Module) -> DeviceMesh:
    """Return the mesh of all processes that share a stage with FSDP2.

    The largest mesh of a parameter has all of them. It may have a dimension of tensor parallelism,
    over which the number of labels is equal.
    """
    meshes = [p.device_mesh for p in module.parameters() if isinstance(p, DTensor)]
    return max(meshes, key=lambda mesh: mesh.size())


def warn_of_copies(module: nn.Module, connections: Connections) -> None:
    """Warn if stages that were split by hand seem to share a parameter; all stages call this.

    Its copies have equal values under names that differ by more than a number; layers that are
    copied or built with one seed have equal values, too, but usually the same name.
    """
    own = [(name, fingerprint(p)) for name, p in module.named_parameters()]
    payload, what = msgspec.msgpack.encode(own), "comparing parameters"
    lengths = connections.all_gather_bytes(str(len(payload)).encode(), 32, what)
    gathered = connections.all_gather_bytes(payload, 4 + max(map(int, lengths)), what)
    seen: dict[bytes, tuple[int, str]] = {}
    for stage, payload in enumerate(gathered):
        for name, values in msgspec.msgpack.decode(payload, type=list[tuple[str, bytes | None]]):
            if values is None:
                continue
            first, other = seen.setdefault(values, (stage, name))
            is_named_alike = re.sub(r"\d", "", name) == re.sub(r"\d", "", other)
            if first != stage == connections.stage and not is_named_alike:
                warnings.warn(
                    f"{name} of stage {stage} has the values of {other} of stage {first}; their "
                    "gradients are summed only if tied= names them: pass "
                    f"tied=[{{{first}: {other!r}, {stage}: {name!r}}}], or tied=[] if each is "
                    "trained alone",
                    stacklevel=3,
                )


def _shape_of(parameter: Parameter) -> str:
    return f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}"


class _BuiltSchedule(NamedTuple):
    schedule: Schedule
    in_flight: list[int]  # maximum by stage


@dataclass(slots=True, kw_only=True)
class FlushRunner:
    """Runs one stage; `spec` may be changed between steps, equally on all stages."""

    has_gradients: ClassVar[bool] = True

    module: nn.Module
    executor: Executor
    num_stages: int
    spec: ScheduleSpec | ExplicitSchedule
    tied: TiedGradients | None
    autotuner: ScheduleAutotuner | None
    division: GradientDivision
    accumulation_context: Callable[[], AbstractContextManager[object]] = nullcontext
    last_backward_context: Callable[[], AbstractContextManager[object]] = nullcontext
    keeps_parameters: bool = False  # nobody replaces them: to list them takes 0.1 ms and more
    # The schedule of the last step; `spec` is that of the next.
    last_spec: ScheduleSpec | ExplicitSchedule = field(init=False)
    _sharded: list[FSDPModule] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.last_spec = self.spec

    @property
    def microbatch_size(self) -> int | None:
        """The micro-batch size that the tuner wants for the next batch; None for no change."""
        tuner = self.autotuner
        if tuner is None or tuner.candidate is None or not tuner.microbatch_sizes:
            return None
        return tuner.candidate.microbatch_size

    def post_receives(self, header: BatchHeader) -> int:
        """Prepare for a batch; return the number of its first micro-batch."""
        stage, connections = self.executor.stage, self.executor.connections
        if header.training:
            stage.peak_in_flight = 0
        if connections is not None:
            in_flight = [_EVAL_WINDOW] * self.num_stages
            if header.training:
                in_flight = _build(self.spec, self.num_stages, len(header.kinds)).in_flight
            connections.set_windows(in_flight, in_flight[stage.stage])
        self.executor.post_receives(header)
        return 0

    def run(self, batch: Batch) -> None:
        built = _build(self.spec, self.num_stages, batch.num_microbatches)
        actions = built.schedule[self.executor.stage.stage]
        if self._sharded is None:  # users apply fully_shard after they have created the pipeline
            is_tuned, stage = self.autotuner is not None, self.executor.stage.stage
            check_module(
                self.module,
                stage=stage,
                is_tuned=is_tuned,
                flush=True,
                has_dw_builder=self.executor.stage.dw_builder is not None,
            )
            self._sharded = [m for m in self.module.modules() if isinstance(m, FSDPModule)]
        for sharded in self._sharded:  # an evaluation may leave a module with whole parameters
            sharded.reshard()
        self.division.mesh = _mesh_of_shards(self.module) if self._sharded else None
        if self._sharded or not self.keeps_parameters or not self.division.parameters:
            self.division.parameters = list(self.module.parameters())
        # The mean of an only micro-batch needs no division, so earlier gradients can stay.
        needs_begin = self.division.is_deferred or not batch.is_own_mean
        batch.on_counted = self.division.begin if needs_begin else None
        with self.tied.sum_gradients() if self.tied is not None else nullcontext():
            with _accumulate_locally(self._sharded), self.accumulation_context():
                self.executor.run(actions[:-1], batch)
            with self.last_backward_context():
                self.executor.run(actions[-1:], batch)
            self.division.end(batch)
        if self.executor.connections is not None:
            self.executor.connections.drain()
        self.last_spec = self.spec
        self._tune(batch)

    def release(self) -> None:
        """Free the activations of a failed step."""
        self.executor.stage.release()
        self.division.release()

    def _tune(self, batch: Batch) -> None:
        stage = self.executor.stage
        transfers = self.executor.pop_transfers()
        if self.autotuner is None:
            return
        self.autotuner.after_step(
            batch.step, batch.header, stage.durations, transfers, stage.activation_bytes
        )
        if self.autotuner.clock_offsets:
            self.executor.clock_offsets = self.autotuner.clock_offsets
        if self.autotuner.candidate is not None:
            self.spec = self.autotuner.candidate.spec


@lru_cache(maxsize=64)
def _build(
    spec: ScheduleSpec | ExplicitSchedule, num_stages: int, num_microbatches: int
) -> _BuiltSchedule:
    schedule = spec.build(num_stages=num_stages, num_microbatches=num_microbatches)
    check(schedule, num_microbatches=num_microbatches)
    return _BuiltSchedule(schedule, list(map(peak_in_flight, schedule)))


@contextmanager
def _accumulate_locally(modules: Sequence[FSDPModule]) -> Iterator[None]:
    """Accumulate gradients locally in this block; the next backward after it reduces them."""
    _set_reduction(modules, False)
    yield
    _set_reduction(modules, True)


def _set_reduction(modules: Sequence[FSDPModule], is_enabled: bool) -> None:
    for module in modules:
        module.set_requires_gradient_sync(is_enabled, recurse=False)
        module.set_is_last_backward(is_enabled)


@dataclass(slots=True, kw_only=True)
class PipeDreamRunner:
    """Runs one stage; `limits[stage]` mini-batches may be in flight on a stage."""

    microbatch_size: ClassVar[None] = None  # batches are not split

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
            if gradient is not None and parameter.grad is not None:
                parameter.grad.add_(gradient)  # in its own memory: users may hold views of it
            elif gradient is not None:
                parameter.grad = gradient


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
