"""Model profiles: valid layers are read, invalid ones are refused by name."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.describe.model import AtSize, Layer, ModelProfile
from polyrhythm.describe.units import keys_with_unit
from polyrhythm.errors import DescriptionError
from polyrhythm.types import Bytes, Seconds

LAYER = Layer(
    name="block",
    forward=0.005,
    backward=0.01,
    parameter_bytes=200,
    activation_bytes=30,
    stored_bytes=600,
)
PROFILE = ModelProfile(name="m", microbatch_size=4, layers=(LAYER, replace(LAYER, name="head")))


@settings(deadline=None)  # a file per example: slow on a busy machine
@given(
    st.floats(0, 1e3),
    st.integers(0, 2**40),
    st.sampled_from(sorted(keys_with_unit("forward", Seconds).items())),
    st.sampled_from(sorted(keys_with_unit("stored_bytes", Bytes).items())),
)
def test_layer_is_read_in_every_unit(tmp_path_factory, time, size, time_unit, size_unit):
    (time_key, time_scale), (size_key, size_scale) = time_unit, size_unit
    layer = asdict(LAYER) | {"backward": "10ms", time_key: time, size_key: size}
    del layer["forward"]
    if size_key != "stored_bytes":
        del layer["stored_bytes"]
    path = tmp_path_factory.mktemp("model") / "model.json"
    path.write_text(json.dumps({"name": "m", "microbatch_size": 4, "layers": [layer]}))
    [read] = ModelProfile.load(path).layers
    assert read.forward == pytest.approx(time * time_scale)
    assert (read.stored_bytes, read.backward) == (size * int(size_scale), 0.01)


@pytest.mark.parametrize(
    "field", ["forward", "backward", "parameter_bytes", "activation_bytes", "stored_bytes"]
)
def test_layer_with_a_negative_amount_is_refused(field):
    with pytest.raises(DescriptionError, match=f"{field} is -1"):
        replace(LAYER, **{field: -1})
    assert getattr(replace(LAYER, **{field: 0}), field) == 0


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"layers": ()}, "model 'm' has no layers"),
        ({"layers": (LAYER, LAYER)}, "2 layers are named 'block'"),
        ({"microbatch_size": 0}, "microbatch_size is 0"),
    ],
)
def test_impossible_profile_is_refused(change, wrong):
    with pytest.raises(DescriptionError) as caught:
        replace(PROFILE, **change)
    assert caught.value.wrong == wrong


def test_wrong_layer_of_a_file_is_named_by_its_index(tmp_path):
    path = tmp_path / "model.toml"
    path.write_text(
        'name = "m"\nmicrobatch_size = 1\n[[layers]]\nname = "x"\nforward_ms = 1\n'
        "backward_ms = -2\nparameter_bytes = 1\nactivation_bytes = 1\nstored_bytes = 1\n"
    )
    with pytest.raises(DescriptionError) as caught:
        ModelProfile.load(str(path))
    assert caught.value.wrong == f"{path}: layers[0]: backward is -2ms"


def at_size(size: int, scale: float) -> AtSize:
    return AtSize(
        microbatch_size=size,
        forward=scale * LAYER.forward,
        backward=scale * LAYER.backward,
        activation_bytes=round(scale * LAYER.activation_bytes),
        stored_bytes=round(scale * LAYER.stored_bytes),
    )


# Twice the samples take three times as long, half of them a quarter.
BENT = replace(LAYER, sizes=(at_size(2, 0.25), at_size(8, 3.0)))
MEASURED = replace(PROFILE, layers=(BENT, replace(BENT, name="head")))


@pytest.mark.parametrize(
    ("size", "scale"), [(2, 0.25), (3, 0.625), (4, 1.0), (5, 1.5), (6, 2.0), (8, 3.0)]
)
def test_profile_for_another_size_is_measured_or_interpolated(size, scale):
    profile = MEASURED.at(size)
    assert profile.microbatch_size == size
    for layer in profile.layers:
        assert layer.forward == pytest.approx(scale * LAYER.forward)
        assert layer.backward == pytest.approx(scale * LAYER.backward)
        assert layer.activation_bytes == pytest.approx(scale * LAYER.activation_bytes, abs=1)
        assert layer.stored_bytes == pytest.approx(scale * LAYER.stored_bytes, abs=1)
        assert layer.parameter_bytes == LAYER.parameter_bytes


@pytest.mark.parametrize(("profile", "size"), [(MEASURED, 1), (MEASURED, 9), (PROFILE, 5)])
def test_a_size_beyond_those_that_were_measured_is_refused(profile, size):
    with pytest.raises(DescriptionError, match=f"micro-batches of {size} for model 'm'"):
        profile.at(size)


@pytest.mark.parametrize(
    "layers",
    [
        (BENT, replace(LAYER, name="head")),
        (replace(LAYER, sizes=(at_size(4, 1.0),)),),
        (replace(LAYER, sizes=(at_size(2, 1.0), at_size(2, 1.0))),),
    ],
)
def test_inconsistent_sizes_are_refused(layers):
    with pytest.raises(DescriptionError, match="has micro-batches of"):
        replace(PROFILE, layers=layers)


@pytest.mark.parametrize("when", ["yesterday", "12:30", "2026-13-01"])
def test_invalid_measured_at_is_refused(when):
    with pytest.raises(DescriptionError, match="measured_at is"):
        replace(PROFILE, measured_at=when)
    assert replace(PROFILE, measured_at="2026-05-12T14:30:00Z")
