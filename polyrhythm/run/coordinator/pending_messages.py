"""A worker's talk with the coordinator: what to say again, and what was heard before.

A broken connection loses messages, either way. So whoever is not sure says it again, and whoever
hears something twice takes no notice. A worker that has said Ready or Done says it again until it
is answered. A coordinator repeats the last of its commands when a worker is connected again; the
worker has its groups one at a time, in the order of their ids, so it knows which ones are new.
"""

import math
from dataclasses import dataclass, field

from polyrhythm.run.coordinator.wire import FromWorker, ToWorker
from polyrhythm.sync.protocol import Abort, Assign, AverageAll, Commit, Done, Ready, Request, Skip
from polyrhythm.types import Seconds, Worker


@dataclass(slots=True)
class PendingMessages:
    worker: Worker
    clock: int  # of the last Ready or Gather; before that, of the model it began with
    requested_clock: int = field(default=-1, init=False)  # the clock of the last Request
    waiting_since: Seconds = field(default=math.inf, init=False)  # for an answer; inf if for none
    _ready: Ready | AverageAll | None = field(default=None, init=False)  # until its step has ended
    _done: Done | None = field(default=None, init=False)  # until its group has ended
    _assigned: int = field(default=-1, init=False)  # the last group heard of
    _ended: int = field(default=-1, init=False)  # the last one that was committed or aborted
    _skip: Skip | None = field(default=None, init=False)

    def on_send(self, message: FromWorker, now: Seconds) -> None:
        """The worker says this, for the first time."""
        if isinstance(message, Ready | AverageAll):
            self.clock, self._ready, self._done = message.clock, message, None
            self.waiting_since = now
        elif isinstance(message, Done):
            self._done = message
            self.waiting_since = now
        elif isinstance(message, Request):
            self.requested_clock = message.clock

    def unanswered(self) -> list[FromWorker]:
        """What to say again; in this order they make sense, whatever was lost."""
        if self.waiting_since == math.inf:
            return []
        return [message for message in (self._ready, self._done) if message is not None]

    def on_receive(self, command: ToWorker, now: Seconds) -> bool:
        """Whether this is news."""
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
            # A worker may gather at the clock of its last step: both may be skipped.
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
