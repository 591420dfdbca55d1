"""Emulate a slow device: a worker sleeps for as long as its scenario prescribes. No torch.

The delay is inserted between the end of an action's compute and the sending of its result.
`emulate` also replaces the compute itself, so that sixteen workers fit on two cores.
`polyrhythm lab run --scenario` names each process's device in its environment variables.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from polyrhythm.describe.scale import scaled_scenario
from polyrhythm.describe.scenario import Scenario
from polyrhythm.describe.slowness import Slowness, load_traces
from polyrhythm.errors import LaunchError
from polyrhythm.types import Op, Seconds

SCENARIO, DEVICE, INDEX = "POLYRHYTHM_SCENARIO", "POLYRHYTHM_DEVICE", "POLYRHYTHM_DEVICE_INDEX"
STARTED_AT, TIME_SCALE = "POLYRHYTHM_STARTED_AT", "POLYRHYTHM_TIME_SCALE"


@dataclass(slots=True)
class EmulatedCompute:
    """The compute delays of one worker; `started_at` is the time at which the scenario starts."""

    slowness: Slowness = field(default_factory=Slowness)
    started_at: Seconds = field(default_factory=time.monotonic)
    _last: dict[Op, Seconds] = field(default_factory=dict, init=False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Read the device and scenario that the lab has set; without a lab, add no delay."""
        if SCENARIO not in environ:
            return cls()
        try:
            index, started_at = int(environ[INDEX]), float(environ[STARTED_AT])
            time_scale = float(environ.get(TIME_SCALE, "1"))
        except (KeyError, ValueError) as error:
            raise LaunchError(
                f"{SCENARIO} is set, but a variable that goes with it is missing or bad: {error}",
                expected=f"{DEVICE}, {INDEX} and {STARTED_AT}, as `polyrhythm lab run` sets them",
                fix=f"unset {SCENARIO}, or start with `polyrhythm lab run --scenario`",
            ) from None
        scenario = scaled_scenario(
            Scenario.load(environ[SCENARIO]), time_scale=time_scale, byte_scale=1.0
        )
        slowness = Slowness.of(scenario, environ[DEVICE], index=index, traces=load_traces(scenario))
        return cls(slowness, started_at)

    def slow_down(self, op: Op, work: Seconds) -> Seconds:
        """Sleep after `work` seconds of real compute; return the added delay."""
        start = max(0.0, time.monotonic() - self.started_at - work)
        delay = self._delay(op, work, start)
        time.sleep(delay)
        return delay

    def emulate(self, op: Op, work: Seconds) -> Seconds:
        """Sleep for `work` seconds of compute plus this device's delay; return the delay."""
        delay = self._delay(op, work, time.monotonic() - self.started_at)
        time.sleep(work + delay)
        return delay

    def _delay(self, op: Op, work: Seconds, now: Seconds) -> Seconds:
        self._last[op] = work
        # Until both have been measured: a backward takes about two forwards.
        forward = self._last.get(Op.F, self._last.get(Op.B, 0.0) / 2)
        backward = self._last.get(Op.B, 2 * forward)
        return self.slowness.delay(now, work, forward + backward)
