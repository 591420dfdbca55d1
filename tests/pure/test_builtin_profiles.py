"""Built-in models: counts match known ones, and scale with micro-batch and dtype."""

import pytest

from polyrhythm.describe.profiles import builtin_profile, layers_of
from polyrhythm.errors import DescriptionError

EXAMPLES = ["gpt-3x128x64", "bert-base", "bert-large-128", "resnet50"]


def test_parameters_match_known_counts() -> None:
    tied = 30522 * 768  # one matrix for both embeddings, which the head counts again
    assert sum(layer.parameters for layer in layers_of("bert-base")) - tied == 109_514_298
    tied = 30522 * 1024
    assert sum(layer.parameters for layer in layers_of("bert-large")) - tied == 335_174_458
    assert sum(layer.parameters for layer in layers_of("resnet50")) == 25_557_032
    tied = 50257 * 768
    gpt2 = layers_of("gpt-12x768x1024x12")
    assert sum(layer.parameters for layer in gpt2) - tied == 124_439_808


def test_operations_match_known_counts() -> None:
    """ResNet-50 has 4.09e9 multiplications; a layer of GPT-3 XL has those that DT-FM states."""
    assert sum(layer.operations for layer in layers_of("resnet50")) == pytest.approx(
        2 * 4.09e9, rel=0.01
    )
    block = layers_of("gpt-24x2048x2048")[1]
    assert (block.parameters, block.operations) == (50_358_272, 240_518_168_576)
    assert block.outputs * 2 == 8_388_608, "bytes in float16"


@pytest.mark.parametrize("name", EXAMPLES)
def test_time_is_operations_over_the_speed_of_the_device(name: str) -> None:
    profile = builtin_profile(name, flops=2e12, microbatch_size=3)
    for layer, work in zip(profile.layers, layers_of(name), strict=True):
        assert layer.forward == pytest.approx(3 * work.operations / 2e12)
        assert layer.backward == pytest.approx(work.backward_ratio * layer.forward)
    assert profile.flops == 2e12
    assert profile.microbatch_size == 3


@pytest.mark.parametrize("name", EXAMPLES)
def test_bytes_follow_the_micro_batch_and_the_type(name: str) -> None:
    one = builtin_profile(name, flops=1e12)
    many = builtin_profile(name, flops=1e12, microbatch_size=4)
    half = builtin_profile(name, flops=1e12, dtype="bfloat16")
    for a, b, c in zip(one.layers, many.layers, half.layers, strict=True):
        assert b.parameter_bytes == a.parameter_bytes == 2 * c.parameter_bytes
        assert b.activation_bytes == 4 * a.activation_bytes
        assert b.stored_bytes == 4 * a.stored_bytes
        assert a.activation_bytes == 2 * c.activation_bytes
        assert c.stored_bytes <= a.stored_bytes, "indices keep their size"


@pytest.mark.parametrize("name", EXAMPLES)
def test_other_sizes_equal_a_profile_of_that_size(name: str) -> None:
    profile = builtin_profile(name, flops=1e12, microbatch_size=8, other_sizes=[2, 4])
    assert profile.microbatch_sizes == (2, 4, 8)
    for size in (2, 4):
        assert profile.at(size) == builtin_profile(name, flops=1e12, microbatch_size=size)


def test_attention_backward_recomputes_the_scores() -> None:
    """Attention has five backward products for two of the forward; other layers two for one."""
    block = layers_of("gpt-1x128x4096")[1]
    attention = 4 * 4096**2 * 128
    backward = block.backward_ratio * block.operations
    assert backward == pytest.approx(2 * block.operations + attention / 2, rel=1e-12)


def test_heads_and_vocabulary_are_optional() -> None:
    short, long = layers_of("gpt-2x128x64"), layers_of("gpt-2x128x64x2x50257")
    assert short == long
    assert layers_of("gpt-2x128x64x4")[1].stored > short[1].stored


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gtp-2x128x64", "did you mean 'gpt-"),
        ("gpt-2x128", "gpt-LAYERSxHIDDENxSEQUENCE"),
        ("bert-huge", "unknown model 'bert-huge'"),
        ("gpt-0x128x64", "gpt-0x128x64: a transformer of shape 0x128x64"),
        ("gpt-2x100x64x3", "hidden 100 for 3 heads"),
        ("bert-base-513", "at most 512"),
        ("resnet50-31", "images of 31 x 31"),
        ("resnet50-" + "9" * 200, "the number 99999999999999999999... of 200 digits"),
        ("resnet50-9999999", "at most 100000 x 100000"),
        ("gpt-" + "1" * 5000 + "x64x64", "of 5000 digits"),
        ("gpt-99999999x64x64", "the number 99999999"),
        ("gpt-9999999x64x64", "at most 10000"),
        ("gpt-2x128x64x0", "a transformer of shape 2x128x64x0x50257"),
        ("gpt-2x128x64x2x0", "a transformer of shape 2x128x64x2x0"),
        ("gpt-2x100x64", "hidden 100 without a number of heads"),
    ],
)
def test_impossible_model_is_refused(name: str, message: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        builtin_profile(name, flops=1e12)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"flops": 0.0}, "flops is 0"),
        ({"flops": float("inf")}, "flops is inf"),
        ({"flops": 1e12, "dtype": "int8"}, "dtype 'int8'"),
        ({"flops": 1e12, "microbatch_size": 0}, "microbatch_size is 0"),
        ({"flops": 1e12, "microbatch_size": 10**5000}, "microbatch_size is endless"),
        ({"flops": 1e12, "other_sizes": [0]}, "microbatch_size is 0"),
        ({"flops": 1e12, "other_sizes": [1]}, "every size once"),
    ],
)
def test_impossible_flops_dtype_or_size_is_refused(more: dict[str, object], message: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        builtin_profile("bert-base", **more)  # type: ignore[arg-type]
    assert message in str(caught.value)
