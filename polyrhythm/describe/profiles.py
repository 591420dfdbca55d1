"""Built-in models by name: `bert-large`, `resnet50`, `gpt-24x2048x2048`.

Nothing is measured: their layers are computed by formulas for a device of a given speed.
"""

import re
from collections.abc import Sequence

from polyrhythm.describe.densenet_work import densenet201
from polyrhythm.describe.inception_work import inceptionv4
from polyrhythm.describe.layer_work import LayerWork, profile_of
from polyrhythm.describe.model import ModelProfile
from polyrhythm.describe.read import unknown
from polyrhythm.describe.resnet_work import resnet50
from polyrhythm.describe.transformer_work import bert, gpt
from polyrhythm.errors import DescriptionError

NAMES = (
    "gpt-LAYERSxHIDDENxSEQUENCE[xHEADS[xVOCABULARY]]",
    "bert-base[-SEQUENCE]",
    "bert-large[-SEQUENCE]",
    "resnet50[-IMAGE]",
    "densenet201[-IMAGE]",
    "inceptionv4[-IMAGE]",
)
_LARGEST = 10_000_000  # of any number in a name; more is a typing error
_LONGEST = 80  # characters of a name in an error
_GPT = re.compile(r"gpt-(\d+)x(\d+)x(\d+)(?:x(\d+))?(?:x(\d+))?", re.ASCII)
_BERT = re.compile(r"bert-(base|large)(?:-(\d+))?", re.ASCII)
_IMAGES = re.compile(r"(resnet50|densenet201|inceptionv4)(?:-(\d+))?", re.ASCII)


def builtin_profile(
    name: str,
    *,
    flops: float,
    microbatch_size: int = 1,
    other_sizes: Sequence[int] = (),
    dtype: str = "float32",
) -> ModelProfile:
    """Return the profile of a built-in model on a device with `flops` operations per second.

    Its layers have `sizes` for other micro-batch sizes, like a measured profile.
    """
    return profile_of(
        name,
        layers_of(name),
        flops=flops,
        microbatch_size=microbatch_size,
        other_sizes=other_sizes,
        dtype=dtype,
    )


def layers_of(name: str) -> list[LayerWork]:
    """Return the layers of the model of that name; raise DescriptionError if unknown."""
    try:
        if found := _GPT.fullmatch(name):
            blocks, hidden, sequence, heads, vocabulary = found.groups()
            return gpt(
                num_blocks=_number(blocks),
                hidden=_number(hidden),
                sequence=_number(sequence),
                num_heads=None if heads is None else _number(heads),
                vocabulary=_number(vocabulary or "50257"),
            )
        if found := _BERT.fullmatch(name):
            return bert(found[1], sequence=_number(found[2] or "512"))
        if found := _IMAGES.fullmatch(name):
            return _of_images(found[1], found[2])
    except DescriptionError as error:
        raise error.at(name if len(name) <= _LONGEST else f"{name[:_LONGEST]}...") from None
    raise unknown("model", name, NAMES, near=("gpt-24x2048x2048", "bert-base", "bert-large"))


def _of_images(model: str, side: str | None) -> list[LayerWork]:
    """Return an image model's layers, by default for the image size that it was designed for."""
    if model == "inceptionv4":
        return inceptionv4(image=_number(side or "299"))
    image = _number(side or "224")
    return densenet201(image=image) if model == "densenet201" else resnet50(image=image)


def _number(digits: str) -> int:
    significant = digits.lstrip("0") or "0"
    # By its length first: Python refuses to read a number of thousands of digits.
    if len(significant) > len(str(_LARGEST)) or int(significant) > _LARGEST:
        shown = digits if len(digits) <= 20 else f"{digits[:20]}... of {len(digits)} digits"
        raise DescriptionError(
            f"the number {shown}", expected=f"at most {_LARGEST}", fix="write a smaller one"
        )
    return int(significant)
