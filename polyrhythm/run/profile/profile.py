"""Profile a user's model, built by a factory, on a device of this machine."""

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
    on_progress: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] = lambda text: None,
) -> ModelProfile:
    """Profile the model that `module:factory` makes; the first of `sizes` is the profile's size.

    Without `sizes`, size 1 is optional: it may be too small (for a batch norm), and is skipped
    with a warning. Raises DescriptionError, also for any error in the user's code.
    """
    torch_device = device_of(device)
    on_progress("nothing yet: the factory is running")
    model = ProfiledModel.of(call_factory(source), source=source)
    float_type = None if dtype is None else getattr(torch, dtype)
    model = model.to(torch_device, float_type)
    first_size, *others = sizes or reversed(model.default_sizes())
    layers = measure_layers(
        model,
        size=first_size,
        other_sizes=others,
        optional=() if sizes or first_size == 1 else (1,),
        repeat=repeat,
        device=torch_device,
        on_progress=on_progress,
        warn=warn,
    )
    on_progress("device speed")
    float_type = float_type or _type_of(model)
    del model  # frees memory for the matrices
    speed = device_flops(torch_device, float_type, repeat=repeat)
    return ModelProfile(
        name=source,
        source=f"polyrhythm profile, {device_text(torch_device)}",
        measured_at=measured_at,
        flops=speed.median,
        flops_dtype=str(float_type).removeprefix("torch."),
        microbatch_size=first_size,
        layers=layers,
    )


def _type_of(model: ProfiledModel) -> torch.dtype:
    """Return the type of most floating-point parameters; float32 without any."""
    count: dict[torch.dtype, int] = {}
    for layer in model.layers.values():
        for parameter in layer.parameters():
            if parameter.is_floating_point():
                count[parameter.dtype] = count.get(parameter.dtype, 0) + parameter.numel()
    return max(count, key=lambda each: count[each], default=torch.float32)
