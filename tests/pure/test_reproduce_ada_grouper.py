"""Ada-Grouper's set-up in numbers, links that others use, and its first claim."""

import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.cost.decoupled import Ring
from polyrhythm.cost.pipeline import length, simulate
from polyrhythm.errors import DescriptionError
from polyrhythm.schedule.tuner import ScheduleDecision, ScheduleTuner
from reproduction.ada_grouper import granularity, tuning
from reproduction.ada_grouper.compared import is_faster
from reproduction.ada_grouper.cut import GPT, UNET, Model, alone
from reproduction.ada_grouper.granularity import Granularity
from reproduction.ada_grouper.load import OtherFlows
from reproduction.ada_grouper.platforms import BUSY_FLOWS, C1X, M8S, S1
from reproduction.ada_grouper.steps import Job, Traffic, kfkb, run_step, run_steps
from reproduction.ada_grouper.tuning import Hour

MEDIUM = GPT["GPT-Medium"]


def job(model: Model = MEDIUM, *, num_workers: int = 8, flows: float = 0.0, batch: int = 48) -> Job:
    return Job(
        model=model,
        platform=S1,
        num_workers=num_workers,
        batch=batch,
        other_flows=flows,
        seed="a test",
    )


def decision() -> ScheduleDecision:
    times = {size: alone(MEDIUM, S1, 2, size) for size in (2, 1)}
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


def test_every_level_of_the_unet_skips_to_its_like():
    model = UNET["UNet-Base"]
    assert len(model.skips) == 12
    # Taken in the reverse of the order in which they were given.
    assert [a for a, _ in model.skips] == sorted((a for a, _ in model.skips), reverse=True)


def test_replicas_send_two_to_five_times_what_a_pipeline_does():
    pipeline = 2 * 64 * MEDIUM.layers[1].outputs * MEDIUM.width  # batch 64, both directions
    ratios = [job(num_workers=n).reduced_bytes / pipeline for n in (2, 8)]
    assert ratios == pytest.approx([2.6, 4.6], abs=0.05), "as the page says"


def test_a_transfer_on_c1x_takes_less_than_a_fifth_of_a_forward():
    """Why it scales here, and not in the paper."""
    for num_workers, name in ((4, "GPT-XL"), (8, "GPT-2.7B")):
        times = alone(GPT[name], C1X, num_workers, 1)
        shared = (1 + C1X.other_flows) * max(link.busy[0] for link in times.activations)
        assert shared < min(times.forward) / 5


def test_a_cut_carries_what_the_next_stage_needs():
    times = alone(MEDIUM, S1, 8, 2)
    message = 2 * 1024 * 1024 * 2 / S1.bandwidth
    assert {link.busy for link in times.activations + times.gradients} == {(message,)}


def test_skips_leave_through_the_uplink_of_their_stage_alone():
    model = UNET["UNet-Base"]
    halves = alone(model, M8S, 2, 1)
    assert halves.activations == halves.gradients, "of two stages, all skips cross one link"
    eighths = alone(model, M8S, 8, 1)
    first, middle = eighths.activations[0].busy[0], eighths.activations[3].busy[0]
    assert middle < first, "the middle does not pass on what the first stages give"


def test_a_link_of_ones_own_takes_what_it_takes():
    link = OtherFlows(0.0, seed="any")
    assert link.arrival(3.0, 0.5) == pytest.approx(3.5)
    assert link.arrival(1000.0, 7.0) == pytest.approx(1007.0)


@given(st.floats(0, 20), st.floats(0, 5), st.floats(0, 5), st.integers(0, 5))
def test_two_messages_back_to_back_take_as_long_as_one(begin, one, other, seed):
    link = OtherFlows(2.0, seed=str(seed))
    together = link.arrival(begin, one + other)
    assert link.arrival(link.arrival(begin, one), other) == pytest.approx(together)
    assert together >= begin + one + other - 1e-9


@pytest.mark.parametrize("mean", [1.0, 3.0])
def test_a_short_message_takes_one_more_time_per_other_flow(mean):
    link, at = OtherFlows(mean, seed="long", lasting=0.1), random.Random(1)
    begins = [at.uniform(0, 1000) for _ in range(4000)]
    takes = fmean(link.arrival(begin, 1e-6) - begin for begin in begins)
    assert takes == pytest.approx((1 + mean) * 1e-6, rel=0.05)


def test_a_seed_is_a_story():
    one, same, other = (OtherFlows(1.0, seed=seed) for seed in ("a", "a", "b"))
    assert one.arrival(0.0, 50.0) == same.arrival(0.0, 50.0) != other.arrival(0.0, 50.0)


@pytest.mark.parametrize(("mean", "lasting"), [(-1.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)])
def test_flows_that_cannot_be_are_refused(mean, lasting):
    with pytest.raises(DescriptionError, match="flows of"):
        OtherFlows(mean, seed="any", lasting=lasting)


@pytest.mark.parametrize("k", [1, 3])
def test_without_others_a_step_is_the_simulated_one(k):
    times, schedule = alone(MEDIUM, S1, 4, 1), kfkb(k).build(num_stages=4, num_microbatches=12)
    takes, _ = run_step(schedule, times, Traffic.of(0.0, num_stages=4, seed="any"), 5.0)
    assert takes == pytest.approx(length(schedule, times))


@pytest.mark.parametrize("k", [1, 3])
def test_recorded_transfers_replay_to_the_same_step(k):
    times, schedule = alone(MEDIUM, C1X, 4, 1), kfkb(k).build(num_stages=4, num_microbatches=12)
    traffic = Traffic.of(3.0, num_stages=4, seed="some")
    for start in (0.0, 7.0):
        takes, recorded = run_step(schedule, times, traffic, start)
        assert takes == pytest.approx(simulate(schedule, recorded).length)
        assert takes > length(schedule, times)


def test_steps_follow_each_other_in_time():
    times, traffic = alone(MEDIUM, C1X, 4, 1), Traffic.of(3.0, num_stages=4, seed="some")
    steps = run_steps(kfkb(1), times, traffic, num_microbatches=12, num_steps=6)
    assert len({takes for takes, _ in steps}) == 6, "each meets other flows"


def test_replicas_without_others_take_compute_and_a_ring():
    replicas = job(num_workers=4, batch=64)
    ring = Ring(latency=S1.latency, bandwidth=S1.bandwidth)
    reduce = ring.all_reduce(MEDIUM.width * MEDIUM.num_parameters, 4)
    compute = alone(MEDIUM, S1, 1, 8).period
    assert replicas.replicated(8) == pytest.approx(2 * (compute + reduce))


def test_grouping_gains_more_on_a_busy_network():
    gains = {
        flows: job(flows=flows).pipelined(1, 6) / job(flows=flows).pipelined(3, 2)
        for flows in (0.0, BUSY_FLOWS)
    }
    assert 1 < gains[0.0] < gains[BUSY_FLOWS]


def test_grouping_alone_gains_on_a_slow_network():
    slow = Job(model=MEDIUM, platform=C1X, num_workers=8, batch=48, other_flows=3.0, seed="a test")
    assert slow.pipelined(3, 1) < slow.pipelined(1, 1) < slow.replicated(6)


def test_of_plans_alike_the_smallest_group_is_chosen():
    hour = Hour(predicted={1: 2.0, 2: 1.0, 3: 0.9995, 4: 0.9999}, decision=decision())
    assert (hour.k, hour.gain) == (2, 2.0)


def test_what_nobody_would_see_is_not_faster():
    assert not is_faster(1.0005)
    assert is_faster(1.01)


def test_a_choice_is_the_printed_one_or_it_differs():
    hour = Hour(predicted={1: 2.0, 2: 2.0, 3: 1.5, 4: 1.0, 5: 1.0, 6: 1.0}, decision=decision())
    chosen = [row for row in tuning.rows([hour] * 5) if "is chosen" in row.what]
    assert [row.printed for row in chosen if row.passes] == [4]
    assert all(row.why for row in chosen if not row.passes)


def test_a_round_in_which_throughput_rises_with_every_k_is_no_plateau():
    flat, rising = dict.fromkeys(range(1, 7), 1.0), {k: 1 / k for k in range(1, 7)}
    for steps, passes in ((flat, True), (rising, False)):
        found = Granularity(rounds=dict.fromkeys(range(1, 6), steps), plain={}, loads={})
        (row,) = [row for row in granularity.rows(found) if "every k" in row.what]
        assert row.passes == passes
