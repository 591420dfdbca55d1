"""Who is still there: some workers tell each other something, and agree on who has told it.

Not over their connections, of which some are broken: when one more worker is lost on the way, those
who are left would disagree on whether it had been heard. The store of torch.distributed decides.
"""

import time
from collections.abc import Callable, Sequence

from torch.distributed.distributed_c10d import PrefixStore, Store

from polyrhythm.run.average.pairs import Peer
from polyrhythm.run.peers import waiting_for
from polyrhythm.types import Seconds

_POLL: Seconds = 0.002  # at first; doubled up to the next one
_LONGEST_POLL: Seconds = 0.05
_WHO = "who"  # the key of who counts


def roll_call(
    store: Store,
    name: str,
    me: Peer,
    members: Sequence[Peer],
    told: str,
    *,
    patience: Seconds,
    stopped: Callable[[], bool],
) -> dict[Peer, str]:
    """Of those who have come: what each tells. All who come get the same; nothing if `stopped`.

    The first one who has seen all of them, or has waited for long enough, says who has come; who is
    not among them has come too late.
    """
    calls = PrefixStore(f"calls/{name}", store)
    ends, pause = time.monotonic() + patience, _POLL

    def come() -> list[Peer]:
        return [peer for peer in members if calls.check([str(peer.worker)])]

    with waiting_for("the store", "calling the roll"):
        calls.set(str(me.worker), told)
        while not calls.check([_WHO]) and len(come()) < len(members):
            if stopped():  # not to say who has come, before the others have
                return {}
            if time.monotonic() >= ends:
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)
        mine = " ".join(str(peer.worker) for peer in come())
        who = calls.compare_set(_WHO, "", mine).decode().split()
        return {p: calls.get(str(p.worker)).decode() for p in members if str(p.worker) in who}
