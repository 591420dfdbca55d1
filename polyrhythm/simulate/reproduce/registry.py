"""The papers by name. What reproduces one is imported when it is asked for: some of it compiles."""

import importlib
from collections.abc import Callable
from typing import NamedTuple

from polyrhythm.errors import UserError
from polyrhythm.simulate.reproduce.claim import Reproduce, Reproduction

ALL = "all"


class Paper(NamedTuple):
    function: str  # module:function
    about: str


PAPERS = {
    "sdpipe": Paper(
        "polyrhythm.simulate.reproduce.sdpipe.paper:reproduce",
        "semi-decentralised pipelines: M x N grids with stragglers, groups, time to a loss",
    ),
    "dt-fm": Paper(
        "polyrhythm.simulate.reproduce.dtfm.paper:reproduce",
        "placement on five networks, against Megatron and random layouts",
    ),
    "ada-grouper": Paper(
        "polyrhythm.simulate.reproduce.ada_grouper.paper:reproduce",
        "kFkB on preempted networks",
    ),
    "prague": Paper(
        "polyrhythm.simulate.reproduce.prague.paper:reproduce",
        "partial all-reduce against all-reduce, parameter servers and AD-PSGD",
    ),
    "dear": Paper(
        "polyrhythm.simulate.reproduce.dear.paper:reproduce",
        "decoupled all-reduce: five models on 10GbE and 100Gb InfiniBand",
    ),
}


def chosen(name: str) -> tuple[str, ...]:
    """The papers that `name` asks for: one, or all of them."""
    if name == ALL:
        return tuple(PAPERS)
    if name not in PAPERS:
        raise UserError(
            f"unknown paper {name!r}",
            expected=f"one of {', '.join(PAPERS)}, or {ALL}",
            fix="polyrhythm reproduce PAPER with one of these names",
        )
    return (name,)


def reproduce(name: str, say: Callable[[str], None]) -> Reproduction:
    """The figures of the paper of this name, computed now."""
    module, _, function = PAPERS[name].function.partition(":")
    run: Reproduce = getattr(importlib.import_module(module), function)
    return run(say)
