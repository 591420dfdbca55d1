"""Who is still there: some workers tell each other something, and agree on who has told it.

Not over their connections, of which some are broken: when one more worker is lost on the way, those
who are left would disagree on whether it had been heard. The store of torch.distributed decides.
"""

import time
from collections.abc import Callable, Sequence

from torch.distributed.distributed_c10d import PrefixStore, Store

from polyrhythm.run.averaging.peer_connections import Peer
from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.types import Seconds

_POLL: Seconds = 0.002  # at first; doubled up to the next one
_LONGEST_POLL: Seconds = 0.05
_SURVIVORS = "who"  # the key of who counts


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
    """Of those who have come: what each tells. All who come get the same; nothing if `should_stop`.

    The first one who has seen all of them, or has waited for long enough, says who has come; who is
    not among them has come too late.
    """
    reports = PrefixStore(f"calls/{name}", store)
    deadline, pause = time.monotonic() + timeout, _POLL

    def arrived() -> list[Peer]:
        return [peer for peer in members if reports.check([str(peer.worker)])]

    with peer_errors("the store", "calling the roll"):
        reports.set(str(me.worker), report)
        while not reports.check([_SURVIVORS]) and len(arrived()) < len(members):
            if should_stop():  # not to say who has come, before the others have
                return {}
            if time.monotonic() >= deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)
        mine = " ".join(str(peer.worker) for peer in arrived())
        survivors = reports.compare_set(_SURVIVORS, "", mine).decode().split()
        return {
            p: reports.get(str(p.worker)).decode() for p in members if str(p.worker) in survivors
        }
