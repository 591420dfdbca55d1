"""Workers lost before, between and after the halves of an average: the others stay exact copies."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyrhythm.run.average import averager, exchange, halves
from polyrhythm.run.average.averager import Averager
from polyrhythm.run.average.group_sync import GroupSync
from polyrhythm.run.average.halves import Halves
from polyrhythm.run.coordinator.client import CoordinatorClient
from polyrhythm.run.launch import Place
from polyrhythm.sync.messages import Done
from tests.gloo.replicas import TIMEOUT, Point, run_with_losses, target_of, train

VICTIM, NUM, SIZE, RATE, LAST = 2, 4, 12, 0.5, 8
DYING = 2  # the number of the average in which somebody dies
OWNED = [2, 6, 10]  # what the victim owns: three buckets of four numbers, one for each member


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_small_parts() -> None:
    exchange.SMALL, halves.BUCKET = 0, 16


def in_the_third(does: Callable[..., Any], usual: Callable[..., Any]) -> Callable[..., Any]:
    """What `usual` is replaced by: the third call is another."""
    count = iter(range(1000))

    def called(*args: Any, **more: Any) -> Any:
        return does(*args, **more) if next(count) == DYING else usual(*args, **more)

    return called


def trained(place: Place, watch: Callable[[GroupSync], None] = lambda _: None) -> list[Tensor]:
    """What the weights were after each local update and each average, and consolidated."""
    model = Point(SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    options, seen = {"window": float("inf"), "group_size": NUM}, []
    with GroupSync(
        model, optimizer, "age", options=options, decoupled=True, timeout=TIMEOUT
    ) as sync:
        watch(sync)
        for _ in range(LAST):
            optimizer.zero_grad()
            model(target_of(place.rank, SIZE)).backward()
            optimizer.step()
            seen.append(model.place.detach().clone())
            sync.step()
            sync.refresh()
            seen.append(model.place.detach().clone())
        sync.consolidate()
        seen.append(model.place.detach().clone())
    return seen


def before_and_after(found: dict[int, list[Tensor]], average: int) -> tuple[Tensor, Tensor]:
    """Of those who are left: what they brought to an average, and what all of them have got."""
    brought = torch.stack([seen[2 * average] for seen in found.values()])
    got = torch.stack([seen[2 * average + 1] for seen in found.values()])
    return brought, got


def expected_of_the_victim() -> Tensor:
    """What it would have brought to the average in which it dies: the others show it before."""
    place = torch.zeros(SIZE)
    targets = torch.stack([target_of(rank, SIZE) for rank in range(NUM)])
    for _ in range(DYING):
        place = place + RATE * (targets.mean(0) - place)
    return place + RATE * (targets[VICTIM] - place)


def check_that_the_others_go_on(found: dict[int, list[Tensor]]) -> None:
    for average in range(LAST):
        _, got = before_and_after(found, average)
        assert (got == got[0]).all(), f"average {average}"
        assert got.isfinite().all()
    ends = [seen[-1] for seen in found.values()]
    assert all(torch.equal(end, ends[0]) for end in ends)
    targets = torch.stack([target_of(rank, SIZE) for rank in found])
    torch.testing.assert_close(ends[0], targets.mean(0), atol=0.1, rtol=0)  # where they go now


def test_what_a_member_has_sent_to_nobody_is_as_with_the_first_who_is_left(tmp_path: Path) -> None:
    def work(place: Place) -> list[Tensor]:
        in_small_parts()
        if place.rank == VICTIM:
            Halves.gather = in_the_third(die, Halves.gather)
        return trained(place)

    found = run_with_losses(NUM, work, tmp_path, lost={VICTIM})
    check_that_the_others_go_on(found)
    brought, got = before_and_after(found, DYING)
    expected = (brought.sum(0) + expected_of_the_victim()) / NUM
    expected[OWNED] = brought[0][OWNED]
    torch.testing.assert_close(got[0], expected)


def test_what_a_member_has_sent_to_one_of_the_others_comes_to_all(tmp_path: Path) -> None:
    """The last one to whom it is sent: the others ask in vain, before."""

    def to_the_last_alone(place: Place) -> None:
        send, post = exchange.Messages.send, halves.post_gather

        def post_and_die(messages: Any, members: Any, *args: Any, **more: Any) -> None:
            def send_to_the_last(_: Any, peer: Any, tensor: Tensor, *, tag: int) -> None:
                if peer == members[-1]:
                    send(messages, peer, tensor, tag=tag)

            exchange.Messages.send = send_to_the_last
            post(messages, members, *args, **more)
            messages._pairs.settle(10.0)
            time.sleep(0.2)  # it is there
            die()

        halves.post_gather = in_the_third(post_and_die, post)

    def work(place: Place) -> list[Tensor]:
        in_small_parts()
        if place.rank == VICTIM:
            to_the_last_alone(place)
        return trained(place)

    found = run_with_losses(NUM, work, tmp_path, lost={VICTIM})
    check_that_the_others_go_on(found)
    brought, got = before_and_after(found, DYING)
    torch.testing.assert_close(got[0], (brought.sum(0) + expected_of_the_victim()) / NUM)


@pytest.mark.parametrize("second", [1, 3])
def test_one_more_that_is_lost_while_they_mend_is_left_out_as_well(
    second: int, tmp_path: Path
) -> None:
    def work(place: Place) -> list[Tensor]:
        in_small_parts()
        if place.rank == VICTIM:
            Halves.gather = in_the_third(die, Halves.gather)
        if place.rank == second:
            Halves._hand_on = die
        return trained(place)

    found = run_with_losses(NUM, work, tmp_path, lost={VICTIM, second})
    for average in range(LAST):
        _, got = before_and_after(found, average)
        assert (got == got[0]).all(), f"average {average}"


def test_one_that_stands_still_is_not_waited_for_and_keeps_what_it_had(tmp_path: Path) -> None:
    """It is alive, and says nothing for longer than the others wait."""

    def work(place: Place) -> list[Tensor]:
        in_small_parts()
        gather, halves._SILENT, halves._PATIENCE = Halves.gather, 1.0, 1.0

        def still(*args: Any) -> Any:
            time.sleep(5.0)
            return gather(*args)

        def soon(half: Halves, _: float, stopped: Any) -> Any:
            return gather(half, 0.0, stopped)

        Halves.gather = in_the_third(still, gather) if place.rank == VICTIM else soon
        return trained(place)

    found = run_with_losses(NUM, work, tmp_path, lost=set())
    late = found.pop(VICTIM)
    _, got = before_and_after(found, DYING)
    assert (got == got[0]).all()
    assert torch.equal(late[2 * DYING], late[2 * DYING + 1]), "as if there had been no average"
    ends = [late[-1], *(seen[-1] for seen in found.values())]
    assert all(torch.equal(end, ends[0]) for end in ends), "consolidated"


def die_at(point: str) -> None:
    """This process is killed the third time that it comes there."""
    if point == "before the exchange":
        averager.Pairs.connect = in_the_third(die, averager.Pairs.connect)
    elif point == "in the first half":
        count = iter(range(1000))
        weighted = exchange._weighted
        third = 3 * DYING + 1  # the second of three buckets
        exchange._weighted = lambda *a: die() if next(count) == third else weighted(*a)
    elif point == "before Done":
        averager.Done = in_the_third(die, averager.Done)
    else:
        assert point == "after Done"
        send, said = CoordinatorClient.send, iter(range(1000))

        def send_and_die(client: CoordinatorClient, message: Any) -> None:
            send(client, message)
            if isinstance(message, Done) and next(said) == DYING:
                time.sleep(0.05)  # it is on its way
                die()

        CoordinatorClient.send = send_and_die


@pytest.mark.parametrize("point", ["before the exchange", "in the first half", "before Done"])
def test_an_average_that_is_given_up_leaves_the_weights_as_they_were(
    point: str, tmp_path: Path
) -> None:
    def work(place: Place) -> tuple[list[Tensor], list[Tensor]]:
        in_small_parts()
        if place.rank == VICTIM:
            die_at(point)
        at_abort, abort = [], Averager._abort

        def watch(sync: GroupSync) -> None:
            def aborted(*args: Any) -> None:
                abort(*args)
                at_abort.append(sync._model.module.place.detach().clone())

            Averager._abort = aborted

        return trained(place, watch), at_abort

    found = run_with_losses(NUM, work, tmp_path, lost={VICTIM})
    check_that_the_others_go_on({rank: seen for rank, (seen, _) in found.items()})
    for seen, at_abort in found.values():
        assert at_abort, "it was given up"
        assert all(torch.equal(place, seen[2 * DYING]) for place in at_abort)


@pytest.mark.parametrize("policy", ["age", "smart", "partial_reduce"])
def test_groups_of_any_policy_go_on_when_one_dies_after_its_done(
    policy: str, tmp_path: Path
) -> None:
    def work(place: Place) -> tuple[int, Tensor]:
        if place.rank == VICTIM:
            die_at("after Done")
        options = {"group_size": 2, "patience": 0.5} if policy == "partial_reduce" else {}
        with train(place, 20, policy, decoupled=True, options=options) as sync:
            sync.consolidate()
            return sync.num_steps, sync._model.module.place.detach().clone()

    found = run_with_losses(NUM, work, tmp_path, lost={VICTIM})
    places = [place for _, place in found.values()]
    assert [steps for steps, _ in found.values()] == [20] * 3
    assert all(torch.equal(place, places[0]) for place in places)
    assert places[0].isfinite().all()


def test_one_that_fails_in_its_own_loop_is_left_out(tmp_path: Path) -> None:
    """Between its step and its next forward, while the others wait for its part."""

    def work(place: Place) -> list[Tensor]:
        in_small_parts()
        if place.rank != VICTIM:
            return trained(place)
        gather = Halves.gather
        Halves.gather = in_the_third(lambda *a: (time.sleep(3.0), gather(*a))[1], gather)
        count = iter(range(1000))

        def watch(sync: GroupSync) -> None:
            step = sync._rounds.step

            def step_and_fail() -> None:
                step()
                if next(count) == DYING:
                    raise ValueError("a bug in the training loop")

            sync._rounds.step = step_and_fail

        with pytest.raises(ValueError, match="a bug"):
            trained(place, watch)
        return []

    found = run_with_losses(NUM, work, tmp_path, lost=set())
    assert found.pop(VICTIM) == []
    check_that_the_others_go_on(found)
