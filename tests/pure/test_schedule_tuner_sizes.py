"""Micro-batch sizes are measured before they are candidates, and again if the network changed."""

from polyrhythm.cost.memory import MemoryBudget
from polyrhythm.cost.pipeline import PipelineTimes
from polyrhythm.schedule.tuner import ScheduleTuner
from tests.pure.schedule_cases import stage_memory, times_of

SIZES = (2, 1, 4)


def tuner_of(**options: object) -> ScheduleTuner:
    return ScheduleTuner(num_stages=4, batch_size=24, microbatch_sizes=SIZES, **options)


def times_at(size: int, transfer: float = 0.02, *, overhead: float = 0.0) -> PipelineTimes:
    """Return times for `size` samples; `overhead` is the fixed cost of a micro-batch."""
    return times_of(*[transfer * size] * 3, work=size + overhead)


def test_every_size_is_tried_once_in_the_order_given() -> None:
    tuner = tuner_of()
    known: dict[int, PipelineTimes] = {}
    tried = []
    while (size := tuner.size_to_measure(known)) is not None:
        assert str(tuner.trial(size).spec) == "1f1b"
        tried.append(size)
        known[size] = times_at(size)
        tuner.decide(known | {tuner.current.microbatch_size: times_at(2)})
    assert tried == [2, 1, 4]


def test_size_without_times_is_not_a_candidate() -> None:
    tuner = tuner_of()
    for transfer in (0.02, 1.0, 0.02, 0.02):
        assert tuner.decide({2: times_at(2, transfer)}).candidate.microbatch_size == 2


def test_small_micro_batches_fill_the_pipeline_and_large_ones_cost_less_each() -> None:
    free = {size: times_at(size) for size in SIZES}
    costly = {size: times_at(size, overhead=1.0) for size in SIZES}
    assert tuner_of().decide(free).candidate.microbatch_size == 1
    decision = tuner_of().decide(costly)
    assert decision.candidate.microbatch_size == 2
    assert not decision.switched
    dear = {size: times_at(size, overhead=8.0) for size in SIZES}
    decision = tuner_of().decide(dear)
    assert decision.candidate.microbatch_size == 4
    assert "with micro-batches of 4, not 2" in decision.why


def test_largest_only_keeps_the_largest_size_that_fits_each_spec() -> None:
    memory = {size: [stage_memory(activation=size)] * 4 for size in SIZES}
    roomy = MemoryBudget(stages=memory, limits=(99,) * 4, window=0)
    tight = MemoryBudget(stages=memory, limits=(10,) * 4, window=0)
    dear = {size: times_at(size, 1.0, overhead=1.0) for size in SIZES}
    paper = tuner_of(budget=roomy, largest_only=True).decide(dear)
    ours = tuner_of(budget=roomy).decide(dear)
    assert (paper.candidate.microbatch_size, ours.candidate.microbatch_size) == (4, 2)
    assert ours.predicted < 0.95 * paper.predicted
    # Specs with many in flight fit only with small micro-batches, so these stay candidates.
    decision = tuner_of(budget=tight, largest_only=True).decide(dear)
    assert decision.candidate.microbatch_size < 4


def test_a_size_is_measured_again_when_its_times_are_old_and_the_network_changed() -> None:
    def wants(*, decisions: int, factor: float, transfer: float = 0.5) -> int | None:
        tuner = tuner_of(stale_after=5)
        known = {size: times_at(size, transfer) for size in SIZES}
        for size in SIZES:  # all others are far slower, so the first size stays in use
            if size != 2:
                known[size] = times_at(size, transfer, overhead=100.0)
        tuner.decide(known)
        for step in range(decisions):
            wobble = 1 + 0.001 * step
            known[2] = times_at(2, transfer * factor * wobble)
            tuner.decide(known)
        assert tuner.current.microbatch_size == 2
        return tuner.size_to_measure(known)

    assert wants(decisions=6, factor=1.5) == 1
    assert wants(decisions=6, factor=0.5) == 1
    assert wants(decisions=5, factor=1.5) is None  # not old
    assert wants(decisions=20, factor=1.1) is None  # not changed
    assert wants(decisions=20, factor=3.0, transfer=0.001) is None  # too fast to matter


def test_measuring_a_size_again_makes_it_fresh() -> None:
    tuner = tuner_of(stale_after=2)
    known = {size: times_at(size, 0.5, overhead=0.0 if size == 2 else 100.0) for size in SIZES}
    tuner.decide(known)
    wanted = []
    for step in range(12):
        known[2] = times_at(2, 1.0 + 0.001 * step)
        tuner.decide(known)
        if (size := tuner.size_to_measure(known)) is not None:
            wanted.append(size)
            known[size] = times_at(size, 1.0, overhead=100.0)
    assert wanted == [1, 4]
    known[1] = times_at(1, 1.1, overhead=100.0)
    tuner.decide(known)
    known[2] = times_at(2, 3.0)  # too soon after size 1 was measured to measure it again
    tuner.decide(known)
    assert tuner.size_to_measure(known) == 4


def test_a_size_that_does_not_fit_is_never_tried() -> None:
    memory = {size: [stage_memory(activation=size)] * 4 for size in (1, 2, 4)}
    budget = MemoryBudget(stages=memory, limits=(3,) * 4, window=0)
    tuner = tuner_of(budget=budget)
    assert str(tuner.current.spec) == "bounded:1,1,1,1"
    assert tuner.size_to_measure({2: times_at(2), 1: times_at(1)}) is None


def test_size_without_memory_figures_is_tried_once_they_exist() -> None:
    memory = {2: [stage_memory()] * 4}
    tuner = tuner_of(budget=MemoryBudget(stages=memory, limits=(9,) * 4, window=0))
    assert tuner.size_to_measure({2: times_at(2)}) is None
    memory = {size: [stage_memory()] * 4 for size in SIZES}
    tuner.budget = MemoryBudget(stages=memory, limits=(9,) * 4, window=0)
    assert tuner.size_to_measure({2: times_at(2)}) == 1


def test_size_that_no_longer_fits_is_replaced_by_an_unmeasured_one() -> None:
    tuner = tuner_of()
    known = {2: times_at(2)}
    tuner.decide(known)
    memory = {1: [stage_memory()] * 4, 2: [stage_memory(activation=10)] * 4}
    tuner.budget = MemoryBudget(stages=memory, limits=(9,) * 4, window=0)
    decision = tuner.decide(known)
    assert str(decision.candidate) == "1f1b of 24 x 1"
    assert decision.switched
    assert decision.predicted == float("inf")
    assert decision.why == "1f1b needs 40B on stage 0, which has 9B"
