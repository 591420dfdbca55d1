"""Membership: pipelines are active as a whole, workers rejoin, models are copied."""

from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.sync.members import Membership, MemberStatus
from polyrhythm.sync.policies.all_reduce import AllReduce
from polyrhythm.sync.protocol import Abort, Assign, CopyFrom, Dead, Join, Leave, Ready, Skip
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Worker
from tests.pure.scheduler_cases import A, B, ready, scheduler_of


def test_death_deactivates_its_pipeline_at_every_stage() -> None:
    scheduler = scheduler_of(2, num_stages=3)
    other = [Worker(stage, 0) for stage in range(3)]
    pipeline = [Worker(stage, 1) for stage in range(3)]
    assert ready(scheduler, pipeline[0], other[0]) != []  # averages at the first stage
    assert ready(scheduler, other[1], pipeline[2]) == []  # wait at the others
    commands = scheduler.step(Dead(pipeline[1], now=2.0))
    assert commands == [
        Abort(1, (other[0], pipeline[0]), "s1p1 died"),
        Skip(pipeline[0], 1, "s1p1 died", True),
        Skip(other[0], 1, "all are ready; 1 of 2 workers are absent"),
        Skip(other[1], 1, "all are ready; 1 of 2 workers are absent"),
        Skip(pipeline[2], 1, "s1p1 died", True),
    ]
    assert scheduler.membership.epoch == 3  # two pipelines joined, one was lost
    (skip,) = ready(scheduler, pipeline[0], clock=2, now=3.0)
    assert skip.why == "its pipeline is incomplete: s1p1 is dead"


def test_without_whole_pipelines_only_the_dead_worker_is_lost() -> None:
    scheduler = scheduler_of(2, num_stages=2, pipelines_die_whole=False)
    scheduler.step(Dead(Worker(0, 1), now=1.0))
    assert ready(scheduler, Worker(1, 0), now=2.0) == []
    assert isinstance(ready(scheduler, Worker(1, 1), now=2.0)[0], Assign)


def test_pipeline_continues_after_one_worker_leaves() -> None:
    scheduler = scheduler_of(2, num_stages=2)
    assert scheduler.step(Leave(Worker(1, 0), now=1.0)) == []
    assert ready(scheduler, Worker(0, 0)) == []
    assert isinstance(ready(scheduler, Worker(0, 1))[0], Assign)
    (skip,) = ready(scheduler, Worker(1, 1))
    assert skip.why.startswith("all are ready")


def test_returning_pipeline_copies_all_stages_from_one_pipeline() -> None:
    scheduler = scheduler_of(3, num_stages=2)
    for clock, pipeline in [(5, 0), (7, 2)]:  # neither is ahead at both stages
        ready(scheduler, Worker(0, pipeline), clock=clock)
        ready(scheduler, Worker(1, pipeline), clock=12 - clock)
    scheduler.step(Dead(Worker(1, 1), now=2.0))
    # Of its old incarnation.
    assert scheduler.step(Join(Worker(1, 1), "node", 0, 0, now=3.0)) == []
    copies = scheduler.step(Join(Worker(1, 1), "node", 0, 1, now=3.0))
    assert [(copy_from.worker, copy_from.source) for copy_from in copies] == [
        (Worker(0, 1), Worker(0, 0)),
        (Worker(1, 1), Worker(1, 0)),
    ]
    # A repeated Join gets the same answer. If the source dies, both stages get another one.
    assert scheduler.step(Join(Worker(1, 1), "node", 0, 1, now=4.0))[0].source == Worker(1, 0)
    copies = [c for c in scheduler.step(Dead(Worker(0, 0), now=5.0)) if isinstance(c, CopyFrom)]
    assert [(copy_from.worker, copy_from.source) for copy_from in copies] == [
        (Worker(0, 1), Worker(0, 2)),
        (Worker(1, 1), Worker(1, 2)),
    ]


def test_rejoining_worker_with_a_model_does_not_copy() -> None:
    """The clock of a straggler is far behind, yet its model is as good as any."""
    scheduler = scheduler_of(2)
    ready(scheduler, A, clock=600)
    scheduler.step(Dead(B, now=2.0))
    assert scheduler.step(Join(B, "node", 100, 1, now=3.0)) == []


def test_restarted_scheduler_orders_no_copies() -> None:
    scheduler = Scheduler([AllReduce(2)], 2, first_gid=50)
    assert scheduler.step(Join(A, "node", 600, 3, now=1.0)) == []
    assert scheduler.step(Join(B, "node", 100, 1, now=1.0)) == []
    assert scheduler.step(Ready(A, 601, 3, now=2.0)) == []
    assert scheduler.step(Ready(B, 101, 1, now=2.0))[0].gid == 50


def test_restart_before_death_is_noticed() -> None:
    scheduler = scheduler_of(2)
    ready(scheduler, A, B, clock=4)
    abort, skip, copy_from = scheduler.step(Join(B, "other node", 0, 1, now=2.0))
    assert abort == Abort(1, (A, B), "s0p1 has restarted")
    assert isinstance(skip, Skip)
    assert copy_from == CopyFrom(B, A, "its pipeline joins a running job", clock=4)
    assert scheduler.step(Ready(B, 5, 0, now=3.0)) == []  # of its old incarnation
    assert scheduler.counters["late"] == 1
    assert ready(scheduler, A, clock=5, now=3.0) == []
    assert isinstance(scheduler.step(Ready(B, 5, 1, now=3.0))[0], Assign)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from(list(MemberStatus)[1:])),
        max_size=30,
    ),
    st.booleans(),
)
def test_active_workers_are_those_of_whole_pipelines(
    story: list[tuple[int, int, MemberStatus]], die_whole: bool
) -> None:
    membership = Membership(3, 3, pipelines_die_whole=die_whole)
    statuses = dict.fromkeys(membership.members, MemberStatus.ABSENT)
    for stage, pipeline, status in story:
        worker = Worker(stage, pipeline)
        statuses[worker] = status
        before = {w for w, member in membership.members.items() if member.is_active}
        epoch = membership.epoch
        changed = membership.change(membership.members[worker], status)
        active = {w for w, member in membership.members.items() if member.is_active}
        assert {member.worker for member in changed} == before ^ active
        assert membership.epoch == epoch + bool(changed)
        assert active == {
            w
            for w, its_status in statuses.items()
            if its_status is MemberStatus.ACTIVE
            and not (
                die_whole
                and any(
                    statuses[Worker(s, w.pipeline)] in (MemberStatus.ABSENT, MemberStatus.DEAD)
                    for s in range(3)
                )
            )
        }


def test_copy_source_is_the_pipeline_with_the_highest_minimum_clock() -> None:
    membership = Membership(2, 4, pipelines_die_whole=True)
    clocks = {1: (9, 3), 2: (5, 6), 3: (5, 5)}
    for pipeline, of_stages in clocks.items():
        for stage, clock in enumerate(of_stages):
            member = membership.members[Worker(stage, pipeline)]
            member.start_over(clock)
            membership.change(member, MemberStatus.ACTIVE)
    behind = [membership.members[Worker(stage, 0)] for stage in range(2)]
    pairs = [(m.worker, source.worker) for m, source in membership.sources(behind)]
    assert pairs == [(Worker(0, 0), Worker(0, 2)), (Worker(1, 0), Worker(1, 2))]
    # Without a complete pipeline, each stage gets its own source.
    for lost in (Worker(0, 2), Worker(1, 3), Worker(0, 1)):
        membership.members[lost].is_active = False
    pairs = [(m.worker, source.worker) for m, source in membership.sources(behind)]
    assert pairs == [(Worker(0, 0), Worker(0, 3)), (Worker(1, 0), Worker(1, 2))]
