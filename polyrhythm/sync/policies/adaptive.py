"""Adaptive groups (SDPipe): workers ready within a window, such that the last P groups connect all.

Fast workers average without the stragglers, and yet no worker is isolated for long: when the last P
groups of a stage would not connect all of its workers, the next group waits for the missing ones.

Source: Miao et al., "SDPipe: A Semi-Decentralized Framework for Heterogeneity-aware
Pipeline-parallel Training", PVLDB 16(9), 2023, sections 3.2 to 3.4, 4 and 5.1 (P = 10). Departures:
the window comes from the measured arrival rate by default (`window="paper"` is the paper's); P
grows with the number of workers by default (`default_last_groups`); enforcement has a lease;
windows end early, and waits with the required arrival (`windowed.py`).
"""

import math
from collections import deque

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policies.windowed import (
    EnforcementToken,
    WindowedGroups,
    WindowRule,
    target_size,
)
from polyrhythm.sync.snapshot import register_state
from polyrhythm.types import Group, Seconds, Worker


def default_last_groups(num_workers: int, group_size: int) -> int:
    """Default of P: 10, as in the paper, and more for many workers.

    The first group connects g workers, and each further one g - 1 more at best: all N take
    (N - 1) / (g - 1) groups that form a tree. Ten groups of 3 connect at most 21 workers; with
    more, no candidate would ever be valid. But random groups form no tree: workers that were in few
    groups are missing at the end, so that about log N times as many groups connect all, as in the
    coupon collector's problem. Here P is log2(N) / 3 trees, which is 10 groups at N = 16 and g = 3,
    as in the paper. In simulations of 8 stages of equal workers, 24 % of the groups were enforced
    or waived at N = 16. With 4/3 of a tree that stayed so for 125 workers, with log2(N) / 3 it was
    1 %, and with P = 10 it was 97 %.
    """
    tree = (num_workers - 1) / max(group_size - 1, 1)
    return max(10, math.ceil(tree * math.log2(max(num_workers, 1)) / 3))


class Adaptive(WindowedGroups):
    """The policy of one stage; the stages of a job share one token."""

    def __init__(
        self,
        num_workers: int,
        *,
        last_groups: int | None = None,  # P; None for `default_last_groups`
        window: WindowRule = "rate",  # T, or the rule for it
        group_size: int | None = None,  # target of "rate"; None for 3, or all of fewer workers
        max_window: Seconds = 30.0,
        startup_timeout: Seconds = 60.0,  # longest wait at the start for absent workers
        stage: int = 0,
        token: EnforcementToken | None = None,
    ) -> None:
        if last_groups is None:
            last_groups = default_last_groups(num_workers, target_size(group_size, num_workers))
        super().__init__(
            UnionConnectivity(last_groups),
            num_workers=num_workers,
            window=window,
            group_size=group_size,
            max_window=max_window,
            startup_timeout=startup_timeout,
            stage=stage,
            token=token,
        )


class UnionConnectivity:
    """Requires that the candidate and the last P-1 groups, each a clique, connect all workers.

    Source: SDPipe, sections 3.3 (sync-graph, Assumption 1) and 3.4 (group validation). Departures:
    a window requires only workers that were present throughout it, and has no path through a worker
    that left; a failed group connects no workers. A global average resets the window; so does a
    failed one, since a validator only sees that all workers left and returned: for once, a stale
    model may go unnoticed. Sets of workers are bit masks.
    """

    def __init__(self, last_groups: int) -> None:
        if last_groups < 1:
            raise PolicyError(
                f"last_groups={last_groups}",
                expected="P >= 1: the number of consecutive groups that must connect all workers",
                fix="use 10, as the paper does, or 1 to average with all workers each time",
            )
        self.last_groups = last_groups  # P
        self._stage = 0
        self._history: deque[int] = deque(maxlen=last_groups - 1)
        self._num_groups = 0
        self._candidate = 0
        self._joined: dict[Worker, int] = {}  # number of groups before the worker joined
        self._required = 0  # workers present since the first group of the window
        self._recent: deque[Worker] = deque()  # workers that joined later

    def join(self, worker: Worker) -> None:
        self._stage = worker.stage
        self._joined[worker] = self._num_groups
        self._recent.append(worker)
        self._require_established()

    def leave(self, worker: Worker) -> None:
        others = ~(1 << worker.pipeline)
        del self._joined[worker]
        if worker in self._recent:
            self._recent.remove(worker)
        self._required &= others
        self._candidate &= others
        for _ in range(len(self._history)):
            self._history.append(self._history.popleft() & others)

    def offer(self, worker: Worker) -> None:
        self._candidate |= 1 << worker.pipeline

    def is_valid(self) -> bool:
        return not self._missing()

    def missing_workers(self) -> tuple[Worker, ...]:
        missing = self._missing()
        pipelines = (p for p in range(missing.bit_length()) if missing >> p & 1)
        return tuple(Worker(self._stage, pipeline) for pipeline in pipelines)

    def form(self, group: Group) -> None:
        self._history.append(self._candidate)
        self._num_groups += 1
        self._candidate = 0
        self._require_established()

    def done(self, group: Group, ok: bool) -> None:
        if ok:
            return
        mask = 0
        for worker in group.members:
            mask |= 1 << worker.pipeline
        for index in reversed(range(len(self._history))):
            if self._history[index] == mask:
                self._history[index] = 0
                return

    def _missing(self) -> int:
        """Required workers outside the candidate's connected component."""
        # Before P groups there is no complete window; Assumption 1 is about complete ones only.
        if len(self._history) < self.last_groups - 1:
            return 0
        missing, groups = self._required & ~self._candidate, list(self._history)
        reached, grows = self._candidate, True
        while missing and grows:
            unreached = []
            for group in groups:
                if group & reached:
                    reached |= group
                else:
                    unreached.append(group)
            grows, groups = len(unreached) < len(groups), unreached
            missing = self._required & ~reached
        return missing

    def _require_established(self) -> None:
        since = self._num_groups - (self.last_groups - 1)
        while self._recent and self._joined[self._recent[0]] <= max(since, 0):
            self._required |= 1 << self._recent.popleft().pipeline


register_state(Adaptive, UnionConnectivity)
