"""After any losses whole pipelines go on, the others recombine, and the global batch stays."""

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PlanError
from polyrhythm.plan.plan import PipelinePlan, Plan, PlanRegion, PredictedStep, even_plan
from polyrhythm.plan.survivors import (
    Assignment,
    assign_survivors,
    first_assignment,
    machines_without_reserve,
    missing_stages,
)
from polyrhythm.types import AUTO, Worker

History = tuple[Plan, list[set[int]]]  # a plan, and the members after each of several losses


@st.composite
def plans(draw: st.DrawFn, *, num_parts: int | None = None) -> Plan:
    """A plan with or without devices, regions and micro-batches.

    With `num_parts` every pipeline runs on up to as many devices; else each worker has its own.
    """
    num_stages, num_pipelines = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    is_planned = draw(st.booleans())
    has_devices = num_parts is not None or draw(st.booleans())
    pipelines, names = list[PipelinePlan](), list[str]()
    for number in range(num_pipelines):
        limit = num_stages if num_parts is None else min(num_parts, num_stages)
        inner = st.lists(st.integers(0, limit - 1), min_size=num_stages, max_size=num_stages)
        places = range(num_stages) if num_parts is None else sorted(draw(inner))
        devices = tuple(f"d{number}.{place}" for place in places)
        names += devices if has_devices else ()
        pipelines.append(
            PipelinePlan(
                devices=devices if has_devices else (),
                num_microbatches=draw(st.integers(1, 9)) if is_planned else None,
                schedule=draw(st.sampled_from(["1f1b", "gpipe", AUTO])),
            )
        )
    sites = {name: draw(st.sampled_from("xyz")) for name in dict.fromkeys(names)}
    return Plan(
        layers_per_stage=(1,) * num_stages,
        pipelines=tuple(pipelines),
        microbatch_size=2,
        left_out=("idle",),
        regions=tuple(
            PlanRegion(name=site, devices=tuple(d for d in sites if sites[d] == site))
            for site in sorted(set(sites.values()))
        ),
        predicted=PredictedStep(step=2.0, bound=1.0, parts=()),
    )


@st.composite
def losses(draw: st.DrawFn, of: st.SearchStrategy[Plan]) -> History:
    plan = draw(of)
    present, history = set(range(plan.num_workers)), []
    for _ in range(draw(st.integers(1, 4))):
        some = st.sets(st.integers(0, plan.num_workers - 1), max_size=4)
        present = (present - draw(some)) | draw(some)
        history.append(present)
    return plan, history


def run(history: History) -> Iterator[tuple[Assignment, set[int], Assignment | None]]:
    """Yield each assignment, the members after it, and the next assignment."""
    plan, later = history
    current = first_assignment(plan)
    for members in later:
        following = assign_survivors(current, members)
        yield current, members, following
        if following is None:
            return
        current = following


def pipelines_of(assignment: Assignment) -> list[tuple[int, ...]]:
    ranked, size = assignment.members_by_rank, assignment.plan.num_stages
    return [ranked[i : i + size] for i in range(0, len(ranked), size)]


def devices_of(plan: Plan, members: Collection[int]) -> list[str]:
    places = [plan.worker(member) for member in members]
    return [plan.pipelines[w.pipeline].devices[w.stage] for w in places]


def can_form(plan: Plan, members: Collection[int]) -> bool:
    """Whether any choice of one member per stage is a pipeline, by trying all of them."""
    by_stage = [[m for m in members if plan.worker(m).stage == s] for s in range(plan.num_stages)]
    for row in product(*by_stage):
        try:
            PipelinePlan(devices=tuple(devices_of(plan, row)))
        except PlanError:
            continue
        return True
    return False


@given(losses(plans() | plans(num_parts=3)))
def test_each_member_has_one_place_at_the_stage_that_it_holds(history: History) -> None:
    first = history[0]
    for _, members, following in run(history):
        if following is None:
            continue
        assert following.members == tuple(sorted(members))
        assert not following.workers.keys() & following.spares.keys()
        places = [following.plan.worker(rank) for rank in range(following.plan.num_workers)]
        assert [following.workers[m] for m in following.members_by_rank] == places
        stages = {m: w.stage for m, w in following.workers.items()} | dict(following.spares)
        assert stages == {m: first.worker(m).stage for m in members}


@given(losses(plans() | plans(num_parts=3)), st.integers(2, 5), st.randoms())
def test_other_members_have_the_places_of_ranks(
    history: History, factor: int, chance: random.Random
) -> None:
    """After a new division members are no ranks: they get what ranks get."""
    plan, later = history
    ranks = list(range(plan.num_workers))
    members = sorted(chance.sample(range(factor * len(ranks)), len(ranks)))
    current = first_assignment(plan, members)
    assert current.places == current.workers == {m: plan.worker(r) for r, m in enumerate(members)}
    for _, present, expected in run((plan, later)):
        found = assign_survivors(current, [members[rank] for rank in present])
        assert (found is None) == (expected is None)
        if found is None or expected is None:
            return
        assert found.plan == expected.plan
        assert found.workers == {members[r]: place for r, place in expected.workers.items()}
        assert found.spares == {members[r]: stage for r, stage in expected.spares.items()}
        current = found


@given(losses(plans() | plans(num_parts=3)))
def test_whole_pipelines_keep_their_members_and_order(history: History) -> None:
    for current, members, following in run(history):
        whole = [row for row in pipelines_of(current) if members.issuperset(row)]
        now = pipelines_of(following) if following else []
        assert now[: len(whole)] == whole


@given(losses(plans()))
def test_there_are_as_many_pipelines_as_members_of_the_rarest_stage(history: History) -> None:
    plan = history[0]
    for current, members, following in run(history):
        counts = [sum(plan.worker(m).stage == s for m in members) for s in range(plan.num_stages)]
        assert (following.plan.num_pipelines if following else 0) == min(counts)
        missing = tuple(stage for stage, count in enumerate(counts) if count == 0)
        assert missing_stages(current, members) == missing
        assert (following is None) == bool(missing)


@given(losses(plans(num_parts=3)))
def test_shared_devices_run_one_pipeline_and_no_possible_pipeline_is_missing(
    history: History,
) -> None:
    plan = history[0]
    for _, members, following in run(history):
        if following is None:
            assert not can_form(plan, members)
            continue
        used = {device for pipeline in following.plan.pipelines for device in pipeline.devices}
        spares = following.spares
        unused = [m for m in spares if not used.intersection(devices_of(plan, [m]))]
        assert not can_form(plan, unused)


@given(losses(plans() | plans(num_parts=3)))
def test_devices_follow_the_members(history: History) -> None:
    plan = history[0]
    names = {device for pipeline in plan.pipelines for device in pipeline.devices}
    for _, _, following in run(history):
        if following is None or not names:
            continue
        used = [device for p in following.plan.pipelines for device in p.devices]
        assert used == devices_of(plan, following.members_by_rank)
        assert following.plan.left_out[0] == "idle"
        assert {*following.plan.left_out[1:]} == names - {*used}
        for worker in following.plan.replicas(0):
            member = following.members_by_rank[following.plan.rank(worker)]
            assert following.plan.region_of(worker) == plan.region_of(plan.worker(member))


@given(losses(plans() | plans(num_parts=3)))
def test_the_global_batch_stays_and_no_number_falls(history: History) -> None:
    plan = history[0]
    for _, _, following in run(history):
        if following is None:
            continue
        assert following.plan.batch == plan.batch
        assert following.plan.predicted is None
        assert following.plan.sync == plan.sync
        for row, pipeline in zip(pipelines_of(following), following.plan.pipelines, strict=True):
            origins = [plan.pipelines[plan.worker(member).pipeline] for member in row]
            before = [origin.num_microbatches or 0 for origin in origins]
            assert (pipeline.num_microbatches or 0) >= min(before)
            if len({origin.schedule for origin in origins}) == 1 and not plan.regions:
                assert pipeline.schedule == origins[0].schedule


@given(losses(plans() | plans(num_parts=3)), st.randoms(use_true_random=False))
def test_all_members_reach_the_same_result(history: History, random: Random) -> None:
    for current, members, following in run(history):
        shuffled = [*members]
        random.shuffle(shuffled)
        places = [*current.workers.items()]
        random.shuffle(places)
        other = replace(current, workers=dict(places))
        assert assign_survivors(other, shuffled) == following


@given(losses(plans()))
def test_losses_one_by_one_leave_as_many_pipelines_as_all_at_once(history: History) -> None:
    plan, later = history
    steps = [following for _, _, following in run(history)]
    at_once = assign_survivors(first_assignment(plan), later[-1])
    assert (at_once is None) == (steps[-1] is None)
    if at_once is not None:
        assert steps[-1] is not None
        assert at_once.plan.num_pipelines == steps[-1].plan.num_pipelines
        assert at_once.members == steps[-1].members


@given(plans() | plans(num_parts=3))
def test_without_a_loss_nothing_changes(plan: Plan) -> None:
    current = first_assignment(plan)
    following = assign_survivors(current, range(plan.num_workers))
    assert following is not None
    assert following.plan == replace(plan, predicted=None)
    assert following.workers == current.workers
    assert (following.spares, following.why) == ({}, "no pipeline is broken")


@given(plans())
def test_with_a_machine_per_pipeline_any_but_the_last_may_be_lost(plan: Plan) -> None:
    machines = {m: f"n{plan.worker(m).pipeline}" for m in range(plan.num_workers)}
    fatal = machines_without_reserve(plan, machines, buddy=None)
    assert fatal == (("n0",) if plan.num_pipelines == 1 else ())
    current, present = first_assignment(plan), set(range(plan.num_workers))
    for number in range(plan.num_pipelines - 1):
        present -= {m for m in machines if machines[m] == f"n{number}"}
        following = assign_survivors(current, present)
        assert following is not None
        assert not following.spares
        assert following.plan.num_pipelines == plan.num_pipelines - number - 1
        current = following


@given(losses(plans(num_parts=3)), st.lists(st.sampled_from("abc"), min_size=20, max_size=20))
def test_machines_without_reserve_are_those_whose_loss_ends_the_job(
    history: History, drawn: list[str]
) -> None:
    plan = history[0]
    machines = dict(zip(range(plan.num_workers), drawn, strict=False))
    current = first_assignment(plan)
    for machine in set(machines.values()):
        others = [member for member in machines if machines[member] != machine]
        ends = assign_survivors(current, others) is None
        assert (machine in machines_without_reserve(plan, machines, buddy=None)) == ends


def named_plan(num_stages: int, regions: Sequence[str], numbers: Sequence[int] = ()) -> Plan:
    """Return a plan with a device `x/3` for stage 3 of a pipeline whose region is x.

    A region per stage, as in "xxyy", makes devices `x/0`, `x/1`, `y/2`, `y/3` of pipeline 0.
    """
    sites = [sites if len(sites) > 1 else sites * num_stages for sites in regions]
    devices = [
        tuple(f"{site}{number}/{stage}" for stage, site in enumerate(some))
        for number, some in enumerate(sites)
    ]
    found: dict[str, list[str]] = {}
    for some, names in zip(sites, devices, strict=True):
        for site, name in zip(some, names, strict=True):
            found.setdefault(site, []).append(name)
    return Plan(
        layers_per_stage=(1,) * num_stages,
        pipelines=tuple(
            PipelinePlan(devices=names, num_microbatches=number)
            for names, number in zip(devices, numbers or (4,) * len(devices), strict=True)
        ),
        microbatch_size=1,
        regions=tuple(PlanRegion(name=site, devices=tuple(some)) for site, some in found.items()),
    )


def without(current: Assignment, *lost: int) -> Assignment:
    found = assign_survivors(current, [m for m in current.members if m not in lost])
    assert found is not None
    return found


def test_two_losses_in_two_pipelines_leave_one() -> None:
    start = first_assignment(even_plan(num_layers=4, num_stages=4, num_pipelines=2))
    once = without(start, 1)
    assert once.members_by_rank == (4, 5, 6, 7)
    assert once.spares == {0: 0, 2: 2, 3: 3}
    assert once.why == (
        "pipeline 0 is broken without process 1 (s1p0); pipeline 1 becomes 0; "
        "spare: process 0 (stage 0), process 2 (stage 2) and process 3 (stage 3)"
    )
    twice = without(once, 6)
    assert twice.members_by_rank == (4, 5, 2, 7)
    assert twice.workers[2] == Worker(2, 0)
    assert twice.spares == {0: 0, 3: 3}
    assert twice.why == (
        "pipeline 0 is broken without process 6 (s2p0); processes 4, 5, 2 and 7 form pipeline 0; "
        "spare: process 0 (stage 0) and process 3 (stage 3)"
    )
    at_once = without(start, 1, 6)
    assert at_once.members_by_rank == (0, 5, 2, 3)
    assert at_once.spares == {4: 0, 7: 3}
    assert assign_survivors(twice, {0, 4, 2, 7}) is None
    assert missing_stages(twice, {0, 4, 2, 7}) == (1,)


def test_a_stage_is_replaced_within_its_region() -> None:
    # Two of the first pipeline are left; two others have the stage that it lacks.
    start = first_assignment(named_plan(3, ["x", "y", "x"]))
    assert without(start, 2, 3, 6).members_by_rank == (0, 1, 8)
    # s0p0 is left in x, s1p1 and s0p2 in y.
    start = first_assignment(named_plan(2, ["x", "y", "y"]))
    assert without(start, 1, 2, 5).members_by_rank == (4, 3)


def test_the_nearest_stage_decides_on_the_region() -> None:
    start = first_assignment(named_plan(4, ["yyxx", "yyyy", "xxxx"]))
    # The first pipeline lacks stage 3, whose neighbor is in x, although most stages are in y.
    assert without(start, 3, 4, 5, 8, 9).members_by_rank == (0, 1, 2, 11)


def test_members_that_began_together_stay_together() -> None:
    start = first_assignment(even_plan(num_layers=4, num_stages=4, num_pipelines=3))
    # Stages 1 and 3 of pipeline 0 are left, 2 and 3 of pipeline 1, 0 and 2 of pipeline 2: stage 2
    # comes from pipeline 2, as stage 0 must.
    assert without(start, 0, 2, 4, 5, 9, 11).members_by_rank == (8, 1, 10, 3)
    # The same with a largest group: stages 1, 3 and 4 of pipeline 0.
    start = first_assignment(even_plan(num_layers=5, num_stages=5, num_pipelines=3))
    lost = (0, 2, 5, 6, 9, 11, 13, 14)
    assert without(start, *lost).members_by_rank == (10, 1, 12, 3, 4)


def test_running_workers_stay_together_although_they_began_apart() -> None:
    start = first_assignment(even_plan(num_layers=6, num_stages=6, num_pipelines=4))
    once = without(start, 3, 4, 5, 6, 8)
    assert once.members_by_rank[12:] == (0, 7, 2, 9, 10, 11)
    assert once.spares == {1: 1}  # it began with 0 and 2
    lost = (9, 10, 11, *range(12, 16), *range(18, 21), 22, 23)
    assert without(once, *lost).members_by_rank == (0, 7, 2, 21, 16, 17)


def test_a_worker_is_preferred_to_a_spare_with_older_weights() -> None:
    start = first_assignment(even_plan(num_layers=4, num_stages=4, num_pipelines=3))
    once = without(start, 0)
    assert once.spares == {1: 1, 2: 2, 3: 3}
    assert without(once, 5, 8, 10).members_by_rank == (4, 9, 6, 7)


def test_numbers_follow_the_first_plan_and_the_slowest_origin() -> None:
    start = first_assignment(named_plan(2, ["x", "x", "x"], numbers=(6, 3, 1)))
    once = without(start, 0)
    assert [p.num_microbatches for p in once.plan.pipelines] == [8, 2]  # of 10, as 3 to 1
    twice = without(once, 5)  # s1p2; s1p0 is spare: it replaces the lost one
    assert twice.members_by_rank == (2, 3, 4, 1)
    assert [p.num_microbatches for p in twice.plan.pipelines] == [8, 2]
    assert twice.plan.batch == start.plan.batch
    start = first_assignment(named_plan(2, ["x", "x", "x"], numbers=(5, 3, 2)))
    assert [p.num_microbatches for p in without(start, 2).plan.pipelines] == [7, 3]  # 7.1 and 2.9


def test_without_a_number_for_each_pipeline_a_recombined_one_has_none() -> None:
    plan = named_plan(2, ["x", "x", "x", "x"])
    unplanned = replace(plan.pipelines[0], num_microbatches=None)
    start = first_assignment(replace(plan, pipelines=(unplanned, *plan.pipelines[1:])))
    following = without(start, 2, 5)
    assert following.members_by_rank == (0, 1, 6, 7, 4, 3)
    assert [p.num_microbatches for p in following.plan.pipelines] == [None, 4, None]


def test_a_schedule_is_chosen_again_for_origins_that_differ() -> None:
    plan = named_plan(2, ["x", "x", "x"])
    schedules = ["1f1b", "1f1b", "gpipe"]
    pipelines = [
        replace(pipeline, schedule=schedule)
        for pipeline, schedule in zip(plan.pipelines, schedules, strict=True)
    ]
    start = first_assignment(replace(plan, pipelines=tuple(pipelines)))
    same, mixed = without(start, 0, 3), without(start, 0, 2, 5)
    assert [p.schedule for p in same.plan.pipelines] == ["gpipe", "1f1b"]
    assert [p.schedule for p in mixed.plan.pipelines] == [AUTO]


def devices_plan(*pipelines: str) -> Plan:
    """Return a plan of pipelines such as "aab": the device of every stage."""
    return Plan(
        layers_per_stage=(1,) * len(pipelines[0]),
        pipelines=tuple(PipelinePlan(devices=tuple(devices)) for devices in pipelines),
    )


def test_a_device_returns_to_no_pipeline_that_has_left_it() -> None:
    start = first_assignment(devices_plan("aaa", "bcd", "efg"))
    once = without(start, 1, 3)  # stage 0 from a, and stage 1 from c
    assert once.members_by_rank == (6, 7, 8, 0, 4, 5)
    assert once.plan.pipelines[1].devices == ("a", "c", "d")
    assert once.spares == {2: 2}
    assert once.plan.left_out == ("b",)
    # a still runs stage 0 with c and d: its stage 2 does not complete e and f.
    twice = without(once, 8)
    assert twice.members_by_rank == (0, 4, 5)
    # Stages 0 and 2 are left on a alone.
    assert assign_survivors(twice, {0, 2, 4}) is None
    assert missing_stages(twice, {0, 2, 4}) == ()


def test_a_choice_that_devices_forbid_is_taken_back() -> None:
    start = first_assignment(devices_plan("aaa", "bcd", "efg"))
    # Stages 0 and 2 on a are the largest group; stage 1 on f parts them, and b has stage 0 as well.
    assert without(start, 1, 4, 5, 6, 8).members_by_rank == (3, 7, 2)


def test_a_device_is_not_taken_from_its_other_stages() -> None:
    start = first_assignment(devices_plan("aafg", "bcde", "hijk"))
    # Stages 0 and 1 are left on a; b and i are lost. Stage 0 for c, d and e comes from h, not a.
    assert without(start, 2, 3, 4, 9).plan.num_pipelines == 2
    start = first_assignment(devices_plan("aafgh", "bcdei", "jklmn"))
    # Stages 0 and 1 for d, e and i come both from a.
    lost = (2, 3, 4, 5, 6, 10, 12, 13, 14)
    assert without(start, *lost).members_by_rank == (0, 1, 7, 8, 9)


def test_what_is_left_on_the_device_of_a_further_pipeline_makes_no_other() -> None:
    start = first_assignment(devices_plan("aacd", "bbbe", "fghi", "jklm"))
    # Stage 0 for g, h and i comes from a; stage 1 on a is not for b, l and m.
    following = without(start, 2, 3, 5, 7, 8, 12, 13)
    assert following.members_by_rank == (0, 9, 10, 11)


def test_a_bounded_schedule_is_chosen_again_for_another_number_of_devices() -> None:
    two = PipelinePlan(devices=("a", "a", "b"), schedule="bounded:2,1")
    other = PipelinePlan(devices=("c", "d", "d"), schedule="bounded:2,1")
    start = first_assignment(Plan(layers_per_stage=(1, 1, 1), pipelines=(two, other)))
    following = without(start, 2, 3)
    assert following.plan.pipelines[0].devices == ("a", "a", "d")
    assert following.plan.pipelines[0].schedule == "bounded:2,1"
    following = without(start, 1, 5)
    assert following.plan.pipelines[0].devices == ("a", "d", "b")
    assert following.plan.pipelines[0].schedule == AUTO


def test_the_machines_of_a_stage_without_replicas_have_no_reserve() -> None:
    plan = even_plan(num_layers=2, num_stages=2, num_pipelines=2)
    machines = {0: "n0", 1: "n1", 2: "n2", 3: "n1"}  # both workers of stage 1 are on n1
    assert machines_without_reserve(plan, machines, buddy=None) == ("n1",)


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        ("abcd", ""),  # each replica's buddy is on another machine
        ("abab", ""),  # replicas 0 and 2 on a, 1 and 3 on b: no neighbours
        ("aabc", "a"),
        ("abca", "a"),  # the buddy of the last replica is the first one
        ("aabb", "ab"),
    ],
)
def test_a_machine_with_a_replica_and_its_buddy_has_no_reserve(
    machines: str, expected: str
) -> None:
    plan = even_plan(num_layers=1, num_stages=1, num_pipelines=4)
    by_machine = dict(enumerate(machines))
    assert "".join(machines_without_reserve(plan, by_machine, buddy=True)) == expected
    assert machines_without_reserve(plan, by_machine, buddy=None) == ()
    assert {*machines_without_reserve(plan, by_machine, buddy=False)} == {*machines}


def test_of_two_replicas_each_is_the_buddy_of_the_other() -> None:
    plan = even_plan(num_layers=2, num_stages=2, num_pipelines=2)
    apart = {0: "a", 1: "a", 2: "b", 3: "b"}
    assert machines_without_reserve(plan, apart, buddy=True) == ()
    assert machines_without_reserve(plan, apart, buddy=False) == ("a", "b")


def test_buddies_of_any_stage_count() -> None:
    plan = even_plan(num_layers=2, num_stages=2, num_pipelines=3)
    together = {0: "a", 1: "b", 2: "c", 3: "b", 4: "e", 5: "f"}  # stage 1 of pipelines 0 and 1
    assert machines_without_reserve(plan, together, buddy=True) == ("b",)


def test_a_long_reason_counts_what_it_does_not_list() -> None:
    start = first_assignment(even_plan(num_layers=2, num_stages=2, num_pipelines=20))
    why = without(start, *range(1, 30, 2)).why
    assert "pipelines 0, 1, 2, 3, 4, 5, 6, 7 and 7 more are broken" in why
    assert "spare: process 0 (stage 0), process 2 (stage 0)" in why
    assert len(why) < 1000


@given(losses(plans()))
def test_all_pipelines_are_whole_again_when_all_have_come_back(history: History) -> None:
    first = history[0]
    for _, _, following in run(history):
        if following is None:
            return
        again = assign_survivors(following, range(first.num_workers))
        assert again is not None
        assert (again.plan.num_pipelines, again.spares) == (first.num_pipelines, {})
        numbers = [pipeline.num_microbatches for pipeline in again.plan.pipelines]
        if all(number is not None for number in numbers):
            total = sum(pipeline.num_microbatches or 0 for pipeline in first.pipelines)
            assert sum(number or 0 for number in numbers) == total


def test_an_unknown_member_is_refused() -> None:
    start = first_assignment(even_plan(num_layers=2, num_stages=2, num_pipelines=1))
    with pytest.raises(AssertionError, match=r"processes \[2\] have no place"):
        assign_survivors(start, {0, 1, 2})
