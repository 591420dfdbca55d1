"""DenseNet-201 and Inception-v4: counts match known ones."""

from itertools import pairwise

import pytest

from polyrhythm.describe import densenet_work, inception_work
from polyrhythm.describe.profiles import builtin_profile, layers_of
from polyrhythm.errors import DescriptionError


@pytest.mark.parametrize(
    ("name", "parameters", "products", "layers"),
    [
        ("densenet201", 20_013_928, 4.29e9, 103),  # as torchvision says
        ("inceptionv4", 42_679_816, 12.27e9, 23),  # as timm says, for images of 299
    ],
)
def test_parameters_and_operations_match_known_counts(
    name: str, parameters: int, products: float, layers: int
) -> None:
    found = layers_of(name)
    assert sum(layer.parameters for layer in found) == parameters
    assert sum(layer.operations for layer in found) == pytest.approx(2 * products, rel=0.005)
    assert len(found) == layers


@pytest.mark.parametrize("name", ["densenet201", "inceptionv4"])
def test_larger_images_need_more_of_everything_but_parameters(name: str) -> None:
    small, large = layers_of(f"{name}-160"), layers_of(f"{name}-320")
    for one, other in zip(small[:-1], large[:-1], strict=True):
        assert one.parameters == other.parameters
        assert one.operations < other.operations
        assert one.outputs < other.outputs
        assert one.stored < other.stored


def test_default_image_size_is_the_models_own() -> None:
    assert layers_of("densenet201") == layers_of("densenet201-224")
    assert layers_of("inceptionv4") == layers_of("inceptionv4-299")
    assert builtin_profile("inceptionv4-224", flops=1e12).name == "inceptionv4-224"


def test_input_of_each_block_is_the_previous_output() -> None:
    blocks = inception_work.blocks_of(224)
    assert [block.side for block in blocks if block.name in ("a3", "b6", "c2")] == [25, 12, 5]
    for one, other in pairwise(blocks):
        assert (one.channels, one.side) == (other.inputs, other.before)
        assert one.num_outputs == other.num_inputs


def test_dense_layer_passes_on_its_input() -> None:
    layers = layers_of("densenet201")
    blocks = densenet_work.blocks_of(224)
    for work, layer, after in zip(layers[1:-1], blocks, blocks[1:], strict=False):
        taken = after.narrow if isinstance(after, densenet_work.DenseLayer) else after.half
        assert work.outputs == taken.num_inputs, layer.name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("densenet201-31", "images of 31 x 31"),
        ("densenet201-9999999", "at most 100000 x 100000"),
        ("inceptionv4-74", "at least 75 x 75"),
        ("inceptionv4-9999999", "at most 100000 x 100000"),
        ("densenet202", "unknown model 'densenet202'"),
    ],
)
def test_images_that_are_too_small_or_too_large_are_refused(name: str, message: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        layers_of(name)
    assert message in str(caught.value)
    smallest = {"densenet201": 32, "inceptionv4": 75}
    for model, side in smallest.items():
        assert all(layer.outputs > 0 for layer in layers_of(f"{model}-{side}"))
