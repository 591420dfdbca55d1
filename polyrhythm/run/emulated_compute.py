"""Compute that is as slow as a scenario says: a real worker is held back by sleeping. No torch.

A slow machine is emulated where it hurts: between the end of an action's work and the sending of
its result. `emulate` also stands in for the work itself, so that sixteen workers fit two cores.
`polyrhythm lab run --scenario` tells its processes by environment variables which device they are.
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
    """What one worker's compute takes; `started_at` is when the scenario's clock began."""

    slowness: Slowness = field(default_factory=Slowness)
    started_at: Seconds = field(default_factory=time.monotonic)
    _last: dict[Op, Seconds] = field(default_factory=dict, init=False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """As the lab that started this process says; at full speed outside of a lab."""
        if SCENARIO not in environ:
            return cls()
        try:
            index, started_at = int(environ[INDEX]), float(environ[STARTED_AT])
            time_scale = float(environ.get(TIME_SCALE, "1"))
        except (KeyError, ValueError) as error:
            raise LaunchError(
                f"{SCENARIO} is set, but not what goes with it: {error}",
                expected=f"{DEVICE}, {INDEX} and {STARTED_AT}, as `polyrhythm lab run` sets them",
                fix=f"unset {SCENARIO}, or start with `polyrhythm lab run --scenario`",
            ) from None
        scenario = scaled_scenario(
            Scenario.load(environ[SCENARIO]), time_scale=time_scale, byte_scale=1.0
        )
        slowness = Slowness.of(scenario, environ[DEVICE], index=index, traces=load_traces(scenario))
        return cls(slowness, started_at)

    def slow_down(self, op: Op, work: Seconds) -> Seconds:
        """After `work` seconds of real compute, sleep as long as this device is slower."""
        began = max(0.0, time.monotonic() - self.started_at - work)
        delay = self._delay(op, work, began)
        time.sleep(delay)
        return delay

    def emulate(self, op: Op, work: Seconds) -> Seconds:
        """In place of `work` seconds of compute: sleep them, and what this device is slower."""
        delay = self._delay(op, work, time.monotonic() - self.started_at)
        time.sleep(work + delay)
        return delay

    def _delay(self, op: Op, work: Seconds, now: Seconds) -> Seconds:
        self._last[op] = work
        # Until both have been seen: a backward takes about two forwards.
        forward = self._last.get(Op.F, self._last.get(Op.B, 0.0) / 2)
        backward = self._last.get(Op.B, 2 * forward)
        return self.slowness.delay(now, work, forward + backward)
