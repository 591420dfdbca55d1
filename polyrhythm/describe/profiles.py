"""Built-in models by name: `bert-large`, `resnet50`, `gpt-24x2048x2048`.

Nothing is measured: their layers are computed by formulas for a device of a given speed.
"""

import re
from collections.abc import Sequence

from polyrhythm.describe.densenet_work import densenet201
from polyrhythm.describe.inception_work import inceptionv4
from polyrhythm.describe.layer_work import BYTES_OF, LayerWork, layer_of
from polyrhythm.describe.model import ModelProfile, check_size
from polyrhythm.describe.read import unknown
from polyrhythm.describe.resnet_work import resnet50
from polyrhythm.describe.transformer_work import bert, gpt
from polyrhythm.describe.units import check_amount
from polyrhythm.errors import DescriptionError

NAMES = (
    "gpt-LAYERSxHIDDENxSEQUENCE[xHEADS[xVOCABULARY]]",
    "bert-base[-SEQUENCE]",
    "bert-large[-SEQUENCE]",
    "resnet50[-IMAGE]",
    "densenet201[-IMAGE]",
    "inceptionv4[-IMAGE]",
)
SPELLINGS = ("gpt-24x2048x2048", "bert-base", "bert-large")  # to suggest
_LARGEST = 10_000_000  # of any number in a name; more is a typing error
_LONGEST = 80  # characters of a name in an error
_GPT = re.compile(r"gpt-(\d+)x(\d+)x(\d+)(?:x(\d+))?(?:x(\d+))?", re.ASCII)
_BERT = re.compile(r"bert-(base|large)(?:-(\d+))?", re.ASCII)
_IMAGE_MODELS = {"resnet50": resnet50, "densenet201": densenet201, "inceptionv4": inceptionv4}
_IMAGES = re.compile(rf"({'|'.join(_IMAGE_MODELS)})(?:-(\d+))?", re.ASCII)


def builtin_profile(
    name: str,
    *,
    flops: float,
    microbatch_size: int = 1,
    other_sizes: Sequence[int] = (),
    dtype: str = "float32",
) -> ModelProfile:
    """Return the profile of a built-in model on a device with `flops` operations per second.

    Its tensors are of `dtype`; its layers have `sizes` for other micro-batch sizes, like a measured
    profile.
    """
    layers = layers_of(name)
    check_amount("flops", flops, zero=False)
    for size in (microbatch_size, *other_sizes):
        check_size(size)
    if dtype not in BYTES_OF:
        raise DescriptionError(
            f"dtype {dtype!r}", expected=f"one of {', '.join(BYTES_OF)}", fix="use float32"
        )
    return ModelProfile(
        name=name,
        source="counted by formulas, not measured",
        microbatch_size=microbatch_size,
        flops=flops,
        flops_dtype=dtype,
        layers=tuple(
            layer_of(each, flops, microbatch_size, other_sizes, BYTES_OF[dtype]) for each in layers
        ),
    )


def is_builtin(name: str) -> bool:
    """Whether this is the name of a built-in model, if its numbers are right."""
    return any(pattern.fullmatch(name) for pattern in (_GPT, _BERT, _IMAGES))


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
            image = {} if found[2] is None else {"image": _number(found[2])}
            return _IMAGE_MODELS[found[1]](**image)
    except DescriptionError as error:
        raise error.at(name if len(name) <= _LONGEST else f"{name[:_LONGEST]}...") from None
    raise unknown("model", name, NAMES, near=SPELLINGS)


def _number(digits: str) -> int:
    significant = digits.lstrip("0") or "0"
    # By its length first: Python refuses to read a number of thousands of digits.
    if len(significant) > len(str(_LARGEST)) or int(significant) > _LARGEST:
        shown = digits if len(digits) <= 20 else f"{digits[:20]}... of {len(digits)} digits"
        raise DescriptionError(
            f"the number {shown}", expected=f"at most {_LARGEST}", fix="write a smaller one"
        )
    return int(significant)
