"""Agree on the surviving members of a group, and gather one report from each.

The store of torch.distributed decides, not the members' connections, some of which are broken: if
another worker were lost meanwhile, the rest would disagree on whether its report had arrived.
"""

import time
from collections.abc import Callable, Sequence

from torch.distributed.distributed_c10d import PrefixStore, Store

from polyrhythm.run.averaging.peer_connections import Peer
from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.types import Seconds

_POLL: Seconds = 0.002  # initially; doubled up to _LONGEST_POLL
_LONGEST_POLL: Seconds = 0.05
_SURVIVORS = "decision"  # the store key of the agreed survivors


def agree_on_survivors(
    store: Store,
    name: str,
    me: Peer,
    members: Sequence[Peer],
    report: str,
    *,
    timeout: Seconds,
    should_stop: Callable[[], bool],
) -> dict[Peer, str]:
    """Return the report of each survivor, equal for all callers; empty if `should_stop`.

    The first member that has seen all reports, or has waited for `timeout`, stores the survivors; a
    member that reports later is not among them.
    """
    reports = PrefixStore(f"survivors/{name}", store)
    deadline, pause = time.monotonic() + timeout, _POLL

    def arrived() -> list[Peer]:
        return [peer for peer in members if reports.check([str(peer.worker)])]

    with peer_errors("the store", "agreeing on survivors"):
        reports.set(str(me.worker), report)
        while not reports.check([_SURVIVORS]) and len(arrived()) < len(members):
            if should_stop():  # do not decide for the others
                return {}
            if time.monotonic() >= deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)
        own_view = " ".join(str(peer.worker) for peer in arrived())
        survivors = reports.compare_set(_SURVIVORS, "", own_view).decode().split()
        return {
            p: reports.get(str(p.worker)).decode() for p in members if str(p.worker) in survivors
        }
