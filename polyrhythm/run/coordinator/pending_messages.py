"""Retransmission between worker and coordinator: unanswered messages, and duplicates.

A broken connection loses messages in both directions. So both sides repeat what is not confirmed
and ignore duplicates. A worker repeats Ready or Done until it is answered. The coordinator repeats
its last commands when a worker reconnects; a worker has one group at a time, in the order of group
ids, so it can tell which commands are new.
"""

import math
from dataclasses import dataclass, field

from polyrhythm.run.coordinator.wire import FromWorker, ToWorker
from polyrhythm.sync.protocol import Abort, Assign, AverageAll, Commit, Done, Ready, Request, Skip
from polyrhythm.types import Seconds, Worker


@dataclass(slots=True)
class PendingMessages:
    worker: Worker
    clock: int  # of the last Ready or AverageAll; before that, of the Hello
    requested_clock: int = field(default=-1, init=False)  # the clock of the last Request
    waiting_since: Seconds = field(default=math.inf, init=False)  # inf: no answer is expected
    _ready: Ready | AverageAll | None = field(default=None, init=False)  # until its step has ended
    _done: Done | None = field(default=None, init=False)  # until its group has ended
    _assigned: int = field(default=-1, init=False)  # the last assigned group
    _ended: int = field(default=-1, init=False)  # the last committed or aborted group
    _skip: Skip | None = field(default=None, init=False)

    def on_send(self, message: FromWorker, now: Seconds) -> None:
        """Record a message that the worker sends for the first time."""
        if isinstance(message, Ready | AverageAll):
            self.clock, self._ready = message.clock, message  # a group may still be open
            self.waiting_since = now
        elif isinstance(message, Done) and message.gid > self._ended:
            self._done = message
            self.waiting_since = now
        elif isinstance(message, Request):
            self.requested_clock = message.clock

    def unanswered(self) -> list[FromWorker]:
        """Return the messages to repeat, in an order that is valid whichever were lost."""
        if self.waiting_since == math.inf:
            return []
        return [message for message in (self._ready, self._done) if message is not None]

    def on_receive(self, command: ToWorker, now: Seconds) -> bool:
        """Record a command; return False for a duplicate."""
        if isinstance(command, Assign):
            if command.gid <= self._assigned:
                return False
            self._assigned, self.waiting_since = command.gid, math.inf
        elif isinstance(command, Commit | Abort):
            if command.gid <= self._ended:
                return False
            self._ended, self._done = command.gid, None
            if isinstance(command, Commit):
                self._end_step(command.end_clocks[command.members.index(self.worker)])
            self.waiting_since = math.inf if self._ready is None else now
        elif isinstance(command, Skip):
            # An AverageAll may have the clock of the last step: both may be skipped.
            last = self._skip
            if last is not None and (command.clock < last.clock or command == last):
                return False
            self._skip = command
            self._end_step(command.clock)
            if self._ready is None:
                self.waiting_since = math.inf
        return True

    def _end_step(self, clock: int) -> None:
        if self._ready is not None and self._ready.clock == clock:
            self._ready = None
