"""Written descriptions are read back equal, up to the written digits."""

import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.model import AtSize, Layer, ModelProfile
from polyrhythm.describe.sample import Sample
from polyrhythm.describe.write import check_target, write_cluster, write_model
from polyrhythm.errors import DescriptionError

WHEN = "2026-05-12T14:30:00+00:00"
amounts = st.floats(1e-6, 1e12)
texts = st.text(max_size=8).filter(str.strip)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    names = draw(st.lists(texts, min_size=1, max_size=4, unique=True))

    def matrix() -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(draw(amounts) for _ in names) for _ in names)

    return Cluster(
        name=draw(texts),
        source=draw(st.text(max_size=8)),
        measured_at=draw(st.sampled_from(["", WHEN])),
        flops_dtype=draw(st.sampled_from(["", "bfloat16"])),
        devices=tuple(
            Device(
                name=name,
                region=name,
                host=draw(st.none() | texts),
                memory=draw(st.none() | st.integers(1, 2**40)),
                speed=draw(amounts),
                flops=draw(st.none() | amounts),
                flops_spread=draw(st.none() | amounts),
            )
            for name in names
        ),
        regions=tuple(names),
        latency=matrix(),
        bandwidth=matrix(),
        latency_spread=draw(st.sampled_from([(), matrix()])),
        bandwidth_spread=draw(st.sampled_from([(), matrix()])),
        nccl_latency=draw(st.sampled_from([(), matrix()])),
        nccl_bandwidth=draw(st.sampled_from([(), matrix()])),
    )


def alike(a: object, b: object, digits: int = 5) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=10**-digits)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(lambda x, y: alike(x, y, digits), a, b))
    if hasattr(a, "__dataclass_fields__") and type(a) is type(b):
        return all(
            alike(getattr(a, key), getattr(b, key), 2 if key.endswith("spread") else digits)
            for key in a.__dataclass_fields__
        )
    return a == b


@settings(deadline=None)  # a file per example: slow on a busy machine
@given(clusters())
def test_a_cluster_is_read_as_it_was_written(cluster: Cluster) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        write_cluster(cluster, path)
        assert alike(Cluster.load(path), cluster)
        assert [file.name for file in path.parent.iterdir()] == ["cluster.toml"]


def layer(name: str, time: float, size: int, spread: float | None, *others: int) -> Layer:
    return Layer(
        name=name,
        forward=time,
        backward=2 * time,
        parameter_bytes=size,
        activation_bytes=size,
        stored_bytes=2 * size,
        forward_spread=spread,
        backward_spread=spread,
        sizes=tuple(
            AtSize(
                microbatch_size=other,
                forward=time * other,
                backward=time,
                activation_bytes=size,
                stored_bytes=other,
            )
            for other in others
        ),
    )


@settings(deadline=None)  # a file per example: slow on a busy machine
@given(
    st.lists(st.tuples(amounts, st.integers(0, 2**40), st.none() | amounts), min_size=1),
    st.sampled_from([(), (1,), (2, 8)]),
    st.sampled_from([".json", ".toml"]),
    st.none() | amounts,
    texts,
)
def test_a_profile_is_read_as_it_was_written(layers, sizes, ending, flops, name) -> None:
    profile = ModelProfile(
        name=name,
        source=name,
        measured_at=WHEN,
        flops=flops,
        flops_dtype="bfloat16" if flops else "",
        microbatch_size=4,
        layers=tuple(layer(f"{name} {i}", *each, *sizes) for i, each in enumerate(layers)),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"profile{ending}"
        write_model(profile, path)
        assert alike(ModelProfile.load(path), profile)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("cluster.yaml", "ends in .toml"),
        ("nowhere/cluster.toml", "cannot be made in"),
        ("folder.toml", "is a folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_beforehand(
    tmp_path: Path, target: str, message: str
) -> None:
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(DescriptionError) as caught:
        check_target(tmp_path / target, (".toml",))
    assert message in str(caught.value)
    check_target(tmp_path / "cluster.toml", (".toml",))


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9), st.floats(0.1, 10))
def test_a_spread_is_a_fraction_that_no_unit_changes(values: list[float], scale: float) -> None:
    sample, scaled = Sample.of(values), Sample.of([scale * value for value in values])
    assert min(values) <= sample.median <= max(values)
    assert scaled.median == pytest.approx(scale * sample.median)
    assert scaled.spread == pytest.approx(sample.spread, abs=1e-6)
    assert Sample.of([values[0]] * 5).spread == 0


def test_one_outlier_changes_neither_median_nor_spread_much() -> None:
    assert Sample.of([1.0, 1.0, 1.01, 0.99, 50.0]) == Sample(1.0, pytest.approx(0.01))
