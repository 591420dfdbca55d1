"""The policy interface: one method per event, each returning groups.

A policy decides for the workers of one stage. It has no clock, no threads and no hidden randomness:
`now` is an argument, groups are returned, and `next_timer` is when to call `on_timer` if nothing
else happens. For each ready report (or request, if the policy takes requests) a worker gets exactly
one group, and is in no other until that group is done.

A policy can rely on this:
- `on_join` is the first call for a worker. `on_ready` always follows `on_request` for a policy that
  overrides `on_request`, perhaps at once; other policies get no requests.
- A group of two or more is done exactly once. After `ok=False` its members report again, as if for
  the first time: members that were ready at once, the others when they are ready, and a skipped
  member with its next step. An update that was not averaged is reported again, and must not count
  twice.
- A group of one is a local step, and done at once: whether `on_done` is called for it makes no
  difference, and its worker may report again right after.
- A worker that leaves is in no group: its groups are done before, with `ok=False`, and so are those
  that the policy forms with it meanwhile. It may come back: `on_join` in another incarnation, or
  `on_return` in the same one, after a wait that timed out or after a global average of its stage.
  For a global average all workers leave before one returns (if it fails, some may have stayed).
"""

import math

from polyrhythm.types import Group, Seconds, Worker


class Policy:
    """Base class; every method does nothing unless a policy overrides it."""

    def on_join(self, worker: Worker, node: str, now: Seconds) -> list[Group]:
        """A worker joins; `node` is the machine it runs on."""
        return []

    def on_return(self, worker: Worker, node: str, now: Seconds) -> list[Group]:
        """A worker that left returns in the same incarnation; most policies treat it as a join."""
        return self.on_join(worker, node, now)

    def on_request(self, worker: Worker, now: Seconds) -> list[Group]:
        """A worker starts a step, at the end of which it will need a group (Prague)."""
        return []

    def on_ready(self, worker: Worker, now: Seconds) -> list[Group]:
        """A worker has updated its weights and can average at once (SDPipe)."""
        return []

    def on_done(self, group: Group, ok: bool, now: Seconds) -> list[Group]:
        """A group has averaged (`ok`) or failed."""
        return []

    def on_timer(self, now: Seconds) -> list[Group]:
        """The time `next_timer` is reached."""
        return []

    def on_leave(self, worker: Worker, now: Seconds) -> list[Group]:
        """A worker leaves; its groups are done before."""
        return []

    def next_timer(self) -> Seconds:
        """Time at which to call `on_timer` if nothing happens before; inf for never."""
        return math.inf
