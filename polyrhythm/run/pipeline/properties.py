"""The properties of a pipeline."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from torch import Tensor
from torch.nn import Parameter

from polyrhythm.errors import ScheduleError
from polyrhythm.run.pipeline.connections import END_OF_DATA, BatchHeader, Connections
from polyrhythm.run.pipeline.flush_runner import FlushRunner
from polyrhythm.run.pipeline.gradients import TiedGradients, norm_over_stages
from polyrhythm.run.pipeline.pipedream_runner import PipeDreamRunner
from polyrhythm.run.pipeline.stage import StageCompute
from polyrhythm.schedule.spec import ExplicitSchedule, ScheduleSpec
from polyrhythm.types import Bytes


class PipelineProperties:
    """Properties to read between steps; `spec` may also be set between steps."""

    stage: int
    num_stages: int
    _compute: StageCompute
    _runner: FlushRunner | PipeDreamRunner
    _is_closed: bool
    _connections: Connections | None
    _tied: TiedGradients | None
    _last_header: BatchHeader | None  # of the latest batch

    @property
    def spec(self) -> ScheduleSpec | ExplicitSchedule:
        """The schedule of the next step; set it between steps, equally on all stages."""
        return self._flush_runner.spec

    @spec.setter
    def spec(self, spec: ScheduleSpec | ExplicitSchedule) -> None:
        self._flush_runner.spec = spec

    @property
    def last_spec(self) -> ScheduleSpec | ExplicitSchedule:
        """The schedule of the last step."""
        return self._flush_runner.last_spec

    @property
    def _flush_runner(self) -> FlushRunner:
        if isinstance(self._runner, FlushRunner):
            return self._runner
        raise ScheduleError(
            "the schedule of a pipeline with flush=False",
            expected="a pipeline whose steps each run a schedule",
            fix="use flush=True",
        )

    @property
    def metadata(self) -> tuple[int, ...]:
        """The first stage's metadata of the latest batch."""
        return () if self._last_header is None else self._last_header.metadata

    def end_batches(self) -> None:
        """Announce from the first stage that no batch follows; the other stages wait for one."""
        self._check_open("end_batches")
        if self._connections is not None and self._connections.stage == 0:
            self._connections.relay_header(END_OF_DATA)

    @property
    def sizes(self) -> list[int]:
        """The sizes of the micro-batches of the latest batch."""
        return [] if self._last_header is None else self._last_header.sizes

    def set_accumulation_context(
        self, context: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """Set the context of all backwards of a step but the last, which completes gradients."""
        self._flush_runner.accumulation_context = context

    @property
    def is_flushed(self) -> bool:
        """Whether each step runs all backwards of its batch, with one version of the weights."""
        return isinstance(self._runner, FlushRunner)

    @property
    def tied(self) -> set[Parameter]:
        """The parameters that other stages hold, too: their gradients are complete after `step`."""
        return set() if self._tied is None else self._tied.parameters()

    @property
    def tied_not_owned(self) -> set[Parameter]:
        """The tied parameters that an earlier stage owns."""
        return set() if self._tied is None else self._tied.not_owned()

    def norm_over_stages(self, norm: Tensor, norm_type: float) -> Tensor:
        """Combine this stage's norm with those of all other stages, which call this, too."""
        control = None if self._connections is None else self._connections.control
        total = norm.double() if norm_type == float("inf") else norm.double() ** norm_type
        return norm_over_stages(total, norm_type, control)

    def _check_open(self, called: str) -> None:
        if self._is_closed:
            raise ScheduleError(
                f"{called} of a closed pipeline",
                expected="an open pipeline: closing frees the batches in flight",
                fix="create a new Pipeline; without a flush, call drain() before close()",
            )

    @property
    def peak_in_flight(self) -> int:
        """The largest number of micro-batches with activations in memory during the last step."""
        return self._compute.peak_in_flight

    @property
    def activation_bytes(self) -> Mapping[int, Bytes]:
        """The activation memory of a micro-batch between forward and backward, by kind."""
        return self._compute.activation_bytes

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def has_gradients(self) -> bool:
        """Whether the last step left gradients; without a flush the first few do not."""
        return self._runner.has_gradients

    @property
    def peak_weight_versions(self) -> int:
        """Without a flush: the largest number of stashed weight versions."""
        return self._runner.peak_weight_versions if isinstance(self._runner, PipeDreamRunner) else 0
