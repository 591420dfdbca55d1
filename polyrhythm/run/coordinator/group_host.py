"""GroupHost: the schedulers of groups in a job whose workers may be lost, beside its epochs.

Elsewhere the first worker hosts the scheduler, and its loss ends the job. Here each GroupSync of an
epoch has a Coordinator in the process that owns the epochs. It learns of losses from these, and
ends when all its workers have left, or with the next epoch.
"""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from polyrhythm.run.coordinator.keys import ServerKeys
from polyrhythm.run.coordinator.server import Coordinator
from polyrhythm.sync.epochs import Member
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds, Worker

_logger = logging.getLogger(__name__)


class _Hosted(NamedTuple):
    coordinator: Coordinator
    workers: dict[Member, Worker]


class GroupHost:
    """One thread calls the methods; each coordinator has a thread of its own."""

    def __init__(self, bind: str, keys: ServerKeys) -> None:
        """`bind`: an address with port 0; `keys`: those of the epochs, too."""
        self._bind, self._keys = bind, keys
        self._hosted: dict[str, _Hosted] = {}  # by name
        self._closing: list[threading.Thread] = []

    def open(
        self,
        name: str,
        setup: Setup,
        members: Sequence[Member],
        *,
        log: Path | None,
        startup_timeout: Seconds,
    ) -> str:
        """Start a coordinator, or return the address of the one that has this name.

        `members`: the workers of the setup, in its order.
        """
        for other in [n for n, hosted in self._hosted.items() if hosted.coordinator.is_over]:
            self._close(other)
        if name not in self._hosted:
            workers = dict(zip(members, setup.workers, strict=True))
            self._hosted[name] = _Hosted(self._start(setup, log, startup_timeout), workers)
        return self._hosted[name].coordinator.address

    def report_lost(self, member: Member) -> None:
        """Let the schedulers know at once what they would notice later."""
        for coordinator, workers in self._hosted.values():
            if member in workers:
                coordinator.report_dead(workers[member])

    def close_all(self) -> None:
        """End all coordinators; their workers have left, or belong to an epoch that has ended."""
        for name in list(self._hosted):
            self._close(name)

    def join(self, timeout: Seconds) -> None:
        """Wait until closed coordinators have ended."""
        for thread in self._closing:
            thread.join(timeout)

    def _start(self, setup: Setup, log: Path | None, startup_timeout: Seconds) -> Coordinator:
        def start(log: Path | None) -> Coordinator:
            return Coordinator(
                setup,
                bind=self._bind,
                keys=self._keys,
                log=log,
                startup_timeout=startup_timeout,
                log_info=_logger.info,
                log_warning=_logger.warning,
            ).start()

        try:
            return start(log)
        except OSError as error:
            if log is None:
                raise
            _logger.warning("no decision log: %s: %s", log, error)  # of another machine's disk
            return start(None)

    def _close(self, name: str) -> None:
        """Close in a thread, as it takes a while until a coordinator sees that it has to end."""
        coordinator = self._hosted.pop(name).coordinator
        self._closing = [thread for thread in self._closing if thread.is_alive()]
        self._closing.append(threading.Thread(target=_close, args=(coordinator,), daemon=True))
        self._closing[-1].start()


def _close(coordinator: Coordinator) -> None:
    try:
        coordinator.close()
    except Exception:  # all its workers know of it
        _logger.exception("the scheduler of groups has failed")
