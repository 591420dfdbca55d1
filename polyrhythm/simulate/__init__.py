"""The simulator: the same plans, schedules and policies in virtual time.

The package can be called: `polyrhythm.simulate(plan, scenario)` is `simulate_plan`. A function of
this name in `polyrhythm` would be replaced as soon as a module of the package is imported.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> object:
        from polyrhythm.simulate.simulate_plan import simulate_plan  # late: loads Numba

        return simulate_plan(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
