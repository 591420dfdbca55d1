"""Inbox and Outbox between two real processes: order, window, layouts, and memory."""

import time
from pathlib import Path

import pytest
import torch

from polyrhythm.run.launch import Place
from polyrhythm.run.pipeline.message import Layout
from polyrhythm.run.pipeline.transport import Inbox, Outbox
from polyrhythm.types import Action, Op
from tests.gloo.pairs import (
    content,
    hear,
    note_receives,
    num_alive,
    route,
    run,
    send,
    take_and_check,
    tell,
    wait_until,
    watch_buffers,
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("window", [1, 3, 100])
def test_messages_of_kinds_that_appear_on_the_way_arrive_whole_and_in_order(
    tmp_path: Path, window: int
) -> None:
    kinds = [10] * 6 + [11] * 6 + [10, 12] * 9

    def sender(place: Place) -> None:
        outbox = Outbox(route(place), announces=True)
        for number, kind in enumerate(kinds):
            send(outbox, number, kind)
        outbox.drain()
        outbox.close()

    def receiver(place: Place) -> None:
        inbox = Inbox(route(place), window=window, announced=True)
        posted = note_receives()
        expected = [(Action(Op.F, number), kind) for number, kind in enumerate(kinds)]
        inbox.expect(expected[:20])
        for number, kind in enumerate(kinds):
            if number == 15:
                inbox.expect(expected[20:])
            take_and_check(inbox, number, kind)
            assert posted.count(False) <= number + 1 + window, "more are open than may be"
        assert posted.count(True) == 3, "each kind is announced once"
        inbox.close()

    run(sender, receiver, tmp_path)


@pytest.mark.timeout(60)
def test_the_window_is_full_and_never_more_than_full(tmp_path: Path) -> None:
    window, number_of_messages = 3, 12

    def sender(place: Place) -> None:
        outbox = Outbox(route(place), announces=False)
        for number in range(number_of_messages):
            send(outbox, number, 10)
        tell(1)
        outbox.drain()

    def receiver(place: Place) -> None:
        inbox = Inbox(route(place), window=window, announced=False)
        inbox.learn(10, Layout.of(content(0, 10)))
        posted = note_receives()
        inbox.expect([(Action(Op.F, number), 10) for number in range(number_of_messages)])
        hear(0)  # all are sent
        wait_until(lambda: len(inbox._arrived) == window, "what was posted arrives")
        for number in range(number_of_messages):
            assert len(posted) == min(number + window, number_of_messages)
            take_and_check(inbox, number, 10)

    run(sender, receiver, tmp_path)


@pytest.mark.timeout(60)
def test_layouts_may_be_learnt_after_messages_are_expected(tmp_path: Path) -> None:
    kinds = [10, 11, 10, 11, 11]

    def sender(place: Place) -> None:
        outbox = Outbox(route(place), announces=False)
        for number, kind in enumerate(kinds):
            send(outbox, number, kind)
        outbox.drain()

    def receiver(place: Place) -> None:
        inbox = Inbox(route(place), window=10, announced=False)
        posted = note_receives()
        inbox.expect([(Action(Op.F, number), kind) for number, kind in enumerate(kinds)])
        assert posted == [], "no layout is known"
        inbox.learn(11, Layout.of(content(0, 11)))
        assert posted == [], "the first message is of the other kind"
        inbox.learn(10, Layout.of(content(0, 10)))
        assert len(posted) == len(kinds)
        for number, kind in enumerate(kinds):
            take_and_check(inbox, number, kind)

    run(sender, receiver, tmp_path)


@pytest.mark.timeout(60)
def test_a_complex_tensor_arrives_with_its_need_of_a_gradient(tmp_path: Path) -> None:
    tensors = [torch.tensor([1 + 2j]).requires_grad_(), torch.tensor([3j])]

    def sender(place: Place) -> None:
        outbox = Outbox(route(place), announces=True)
        outbox.send(Action(Op.F, 0), 1, [t.detach() for t in tensors], Layout.of(tensors))
        outbox.drain()

    def receiver(place: Place) -> None:
        inbox = Inbox(route(place), window=1, announced=True)
        inbox.expect([(Action(Op.F, 0), 1)])
        received, _ = inbox.take(Action(Op.F, 0))
        assert [tensor.requires_grad for tensor in received] == [True, False]

    run(sender, receiver, tmp_path)


@pytest.mark.timeout(60)
def test_sends_return_before_any_receive_is_posted(tmp_path: Path) -> None:
    """More than any socket holds: 24 MB."""
    numbers, large = range(12), torch.ones(500_000)

    def sender(place: Place) -> None:
        outbox = Outbox(route(place), announces=True)
        for number in numbers:
            outbox.send(Action(Op.B, number), 1, [number * large], Layout.of([large]))
        tell(1)
        outbox.drain()

    def receiver(place: Place) -> None:
        inbox = Inbox(route(place), window=2, announced=True)
        hear(0)
        inbox.expect([(Action(Op.B, number), 1) for number in numbers])
        for number in numbers:
            (tensor,), transfer = inbox.take(Action(Op.B, number))
            assert torch.equal(tensor, number * large)
            assert transfer.sent <= transfer.posted <= transfer.arrived, "sent first, on one clock"

    run(sender, receiver, tmp_path)


@pytest.mark.timeout(60)
def test_memory_is_given_back_as_soon_as_a_message_has_left_or_was_used(tmp_path: Path) -> None:
    def sender(place: Place) -> None:
        outbox = Outbox(route(place), announces=False)
        buffers = watch_buffers()
        for number in range(4):
            send(outbox, number, 10)
        assert num_alive(buffers) == 4, "nothing is received yet"
        tell(1)
        # The receiver takes two and has a window of one: the third leaves too, the fourth waits.
        wait_until(lambda: num_alive(buffers) == 1, "three have left")
        assert not buffers[3].expired()
        tell(1)
        outbox.drain()
        wait_until(lambda: num_alive(buffers) == 0, "all have left")

    def receiver(place: Place) -> None:
        inbox = Inbox(route(place), window=1, announced=False)
        buffers = watch_buffers()
        inbox.learn(10, Layout.of(content(0, 10)))
        hear(0)
        inbox.expect([(Action(Op.F, number), 10) for number in range(4)])
        for number in range(2):
            take_and_check(inbox, number, 10)
        wait_until(lambda: num_alive(buffers) == 1, "two were used, one waits to be")
        hear(0)
        for number in range(2, 4):
            take_and_check(inbox, number, 10)
        wait_until(lambda: num_alive(buffers) == 0, "the last one is not kept either")

    run(sender, receiver, tmp_path)


@pytest.mark.timeout(60)
def test_a_peer_that_takes_messages_slowly_is_not_lost(tmp_path: Path) -> None:
    """All of them take longer than the deadline; none of them does."""
    deadline, num_messages = 4.0, 7

    def sender(place: Place) -> None:
        outbox = Outbox(route(place, deadline=deadline), announces=False)
        for number in range(num_messages):
            send(outbox, number, 10)
        start = time.perf_counter()
        outbox.drain()
        assert time.perf_counter() - start > deadline, "the test is about a long wait"

    def receiver(place: Place) -> None:
        inbox = Inbox(route(place), window=1, announced=False)
        inbox.learn(10, Layout.of(content(0, 10)))
        inbox.expect([(Action(Op.F, number), 10) for number in range(num_messages)])
        for number in range(num_messages):
            take_and_check(inbox, number, 10)
            if number < num_messages - 2:  # then the last one has left: the sender waits no more
                time.sleep(deadline / 4)

    run(sender, receiver, tmp_path)
