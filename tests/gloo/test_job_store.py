"""JobStore: values, errors and timeouts of the members of an agreement."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import DescriptionError, LaunchError, PeerError, UserError
from polyrhythm.run.comm import store as store_module
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.comm.store import JobStore, Members, decode, encode, job_store_backend
from tests.gloo.replicas import run_replicas, run_with_failures
from tests.gloo.transport_peers import wait_until

TIMEOUT = 30.0
SHORT_TIMEOUT = 1.0

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary()
scalars |= st.floats(allow_nan=False)
plain_values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.integers().filter(lambda i: abs(i) < 2**62) | st.text(), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@dataclass(frozen=True)
class Record:
    number: int
    names: tuple[str, ...] = ()


def run_members(
    num: int, work: Callable[[JobStore, Members], Any], timeout: float = TIMEOUT
) -> list[Any]:
    """Run `work` for each member in a thread of its own, over one store; exceptions are results."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=TIMEOUT))
    members = Members(tuple(range(10, 10 + num)), epoch=3)

    # Before any timeout begins: a connection takes seconds where c10d's lookup of a name does.
    backends = [server.clone() for _ in members.ranks]

    def run(rank: int, backend: Any) -> Any:
        try:
            return work(JobStore(backend, rank, timeout=timeout), members)
        except (UserError, PeerError) as error:
            return error.with_traceback(None)

    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(run, members.ranks, backends))


@given(plain_values)
def test_plain_values_survive_with_their_types(value: Any) -> None:
    assert repr(decode(encode(value, None, "a value"), None)) == repr(value)


@pytest.mark.parametrize("value", [{1, 2}, Record(1), Path("x"), 2**70, [object()], (1, {"a": 1j})])
def test_value_that_would_change_is_refused(value: Any) -> None:
    with pytest.raises(LaunchError, match="settings: a value that cannot be sent"):
        encode(value, None, "settings")


def test_values_reach_all_members_in_order() -> None:
    def work(store: JobStore, members: Members) -> Any:
        rank = store.rank
        return (
            store.broadcast_object("a", (rank, [rank]), members),
            store.broadcast_object("b", Record(rank, ("x",)), members, as_type=Record),
            store.all_gather_object("c", (rank,), members),
            store.run_on_leader("d", lambda: {rank: "led"}, members),
        )

    expected = ((10, [10]), Record(10, ("x",)), [(10,), (11,), (12,)], {10: "led"})
    assert run_members(3, work) == [expected] * 3


def test_epochs_do_not_share_values() -> None:
    def work(store: JobStore, members: Members) -> Any:
        later = Members(tuple(reversed(members.ranks)), epoch=members.epoch + 1)
        return [store.broadcast_object("plan", store.rank, who) for who in (members, later)]

    assert run_members(2, work) == [[10, 11]] * 2


def test_barrier_waits_for_last_member() -> None:
    has_arrived = threading.Event()

    def work(store: JobStore, members: Members) -> bool:
        if store.rank == 12:
            time.sleep(0.3)
            has_arrived.set()
        store.barrier("start", members)
        return has_arrived.is_set()

    assert run_members(3, work) == [True] * 3


def test_different_settings_are_named() -> None:
    def work(store: JobStore, members: Members) -> None:
        seed = 2 if store.rank == 11 else 1
        store.check_consistent("settings", {"lr": 0.1, "seed": seed}, members)

    errors = run_members(3, work)
    assert all(isinstance(error, LaunchError) for error in errors), "nobody waits for the others"
    assert {error.wrong for error in errors} == {
        "the process of rank 11 has seed=2, and the process of rank 10 has seed=1"
    }


@pytest.mark.parametrize(
    ("error", "kind", "wrong"),
    [
        (DescriptionError("no layer", expected="one", fix="add it"), DescriptionError, "no layer"),
        (OSError("disk full"), LaunchError, "the plan: OSError: disk full"),
    ],
)
def test_error_on_leader_is_raised_on_all_members(
    error: Exception, kind: type[UserError], wrong: str
) -> None:
    def work(store: JobStore, members: Members) -> Any:
        def fail() -> None:
            raise error

        try:
            return store.run_on_leader("the plan", fail, members)
        except OSError as raised:
            return raised

    first, *others = run_members(3, work)
    assert first is error
    assert [(type(other), other.wrong) for other in others] == [(kind, wrong)] * 2


def test_member_that_fails_ends_the_wait_of_others() -> None:
    def work(store: JobStore, members: Members) -> Any:
        if store.rank == 11:
            error = LaunchError("no GPU", expected="one", fix="use device='cpu'")
            store.fail("shapes", error, members)
            raise error
        return store.all_gather_object("shapes", 1, members)

    found = run_members(3, work)
    assert [type(error) for error in found] == [LaunchError] * 3
    assert {error.wrong for error in found} == {"no GPU"}


def test_value_that_cannot_be_encoded_fails_all_members_at_once() -> None:
    def work(store: JobStore, members: Members) -> None:
        store.broadcast_object("settings", {1, 2}, members)

    start = time.monotonic()
    errors = run_members(3, work)
    assert time.monotonic() - start < TIMEOUT / 2, "nobody waits for the timeout"
    assert all(isinstance(error, LaunchError) for error in errors)
    assert all("settings: a value that cannot be sent: a set" in error.wrong for error in errors)


def test_text_that_is_not_utf8_is_refused_and_reported() -> None:
    def work(store: JobStore, members: Members) -> None:
        store.broadcast_object("the folder", "run-\udcff", members)

    errors = run_members(2, work)
    assert all("the folder: a value that cannot be sent" in error.wrong for error in errors)

    def fail(store: JobStore, members: Members) -> None:
        def read() -> None:
            raise OSError("run-\udcff: no such file")

        store.run_on_leader("the folder", read, members)

    leader, other = run_members(2, lambda store, members: _or_os_error(fail, store, members))
    assert isinstance(leader, str)
    assert other.wrong == r"the folder: OSError: run-\udcff: no such file"


def _or_os_error(
    work: Callable[[JobStore, Members], Any], store: JobStore, members: Members
) -> Any:
    try:
        return work(store, members)
    except OSError as error:
        return str(error)


def test_lost_peer_of_the_leader_is_a_lost_peer_of_all() -> None:
    def work(store: JobStore, members: Members) -> None:
        def lose() -> None:
            raise PeerError("s0p7", action="probing", waited=3.0, cause="no answer")

        store.run_on_leader("the plan", lose, members)

    errors = run_members(3, work)
    assert all(isinstance(error, PeerError) for error in errors)
    assert {error.peer for error in errors} == {"s0p7"}


def test_large_value_is_compressed_and_one_too_large_is_refused() -> None:
    def work(store: JobStore, members: Members) -> int:
        found = store.broadcast_object("names", ["model.layers.weight"] * 600_000, members)
        return len(found)

    assert run_members(2, work) == [600_000] * 2

    def refused(store: JobStore, members: Members) -> None:
        store.broadcast_object("noise", os.urandom(9_000_000), members)

    errors = run_members(2, refused)
    assert all("noise: a value of 9" in error.wrong for error in errors)


def test_all_missing_members_are_named_after_one_timeout() -> None:
    def work(store: JobStore, members: Members) -> Any:
        if store.rank != members.leader:
            return None
        start = time.monotonic()
        try:
            return store.all_gather_object("hosts", 1, members)
        except PeerError as error:
            return error.peer, time.monotonic() - start

    (peers, waited), *_ = run_members(4, work, timeout=SHORT_TIMEOUT)
    assert peers == ", ".join(f"the process of rank {rank}" for rank in (11, 12, 13))
    assert waited < 2 * SHORT_TIMEOUT, "not a timeout for each"


def test_published_value_is_received_by_whom_it_concerns() -> None:
    def work(store: JobStore, members: Members) -> Any:
        if store.rank != members.leader:
            store.publish("times", [0.5, store.rank], members)
            store.barrier("published", members)
            return None
        store.barrier("published", members)
        last = members.ranks[-1]
        assert store.is_published("times", last, members)
        assert not store.is_published("other times", last, members)
        received = store.receive("times", last, members)
        store.delete("times", members, rank=last)
        assert not store.is_published("times", last, members)
        return received

    assert run_members(3, work) == [[0.5, 12], None, None]


def test_first_value_counts_and_nobody_waits() -> None:
    def work(store: JobStore, members: Members) -> Any:
        before = store.peek("notice", members) if store.rank == members.leader else None
        store.barrier("start", members)
        agreed = store.set_once("notice", f"of {store.rank}", members)
        return before, agreed, store.peek("notice", members)

    found = run_members(3, work)
    (_, agreed, _) = found[0]
    assert agreed in {"of 10", "of 11", "of 12"}
    assert found == [(None, agreed, agreed)] * 3


def test_check_ends_a_wait() -> None:
    def work(store: JobStore, members: Members) -> None:
        def check() -> None:
            raise PeerError("the coordinator", action="starting", waited=0.0, cause="it has died")

        JobStore(store._backend, store.rank, timeout=TIMEOUT, check=check).barrier(
            "start", Members((*members.ranks, 99), members.epoch)
        )

    (error,) = run_members(1, work)
    assert "lost the coordinator" in str(error)


def test_missing_member_is_named_after_timeout() -> None:
    def work(store: JobStore, members: Members) -> Any:
        return None if store.rank == 11 else store.all_gather_object("shapes", 1, members)

    first, _, third = run_members(3, work, SHORT_TIMEOUT)
    for error in (first, third):
        assert isinstance(error, PeerError)
        assert (error.peer, error.cause) == ("the process of rank 11", "no answer")
        assert error.action == "agreeing on shapes"
        assert error.waited >= SHORT_TIMEOUT


def test_function_on_leader_may_take_longer_than_timeout() -> None:
    def work(store: JobStore, members: Members) -> Any:
        def decide() -> str:
            time.sleep(3 * SHORT_TIMEOUT)
            return "late"

        return store.run_on_leader("the plan", decide, members)

    assert run_members(2, work, SHORT_TIMEOUT) == ["late"] * 2


@pytest.mark.long
def test_function_on_leader_is_given_up_after_max_timeouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "MAX_TIMEOUTS", 2)

    def work(store: JobStore, members: Members) -> Any:
        def decide() -> str:
            time.sleep(6 * SHORT_TIMEOUT)
            return "too late"

        return store.run_on_leader("the plan", decide, members)

    first, second = run_members(2, work, SHORT_TIMEOUT)
    assert first == "too late"
    assert isinstance(second, PeerError)
    assert second.cause == "no heartbeat"


@pytest.mark.long
def test_leader_that_holds_the_gil_is_lost(tmp_path: Path) -> None:
    def block_all_threads() -> str:
        time.sleep(1)  # with heartbeats
        ctypes.PyDLL(None).sleep(5)  # with the GIL held
        return "too late"

    def work(ctx: DistContext) -> str:
        backend = job_store_backend("test", timeout=TIMEOUT)
        store = JobStore(backend, ctx.rank, timeout=SHORT_TIMEOUT)
        try:
            return store.run_on_leader("the plan", block_all_threads, Members((1, 0)))
        except PeerError as error:
            return error.cause

    assert run_replicas(2, work, tmp_path) == ["no heartbeat", "too late"]


def test_leader_that_dies_while_it_decides_is_named(tmp_path: Path) -> None:
    noticed = tmp_path / "noticed"

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def work(ctx: DistContext) -> tuple[str, str]:
        store = JobStore(job_store_backend("test", timeout=TIMEOUT), ctx.rank, timeout=2.0)
        with pytest.raises(PeerError) as lost:
            store.run_on_leader("the plan", die, Members((2, 0, 1)))
        if ctx.rank == 1:
            noticed.touch()
        wait_until(noticed.exists, "rank 1 has noticed it: rank 0 serves the store until then")
        return lost.value.peer, lost.value.cause

    found = run_with_failures(3, work, tmp_path, lost={2})
    assert found == dict.fromkeys((0, 1), ("the process of rank 2", "no heartbeat"))
