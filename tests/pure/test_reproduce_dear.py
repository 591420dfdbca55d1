"""DeAR's evaluation: its models are those of Table I, and what it claims most comes out."""

import pytest

from polyrhythm.describe.profiles import layers_of
from polyrhythm.sync.fusion.layers import by_bytes
from polyrhythm.sync.fusion.timeline import wfbp
from polyrhythm.sync.fusion.tuner import GridSearch
from reproduction.dear import fusion, methods, overlap, speedups
from reproduction.dear.gpu_time import Gpu, LearnableLayer, layer_times
from reproduction.dear.paper import setup
from reproduction.dear.setting import (
    ETHERNET,
    INFINIBAND,
    MODELS,
    NETWORKS,
    WORKERS,
    Model,
    Network,
    work,
)

TABLE_1 = {  # layers, tensors, millions of parameters
    "ResNet-50": (107, 161, 25.6),
    "DenseNet-201": (402, 604, 20.0),
    "Inception-v4": (299, 449, 42.7),
    "BERT-Base": (105, 206, 110.1),
    "BERT-Large": (201, 398, 336.2),
}
BY_NAME = {model.name: model for model in MODELS}
every_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
every_network = pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)


@every_model
def test_layers_tensors_and_parameters_are_those_of_table_1(model: Model) -> None:
    layers = model.make()
    parameters = sum(layer.parameters for layer in layers)
    tensors = sum(len(layer.tensors) for layer in layers)
    assert (len(layers), tensors, round(parameters / 1e6, 1)) == TABLE_1[model.name]


@pytest.mark.parametrize("name", ["ResNet-50", "DenseNet-201", "Inception-v4"])
def test_models_of_images_are_those_that_come_along(name: str) -> None:
    counted = layers_of(f"{name.replace('-', '').lower()}-224")
    layers = BY_NAME[name].make()
    assert sum(one.parameters for one in layers) == sum(one.parameters for one in counted)
    assert sum(one.operations for one in layers) == sum(one.operations for one in counted)


@pytest.mark.parametrize(("name", "heads"), [("base", 30528 * 768), ("large", 30528 * 1024)])
def test_a_bert_has_the_operations_of_the_one_that_comes_along(name: str, heads: int) -> None:
    """But for six words more, and the guess whether a sentence is the next one."""
    layers = BY_NAME[f"BERT-{name.title()}"].make()
    counted = sum(layer.operations for layer in layers_of(f"bert-{name}-64"))
    assert sum(layer.operations for layer in layers) == pytest.approx(counted, rel=1e-3)
    assert layers[0].parameters == heads


@every_model
def test_tensors_have_all_bytes_and_time_of_layers(model: Model) -> None:
    one = work(model)
    assert sum(t.size for t in one.tensors) == sum(layer.size for layer in one.layers)
    assert sum(t.backward for t in one.tensors) == pytest.approx(
        sum(layer.backward for layer in one.layers)
    )


def test_a_layer_takes_the_longer_of_its_operations_and_its_moves() -> None:
    gpu = Gpu(operations=100.0, memory=40.0)
    layer = LearnableLayer(name="x", tensors=(5, 5), operations=100, product_moves=5)
    moved = LearnableLayer(name="x", tensors=(5,), operations=1, product_moves=30, forward_moves=10)
    by_operations, by_moves = layer_times([layer, moved], 2, gpu)
    assert (by_operations.forward, by_operations.backward) == (2.0, 4.0)
    assert (by_moves.forward, by_moves.backward) == (6.0 + 2.0, 12.0)
    assert by_operations.size == 40


def test_all_reduces_on_ethernet_take_what_the_paper_says() -> None:
    assert ETHERNET.ring.all_reduce(1_000_000, WORKERS) == pytest.approx(4.5e-3, rel=0.03)
    assert ETHERNET.ring.all_reduce(500_000, WORKERS) == pytest.approx(3.9e-3, rel=0.03)


def test_bounds_and_speedups_of_table_2_come_out() -> None:
    rows = [row for row in speedups.rows() if row.place == "Table II"]
    assert len(rows) == 30
    assert all(row.passes for row in rows if row.what.endswith("S_max") and "/" not in row.what)
    counted = [row for row in rows if not row.is_given]
    assert len(counted) == 20
    assert {row.what for row in counted if not row.passes} == {"BERT-Large, 100GbIB: S of DeAR"}
    assert all(bool(row.why) != row.passes for row in counted)


def test_dear_beats_all_on_ethernet_and_gains_less_on_infiniband() -> None:
    slow, fast = speedups.gains(ETHERNET), speedups.gains(INFINIBAND)
    assert len(slow) == len(fast) == 14
    assert min(slow.values()) > 1
    assert sum(fast.values()) < sum(slow.values())


@every_network
@every_model
def test_no_system_beats_the_largest_speedup(model: Model, network: Network) -> None:
    one = work(model)
    most = one.bounds(network.ring).max_speedup(WORKERS)
    slack = (WORKERS - 1) / WORKERS  # a ring moves that part of the bytes, which the bound leaves
    for step in (methods.horovod, methods.ddp, methods.mg_wfbp, methods.dear_fixed):
        assert speedups.speedup(step(one, network)) * slack <= most


def test_without_fusion_dear_is_ahead_of_wfbp_and_that_of_bytescheduler_on_ethernet() -> None:
    for model in MODELS:
        one = work(model)
        dear = methods.dear_unfused(one, ETHERNET).seconds
        plain = methods.wait_free(one, ETHERNET).seconds
        assert dear < plain < methods.byte_scheduler(one, ETHERNET).seconds
        assert methods.dear_fixed(one, ETHERNET).seconds < dear, "fusion gains"


@every_network
def test_to_agree_on_a_buffer_takes_horovod_time(network: Network) -> None:
    one = work(BY_NAME["BERT-Large"])
    buckets = by_bytes([layer.size for layer in one.layers], methods.BUFFER)
    plain = wfbp(one.layers, buckets, network.ring, WORKERS)
    agreed = methods.horovod(one, network).seconds - plain.seconds
    assert 0 < agreed < 0.05 * plain.seconds


@every_model
def test_what_halves_show_adds_up_to_what_dear_shows(model: Model) -> None:
    parts = overlap.exposed(work(model), ETHERNET)
    assert parts["RS-only"] + parts["AG-only"] == pytest.approx(parts["DeAR"])
    assert parts["RS-only"] <= parts["AG-only"] + 1e-9


def test_smaller_batches_compute_less_and_scale_worse() -> None:
    model = BY_NAME["ResNet-50"]
    small, large = work(model, 16), work(model)
    assert small.compute < large.compute
    one, other = (speedups.speedup(methods.dear_fixed(w, ETHERNET)) for w in (small, large))
    assert one < other


def test_a_search_never_gets_worse() -> None:
    one = work(fusion.STUDIED[0])
    search = GridSearch(space=methods.space_of(one), num_trials=6)
    times = [step.seconds for step in methods.found_by(search, one, ETHERNET)]
    assert len(times) == 6
    assert times == sorted(times, reverse=True)


def test_what_goes_in_or_follows_does_not_count() -> None:
    rows = [*overlap.rows(), *speedups.rows()]
    given = [row.what for row in rows if row.is_given]
    assert sum("S / S_max" in what for what in given) == 12
    assert sum(what.startswith("reduce-scatter over") for what in given) == 2
    assert sum("Horovod" in what for what in given) == 2, "the third way to print it counts"


def test_the_page_says_what_other_readings_would_give() -> None:
    text = setup()
    assert "{" not in text
    assert f"message, {1e6 * ETHERNET.ring.latency:.0f} us," in text
    assert f"here {max(speedups.gains(ETHERNET).values()):.2f} over it" in text


@pytest.mark.long
def test_on_infiniband_ways_to_fuse_are_as_near_as_the_reasons_say() -> None:
    for model in fusion.STUDIED:
        one = work(model)
        nearby = methods.dear_nearby(one, INFINIBAND).seconds
        if model.is_image:
            assert 1 < methods.dear_tuned(one, INFINIBAND).seconds / nearby < 1.001
        else:
            fixed = methods.dear_fixed(one, INFINIBAND, methods.SMALL_BUFFER).seconds
            assert nearby / fixed == pytest.approx(1.005, abs=0.002)
