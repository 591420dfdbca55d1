"""What one can ask a pipeline about itself."""

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
    """Read between steps; `spec` may be set there, too."""

    stage: int
    num_stages: int
    _compute: StageCompute
    _runner: FlushRunner | PipeDreamRunner
    _is_closed: bool
    _connections: Connections | None
    _tied: TiedGradients | None
    _last_header: BatchHeader | None  # of the batch that was begun last

    @property
    def spec(self) -> ScheduleSpec | ExplicitSchedule:
        """The schedule of the next step; set it between steps, on all stages alike."""
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
            expected="one whose steps run a schedule each",
            fix="use flush=True",
        )

    @property
    def metadata(self) -> tuple[int, ...]:
        """Of the first stage, on the batch that was begun last."""
        return () if self._last_header is None else self._last_header.metadata

    def end_batches(self) -> None:
        """On the first stage: the others, who wait for the next batch, hear that none will come."""
        self._check_open("end_batches")
        if self._connections is not None and self._connections.stage == 0:
            self._connections.relay_header(END_OF_DATA)

    @property
    def sizes(self) -> list[int]:
        """Of the micro-batches of the batch that was begun last."""
        return [] if self._last_header is None else self._last_header.sizes

    def set_accumulation_context(
        self, context: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """Entered around all backwards of a step but the last, whose gradients are complete."""
        self._flush_runner.accumulation_context = context

    @property
    def is_flushed(self) -> bool:
        """Whether each step runs all backwards of its batch, with one version of the weights."""
        return isinstance(self._runner, FlushRunner)

    @property
    def tied(self) -> set[Parameter]:
        """Those that other stages hold, too: their gradients are complete after the step."""
        return set() if self._tied is None else self._tied.parameters()

    @property
    def tied_not_owned(self) -> set[Parameter]:
        """Those of them that an earlier stage counts as its own."""
        return set() if self._tied is None else self._tied.not_owned()

    def norm_over_stages(self, norm: Tensor, norm_type: float) -> Tensor:
        """That of all stages' numbers, given that of this stage's; called by all stages."""
        control = None if self._connections is None else self._connections.control
        total = norm.double() if norm_type == float("inf") else norm.double() ** norm_type
        return norm_over_stages(total, norm_type, control)

    def _check_open(self, called: str) -> None:
        if self._is_closed:
            raise ScheduleError(
                f"{called} of a pipeline that is closed",
                expected="a pipeline in use: closing frees what is in flight",
                fix="make a new Pipeline; without a flush, drain() before close()",
            )

    @property
    def peak_in_flight(self) -> int:
        """The most micro-batches whose activations were held at once, in the last step."""
        return self._compute.peak_in_flight

    @property
    def activation_bytes(self) -> Mapping[int, Bytes]:
        """What a micro-batch holds from its forward to its backward, by kind of micro-batch."""
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
        """Without a flush: the most copies of the weights that were stashed at once."""
        return self._runner.peak_weight_versions if isinstance(self._runner, PipeDreamRunner) else 0
