"""A model as a table of layers: what each takes in time and bytes, for one micro-batch.

This is all that planning and simulation need to know of a model. Times are those of a device of
speed 1; a stage of consecutive layers takes the sum of theirs.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from polyrhythm.describe.read import read
from polyrhythm.describe.units import check_amount
from polyrhythm.errors import DescriptionError
from polyrhythm.types import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    name: str
    forward: Seconds
    backward: Seconds
    parameter_bytes: Bytes
    activation_bytes: Bytes  # the output, which travels if the next layer is on another device
    stored_bytes: Bytes  # kept from the forward of a micro-batch to its backward

    def __post_init__(self) -> None:
        check_amount("forward", self.forward, Seconds)
        check_amount("backward", self.backward, Seconds)
        check_amount("parameter_bytes", self.parameter_bytes, Bytes)
        check_amount("activation_bytes", self.activation_bytes, Bytes)
        check_amount("stored_bytes", self.stored_bytes, Bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    name: str
    microbatch_size: int  # samples in the micro-batch that was measured
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        if self.microbatch_size < 1:
            raise DescriptionError(
                f"microbatch_size is {self.microbatch_size}",
                expected="1 or more samples",
                fix="give the micro-batch size that the layers were measured with",
            )
        if not self.layers:
            raise DescriptionError(
                f"model {self.name!r} has no layers",
                expected="at least one",
                fix="add a [[layers]] table",
            )
        for name, count in Counter(layer.name for layer in self.layers).items():
            if count > 1:
                raise DescriptionError(
                    f"{count} layers are named {name!r}",
                    expected="one layer per name",
                    fix=f"number them: '{name}.0', '{name}.1', ...",
                )

    @classmethod
    def load(cls, path: str | Path) -> "ModelProfile":
        """Read a .toml or .json file."""
        return read(Path(path), cls)
