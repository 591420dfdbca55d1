"""A profile of a user's model: made by a factory, measured on a device of this machine."""

from collections.abc import Callable, Sequence

import torch

from polyrhythm.describe.factory import call_factory
from polyrhythm.describe.measure import device_flops, device_of, device_text
from polyrhythm.describe.model import ModelProfile
from polyrhythm.run.profile.layers import measure_layers
from polyrhythm.run.profile.profiled_model import ProfiledModel


def measure_profile(
    source: str,
    *,
    sizes: Sequence[int] = (),
    repeat: int = 5,
    device: str = "auto",
    dtype: str | None = None,
    measured_at: str = "",
    say: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] = lambda text: None,
) -> ModelProfile:
    """The profile of what `module:factory` makes; the first of `sizes` is its own.

    Without sizes a single sample may be too few (for a batch norm): it is left out with a note.
    Raises DescriptionError, also for whatever goes wrong in the user's code.
    """
    where = device_of(device)
    say("nothing yet: the factory is at work")
    subject = ProfiledModel.of(call_factory(source), source=source)
    number = None if dtype is None else getattr(torch, dtype)
    subject = subject.to(where, number)
    own, *others = sizes or reversed(subject.default_sizes())
    layers = measure_layers(
        subject,
        size=own,
        other_sizes=others,
        optional=() if sizes or own == 1 else (1,),
        repeat=repeat,
        device=where,
        say=say,
        warn=warn,
    )
    say("the speed of the device")
    number = number or _type_of(subject)
    del subject  # its memory is for the matrices now
    speed = device_flops(where, number, repeat=repeat)
    return ModelProfile(
        name=source,
        source=f"polyrhythm profile, {device_text(where)}",
        measured_at=measured_at,
        flops=speed.median,
        flops_dtype=str(number).removeprefix("torch."),
        microbatch_size=own,
        layers=layers,
    )


def _type_of(subject: ProfiledModel) -> torch.dtype:
    """The type of most of the model's numbers; float32 for one without any."""
    count: dict[torch.dtype, int] = {}
    for layer in subject.layers.values():
        for parameter in layer.parameters():
            if parameter.is_floating_point():
                count[parameter.dtype] = count.get(parameter.dtype, 0) + parameter.numel()
    return max(count, key=lambda each: count[each], default=torch.float32)
