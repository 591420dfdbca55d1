"""Ada-Grouper's set-up in numbers, links that other flows share, and its first claim."""

import random
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.cost.pipeline import length, simulate
from polyrhythm.errors import DescriptionError
from polyrhythm.schedule.tuner import ScheduleDecision, ScheduleTuner
from reproduction.ada_grouper import granularity, tuned_k
from reproduction.ada_grouper.granularity import GranularityResult
from reproduction.ada_grouper.models import GPT, UNET, AdaGrouperModel, unshared_times
from reproduction.ada_grouper.steps import (
    AdaGrouperJob,
    draw_load,
    is_faster,
    kfkb,
    run_step,
)
from reproduction.ada_grouper.testbed import BUSY_FLOWS, C1X, M8S, S1, OtherFlows
from reproduction.ada_grouper.tuned_k import TuningHour
from reproduction.dear.ring import Ring

MEDIUM = GPT["GPT-Medium"]


def job(
    model: AdaGrouperModel = MEDIUM, *, num_workers: int = 8, flows: float = 0.0, batch: int = 48
) -> AdaGrouperJob:
    return AdaGrouperJob(model, replace(S1, other_flows=flows), num_workers, batch, seed="a test")


def decision() -> ScheduleDecision:
    times = {size: unshared_times(MEDIUM, S1, 2, size) for size in (2, 1)}
    return ScheduleTuner(num_stages=2, batch_size=4, microbatch_sizes=(2, 1)).decide(times)


@pytest.mark.parametrize(
    ("name", "printed"),
    [("GPT-Medium", 350e6), ("GPT-Large", 760e6), ("GPT-XL", 1.3e9), ("GPT-2.7B", 2.7e9)],
)
def test_gpt_has_the_parameters_of_table_1(name, printed):
    assert GPT[name].num_parameters == pytest.approx(printed, rel=0.02)


def test_the_wide_unet_is_that_of_latent_diffusion():
    assert UNET["UNet-Medium"].num_parameters == pytest.approx(859.5e6, rel=1e-3)
    assert UNET["UNet-Base"].num_parameters == pytest.approx(38e6, rel=0.02)


def test_skips_of_the_unet_are_consumed_in_reverse_order():
    model = UNET["UNet-Base"]
    assert len(model.skips) == 12
    assert [a for a, _ in model.skips] == sorted((a for a, _ in model.skips), reverse=True)


def test_replicas_send_two_to_five_times_as_much_as_a_pipeline():
    pipeline = 2 * 64 * MEDIUM.layers[1].outputs * MEDIUM.element_bytes  # batch 64, both directions
    ratios = [job(num_workers=n).all_reduce_bytes / pipeline for n in (2, 8)]
    assert ratios == pytest.approx([2.6, 4.6], abs=0.05), "as the page says"


def test_a_transfer_on_c1x_takes_less_than_a_fifth_of_a_forward():
    """The reason why C1x scales here but not in the paper."""
    for num_workers, name in ((4, "GPT-XL"), (8, "GPT-2.7B")):
        times = unshared_times(GPT[name], C1X, num_workers, 1)
        shared = (1 + C1X.other_flows) * max(link.busy[0] for link in times.activations)
        assert shared < min(times.forward) / 5


def test_a_stage_sends_the_input_of_the_next_stage():
    times = unshared_times(MEDIUM, S1, 8, 2)
    message = 2 * 1024 * 1024 * 2 / S1.bandwidth
    assert {link.busy for link in times.activations + times.gradients} == {(message,)}


def test_skips_use_only_the_uplink_of_their_stage():
    model = UNET["UNet-Base"]
    two_stages = unshared_times(model, M8S, 2, 1)
    assert two_stages.activations == two_stages.gradients, "of two stages, all skips cross one link"
    eight_stages = unshared_times(model, M8S, 8, 1)
    first, middle = eight_stages.activations[0].busy[0], eight_stages.activations[3].busy[0]
    assert middle < first, "the middle does not forward the skips of the first stages"


def test_an_unshared_link_does_not_delay_a_message():
    link = OtherFlows(0.0, seed="any")
    assert link.arrival(3.0, 0.5) == pytest.approx(3.5)
    assert link.arrival(1000.0, 7.0) == pytest.approx(1007.0)


@given(st.floats(0, 20), st.floats(0, 5), st.floats(0, 5), st.integers(0, 5))
def test_two_messages_back_to_back_take_as_long_as_one(start, one, other, seed):
    link = OtherFlows(2.0, seed=str(seed))
    together = link.arrival(start, one + other)
    assert link.arrival(link.arrival(start, one), other) == pytest.approx(together)
    assert together >= start + one + other - 1e-9


@pytest.mark.parametrize("mean", [1.0, 3.0])
def test_each_other_flow_adds_the_unshared_time_to_a_short_message(mean):
    link, at = OtherFlows(mean, seed="long", lasting=0.1), random.Random(1)
    starts = [at.uniform(0, 1000) for _ in range(4000)]
    duration = fmean(link.arrival(start, 1e-6) - start for start in starts)
    assert duration == pytest.approx((1 + mean) * 1e-6, rel=0.05)


def test_a_seed_fixes_the_other_flows():
    one, same, other = (OtherFlows(1.0, seed=seed) for seed in ("a", "a", "b"))
    assert one.arrival(0.0, 50.0) == same.arrival(0.0, 50.0) != other.arrival(0.0, 50.0)


@pytest.mark.parametrize(("mean", "lasting"), [(-1.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)])
def test_a_negative_number_of_flows_or_no_duration_is_refused(mean, lasting):
    with pytest.raises(DescriptionError, match="flows of"):
        OtherFlows(mean, seed="any", lasting=lasting)


@pytest.mark.parametrize("k", [1, 3])
def test_without_other_flows_a_step_takes_the_predicted_time(k):
    times = unshared_times(MEDIUM, S1, 4, 1)
    schedule = kfkb(k).build(num_stages=4, num_microbatches=12)
    duration, _ = run_step(schedule, times, draw_load(0.0, num_stages=4, seed="any"), 5.0)
    assert duration == pytest.approx(length(schedule, times))


@pytest.mark.parametrize("k", [1, 3])
def test_measured_transfers_replay_to_the_same_step(k):
    times = unshared_times(MEDIUM, C1X, 4, 1)
    schedule = kfkb(k).build(num_stages=4, num_microbatches=12)
    load = draw_load(3.0, num_stages=4, seed="some")
    for start in (0.0, 7.0):
        duration, measured = run_step(schedule, times, load, start)
        assert duration == pytest.approx(simulate(schedule, measured).length)
        assert duration > length(schedule, times)


def test_steps_follow_each_other_in_time():
    steps = AdaGrouperJob(MEDIUM, replace(C1X, other_flows=3.0), 4, 12, "some").steps(1, 1, 6)
    assert len({duration for duration, _ in steps}) == 6, "each step meets different flows"


def test_replicas_without_other_flows_take_compute_and_a_ring():
    replicas = job(num_workers=4, batch=64)
    ring = Ring(latency=S1.latency, bandwidth=S1.bandwidth)
    reduce = ring.all_reduce(MEDIUM.element_bytes * MEDIUM.num_parameters, 4)
    compute = unshared_times(MEDIUM, S1, 1, 8).period
    assert replicas.replica_step(8) == pytest.approx(2 * (compute + reduce))


def test_grouping_gains_more_on_a_busy_network():
    gains = {
        flows: job(flows=flows).pipeline_step(1, 6) / job(flows=flows).pipeline_step(3, 2)
        for flows in (0.0, BUSY_FLOWS)
    }
    assert 1 < gains[0.0] < gains[BUSY_FLOWS]


def test_grouping_alone_gains_on_a_slow_network():
    slow = AdaGrouperJob(MEDIUM, replace(C1X, other_flows=3.0), 8, 48, seed="a test")
    assert slow.pipeline_step(3, 1) < slow.pipeline_step(1, 1) < slow.replica_step(6)


def test_of_equally_fast_plans_the_smallest_group_is_chosen():
    hour = TuningHour(predicted={1: 2.0, 2: 1.0, 3: 0.9995, 4: 0.9999}, decision=decision())
    assert (hour.k, hour.gain) == (2, 2.0)


def test_a_gain_below_a_thousandth_does_not_count():
    assert not is_faster(1.0005)
    assert is_faster(1.01)


def test_only_the_printed_choice_passes():
    hour = TuningHour(
        predicted={1: 2.0, 2: 2.0, 3: 1.5, 4: 1.0, 5: 1.0, 6: 1.0}, decision=decision()
    )
    chosen = [row for row in tuned_k.rows([hour] * 5) if "is chosen" in row.what]
    assert [row.printed for row in chosen if row.passes] == [4]
    assert all(row.why for row in chosen if not row.passes)


def test_a_round_whose_throughput_rises_with_every_k_does_not_pass():
    flat, rising = dict.fromkeys(range(1, 7), 1.0), {k: 1 / k for k in range(1, 7)}
    for steps, passes in ((flat, True), (rising, False)):
        found = GranularityResult(rounds=dict.fromkeys(range(1, 6), steps), plain={}, loads={})
        (row,) = [row for row in granularity.rows(found) if "every k" in row.what]
        assert row.passes == passes
