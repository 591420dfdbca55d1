"""Inbox and Outbox between two real processes: order, window, layouts, and memory."""

import time
from pathlib import Path

import pytest
import torch

from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.transport import Inbox, MessageLayout, Outbox
from polyrhythm.types import Action, Op
from tests.gloo.transport_peers import (
    content,
    num_alive,
    receive_and_check,
    record_receives,
    route,
    run,
    send,
    signal_peer,
    track_buffers,
    wait_for_peer,
    wait_until,
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("window", [1, 3, 100])
def test_messages_of_new_kinds_arrive_in_order(tmp_path: Path, window: int) -> None:
    kinds = [10] * 6 + [11] * 6 + [10, 12] * 9

    def sender(ctx: DistContext) -> None:
        outbox = Outbox(route(ctx), announces=True)
        for number, kind in enumerate(kinds):
            send(outbox, number, kind)
        outbox.drain()
        outbox.close()

    def receiver(ctx: DistContext) -> None:
        inbox = Inbox(route(ctx), window=window, announced=True)
        posted = record_receives()
        expected = [(Action(Op.F, number), kind) for number, kind in enumerate(kinds)]
        inbox.post_receives(expected[:20])
        for number, kind in enumerate(kinds):
            if number == 15:
                inbox.post_receives(expected[20:])
            receive_and_check(inbox, number, kind)
            assert posted.count(False) <= number + 1 + window, "window exceeded"
        assert posted.count(True) == 3, "each kind is announced once"
        inbox.close()

    run(sender, receiver, tmp_path)


@pytest.mark.timeout(60)
def test_window_is_filled_and_never_exceeded(tmp_path: Path) -> None:
    window, number_of_messages = 3, 12

    def sender(ctx: DistContext) -> None:
        outbox = Outbox(route(ctx), announces=False)
        for number in range(number_of_messages):
            send(outbox, number, 10)
        signal_peer(1)
        outbox.drain()

    def receiver(ctx: DistContext) -> None:
        inbox = Inbox(route(ctx), window=window, announced=False)
        inbox.set_layout(10, MessageLayout.of(content(0, 10)))
        posted = record_receives()
        inbox.post_receives([(Action(Op.F, number), 10) for number in range(number_of_messages)])
        wait_for_peer(0)  # all are sent
        wait_until(lambda: len(inbox._arrived) == window, "posted messages arrive")
        for number in range(number_of_messages):
            assert len(posted) == min(number + window, number_of_messages)
            receive_and_check(inbox, number, 10)

    run(sender, receiver, tmp_path)


@pytest.mark.timeout(60)
def test_layouts_may_be_set_after_expect(tmp_path: Path) -> None:
    kinds = [10, 11, 10, 11, 11]

    def sender(ctx: DistContext) -> None:
        outbox = Outbox(route(ctx), announces=False)
        for number, kind in enumerate(kinds):
            send(outbox, number, kind)
        outbox.drain()

    def receiver(ctx: DistContext) -> None:
        inbox = Inbox(route(ctx), window=10, announced=False)
        posted = record_receives()
        inbox.post_receives([(Action(Op.F, number), kind) for number, kind in enumerate(kinds)])
        assert posted == [], "no layout is known"
        inbox.set_layout(11, MessageLayout.of(content(0, 11)))
        assert posted == [], "the first message is of the other kind"
        inbox.set_layout(10, MessageLayout.of(content(0, 10)))
        assert len(posted) == len(kinds)
        for number, kind in enumerate(kinds):
            receive_and_check(inbox, number, kind)

    run(sender, receiver, tmp_path)


@pytest.mark.timeout(60)
def test_requires_grad_is_kept_for_complex_tensors(tmp_path: Path) -> None:
    tensors = [torch.tensor([1 + 2j]).requires_grad_(), torch.tensor([3j])]

    def sender(ctx: DistContext) -> None:
        outbox = Outbox(route(ctx), announces=True)
        outbox.send(Action(Op.F, 0), 1, [t.detach() for t in tensors], MessageLayout.of(tensors))
        outbox.drain()

    def receiver(ctx: DistContext) -> None:
        inbox = Inbox(route(ctx), window=1, announced=True)
        inbox.post_receives([(Action(Op.F, 0), 1)])
        received, _ = inbox.get(Action(Op.F, 0))
        assert [tensor.requires_grad for tensor in received] == [True, False]

    run(sender, receiver, tmp_path)


@pytest.mark.timeout(60)
def test_sends_return_before_any_receive_is_posted(tmp_path: Path) -> None:
    """24 MB are more than any socket buffer holds."""
    numbers, large = range(12), torch.ones(500_000)

    def sender(ctx: DistContext) -> None:
        outbox = Outbox(route(ctx), announces=True)
        for number in numbers:
            outbox.send(Action(Op.B, number), 1, [number * large], MessageLayout.of([large]))
        signal_peer(1)
        outbox.drain()

    def receiver(ctx: DistContext) -> None:
        inbox = Inbox(route(ctx), window=2, announced=True)
        wait_for_peer(0)
        inbox.post_receives([(Action(Op.B, number), 1) for number in numbers])
        for number in numbers:
            (tensor,), transfer = inbox.get(Action(Op.B, number))
            assert torch.equal(tensor, number * large)
            assert transfer.sent <= transfer.posted <= transfer.arrived, "one clock, sent first"

    run(sender, receiver, tmp_path)


@pytest.mark.timeout(60)
def test_buffers_are_freed_after_send_or_use(tmp_path: Path) -> None:
    def sender(ctx: DistContext) -> None:
        outbox = Outbox(route(ctx), announces=False)
        buffers = track_buffers()
        for number in range(4):
            send(outbox, number, 10)
        assert num_alive(buffers) == 4, "nothing is received yet"
        signal_peer(1)
        # The receiver uses two and has a window of one: the third is sent too, the fourth waits.
        wait_until(lambda: num_alive(buffers) == 1, "three are sent")
        assert not buffers[3].expired()
        signal_peer(1)
        outbox.drain()
        wait_until(lambda: num_alive(buffers) == 0, "all are sent")

    def receiver(ctx: DistContext) -> None:
        inbox = Inbox(route(ctx), window=1, announced=False)
        buffers = track_buffers()
        inbox.set_layout(10, MessageLayout.of(content(0, 10)))
        wait_for_peer(0)
        inbox.post_receives([(Action(Op.F, number), 10) for number in range(4)])
        for number in range(2):
            receive_and_check(inbox, number, 10)
        wait_until(lambda: num_alive(buffers) == 1, "two are used, one is not")
        wait_for_peer(0)
        for number in range(2, 4):
            receive_and_check(inbox, number, 10)
        wait_until(lambda: num_alive(buffers) == 0, "the last one is freed, too")

    run(sender, receiver, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(60)
def test_slow_receiver_is_not_reported_lost(tmp_path: Path) -> None:
    """All messages together take longer than the timeout; no single one does."""
    timeout, num_messages = 4.0, 7

    def sender(ctx: DistContext) -> None:
        outbox = Outbox(route(ctx, timeout=timeout), announces=False)
        start = time.perf_counter()
        for number in range(num_messages):
            send(outbox, number, 10)
        outbox.drain()
        assert time.perf_counter() - start > timeout, "the test is about a long wait"

    def receiver(ctx: DistContext) -> None:
        inbox = Inbox(route(ctx), window=1, announced=False)
        inbox.set_layout(10, MessageLayout.of(content(0, 10)))
        inbox.post_receives([(Action(Op.F, number), 10) for number in range(num_messages)])
        for number in range(num_messages):
            receive_and_check(inbox, number, 10)
            if number < num_messages - 2:  # after that the last message is sent
                time.sleep(timeout / 4)

    run(sender, receiver, tmp_path)
