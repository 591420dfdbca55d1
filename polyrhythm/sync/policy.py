"""What every policy can be told: one method per thing that can happen, each returning groups.

A policy decides for the workers of one stage. It has no clock, no threads and no hidden randomness:
`now` comes in, groups come out, and `next_timer` says when to call `on_timer` if nothing else
happens. A worker that is ready (or that has requested, where a policy is asked ahead) is in exactly
one group for it, and in no other until that group is done.

A policy can rely on this:
- A worker joins before anything else. `on_ready` always follows `on_request` for a policy that
  overrides that (is asked ahead), perhaps at once; a policy that does not is never asked.
- A group of two or more is done exactly once. After `ok=False` its members report again, as if for
  the first time: those that were ready at once, the others when they are, and one that is sent on
  alone with its next step. What was not averaged comes again, and must not count twice.
- A group of one is a local step, and done at once: whether `on_done` is called for it makes no
  difference, and its worker may report again right after.
- A worker that leaves is in no group: those it was in are done before, with `ok=False`, and so are
  those that the policy forms of it meanwhile. It may come back: it joins in another life, and it
  returns, in the same one, from a wait that was too long, or from an average of all workers of its
  stage, for which all of them leave before one returns (or from one that failed, and some stayed).
"""

import math
from typing import ClassVar

from polyrhythm.types import Group, Seconds, Worker


class Policy:
    """By default nothing happens; a policy overrides what it cares about."""

    lockstep: ClassVar[bool] = False  # its workers make each step together, or not at all

    def on_join(self, worker: Worker, node: str, now: Seconds) -> list[Group]:
        """A worker takes part from now on; `node` is the machine it runs on."""
        return []

    def on_return(self, worker: Worker, node: str, now: Seconds) -> list[Group]:
        """A worker that has left is back; to most policies it is as good as one that joins."""
        return self.on_join(worker, node, now)

    def on_request(self, worker: Worker, now: Seconds) -> list[Group]:
        """A worker begins a step, at the end of which it will want to average (Prague)."""
        return []

    def on_ready(self, worker: Worker, now: Seconds) -> list[Group]:
        """A worker has updated its weights and can average at once (SDPipe)."""
        return []

    def on_done(self, group: Group, ok: bool, now: Seconds) -> list[Group]:
        """A group has averaged, or has given up."""
        return []

    def on_timer(self, now: Seconds) -> list[Group]:
        """It is `next_timer` or later."""
        return []

    def on_leave(self, worker: Worker, now: Seconds) -> list[Group]:
        """A worker is gone; groups it was in are done first."""
        return []

    def next_timer(self) -> Seconds:
        """When to call `on_timer` if nothing happens before; inf for never."""
        return math.inf
