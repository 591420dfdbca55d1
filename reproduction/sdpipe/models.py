"""The two models of SDPipe's evaluation, in stages, on A100s.

The cuts are those of the authors' published scripts: of ResNet-50's sixteen blocks four to a stage,
of BERT-base's twelve layers 2, 4, 4 and 2, since the ends have the embedding and the head too. With
fewer stages, neighbours are put together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from polyrhythm.cost.step import StageWork
from polyrhythm.describe.layer_work import LayerWork
from polyrhythm.describe.resnet_work import resnet50
from polyrhythm.describe.transformer_work import bert
from polyrhythm.types import Seconds

# The data sheet's 19.5 TFLOPS in single precision; the scripts ask for CUDA 10.2, which knows no
# TF32. Half of that is what ResNet-50 reaches in single precision: Lambda Labs measured 294 images
# per second on an RTX 2080 Ti, 54 % of its 13.45 TFLOPS.
A100 = 0.5 * 19.5e12
BATCH = 64  # of each pipeline, in all of the scripts
_WIDTH = 4  # bytes of a number


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    layers: tuple[LayerWork, ...]
    cut: tuple[int, ...]  # layers of each of four stages, the first and the last layer apart
    sleeps: dict[str, Seconds]  # of section 5.1, by setting


RESNET = Workload(
    name="ResNet-50",
    layers=tuple(resnet50()),
    cut=(4, 4, 4, 4),
    sleeps={"homogeneous": 0.0, "A": 0.1, "B": 0.3},
)
BERT = Workload(
    name="BERT-base",
    layers=tuple(bert("base", sequence=128)),
    cut=(2, 4, 4, 2),
    sleeps={"homogeneous": 0.0, "A": 0.2, "B": 0.6},
)


def stages_of(workload: Workload, num_stages: int) -> tuple[StageWork, ...]:
    """One, two or four of them."""
    first, *blocks, last = workload.layers
    parts: list[list[LayerWork]] = [[] for _ in range(num_stages)]
    parts[0].append(first)
    for place, count in enumerate(workload.cut):
        parts[place * num_stages // len(workload.cut)] += blocks[:count]
        blocks = blocks[count:]
    parts[-1].append(last)
    return tuple(_stage(part) for part in parts)


def _stage(layers: Sequence[LayerWork]) -> StageWork:
    operations = [BATCH * layer.operations for layer in layers]
    return StageWork(
        forward=sum(operations) / A100,
        backward=sum(
            layer.backward_ratio * count for layer, count in zip(layers, operations, strict=True)
        )
        / A100,
        activation_bytes=BATCH * _WIDTH * layers[-1].outputs,
        gradient_bytes=sum(_WIDTH * layer.parameters for layer in layers),
    )
