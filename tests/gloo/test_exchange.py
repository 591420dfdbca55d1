"""Means over any group: exact, the same bits for all, and out of place; pairs break alone."""

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.distributed_c10d import _get_default_store

from polyrhythm.errors import PeerError
from polyrhythm.run.average.exchange import Messages, mean, scatter
from polyrhythm.run.average.pairs import Pairs, Peer
from polyrhythm.run.launch import Place
from polyrhythm.types import Worker
from tests.gloo.pairs import wait_until
from tests.gloo.pipelines import run_stages
from tests.gloo.replicas import run_with_losses

GROUPS = [(0, 1, 2), (1, 3), (0, 2, 3, 4), (2, 4), (0, 1, 2, 3, 4), (0, 3, 4)]


def peer(rank: int) -> Peer:
    return Peer(Worker(0, rank), 1)


def pairs_of(place: Place) -> Pairs:
    return Pairs(_get_default_store(), peer(place.rank))


def exchanged(pairs: Pairs, group: tuple[int, ...], flat, number, weights=None, timeout=20.0):
    members = [peer(rank) for rank in group]
    others = [member for member in members if member != pairs.me]
    pairs.connect(others, str(number), deadline=20.0)
    weights = weights or [1 / len(group)] * len(group)
    found = mean(pairs, members, weights, flat, number=number, timeout=timeout)
    pairs.settle(timeout)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_members_of_any_groups_get_the_same_mean_and_keep_what_they_gave(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    sizes = (1, 3, 1000, 50_000)

    def values(rank: int, size: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * rank + size)
        return torch.randn(size, generator=generator).to(dtype)

    def work(place: Place) -> list[torch.Tensor | None]:
        pairs, found = pairs_of(place), []
        for number, group in enumerate(GROUPS):
            for size in sizes:
                if place.rank not in group:
                    found.append(None)
                    continue
                given = values(place.rank, size)
                found.append(exchanged(pairs, group, given, 10 * number + sizes.index(size)))
                assert torch.equal(given, values(place.rank, size)), "out of place"
        return found

    found = run_stages(5, work, tmp_path)
    cases = [(group, size) for group in GROUPS for size in sizes]
    for case, (group, size) in enumerate(cases):
        results = [found[rank][case] for rank in group]
        assert all(torch.equal(result, results[0]) for result in results)
        wide = torch.stack([values(rank, size).double() for rank in group]).mean(0)
        tolerance = 4e-3 if dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(results[0].double(), wide, atol=tolerance, rtol=tolerance)


def test_half_precision_is_added_up_in_single_precision(tmp_path: Path) -> None:
    """256 + 1 + 1 + 1 is 256 again if it is added up in bfloat16, which has eight bits."""

    def work(place: Place) -> float:
        value = 256.0 if place.rank == 0 else 1.0
        given = torch.full((4,), value, dtype=torch.bfloat16)
        return exchanged(pairs_of(place), (0, 1, 2, 3), given, 1, weights=[1.0] * 4)[0].item()

    assert run_stages(4, work, tmp_path) == [260.0] * 4  # 259, rounded once


def test_weights_are_those_of_the_members_in_their_order(tmp_path: Path) -> None:
    def work(place: Place) -> list[float]:
        given = torch.full((3,), float(place.rank + 1))
        return exchanged(pairs_of(place), (0, 1, 2), given, 1, weights=[0.5, 0.25, 0.25]).tolist()

    assert run_stages(3, work, tmp_path) == [[1.75] * 3] * 3


def test_a_lost_member_breaks_its_own_pairs_only(tmp_path: Path) -> None:
    def work(place: Place) -> str:
        pairs, flat = pairs_of(place), torch.ones(50_000)
        exchanged(pairs, (0, 1, 2), flat, 1)
        if place.rank == 2:
            return "gone"
        lost = ""
        try:  # not in one group: whoever noticed first would leave the other one waiting
            exchanged(pairs, (place.rank, 2), flat, 2)
        except PeerError as error:
            lost = error.peer
        pairs.drop([Worker(0, 2)])
        exchanged(pairs, (0, 1), flat, 3)  # the pair of those who are left works as before
        return lost

    assert run_stages(3, work, tmp_path)[:2] == ["s0p2", "s0p2"]


LARGE = 1 << 24  # numbers: more than the sockets of a connection hold


def send_otherwise(how: Callable[[Callable[[], None]], None]) -> None:
    """In this process, from now on: `how` is given what sends a message."""
    send = Messages.send
    Messages.send = lambda *args, **more: how(lambda: send(*args, **more))


def scattered(pairs: Pairs, place: Place, num_owned: int) -> torch.Tensor:
    """Of two; the first one owns so many numbers."""
    pairs.connect([peer(1 - place.rank)], "1", deadline=20.0)
    flat = torch.full((LARGE + 4,), place.rank + 1.0)
    parts = [[slice(0, num_owned), slice(num_owned, LARGE + 4)]]
    return scatter(pairs, [peer(0), peer(1)], [0.5] * 2, flat, parts, number=1, timeout=60.0)


def test_one_that_dies_with_a_message_to_it_half_way_is_not_waited_for(tmp_path: Path) -> None:
    """Gloo tells nobody. The other one has its part; that one is lost, the scheduler finds out."""
    said = tmp_path / "pid"

    def send_and_say_so(pairs: Pairs, send: Callable[[], None]) -> None:
        send()
        pairs.settle(20.0)
        said.write_text(f"{os.getpid()}\n")

    def send_to_one_that_stands_still(send: Callable[[], None]) -> None:
        wait_until(lambda: said.exists() and said.read_text().endswith("\n"), "it has sent its own")
        victim = int(said.read_text())
        os.kill(victim, signal.SIGSTOP)
        send()
        threading.Timer(0.2, os.kill, [victim, signal.SIGKILL]).start()

    def work(place: Place) -> list[float]:
        pairs = pairs_of(place)
        if place.rank == 1:
            send_otherwise(partial(send_and_say_so, pairs))
        else:
            send_otherwise(send_to_one_that_stands_still)
        found = scattered(pairs, place, 4)
        pairs.drop([Worker(0, 1)])
        return found[:4].tolist()

    found = run_with_losses(2, work, tmp_path, lost={1}, timeout=30.0)
    assert found == {0: [1.5] * 4}


@pytest.mark.parametrize("what", ["dies", "stands still"])
def test_a_message_that_stays_half_way_is_not_waited_for(what: str, tmp_path: Path) -> None:
    """Gloo tells nobody that its sender is gone, or that the connection was broken off."""
    said = tmp_path / "pid"

    def send_half(send: Callable[[], None]) -> None:
        time.sleep(0.5)  # the other one is ready to receive
        send()
        os.kill(os.getpid(), signal.SIGKILL if what == "dies" else signal.SIGSTOP)

    def send_and_break_off(pairs: Pairs, send: Callable[[], None]) -> None:
        send()
        threading.Timer(1.0, pairs.break_off, [[peer(1)]]).start()

    def work(place: Place) -> str:
        pairs = pairs_of(place)
        if place.rank == 1:
            said.write_text(str(os.getpid()))
            send_otherwise(send_half)
        elif what == "stands still":
            send_otherwise(partial(send_and_break_off, pairs))
        with pytest.raises(PeerError) as caught:
            scattered(pairs, place, LARGE)
        if what == "stands still":
            os.kill(int(said.read_text()), signal.SIGKILL)
        return caught.value.peer

    assert run_with_losses(2, work, tmp_path, lost={1}, timeout=30.0) == {0: "s0p1"}


def test_whoever_waits_for_a_peer_that_does_not_come_is_let_go(tmp_path: Path) -> None:
    def work(place: Place) -> tuple[str, bool]:
        if place.rank == 1:
            return "", False
        pairs, began = pairs_of(place), time.monotonic()
        with pytest.raises(PeerError) as caught:
            pairs.connect(
                [peer(1)], "1", deadline=60.0, stopped=lambda: time.monotonic() - began > 0.2
            )
        return caught.value.cause, time.monotonic() - began < 30.0

    assert run_stages(2, work, tmp_path)[0] == ("the group was given up", True)


def test_breaking_off_wakes_both_sides_of_a_silent_exchange(tmp_path: Path) -> None:
    """One member stands still; the others wait until one of them breaks off."""

    def work(place: Place) -> tuple[str, float]:
        pairs, flat = pairs_of(place), torch.ones(10)
        exchanged(pairs, (0, 1, 2), flat, 1)
        if place.rank == 2:
            time.sleep(4.0)  # alive, and says nothing
            return "", 0.0
        others = [peer(rank) for rank in (0, 1, 2) if rank != place.rank]
        threading.Timer(0.5, pairs.break_off, [others]).start()
        began = time.monotonic()
        with pytest.raises(PeerError):
            exchanged(pairs, (0, 1, 2), flat, 2, timeout=60.0)
        return "woken", time.monotonic() - began

    found = run_stages(3, work, tmp_path)
    assert [how for how, _ in found[:2]] == ["woken", "woken"]
    assert max(waited for _, waited in found[:2]) < 3.5, "before the silent one ended"


def test_one_that_has_given_up_is_not_waited_for_when_it_is_met_too_late(tmp_path: Path) -> None:
    """The first says that it is here, gives up, and only then the second one comes."""

    def work(place: Place) -> tuple[str, bool]:
        pairs, other = pairs_of(place), peer(1 - place.rank)
        began = time.monotonic()
        with pytest.raises(PeerError) as caught:
            if place.rank == 0:
                pairs.connect([other], "1", deadline=0.1)
            else:
                time.sleep(0.5)
                pairs.connect([other], "1", deadline=60.0)
        return caught.value.cause, time.monotonic() - began < 15.0

    found = run_stages(2, work, tmp_path)
    assert found == [("it did not come", True), ("it has given up the group", True)]
