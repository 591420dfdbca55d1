"""Models that come along, by name: `bert-large`, `resnet50`, `gpt-24x2048x2048`.

Nothing is measured: their layers are counted by formulas, for a device of a given speed.
"""

import re

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
)
_GPT = re.compile(r"gpt-(\d+)x(\d+)x(\d+)(?:x(\d+))?(?:x(\d+))?", re.ASCII)
_BERT = re.compile(r"bert-(base|large)(?:-(\d+))?", re.ASCII)
_RESNET = re.compile(r"resnet50(?:-(\d+))?", re.ASCII)


def builtin_profile(
    name: str, *, flops: float, microbatch_size: int = 1, dtype: str = "float32"
) -> ModelProfile:
    """The model of that name on a device that does `flops` operations per second."""
    return profile_of(
        name, layers_of(name), flops=flops, microbatch_size=microbatch_size, dtype=dtype
    )


def layers_of(name: str) -> list[LayerWork]:
    """What the layers of the model of that name compute and keep; raises DescriptionError."""
    try:
        if found := _GPT.fullmatch(name):
            blocks, hidden, sequence, heads, vocabulary = (
                int(n) if n else 0 for n in found.groups()
            )
            return gpt(
                num_blocks=blocks,
                hidden=hidden,
                sequence=sequence,
                num_heads=heads or None,
                vocabulary=vocabulary or 50257,
            )
        if found := _BERT.fullmatch(name):
            return bert(found[1], sequence=int(found[2] or 512))
        if found := _RESNET.fullmatch(name):
            return resnet50(image=int(found[1] or 224))
    except DescriptionError as error:
        raise error.at(name) from None
    raise unknown("model", name, NAMES, near=("gpt-24x2048x2048", "bert-base", "bert-large"))
