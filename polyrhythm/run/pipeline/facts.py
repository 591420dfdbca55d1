"""What one can ask a pipeline about itself."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from torch import Tensor
from torch.nn import Parameter

from polyrhythm.errors import ScheduleError
from polyrhythm.run.pipeline.connections import NO_MORE, Connections, Cut
from polyrhythm.run.pipeline.continuous import Continuous
from polyrhythm.run.pipeline.flushed import Flushed
from polyrhythm.run.pipeline.gradients import TiedGradients, norm_over_stages
from polyrhythm.run.pipeline.stage import StageCompute
from polyrhythm.schedule.recipe import Recipe, Written
from polyrhythm.types import Bytes


class PipelineFacts:
    """Read between steps; `recipe` may be set there, too."""

    stage: int
    num_stages: int
    _compute: StageCompute
    _way: Flushed | Continuous
    _is_closed: bool
    _connections: Connections | None
    _tied: TiedGradients | None
    _last_cut: Cut | None  # of the batch that was begun last

    @property
    def recipe(self) -> Recipe | Written:
        """The schedule of the next step; set it between steps, on all stages alike."""
        return self._flushed.recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | Written) -> None:
        self._flushed.recipe = recipe

    @property
    def last_recipe(self) -> Recipe | Written:
        """The schedule of the last step."""
        return self._flushed.last_recipe

    @property
    def _flushed(self) -> Flushed:
        if isinstance(self._way, Flushed):
            return self._way
        raise ScheduleError(
            "the schedule of a pipeline with flush=False",
            expected="one whose steps run a schedule each",
            fix="use flush=True",
        )

    @property
    def note(self) -> tuple[int, ...]:
        """Of the first stage, on the batch that was begun last."""
        return () if self._last_cut is None else self._last_cut.note

    def end_batches(self) -> None:
        """On the first stage: the others, who wait for the next batch, hear that none will come."""
        self._check_open("end_batches")
        if self._connections is not None and self._connections.stage == 0:
            self._connections.brief(NO_MORE)

    @property
    def sizes(self) -> list[int]:
        """Of the micro-batches of the batch that was begun last."""
        return [] if self._last_cut is None else self._last_cut.sizes

    def accumulate_in(self, context: Callable[[], AbstractContextManager[object]]) -> None:
        """Entered around all backwards of a step but the last, whose gradients are complete."""
        self._flushed.accumulating = context

    @property
    def is_flushed(self) -> bool:
        """Whether each step runs all backwards of its batch, with one version of the weights."""
        return isinstance(self._way, Flushed)

    @property
    def tied(self) -> set[Parameter]:
        """Those that other stages hold, too: their gradients are complete after the step."""
        return set() if self._tied is None else self._tied.here()

    @property
    def tied_elsewhere(self) -> set[Parameter]:
        """Those of them that an earlier stage counts as its own."""
        return set() if self._tied is None else self._tied.elsewhere()

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
        return self._way.has_gradients

    @property
    def most_versions(self) -> int:
        """Without a flush: the most copies of the weights that were stashed at once."""
        return self._way.most_versions if isinstance(self._way, Continuous) else 0
