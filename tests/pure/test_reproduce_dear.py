"""DeAR's evaluation: its models are those of Table I, and its main claims come out."""

import pytest

from polyrhythm.describe.profiles import layers_of
from polyrhythm.sync.fusion.layers import by_bytes
from reproduction.dear import methods, overlap, speedups
from reproduction.dear.layers import Gpu, LearnableLayer
from reproduction.dear.paper import setup
from reproduction.dear.search import GridSearch
from reproduction.dear.testbed import (
    ETHERNET,
    INFINIBAND,
    MODELS,
    NETWORKS,
    NUM_WORKERS,
    DearModel,
    DearNetwork,
    compute_times,
)
from reproduction.dear.timeline import wfbp

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
def test_layers_tensors_and_parameters_are_those_of_table_1(model: DearModel) -> None:
    layers = model.layers()
    parameters = sum(layer.parameters for layer in layers)
    tensors = sum(len(layer.tensors) for layer in layers)
    assert (len(layers), tensors, round(parameters / 1e6, 1)) == TABLE_1[model.name]


@pytest.mark.parametrize("name", ["ResNet-50", "DenseNet-201", "Inception-v4"])
def test_image_models_equal_the_built_in_ones(name: str) -> None:
    counted = layers_of(f"{name.replace('-', '').lower()}-224")
    layers = BY_NAME[name].layers()
    assert sum(one.parameters for one in layers) == sum(one.parameters for one in counted)
    assert sum(one.operations for one in layers) == sum(one.operations for one in counted)


@pytest.mark.parametrize(("name", "heads"), [("base", 30528 * 768), ("large", 30528 * 1024)])
def test_a_bert_has_the_operations_of_the_built_in_one(name: str, heads: int) -> None:
    """Except for six more words, and the head that guesses the next sentence."""
    layers = BY_NAME[f"BERT-{name.title()}"].layers()
    counted = sum(layer.operations for layer in layers_of(f"bert-{name}-64"))
    assert sum(layer.operations for layer in layers) == pytest.approx(counted, rel=1e-3)
    assert layers[0].parameters == heads


@every_model
def test_tensors_have_the_bytes_and_the_time_of_layers(model: DearModel) -> None:
    times = compute_times(model)
    assert sum(t.size for t in times.tensors) == sum(layer.size for layer in times.layers)
    assert sum(t.backward for t in times.tensors) == pytest.approx(
        sum(layer.backward for layer in times.layers)
    )


def test_a_layer_takes_the_longer_of_compute_and_memory_time() -> None:
    gpu = Gpu(operations=100.0, memory=40.0)
    layer = LearnableLayer(tensors=(5, 5), operations=100, product_elements=5)
    stored = LearnableLayer(tensors=(5,), operations=1, product_elements=30, forward_elements=10)
    by_operations, by_memory = (each.times(2, gpu) for each in (layer, stored))
    assert (by_operations.forward, by_operations.backward) == (2.0, 4.0)
    assert (by_memory.forward, by_memory.backward) == (6.0 + 2.0, 12.0)
    assert by_operations.size == 40


def test_all_reduces_on_ethernet_take_the_printed_times() -> None:
    assert ETHERNET.ring.all_reduce(1_000_000, NUM_WORKERS) == pytest.approx(4.5e-3, rel=0.03)
    assert ETHERNET.ring.all_reduce(500_000, NUM_WORKERS) == pytest.approx(3.9e-3, rel=0.03)


@pytest.mark.long
def test_bounds_and_speedups_of_table_2_come_out() -> None:
    rows = [row for row in speedups.rows() if row.place == "Table II"]
    assert len(rows) == 30
    assert all(row.passes for row in rows if row.what.endswith("S_max") and "/" not in row.what)
    counted = [row for row in rows if not row.is_given]
    assert len(counted) == 20
    assert {row.what for row in counted if not row.passes} == {"BERT-Large, 100GbIB: S of DeAR"}
    assert all(row.why for row in counted if not row.passes)


def test_dear_beats_all_on_ethernet_and_gains_less_on_infiniband() -> None:
    slow, fast = speedups.dear_gains(ETHERNET), speedups.dear_gains(INFINIBAND)
    assert len(slow) == len(fast) == 14
    assert min(slow.values()) > 1
    assert sum(fast.values()) < sum(slow.values())


@every_network
@every_model
def test_no_system_beats_the_largest_speedup(model: DearModel, network: DearNetwork) -> None:
    times = compute_times(model)
    most = times.bounds(network.ring).max_speedup(NUM_WORKERS)
    slack = (NUM_WORKERS - 1) / NUM_WORKERS  # a ring sends that part of the bytes, the bound all
    for step in (methods.horovod, methods.ddp, methods.mg_wfbp, methods.dear_fixed):
        assert speedups.speedup(step(times, network)) * slack <= most


def test_without_fusion_dear_beats_wfbp_and_wfbp_beats_bytescheduler_on_ethernet() -> None:
    for model in MODELS:
        times = compute_times(model)
        dear = methods.dear_unfused(times, ETHERNET).seconds
        plain = methods.wait_free(times, ETHERNET).seconds
        assert dear < plain < methods.byte_scheduler(times, ETHERNET).seconds
        assert methods.dear_fixed(times, ETHERNET).seconds < dear, "fusion gains"


@every_network
def test_negotiation_of_buckets_costs_horovod_time(network: DearNetwork) -> None:
    times = compute_times(BY_NAME["BERT-Large"])
    buckets = by_bytes([layer.size for layer in times.layers], methods.BUCKET)
    plain = wfbp(times.layers, buckets, network.ring, NUM_WORKERS)
    negotiation = methods.horovod(times, network).seconds - plain.seconds
    assert 0 < negotiation < 0.05 * plain.seconds


@every_model
def test_exposed_phases_add_up_to_what_dear_exposes(model: DearModel) -> None:
    parts = overlap.exposed(compute_times(model), ETHERNET)
    assert parts["RS-only"] + parts["AG-only"] == pytest.approx(parts["DeAR"])
    assert parts["RS-only"] <= parts["AG-only"] + 1e-9


def test_smaller_batches_compute_less_and_scale_worse() -> None:
    model = BY_NAME["ResNet-50"]
    small, large = compute_times(model, 16), compute_times(model)
    assert small.compute < large.compute
    one, other = (speedups.speedup(methods.dear_fixed(times, ETHERNET)) for times in (small, large))
    assert one < other


def test_a_search_never_gets_worse() -> None:
    times = compute_times(speedups.STUDIED[0])
    search = GridSearch(space=methods.bucket_space(times), num_trials=6)
    seconds = [step.seconds for step in methods.run_search(search, times, ETHERNET)]
    assert len(seconds) == 6
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.long
def test_inputs_and_consequences_of_other_rows_do_not_count() -> None:
    rows = [*overlap.rows(), *speedups.rows()]
    given = [row.what for row in rows if row.is_given]
    assert sum("S / S_max" in what for what in given) == 12
    assert sum(what.startswith("reduce-scatter over") for what in given) == 2
    assert sum("Horovod" in what for what in given) == 2, "the third form of it counts"


@pytest.mark.long
def test_the_page_states_what_other_readings_would_give() -> None:
    text = setup()
    assert "{" not in text
    assert f"message, {1e6 * ETHERNET.ring.latency:.0f} us," in text
    assert f"here {max(speedups.dear_gains(ETHERNET).values()):.2f} over it" in text


@pytest.mark.long
def test_on_infiniband_bucket_choices_differ_as_little_as_the_reasons_say() -> None:
    for model in speedups.STUDIED:
        times = compute_times(model)
        nearby = methods.dear_nearby(times, INFINIBAND).seconds
        if model.is_image:
            assert 1 < methods.dear_tuned(times, INFINIBAND).seconds / nearby < 1.001
        else:
            fixed = methods.dear_fixed(times, INFINIBAND, methods.SMALL_BUCKET).seconds
            assert nearby / fixed == pytest.approx(1.005, abs=0.002)
